"""Telling systemd how a service is: ready, alive, stopping. Without systemd nothing is said."""

import logging
import os
import socket
import time
from collections.abc import MutableMapping

log = logging.getLogger(__name__)


class Notifier:
    """The socket that systemd gave this process, if it did.

    Its variables are taken out of the environment: they are not for the programs that
    handlers start.
    """

    def __init__(self, environment: MutableMapping[str, str] = os.environ) -> None:
        path = environment.pop("NOTIFY_SOCKET", "")
        #: An abstract address is written with an @ in place of the zero byte.
        self._address = f"\0{path[1:]}" if path.startswith("@") else path
        microseconds = environment.pop("WATCHDOG_USEC", "")
        pid = environment.pop("WATCHDOG_PID", "") or str(os.getpid())
        is_ours = microseconds.isdecimal() and pid == str(os.getpid())
        #: A sign of life is due so often: twice as often as it is waited for.
        self._every_s = int(microseconds) / 2e6 if is_ours else 0.0
        self._last = 0.0

    def ready(self, status: str) -> None:
        """The service does its work from now on."""
        self._send(f"READY=1\nSTATUS={status}")

    def stopping(self, status: str) -> None:
        """The service is about to end."""
        self._send(f"STOPPING=1\nSTATUS={status}")

    def alive(self) -> None:
        """A sign of life; sent when one is due."""
        now = time.monotonic()
        if self._every_s and now - self._last >= self._every_s:
            self._last = now
            self._send("WATCHDOG=1")

    def _send(self, text: str) -> None:
        if not self._address:
            return
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
                sock.setblocking(False)
                sock.sendto(text.encode(), self._address)
        except OSError as error:
            log.warning("systemd cannot be told %s: %s", text.partition("\n")[0], error)
