"""What ``streamq worker`` does once it is known what is wanted.

It needs the driver, and is imported while the processes start that run handlers.
"""

from collections.abc import Generator
from contextlib import contextmanager

import typer

from streamq.protocol.protocol import Protocol
from streamq.queue.backlog import Lookout, build
from streamq.settings import Settings
from streamq.telemetry.health import HealthServer, Subject
from streamq.telemetry.logs import harmless
from streamq.telemetry.systemd import Notifier
from streamq.worker.channel import Config, PoolOptions
from streamq.worker.lease_keeper import Keeper
from streamq.worker.pool import Pool, Unrunnable
from streamq.worker.spawning import Nursery

from . import render


def serve(
    protocol: Protocol,
    config: Config,
    options: PoolOptions,
    nursery: Nursery,
    levels: str,
    health_port: str,
) -> int:
    """Run a pool to its end. Returns the exit code."""
    settings = Settings.from_env()
    keeper = Keeper(
        protocol,
        config,
        options.processes,
        beat_ms=min(settings.beat_ms, config.lease_ms // 4),
        audit_ms=settings.audit_ms,
        levels=levels,
    )
    pool = Pool(config, options, keeper, notifier=Notifier(), nursery=nursery)
    with _health(health_port, pool, protocol, keeper, config):
        try:
            return pool.run()
        except Unrunnable as error:
            typer.echo(harmless(error.trace), err=True, nl=False)
            render.error(str(error))
            raise typer.Exit(4) from None


@contextmanager
def _health(
    address: str, pool: Pool, protocol: Protocol, keeper: Keeper, config: Config
) -> Generator[None]:
    """Let those know how the pool is who ask at the address, if there is one."""
    if not address:
        yield
        return
    lookout = Lookout(protocol, [config.queue])
    server = HealthServer(
        address,
        Subject(
            ticked_at=lambda: pool.ticked_at,
            unready=pool.unready,
            samples=lambda: pool.samples() | lookout.samples() | build(),
            wanted=lambda: lookout.backlogs()[0].wanted(keeper.handlers or None, config.levels),
        ),
    )
    try:
        yield
    finally:
        server.close()
        lookout.close()
