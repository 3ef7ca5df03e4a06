"""Tells whether the files of a load are what they were: unchanged, or only longer at their end.

A load reads each file as it was when the load began, whether it is stopped on the way or not. So a
file that has only grown is no other input: what was paid for so far is not lost because a line was
added. A warning tells how much is not read.
"""

import logging
from collections.abc import Sequence

from streamq.records.inputs import BadInput, InputIdentity

log = logging.getLogger(__name__)


class InputDifferences:
    """Compares files with what they were, and warns once of what was added to each."""

    def __init__(self, *, may_grow: bool) -> None:
        """``may_grow``: a file that has only grown is read as it was."""
        self._may_grow = may_grow
        self._told: dict[str, int] = {}

    def difference(
        self, then: Sequence[InputIdentity], now: list[InputIdentity], *, may_grow: bool
    ) -> str:
        """Return in words how files differ from what was loaded; "" if they do not.

        ``may_grow``: files that have only grown do not differ, and ``now`` gets what they were.
        """
        if len(now) != len(then):
            return f"it was {len(then)} files, and is {len(now)}"
        for index, old in enumerate(then):
            if may_grow and now[index].name == old.name and self._has_only_grown(old, now[index]):
                now[index] = old
            elif changed := now[index].difference(old):
                return changed
        return ""

    def check_loaded(self, then: Sequence[InputIdentity]) -> None:
        """Check that files are what they were when the load began.

        Raises:
            BadInput: one of them has changed.
        """
        for old in then:
            now = InputIdentity.of(old.name)
            if not self._has_only_grown(old, now) and (changed := now.difference(old)):
                raise BadInput(f"the input changed while it was loaded: {changed}")

    def _has_only_grown(self, then: InputIdentity, now: InputIdentity) -> bool:
        """Return whether a file may grow and did; warn if it has more than was told before."""
        if not (self._may_grow and then.has_only_grown):
            return False
        more = now.size - then.size
        if more > self._told.get(then.name, 0):
            self._told[then.name] = more
            log.warning("%s has %d bytes more by now, which are not read", then.name, more)
        return True
