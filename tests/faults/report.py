"""The page of figures."""

from tests.faults.verdict import Figures


def page(figures: list[Figures]) -> str:
    return ""
