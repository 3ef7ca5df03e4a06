"""Flows: a pipeline over text, with one result at its end. Lines become words, words are counted
line by line, and a reduce adds all up, as an iterator in constant memory."""

from collections import Counter
from collections.abc import Iterator

from streamq import App

app = App()


@app.map
def words(line: str) -> list[str] | None:
    """Return the words of a line; a line without words drops out."""
    found = [word.strip(".,:;()`*").lower() for word in line.split()]
    return [word for word in found if word.isalpha()] or None


@app.map
def counts(found: list[str]) -> dict[str, int]:
    """Return how often each word is in the line."""
    return dict(Counter(found))


@app.handler
def total(lines: Iterator[dict[str, int]]) -> dict[str, int]:
    """Return the ten most frequent words of all lines."""
    found: Counter[str] = Counter()
    for each in lines:
        found.update(each)
    return dict(sorted(found.most_common(10), key=lambda pair: (-pair[1], pair[0])))


text = app.flow("text").map(words).map(counts).reduce(total)
