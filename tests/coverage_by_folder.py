"""Sums up a report of ``coverage json`` by folder: ``make coverage`` prints it."""

import json
import sys
from collections import Counter
from pathlib import Path


def by_folder(report: dict[str, dict[str, dict[str, int]]]) -> dict[str, tuple[int, int]]:
    """Of each folder its statements, and how many of them were run."""
    statements: Counter[str] = Counter()
    covered: Counter[str] = Counter()
    for name, file in report.items():
        folder = str(Path(name).parent)
        statements[folder] += file["summary"]["num_statements"]
        covered[folder] += file["summary"]["covered_lines"]
    return {folder: (statements[folder], covered[folder]) for folder in sorted(statements)}


def table(folders: dict[str, tuple[int, int]]) -> str:
    """The same as a table in Markdown, with the sum."""
    rows = {**folders, "all": tuple(map(sum, zip(*folders.values(), strict=True)))}
    lines = ["| folder | statements | run by tests |", "|---|--:|--:|"]
    lines += [
        f"| `{name}` | {all_:,} | {100 * run / all_:.1f} % |"
        for name, (all_, run) in rows.items()
        if all_
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    print(table(by_folder(json.loads(Path(sys.argv[1]).read_text())["files"])))
