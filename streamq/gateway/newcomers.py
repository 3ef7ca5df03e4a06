"""Connections whose callers are not known yet: when there are too many, the oldest makes room."""

from collections.abc import Callable


class Newcomers:
    """Those who have not made a call that was accepted, in the order in which they came.

    Whoever opens connections and says nothing keeps nobody else out: a caller who comes and says
    who it is stays, and one who has been silent for longest goes.
    """

    def __init__(self) -> None:
        self._leave: dict[object, Callable[[], object]] = {}

    def add(self, who: object, leave: Callable[[], object]) -> None:
        """Note somebody who came. ``leave`` ends the connection, and is called once at most."""
        self._leave[who] = leave

    def drop(self, who: object) -> None:
        """Forget somebody who is known now, or has left."""
        self._leave.pop(who, None)

    def make_room(self) -> bool:
        """End the connection of the oldest. Returns whether there was one."""
        if not self._leave:
            return False
        self._leave.pop(next(iter(self._leave)))()
        return True
