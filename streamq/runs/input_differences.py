"""Tells whether the files of a load are what they were: unchanged, or only longer at their end."""

import logging
from collections.abc import Sequence

from streamq.records.inputs import BadInput, InputIdentity

log = logging.getLogger(__name__)


def difference_of_inputs(
    then: Sequence[InputIdentity], now: list[InputIdentity], *, may_grow: bool
) -> str:
    """Return in words how files differ from what was loaded; "" if they do not.

    ``may_grow``: a file that has only grown is read as it was, and ``now`` gets what it was.
    """
    if len(now) != len(then):
        return f"it was {len(then)} files, and is {len(now)}"
    for index, old in enumerate(then):
        if may_grow and now[index].name == old.name and old.has_only_grown:
            now[index] = old
        elif changed := now[index].difference(old):
            return changed
    return ""


def check_loaded(then: Sequence[InputIdentity], *, may_grow: bool) -> None:
    """Check that files are what they were when the load began; log which of them have grown.

    Raises:
        BadInput: one of them has changed.
    """
    for old in then:
        now = InputIdentity.of(old.name)
        if may_grow and old.has_only_grown:
            more = now.size - old.size
            log.warning("%s has %d bytes more by now, which are not read", old.name, more)
        elif changed := now.difference(old):
            raise BadInput(f"the input changed while it was loaded: {changed}")
