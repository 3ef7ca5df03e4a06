"""Failures on the terminal: where a record failed, and what is said of all failures at the end."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from streamq.model import Failure

from . import render

#: How many failures are shown at the end.
_FIRST_FAILURES = 3
_MOST_KINDS = 5


def show_failures(found: Sequence[Failure], path: Path) -> None:
    """Say where failures were written, if there are any; show how many of each kind, and three."""
    if not found:
        return
    kinds = Counter(each.error for each in found).most_common(_MOST_KINDS)
    told = ", ".join(f"{number:,} {kind}" for kind, number in kinds)
    render.note(f"{render.count(len(found), 'failure')} in {path}: {told}")
    for each in found[:_FIRST_FAILURES]:
        render.note(f"  {failure_line(each)}")
    parts = [each for each in found if each.records > 1]
    if parts:
        records = sum(each.records for each in parts)
        render.note(
            f"  {render.count(len(parts), 'part')} with {render.count(records, 'record')} failed "
            "as a whole: one call gets a part. --lines 1 makes each record a part of its own"
        )


def failure_line(failure: Failure) -> str:
    """Return a failure in a line: where, and why."""
    place = failure.source or f"part {failure.part}"
    if failure.source and failure.line:
        place = f"{failure.source}:{failure.line}"
    message = failure.message.strip().splitlines()
    why = f"{failure.error}: {message[0]}" if message else failure.error
    # The message about a file that cannot be read names the file already.
    is_named = bool(failure.source and message and message[0].startswith(failure.source))
    return render.clean(why if is_named else f"{place}: {why}")


def failure_place(failure: Failure) -> str:
    """Return file and line: ``in.txt:7``, or for several records ``in.txt:1-9 (9 records)``."""
    if not failure.line:
        return failure.source
    if not failure.records:
        return f"{failure.source}:{failure.line}"
    records = render.count(failure.records, "record")
    return f"{failure.source}:{failure.line}-{failure.last_line} ({records})"
