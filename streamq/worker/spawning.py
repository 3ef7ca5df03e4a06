"""Processes of a pool that are started before it is known what they are to do.

A new interpreter needs about as long to start as its parent needs to find the server, the files and
its own modules. So the parent starts the processes first, and does not wait for them.
"""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple, Self

from streamq.worker.channel import Channel
from streamq.worker.slot_table import SlotTable

#: The garbage collector is off during the imports: they make no garbage, and it slows them down.
_BEGIN = "import gc; gc.disable(); from streamq.worker.process import main; main()"
#: At most 32 processes start at the same time, so that the first of very many are soon ready.
MOST_STARTING = 32


class SpawnedProcess(NamedTuple):
    """A process that waits for its configuration, the channel to it, and the table it shares."""

    popen: subprocess.Popen[bytes]
    channel: Channel
    table: SlotTable


#: Starts a process with so many slots.
Start = Callable[[int], SpawnedProcess]


class Spawner:
    """Starts processes, some of them ahead of time. At its end it kills those nobody took."""

    def __init__(self, slots: int, ahead: int = 0, start: Start | None = None) -> None:
        """``start`` starts those ahead of time; without it they are new interpreters, as others."""
        self._slots = slots
        self._waiting: list[SpawnedProcess] = []
        with suppress(OSError):  # ``take`` tries again, and raises it
            for _ in range(min(ahead, MOST_STARTING)):
                self._waiting.append(start(slots) if start else self._start())

    def take(self) -> SpawnedProcess:
        """Return a process that waits to be told what to do.

        Raises:
            OSError: none can be started.
        """
        return self._waiting.pop(0) if self._waiting else self._start()

    def _start(self) -> SpawnedProcess:
        table, fd = SlotTable.create(self._slots)
        ours, theirs = socket.socketpair()
        try:
            popen = subprocess.Popen(
                [sys.executable, "-P", "-c", _BEGIN, str(theirs.fileno()), str(fd)],
                stdin=subprocess.DEVNULL,
                # Ctrl-C in the terminal is for the parent, which lets its processes finish.
                process_group=0,
                pass_fds=(theirs.fileno(), fd),
            )
        except OSError:
            ours.close()
            table.close()
            raise
        finally:
            theirs.close()
            os.close(fd)
        return SpawnedProcess(popen, Channel(ours), table)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for popen, channel, table in self._waiting:
            with suppress(ProcessLookupError):
                os.killpg(popen.pid, signal.SIGKILL)
            popen.wait()
            channel.close()
            table.close()
        self._waiting.clear()
