"""``streamq janitor``."""

import logging
import signal
import threading
import time
from types import FrameType
from typing import Annotated

import typer

from streamq import backoff, units
from streamq.errors import InvalidValue, ServerError
from streamq.janitor import Janitor

from . import logs
from .context import (
    LogFormatOption,
    LogLevelOption,
    PrefixOption,
    QueuesOption,
    UrlOption,
    connected,
)

log = logging.getLogger(__name__)

#: How long to leave a server alone that does not answer: at first, and at most.
REST_MS = 200
LONGEST_REST_MS = 10_000


def janitor(
    is_once: Annotated[
        bool, typer.Option("--once", help="Look once at what is due, and end.")
    ] = False,
    queues: QueuesOption = ["default"],  # noqa: B006  typer reads it and nobody changes it
    interval: Annotated[
        str,
        typer.Option("--interval", metavar="TIME", help="Look at each open request so often."),
    ] = "5s",
    log_level: LogLevelOption = logs.Level.INFO,
    log_format: LogFormatOption = logs.Format.TEXT,
    url: UrlOption = None,
    prefix: PrefixOption = None,
) -> None:
    """Take back what the dead left, and forget what was kept long enough.

    Every worker pool does this too; any number may do it at once. Ends politely with
    Ctrl-C or TERM.

        streamq janitor --queue default --queue slow
    """
    every_ms = units.duration_ms(interval, "interval")
    if every_ms < 100:
        raise InvalidValue(f"interval {interval!r} is too short: 100ms or more")
    names = [units.name(queue, "queue") for queue in dict.fromkeys(queues)]
    logs.configure(log_level, log_format)
    with connected(url, prefix) as protocol:
        janitors = [Janitor(protocol, name, every_ms) for name in names]
        if is_once:
            for each in janitors:
                while each.sweep() == 0:  # more is due than one sweep takes
                    pass
            return
        stop = _stop_on_signals()
        log.info("sweeping %s at %s", ", ".join(names), protocol.connection.where)
        _run([Round(each, name) for each, name in zip(janitors, names, strict=True)], stop)
    log.info("stopped")


class Round:
    """One queue's janitor, who comes again when something is due, and outlives outages."""

    def __init__(self, janitor: Janitor, queue: str) -> None:
        self._janitor = janitor
        self._queue = queue
        self._failed = 0
        #: When to sweep next, by the clock that never jumps.
        self.at = 0.0

    def sweep(self) -> None:
        """Sweep, and know when to do so again. An outage is logged once."""
        try:
            wait_ms = self._janitor.sweep()
        except ServerError as error:
            self._failed += 1
            wait_ms = backoff.delay_ms(self._failed, REST_MS, LONGEST_REST_MS)
            if self._failed == 1:
                log.warning("queue %s: %s; trying on", self._queue, error)
        else:
            if self._failed:
                log.info("queue %s is swept again", self._queue)
            self._failed = 0
        self.at = time.monotonic() + wait_ms / 1e3


def _run(rounds: list[Round], stop: threading.Event) -> None:
    while not stop.is_set():
        first = min(rounds, key=lambda each: each.at)
        if not stop.wait(max(0.0, first.at - time.monotonic())):
            first.sweep()


def _stop_on_signals() -> threading.Event:
    """Set by INT or TERM. A second INT ends the program wherever it is; TERM may be repeated."""
    stop = threading.Event()

    def on_signal(number: int, _: FrameType | None) -> None:
        stop.set()
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, on_signal)
    return stop
