"""The handlers of the flows in the fault runs: each takes its time, and returns what it was."""

import time
from collections.abc import Iterator

from streamq import App, Spread

app = App()


@app.map
def split(given: list[int]) -> Spread:
    """Make so many children as the second number says; the first is which input it is."""
    number, children = given
    time.sleep(0.002)
    return Spread([[number, child] for child in range(children)], keep=number)


@app.map
def work(given: list[int]) -> int:
    """Return a number that tells which child of which input it was."""
    time.sleep(0.004)
    return given[0] * 1_000 + given[1]


@app.handler
def merge(kept: int, children: list[int]) -> list[int]:
    """Return the input, how many children came, and their sum."""
    time.sleep(0.01)
    return [kept, len(children), sum(children)]


@app.map
def first(given: list[int]) -> int:
    """Return the number of the input."""
    time.sleep(0.004)
    return given[0]


@app.handler
def add(numbers: Iterator[int]) -> int:
    """Return the sum."""
    return sum(numbers)


joined = app.flow("joined").spread(split).map(work, window="60 parts").join(merge)
summed = app.flow("summed").map(first).reduce(add, width=20, limit=2)
totalled = app.flow("totalled").map(first).reduce(add)
