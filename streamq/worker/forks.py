"""Copies of a process that a handler makes by forking. They must not go on as a second worker."""

import asyncio
import os
from collections.abc import Callable

#: Whether this process is such a copy.
is_copy = False
#: The event loop on which coroutines run, if there is one.
loop: asyncio.AbstractEventLoop | None = None
#: Takes away the records that would run next at a stretch, if any do: a copy is to run none.
end_stretches: Callable[[], object] | None = None


def _note_forked_copy() -> None:
    global is_copy
    is_copy = True
    if end_stretches:
        end_stretches()
    if loop:
        # The coroutine that forked may wait for something: the copy must not run the others
        # meanwhile.
        loop.call_soon(os._exit, 0)


os.register_at_fork(after_in_child=_note_forked_copy)
