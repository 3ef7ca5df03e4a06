"""Signals that end a command. Imported first, so that they work from the first moment on."""

import signal
from types import FrameType
from typing import NoReturn


class Terminated(KeyboardInterrupt):
    """TERM or HUP came: the command ends as after Ctrl-C, with another exit code."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number


def exit_code_of_signal(error: KeyboardInterrupt) -> int:
    """Return the exit code of a command that a signal cut short."""
    return 128 + (error.number if isinstance(error, Terminated) else signal.SIGINT)


def raise_on_term_and_hup(*, is_worker: bool) -> None:
    """Make TERM and HUP raise an exception, as INT does, so that a command can clean up.

    A worker restarts its processes at HUP; before it has any, HUP does nothing. A signal that our
    parent has set to be ignored (``nohup``) stays ignored: Python does that for INT, we for HUP.
    The ends of our own processes are never ignored: nobody could wait for these processes.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)

    def terminate(number: int, _: FrameType | None) -> NoReturn:
        signal.signal(number, signal.SIG_IGN)  # ignore repeats, which supervisors send
        raise Terminated(number)

    signal.signal(signal.SIGTERM, terminate)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        # Not SIG_IGN for a worker: programs that it starts would inherit that.
        signal.signal(signal.SIGHUP, (lambda *_: None) if is_worker else terminate)
