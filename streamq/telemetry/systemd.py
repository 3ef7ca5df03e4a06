"""Tells systemd that a service is ready, alive or stopping. Without systemd it does nothing."""

import logging
import os
import socket
import time
from collections.abc import MutableMapping

log = logging.getLogger(__name__)


class Notifier:
    """The socket that systemd gave this process, if it did.

    Its variables are removed from the environment, so that programs which handlers start do not use
    them.
    """

    def __init__(self, environment: MutableMapping[str, str] = os.environ) -> None:
        path = environment.pop("NOTIFY_SOCKET", "")
        #: An abstract address is written with an @ in place of the zero byte.
        self._address = f"\0{path[1:]}" if path.startswith("@") else path
        microseconds = environment.pop("WATCHDOG_USEC", "")
        pid = environment.pop("WATCHDOG_PID", "") or str(os.getpid())
        is_ours = microseconds.isdecimal() and pid == str(os.getpid())
        #: Seconds between two signs of life: half of the time after which systemd gives up.
        self._every_s = int(microseconds) / 2e6 if is_ours else 0.0
        self._last = 0.0

    def ready(self, status: str) -> None:
        """Tell systemd that the service is ready."""
        self._send(f"READY=1\nSTATUS={status}")

    def stopping(self, status: str) -> None:
        """Tell systemd that the service is about to end."""
        self._send(f"STOPPING=1\nSTATUS={status}")

    def alive(self) -> None:
        """Send a sign of life, if one is due."""
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
