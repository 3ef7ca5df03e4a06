"""Processes of a pool that are forked from a parent which has imported all that they need.

A new interpreter takes a tenth of a second of CPU time for its imports, in each process. A copy of
a parent that has imported them starts at once. Only a parent without other threads may be copied:
the copy would not have them, and locks that they held would stay held in it.
"""

import gc
import os
import signal
import socket
import sys
import traceback
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

from streamq.worker import entry, forks
from streamq.worker.channel import Channel
from streamq.worker.slot_table import SlotTable
from streamq.worker.spawning import SpawnedProcess

_TASKS = Path("/proc/self/task")
_DESCRIPTORS = Path("/proc/self/fd")


def can_fork() -> bool:
    """Return whether this process may be copied: it is on Linux, and has one thread.

    Its input and output are open, too. A copy would take another file that has one of their
    numbers for them.
    """
    if sys.platform != "linux" or None in (sys.stdin, sys.stdout, sys.stderr):
        return False
    try:
        return len(list(_TASKS.iterdir())) == 1
    except OSError:
        return False


class ForkedProcess:
    """A process that was forked, with what a pool uses of ``subprocess.Popen``."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Return its exit code, or None while it runs; less than 0 is a signal."""
        return self._wait(os.WNOHANG)

    def wait(self) -> int:
        """Wait for its end. Return its exit code."""
        code = self._wait(0)
        assert code is not None
        return code

    def kill(self) -> None:
        """Kill it, if it was not waited for yet."""
        if self.returncode is None:
            os.kill(self.pid, signal.SIGKILL)

    def _wait(self, options: int) -> int | None:
        if self.returncode is None:
            try:
                pid, status = os.waitpid(self.pid, options)
            except ChildProcessError:  # it is gone, and nobody can tell how, as with Popen
                pid, status = self.pid, 0
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode


def fork_process(slots: int) -> SpawnedProcess:
    """Return a copy of this process that waits to be told what to do.

    Raises:
        OSError: no process can be started.
    """
    table, fd = SlotTable.create(slots)
    ours, theirs = socket.socketpair()
    with theirs:
        try:
            sys.stdout.flush()
            sys.stderr.flush()
            pid = os.fork()
            if not pid:
                _run(theirs.detach(), fd)
        except OSError:
            ours.close()
            table.close()
            raise
        finally:
            os.close(fd)
    with suppress(OSError):  # it did so itself, or is gone
        os.setpgid(pid, pid)
    process: Any = ForkedProcess(pid)
    return SpawnedProcess(process, Channel(ours), table)


def _run(channel: int, table: int) -> None:
    """Go on as a process of a pool that was just started, and end."""
    try:
        # Ctrl-C in the terminal is for the parent, which lets its processes finish.
        os.setpgid(0, 0)
        _close_all_but(channel, table)
        # It is no copy that a handler has made.
        forks.is_copy = False
        # What a new interpreter has: handlers may look at it.
        sys.argv = ["-c", str(channel), str(table)]
        if not sys.flags.safe_path:
            sys.path[0] = ""
        sys.modules["__main__"] = ModuleType("__main__")
        # It is off until the user's code is loaded, as in a process that is not forked.
        gc.disable()
        entry.main()
    except BaseException:  # noqa: BLE001  nothing may go on with what the parent was about to do
        traceback.print_exc()
    finally:
        os._exit(1)


def _close_all_but(*kept: int) -> None:
    """Close all descriptors but these and those of output, and let standard input be empty.

    Among them are the parent's ends of all channels: a process ends when its channel is closed.
    """
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    for each in [int(path.name) for path in _DESCRIPTORS.iterdir()]:
        if each > 2 and each not in kept:
            with suppress(OSError):
                os.close(each)
