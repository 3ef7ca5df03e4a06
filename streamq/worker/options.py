"""Turns the options of a worker, as people write them, into descriptions of pool and processes.

This module does not import redis-py.
"""

import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path

from streamq import units
from streamq.errors import InvalidValue
from streamq.model import LAST_LEVEL, MAX_RESULT
from streamq.records.remote import is_remote, locate_url
from streamq.settings import Settings
from streamq.worker.channel import (
    MOST_PROCESSES,
    MOST_SLOTS,
    PoolOptions,
    ProcessConfig,
    check_capacity_of_pool,
)
from streamq.worker.program import words_of_program
from streamq.worker.webhooks import check_prefix

#: Every level, as people write it.
ALL_LEVELS = f"0-{LAST_LEVEL}"
LARGEST_RESULT = f"{MAX_RESULT // 2**20}MiB"
#: Longer texts are no list of levels: reading megabytes of them would take seconds.
LONGEST_LEVELS = 1_000
_LEVELS = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9}))?")
#: A lease of 500 ms is renewed every 125 ms. A shorter one would leave too little time for that.
SHORTEST_LEASE_MS = 500

Named = Callable[[str], str]


def describe_process(  # noqa: PLR0913  the options of a worker are many and flat
    target: str,
    *,
    url: str,
    prefix: str,
    command: str = "",
    handler: str = "",
    queue: str = "default",
    concurrency: int = 1,
    levels: str = ALL_LEVELS,
    quantum: str | float = "50ms",
    lease: str | float | None = None,
    max_result: str | int = LARGEST_RESULT,
    allow_read: Iterable[str] = (),
    allow_post: Iterable[str] = (),
    spool: Iterable[str] = (),
    log_level: str = "info",
    log_format: str = "text",
    named: Named = str,
) -> ProcessConfig:
    """Return what each process of the pool is told.

    Raises:
        InvalidValue: an option has no such value. The message has the name that ``named`` gives it.
    """
    lease_ms = (
        Settings.from_env().lease_ms if lease is None else units.duration_ms(lease, named("lease"))
    )
    if lease_ms < SHORTEST_LEASE_MS:
        raise InvalidValue(
            f"{named('lease')} {lease or ''!r} is too short: {SHORTEST_LEASE_MS}ms or more"
        )
    return ProcessConfig(
        url=url,
        prefix=prefix,
        queue=units.name(queue, "queue"),
        target=target,
        argv=words_of_program(command, named("exec")),
        handler=units.name(handler, named("handler")) if handler else "",
        allow_read=tuple(_allowed_input_place(place, named("allow_read")) for place in allow_read),
        allow_post=tuple(check_prefix(each, named("allow_post")) for each in allow_post),
        shared_spools=tuple(_spool_folder(place, named("spool")) for place in spool),
        slots=units.whole(concurrency, named("concurrency"), 1, MOST_SLOTS),
        levels=levels_of_options(levels, named("levels")),
        quantum_ms=units.duration_ms(quantum, named("quantum")),
        lease_ms=lease_ms,
        max_result=units.size_bytes(max_result, named("max_result")),
        log_level=log_level,
        log_format=log_format,
    )


def describe_pool(
    *,
    processes: int = 1,
    concurrency: int = 1,
    burst: bool = False,
    max_idle: str | float | None = None,
    max_parts: int = 0,
    max_memory: str | int | None = None,
    grace: str | float = "25s",
    cancel_grace: str | float = "10s",
    reload: bool = False,
    named: Named = str,
) -> PoolOptions:
    """Return how the parent looks after its processes.

    Raises:
        InvalidValue: an option has no such value. The message has the name that ``named`` gives it.
    """
    units.whole(processes, named("processes"), 1, MOST_PROCESSES)
    check_capacity_of_pool(processes, concurrency)
    idle_ms = 0 if max_idle is None else units.duration_ms(max_idle, named("max_idle"))
    return PoolOptions(
        processes=processes,
        grace_s=units.duration_ms(grace, named("grace")) / 1e3,
        cancel_grace_s=units.duration_ms(cancel_grace, named("cancel_grace")) / 1e3,
        is_burst=burst,
        max_idle_s=idle_ms / 1e3,
        max_parts=units.whole(max_parts, named("max_parts"), 0),
        max_memory=0 if max_memory is None else units.size_bytes(max_memory, named("max_memory")),
        is_reloading=reload,
    )


def _allowed_input_place(place: str, what: str) -> str:
    if is_remote(place):
        locate_url(place)  # raises InvalidValue if the URL is bad
        return place
    if not Path(place).exists():
        raise InvalidValue(f"{what} {place}: there is no such folder")
    return str(Path(place).absolute())


def _spool_folder(place: str, what: str) -> str:
    if not os.access(place, os.W_OK | os.X_OK) or not Path(place).is_dir():
        raise InvalidValue(f"{what} {place}: there is no such folder, or it may not be written to")
    return str(Path(place).absolute())


def levels_of_options(text: str, what: str) -> tuple[int, ...]:
    """Return the levels of ``0-19`` or ``0-9,50``."""
    chosen: set[int] = set()
    for piece in text.split(",") if len(text) <= LONGEST_LEVELS else [""]:
        found = _LEVELS.fullmatch(piece.strip())
        if not found:
            raise InvalidValue(f"{what} {text!r:.80}: write 0-19 or 0-9,50")
        low, high = int(found[1]), int(found[2] or found[1])
        units.whole(high, what, low, LAST_LEVEL)
        chosen |= set(range(low, high + 1))
    return tuple(sorted(chosen))
