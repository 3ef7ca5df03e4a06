"""``streamq janitor``."""

import logging
import signal
import threading
import time
from types import FrameType
from typing import Annotated

import typer

from streamq import backoff, units
from streamq.errors import Damaged, InvalidValue, ServerError
from streamq.model import LAST_LEVEL
from streamq.queue.backlog import Lookout, build
from streamq.queue.janitor import Janitor, totals
from streamq.telemetry.health import HealthServer, Subject
from streamq.telemetry.metrics import Samples
from streamq.telemetry.systemd import Notifier

from ..connecting import connected
from ..shared_options import (
    HealthPortOption,
    LogFormat,
    LogFormatOption,
    LogLevel,
    LogLevelOption,
    PrefixOption,
    QueuesOption,
    UrlOption,
    configure_logs,
)

log = logging.getLogger(__name__)

#: How long to leave a server alone that does not answer: at first, and at most.
REST_MS = 200
LONGEST_REST_MS = 10_000
#: How often to say that all is well, and how long a sweep may take to end.
TICK_S = 0.2
LEAVE_S = 5.0


def janitor(
    is_once: Annotated[
        bool, typer.Option("--once", help="Look once at what is due, and end.")
    ] = False,
    queues: QueuesOption = ["default"],  # noqa: B006  typer reads it and nobody changes it
    interval: Annotated[
        str,
        typer.Option("--interval", metavar="TIME", help="Look at each open request so often."),
    ] = "5s",
    health_port: HealthPortOption = "",
    log_level: LogLevelOption = LogLevel.INFO,
    log_format: LogFormatOption = LogFormat.TEXT,
    url: UrlOption = None,
    prefix: PrefixOption = None,
) -> None:
    """Take back what the dead left, and forget what was kept long enough.

    Every worker pool does this too; any number may do it at once. Ends politely with
    Ctrl-C or TERM. With --once it stays for some seconds where a lease has just expired,
    until it is known whether its holder is dead.

        streamq janitor --queue default --queue slow
    """
    every_ms = units.duration_ms(interval, "interval")
    if every_ms < 100:
        raise InvalidValue(f"interval {interval!r} is too short: 100ms or more")
    names = [units.name(queue, "queue") for queue in dict.fromkeys(queues)]
    configure_logs(log_level, log_format)
    with connected(url, prefix, is_patient=False, is_warned=True) as protocol:
        janitors = [Janitor(protocol, name, every_ms) for name in names]
        if is_once:
            for each in janitors:
                each.sweep_out()
            return
        rounds = [Round(each, name) for each, name in zip(janitors, names, strict=True)]
        stop = _stop_on_signals()
        log.info("sweeping %s at %s", ", ".join(names), protocol.connection.where)
        _serve(rounds, Watch(rounds, Lookout(protocol, names)), health_port, stop)
    log.info("stopped")


def _serve(rounds: list["Round"], watch: "Watch", health_port: str, stop: threading.Event) -> None:
    """Sweep each queue in a thread, and stay to tell how it goes.

    A server that is away may hold up a thread; and one queue that takes long must not hold up the
    looks at another, whose leases are known to be over only when they are looked at every second.
    """
    notifier = Notifier()
    server = HealthServer(health_port, watch.subject()) if health_port else None
    threads = [
        threading.Thread(target=_run, args=(each, stop), name=each.queue, daemon=True)
        for each in rounds
    ]
    for thread in threads:
        thread.start()
    notifier.ready("sweeping")
    while all(thread.is_alive() for thread in threads) and not stop.wait(TICK_S):
        watch.ticked_at = time.monotonic()
        notifier.alive()
    notifier.stopping("told to stop")
    end = time.monotonic() + LEAVE_S
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    if server:
        server.close()


class Watch:
    """What is told of the rounds."""

    def __init__(self, rounds: list["Round"], lookout: Lookout) -> None:
        self._rounds = rounds
        self._lookout = lookout
        self.ticked_at = time.monotonic()

    def subject(self) -> Subject:
        """The same for those who ask over HTTP."""
        return Subject(
            ticked_at=lambda: self.ticked_at,
            unready=self._unready,
            samples=self._samples,
            wanted=lambda: sum(
                backlog.wanted(None, range(LAST_LEVEL + 1)) for backlog in self._lookout.backlogs()
            ),
        )

    def _unready(self) -> str:
        return "the server does not answer" if any(each.is_away for each in self._rounds) else ""

    def _samples(self) -> Samples:
        is_away = any(each.is_away for each in self._rounds)
        janitors = [each.janitor for each in self._rounds]
        return {
            "streamq_server_up": [({}, int(not is_away))],
            **totals(janitors),
            **self._lookout.samples(),
            **build(),
        }


class Round:
    """One queue's janitor, who comes again when something is due, and outlives outages."""

    def __init__(self, janitor: Janitor, queue: str) -> None:
        self.janitor = janitor
        self.queue = queue
        self._failed = 0
        #: When to sweep next, by the clock that never jumps.
        self.at = 0.0

    @property
    def is_away(self) -> bool:
        """Whether the server did not answer the last time."""
        return self._failed > 0

    def sweep(self) -> None:
        """Sweep, and know when to do so again. An outage is logged once."""
        try:
            wait_ms = self.janitor.sweep()
        except (ServerError, Damaged) as error:
            self._failed += 1
            wait_ms = backoff.delay_ms(self._failed, REST_MS, LONGEST_REST_MS)
            if self._failed == 1:
                log.warning("queue %s: %s; trying on", self.queue, error)
        else:
            if self._failed:
                log.info("queue %s is swept again", self.queue)
            self._failed = 0
        self.at = time.monotonic() + wait_ms / 1e3


def _run(each: Round, stop: threading.Event) -> None:
    while not stop.wait(max(0.0, each.at - time.monotonic())):
        each.sweep()


def _stop_on_signals() -> threading.Event:
    """Set by INT or TERM. A second INT ends the program wherever it is; TERM may be repeated."""
    stop = threading.Event()

    def on_signal(number: int, _: FrameType | None) -> None:
        stop.set()
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    for number in (signal.SIGINT, signal.SIGTERM):
        # What whoever started us has us ignore stays ignored.
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, on_signal)
    return stop
