"""Count the words of each line."""

from collections import Counter


def count_words(line: str) -> dict[str, int]:
    """Return how often each word stands in a line. (To write no line, return None.)"""
    return dict(Counter(line.lower().split()))
