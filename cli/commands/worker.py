"""``streamq worker``."""

from pathlib import Path
from typing import Annotated

import msgspec
import typer

from streamq import units
from streamq.errors import InvalidValue
from streamq.model import LAST_LEVEL, MAX_RESULT
from streamq.records.remote import is_remote, locate
from streamq.settings import Settings
from streamq.telemetry.logs import harmless
from streamq.worker.channel import (
    MOST_PROCESSES,
    MOST_SLOTS,
    Config,
    PoolOptions,
    check_capacity,
)
from streamq.worker.program import words_of
from streamq.worker.spawning import Nursery

from .. import render
from ..connecting import connected, url_of
from ..option_structs import with_options
from ..shared_options import (
    ExecOption,
    HealthPortOption,
    LogFormat,
    LogFormatOption,
    LogLevel,
    LogLevelOption,
    PrefixOption,
    QueueOption,
    UrlOption,
    configure_logs,
    log_style,
)


class PoolWishes(msgspec.Struct, kw_only=True):
    """What a pool is to be like, as it was typed."""

    target: Annotated[
        str, typer.Argument(metavar="MODULE:APP", help="package.module:app or file.py:app")
    ] = ""
    command: ExecOption = ""
    handler: Annotated[
        str, typer.Option(metavar="NAME", help="With --exec: what requests call the program.")
    ] = ""
    processes: Annotated[
        int,
        typer.Option("-p", "--processes", min=1, max=MOST_PROCESSES, envvar="STREAMQ_PROCESSES"),
    ] = 1
    slots: Annotated[
        int,
        typer.Option(
            "-c",
            "--concurrency",
            min=1,
            max=MOST_SLOTS,
            envvar="STREAMQ_CONCURRENCY",
            help="Parts at once in each process.",
        ),
    ] = 1
    queue: QueueOption = "default"
    levels: Annotated[
        str, typer.Option(metavar="RANGE", help="Take only these levels, such as 0-19.")
    ] = f"0-{LAST_LEVEL}"
    is_burst: Annotated[bool, typer.Option("--burst", help="Exit when nothing is left to do.")] = (
        False
    )
    max_idle: Annotated[
        str, typer.Option(metavar="TIME", help="Exit after so long without a part.")
    ] = ""
    max_parts: Annotated[
        int, typer.Option(min=0, help="Replace a process after so many parts.")
    ] = 0
    max_memory: Annotated[
        str, typer.Option(metavar="SIZE", help="Replace a process that grows beyond this.")
    ] = ""
    max_result: Annotated[str, typer.Option(metavar="SIZE", help="Largest result of a part.")] = (
        f"{MAX_RESULT // 2**20}MiB"
    )
    grace: Annotated[
        str,
        typer.Option(
            metavar="TIME",
            envvar="STREAMQ_GRACE",
            help="Time for what runs to end when told to stop.",
        ),
    ] = "25s"
    cancel_grace: Annotated[
        str, typer.Option(metavar="TIME", help="Time for a cancelled part to end.")
    ] = "10s"
    quantum: Annotated[
        str, typer.Option(metavar="TIME", help="Work on one request before others have a turn.")
    ] = "50ms"
    lease: Annotated[
        str,
        typer.Option(
            metavar="TIME",
            help="When a whole pool is silent for so long, and for some seconds of grace, others "
            "take its parts. [default: 20s]",
        ),
    ] = ""
    health_port: HealthPortOption = ""
    allow_read: Annotated[
        list[str],
        typer.Option(metavar="DIR|URL", help="Where parts may refer to files; may be repeated."),
    ] = []
    is_reloading: Annotated[
        bool, typer.Option("--reload", help="Restart the processes when the code changes.")
    ] = False
    log_level: LogLevelOption = LogLevel.INFO
    log_format: LogFormatOption = LogFormat.TEXT

    def config(self, url: str | None, prefix: str | None) -> Config:
        """What its processes are told."""
        argv = words_of(self.command)
        if bool(self.target) == bool(argv) or bool(argv) != bool(self.handler):
            raise InvalidValue("give MODULE:APP, or --exec 'PROGRAM ARGS' --handler NAME")
        settings = Settings.from_env()
        lease_ms = units.duration_ms(self.lease, "--lease") if self.lease else settings.lease_ms
        if lease_ms < 500:
            raise InvalidValue(f"--lease {self.lease!r} is too short: 500ms or more")
        return Config(
            url=url_of(url),
            prefix=prefix or settings.prefix,
            queue=units.name(self.queue, "queue"),
            target=self.target,
            argv=argv,
            handler=units.name(self.handler, "--handler") if self.handler else "",
            allow_read=tuple(map(_allowed, self.allow_read)),
            slots=self.slots,
            levels=_levels(self.levels),
            quantum_ms=units.duration_ms(self.quantum, "--quantum"),
            lease_ms=lease_ms,
            max_result=units.size_bytes(self.max_result, "--max-result"),
            log_level=self.log_level.value,
            log_format=log_style(self.log_format),
        )

    def options(self) -> PoolOptions:
        """How it looks after them."""
        check_capacity(self.processes, self.slots)
        return PoolOptions(
            processes=self.processes,
            grace_s=units.duration_ms(self.grace, "--grace") / 1e3,
            cancel_grace_s=units.duration_ms(self.cancel_grace, "--cancel-grace") / 1e3,
            is_burst=self.is_burst,
            max_idle_s=units.duration_ms(self.max_idle, "--max-idle") / 1e3 if self.max_idle else 0,
            max_parts=self.max_parts,
            max_memory=units.size_bytes(self.max_memory, "--max-memory") if self.max_memory else 0,
            is_reloading=self.is_reloading,
        )


@with_options
def worker(wishes: PoolWishes, url: UrlOption = None, prefix: PrefixOption = None) -> None:
    """Run the handlers of an app on parts of requests, in processes that are looked after.

    TERM or Ctrl-C lets what runs end and hands back the rest; Ctrl-C again stops now, and
    nothing is lost either. HUP restarts the processes, USR1 takes nothing more, USR2 shows
    what runs.

    With --exec a program is the handler, under the name that --handler gives it.

        streamq worker shop.tasks:app -p 4 -c 8
    """
    config, options = wishes.config(url, prefix), wishes.options()
    configure_logs(wishes.log_level, wishes.log_format)
    try:
        with Nursery(config.slots, options.processes) as nursery:
            # The driver takes a while to import: as long as the processes take to start.
            from streamq.worker.pool import Unrunnable
            from streamq.worker.service import serve_pool

            with connected(url, prefix, is_patient=False, is_warned=True) as protocol:
                try:
                    code = serve_pool(
                        protocol,
                        config,
                        options,
                        nursery,
                        levels=wishes.levels,
                        health_port=wishes.health_port,
                    )
                except Unrunnable as error:
                    typer.echo(harmless(error.trace), err=True, nl=False)
                    render.error(str(error))
                    code = 4
    except KeyboardInterrupt:
        code = 0  # told to stop before there was anything to finish
    raise typer.Exit(code)


def _allowed(place: str) -> str:
    if is_remote(place):
        locate(place)  # a bad URL is told at once
        return place
    if not Path(place).exists():
        raise InvalidValue(f"--allow-read {place}: there is no such folder")
    return str(Path(place).absolute())


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
