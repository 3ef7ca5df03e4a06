"""The function that ``streamq demo`` runs, and its input."""

import random
from pathlib import Path

WORDS = ["stream", "queue", "token", "lease", "part", "record", "worker", "janitor", "limit"]


def count_letters(line: str) -> dict[str, int]:
    """Return how often each letter stands in a line. This is the demo's handler."""
    return {letter: line.count(letter) for letter in sorted(set(line)) if letter.isalpha()}


def make_input(path: Path, lines: int) -> int:
    """Write a file of ``lines`` lines of words. Return its size in bytes."""
    chance = random.Random(7)
    with path.open("w") as file:
        for _ in range(lines):
            file.write(" ".join(chance.choices(WORDS, k=6)) + "\n")
    return path.stat().st_size
