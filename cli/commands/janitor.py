"""``streamq janitor``."""

from typing import Annotated

import typer

from streamq import units
from streamq.errors import InvalidValue
from streamq.protocol.script_cache import ScriptCache
from streamq.queue.janitor import Janitor
from streamq.worker.service import serve_janitor

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
    use_log_options,
)


def janitor(
    is_once: Annotated[
        bool, typer.Option("--once", help="Look once at the requests that are due, and exit.")
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
    """Take back the parts of dead workers, and purge requests whose retention is over.

    Every worker pool does this too; any number of janitors may run at once. A janitor also loads
    streamq's scripts into the server, for users who may not (streamq acl --only-janitors-load).

    Ctrl-C or TERM ends it politely. If a lease has just expired, --once waits some seconds until
    the janitor knows whether the holder is dead.

        streamq janitor --queue default --queue slow
    """
    every_ms = units.duration_ms(interval, "interval")
    if every_ms < 100:
        raise InvalidValue(f"interval {interval!r} is too short: 100ms or more")
    names = [units.name(queue, "queue") for queue in dict.fromkeys(queues)]
    use_log_options(log_level, log_format)
    with connected(url, prefix, is_patient=False, is_warned=True) as protocol:
        if is_once:
            ScriptCache(protocol.connection).fill()
            for name in names:
                Janitor(protocol, name, every_ms).sweep_out()
            return
        serve_janitor(protocol, names, every_ms, health_port)
