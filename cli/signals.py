"""Signals that end a command, from its first moment on: it is imported before anything else."""

import signal
from types import FrameType
from typing import NoReturn


class Terminated(KeyboardInterrupt):
    """TERM or HUP came: everything ends as with Ctrl-C, but for the exit code."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number


def exit_code(error: KeyboardInterrupt) -> int:
    """What a command that was cut short tells the shell."""
    return 128 + (error.number if isinstance(error, Terminated) else signal.SIGINT)


def heed(*, is_worker: bool) -> None:
    """Let TERM and HUP be exceptions, as INT is: what was begun is ended properly, and told.

    To a worker HUP says that it is to restart its processes; before it has any it does nothing.
    What whoever started us has us ignore (``nohup``) stays ignored: of INT Python sees to that.
    """

    def terminate(number: int, _: FrameType | None) -> NoReturn:
        signal.signal(number, signal.SIG_IGN)  # supervisors repeat it
        raise Terminated(number)

    signal.signal(signal.SIGTERM, terminate)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        # Not SIG_IGN for a worker: the programs that it starts would inherit that.
        signal.signal(signal.SIGHUP, (lambda *_: None) if is_worker else terminate)
