"""Handlers of flows, for tests of pools and commands."""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

from streamq import Abandon, App, Context, Failed, Spread

app = App()


@app.map
def shout(line: str) -> str | None:
    return None if "drop" in line else line.upper()


@app.map
def size(line: str) -> int:
    return len(line)


@app.handler
def letters(word: str) -> Spread:
    return Spread(list(word), keep={"word": word})


@app.handler
def many(word: str) -> list[int]:
    return list(range(int(word)))


@app.handler
def code(letter: str) -> int:
    if letter == "!":
        raise Abandon("no letter")
    return ord(letter)


@app.handler
def merge(kept: dict[str, str], children: list[int | Failed]) -> dict[str, object]:
    good = [child for child in children if isinstance(child, int)]
    return {"word": kept["word"], "sum": sum(good), "failed": len(children) - len(good)}


@app.handler
def total(words: Iterator[dict[str, object]], context: Context) -> str:
    found = [(each["word"], each["sum"]) for each in words]
    return f"{found} {context.failed}"


maps = app.flow("maps").map(shout).map(size, limit=2)
tolerant = app.flow("tolerant").spread(letters).map(code).join(merge, on_failure="run")
strict = app.flow("strict").spread(letters).map(code).join(merge)
unjoined = app.flow("unjoined").spread(letters).map(code)
reduced = tolerant.reduce(total)


@app.map
def pick(line: str) -> str:
    word, _, mended = line.partition("!")
    if mended and not Path(mended).exists():
        raise Abandon("not mended")
    return word


@app.handler
def scatter(line: str) -> list[str]:
    return list(pick(line))


@app.handler
def gather(words: Iterator[str]) -> str:
    return " ".join(words)


picked = app.flow("picked").map(pick).reduce(gather)


@app.handler
def add(numbers: Iterator[int]) -> int:
    return sum(numbers)


summed = app.flow("summed").map(size).reduce(add, width=10, limit=4)


@app.map(timeout="300ms", retries=0)
def slowly(letter: str) -> str:
    if letter == "s":
        time.sleep(60)
    return letter


@app.map(retries=0)
def deadly(letter: str) -> str:
    if letter == "k":
        os.kill(os.getpid(), signal.SIGKILL)
    return letter


@app.handler
def named(kept: dict[str, str], children: list[str | Failed]) -> str:
    return (
        kept["word"]
        + ":"
        + ",".join(each if isinstance(each, str) else each.error for each in children)
    )


endangered = (
    app.flow("endangered")
    .spread(letters)
    .map(slowly)
    .map(deadly, poison=1)
    .join(named, on_failure="run")
)


@app.map
def size_of(number: int) -> int:
    return number


@app.handler
def add_letters(kept: dict[str, str], children: list[int]) -> int:
    return sum(children)


misjoined = app.flow("misjoined").spread(letters).map(shout).join(add_letters)
misreduced = app.flow("misreduced").map(shout).reduce(add)
