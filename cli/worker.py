"""``streamq worker``."""

from typing import Annotated

import typer

from streamq import logs, units
from streamq.connection import Connection
from streamq.control import Config
from streamq.errors import InvalidValue
from streamq.keeper import Keeper
from streamq.model import LAST_LEVEL
from streamq.pool import Pool, PoolOptions, Unrunnable
from streamq.protocol import Protocol
from streamq.runner import MAX_RESULT
from streamq.settings import Settings

from .context import UrlOption, url_of


def worker(  # noqa: PLR0913, PLR0917  the options of a pool are many and flat
    target: Annotated[
        str, typer.Argument(metavar="MODULE:APP", help="package.module:app or file.py:app")
    ],
    url: UrlOption = None,
    processes: Annotated[
        int, typer.Option("-p", "--processes", min=1, envvar="STREAMQ_PROCESSES")
    ] = 1,
    slots: Annotated[
        int,
        typer.Option(
            "-c",
            "--concurrency",
            min=1,
            help="Parts at once in each process.",
            envvar="STREAMQ_CONCURRENCY",
        ),
    ] = 1,
    queue: Annotated[str, typer.Option(envvar="STREAMQ_QUEUE")] = "default",
    levels: Annotated[
        str, typer.Option(help="Take only these levels, such as 0-19.")
    ] = f"0-{LAST_LEVEL}",
    burst: Annotated[
        bool, typer.Option("--burst", help="Exit when nothing is left to do.")
    ] = False,
    max_idle: Annotated[str, typer.Option(help="Exit after so long without a part.")] = "",
    max_parts: Annotated[
        int, typer.Option(min=0, help="Replace a process after so many parts.")
    ] = 0,
    max_memory: Annotated[str, typer.Option(help="Replace a process that grows beyond this.")] = "",
    max_result: Annotated[str, typer.Option(help="Largest result of a part.")] = f"{MAX_RESULT}",
    grace: Annotated[
        str, typer.Option(help="Time for parts to end when told to stop.", envvar="STREAMQ_GRACE")
    ] = "25s",
    cancel_grace: Annotated[str, typer.Option(help="Time for a cancelled part to end.")] = "10s",
    quantum: Annotated[
        str, typer.Option(help="Work on one request before others have a turn.")
    ] = "50ms",
    lease: Annotated[
        str, typer.Option(help="A silent worker's parts are taken back after this.")
    ] = "",
    reload: Annotated[
        bool, typer.Option("--reload", help="Restart when the code changes.")
    ] = False,
    log_level: Annotated[str, typer.Option(envvar="STREAMQ_LOG_LEVEL")] = "info",
    log_format: Annotated[str, typer.Option(envvar="STREAMQ_LOG_FORMAT")] = "text",
) -> None:
    """Run the handlers of an app on parts of requests.

    streamq worker shop.tasks:app -p 4 -c 8
    """
    if log_level not in logs.LEVELS or log_format not in logs.FORMATS:
        levels_known, formats_known = ", ".join(logs.LEVELS), ", ".join(logs.FORMATS)
        raise InvalidValue(f"--log-level is one of {levels_known}; --log-format of {formats_known}")
    settings = Settings.from_env()
    address = url_of(url)
    lease_ms = units.duration_ms(lease, "--lease") if lease else settings.lease_ms
    config = Config(
        url=address,
        prefix=settings.prefix,
        queue=units.name(queue, "--queue"),
        target=target,
        slots=slots,
        levels=_levels(levels),
        quantum_ms=units.duration_ms(quantum, "--quantum"),
        lease_ms=lease_ms,
        max_result=units.size_bytes(max_result, "--max-result"),
        log_level=log_level,
        log_format=log_format,
    )
    options = PoolOptions(
        processes=processes,
        grace_s=units.duration_ms(grace, "--grace") / 1e3,
        cancel_grace_s=units.duration_ms(cancel_grace, "--cancel-grace") / 1e3,
        is_burst=burst,
        max_idle_s=units.duration_ms(max_idle, "--max-idle") / 1e3 if max_idle else 0.0,
        max_parts=max_parts,
        max_memory=units.size_bytes(max_memory, "--max-memory") if max_memory else 0,
        is_reloading=reload,
    )
    logs.configure(log_level, log_format)
    connection = Connection(address)
    connection.check()
    beat_ms = min(settings.beat_ms, lease_ms // 4)
    keeper = Keeper(
        Protocol(connection, settings.prefix),
        config.queue,
        lease_ms=lease_ms,
        beat_ms=beat_ms,
        audit_ms=settings.audit_ms,
    )
    keeper.slots, keeper.levels = processes * slots, levels
    try:
        code = Pool(config, options, keeper).run()
    except Unrunnable as error:
        typer.echo(error.trace, err=True, nl=False)
        typer.secho(f"streamq: {error}", err=True, fg="red")
        raise typer.Exit(4) from None
    raise typer.Exit(code)


def _levels(text: str) -> tuple[int, ...]:
    """Levels of ``0-19`` or ``0-9,50``."""
    chosen: set[int] = set()
    for piece in text.split(","):
        first, dash, last = piece.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise InvalidValue(f"--levels {text!r}: write 0-19 or 0-9,50")
        low, high = int(first), int(last or first)
        units.whole(high, "--levels", low, LAST_LEVEL)
        chosen |= set(range(low, high + 1))
    return tuple(sorted(chosen))
