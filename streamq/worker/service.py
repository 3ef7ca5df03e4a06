"""Runs a pool or a janitor until it is told to stop, with health, metrics and systemd around it.

This module imports redis-py. Commands import it after they have started the worker processes, so
both happen at the same time.
"""

import logging
import signal
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from types import FrameType

import msgspec

from streamq.model import LAST_LEVEL
from streamq.protocol.protocol import Protocol
from streamq.protocol.script_cache import ScriptCache
from streamq.queue.backlog import BacklogCache
from streamq.queue.lease_keeper import LeaseKeeper, most_between_beats_ms
from streamq.queue.sweeper import Sweepers
from streamq.settings import Settings
from streamq.telemetry.health import HealthServer, HealthSource
from streamq.telemetry.metrics import build_info_samples
from streamq.telemetry.systemd import Notifier
from streamq.worker.channel import PoolOptions, ProcessConfig, new_pool_word
from streamq.worker.pool import Pool
from streamq.worker.spawning import Spawner

log = logging.getLogger(__name__)

#: A janitor tells systemd and the health port this often that it lives.
TICK_S = 0.2
#: How long a janitor that stops waits for its sweeps to end.
LEAVE_S = 5.0


def serve_pool(
    protocol: Protocol,
    config: ProcessConfig,
    options: PoolOptions,
    spawner: Spawner,
    *,
    levels: str,
    health_port: str = "",
    started: Callable[[Pool], object] = lambda _: None,
) -> int:
    """Run a pool to its end, and report its health at the port. Return the exit code.

    ``started`` is called with the pool, so that the caller can stop it.

    Raises:
        AppLoadError: the user's module cannot be loaded.
    """
    settings = Settings.from_env()
    # A program may serve one description several times, also in forked processes at once. Each
    # pool needs a word of its own. Otherwise a janitor would take the heartbeats of one pool for
    # those of another pool that is dead.
    config = msgspec.structs.replace(config, pool=new_pool_word())
    keeper = LeaseKeeper(
        protocol,
        config.queue,
        config.pool,
        slots=options.processes * config.slots,
        lease_ms=config.lease_ms,
        beat_ms=min(settings.beat_ms, most_between_beats_ms(config.lease_ms)),
        audit_ms=settings.audit_ms,
        levels=config.levels,
        levels_text=levels,
    )
    pool = Pool(config, options, keeper, notifier=Notifier(), spawner=spawner)
    started(pool)
    with _serve_pool_health(health_port, pool, protocol, keeper, config):
        return pool.run()


@contextmanager
def _serve_pool_health(
    address: str, pool: Pool, protocol: Protocol, keeper: LeaseKeeper, config: ProcessConfig
) -> Generator[None]:
    """Serve the health and the metrics of the pool at the address, if there is one."""
    if not address:
        yield
        return
    lookout = BacklogCache(protocol, [config.queue])
    server = HealthServer(
        address,
        HealthSource(
            ticked_at=lambda: pool.ticked_at,
            unready=pool.unready,
            samples=lambda: pool.samples() | lookout.samples() | build_info_samples(),
            wanted=lambda: lookout.backlogs()[0].wanted(keeper.handlers or None, config.levels),
        ),
    )
    try:
        yield
    finally:
        server.close()
        lookout.close()


def serve_janitor(
    protocol: Protocol, queues: Sequence[str], every_ms: int, health_port: str = ""
) -> None:
    """Sweep queues until INT or TERM comes, and report the janitor's health at the port."""
    stop = _stop_service_on_signals()
    log.info("sweeping %s at %s", ", ".join(queues), protocol.connection.where)
    lookout = BacklogCache(protocol, list(queues))
    sweepers = Sweepers(protocol, queues, every_ms)
    ticked_at = time.monotonic()
    subject = HealthSource(
        ticked_at=lambda: ticked_at,
        unready=lambda: "the server does not answer" if sweepers.is_away else "",
        samples=lambda: {
            "streamq_server_up": [({}, int(not sweepers.is_away))],
            **sweepers.samples(),
            **lookout.samples(),
            **build_info_samples(),
        },
        wanted=lambda: sum(
            backlog.wanted(None, range(LAST_LEVEL + 1)) for backlog in lookout.backlogs()
        ),
    )
    notifier = Notifier()
    server = HealthServer(health_port, subject) if health_port else None
    scripts = ScriptCache(protocol.connection)
    scripts.fill()
    threading.Thread(target=scripts.keep_filled, args=(stop,), name="scripts", daemon=True).start()
    sweepers.start(stop)
    notifier.ready("sweeping")
    while sweepers.are_alive() and not stop.wait(TICK_S):
        ticked_at = time.monotonic()
        notifier.alive()
    notifier.stopping("told to stop")
    stop.set()
    sweepers.join(LEAVE_S)
    if server:
        server.close()
    log.info("stopped")


def _stop_service_on_signals() -> threading.Event:
    """Return an event that INT or TERM sets.

    A second INT raises KeyboardInterrupt; a second TERM does nothing.
    """
    stop = threading.Event()

    def on_signal(number: int, _: FrameType | None) -> None:
        stop.set()
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    for number in (signal.SIGINT, signal.SIGTERM):
        # A signal that this program was started to ignore, as by nohup, stays ignored.
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, on_signal)
    return stop
