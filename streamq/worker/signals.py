"""The signals that a pool heeds, and how they come to it."""

import signal
import threading
from collections import deque
from collections.abc import Callable
from types import FrameType

_HEEDED = (
    signal.SIGTERM,
    signal.SIGINT,
    signal.SIGQUIT,
    signal.SIGHUP,
    signal.SIGUSR1,
    signal.SIGUSR2,
)


class Signals:
    """Signals that have come and are not obeyed yet.

    A signal may come between any two steps of a loop, so it is only noted, and its loop is woken.
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._come: deque[int] = deque()
        self._previous: dict[int, Callable[..., object] | int | None] = {}

    def install(self, *, stops_on_hup: bool) -> None:
        """Note signals from now on.

        Only the main thread may do that. In another thread the pool heeds no signals.
        """
        if threading.current_thread() is not threading.main_thread():
            return
        # A signal that is ignored since our start stays ignored: INT by a shell, for what runs in
        # the background, and HUP by nohup. A pool that HUP does not stop heeds HUP all the same.
        may_be_ignored = [signal.SIGINT]
        if stops_on_hup:
            may_be_ignored.append(signal.SIGHUP)
        self._previous = {
            number: signal.signal(number, self._on_signal)
            for number in _HEEDED
            if number not in may_be_ignored or signal.getsignal(number) is not signal.SIG_IGN
        }

    def restore(self) -> None:
        """Handle signals as before ``install``."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def note(self, number: int) -> None:
        """Do as if the signal had come; from any thread."""
        self._come.append(number)
        self._wake()

    def next(self) -> int | None:
        """Return the oldest signal that is not obeyed yet."""
        return self._come.popleft() if self._come else None

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        self.note(number)
