"""Options of ``load`` and ``run`` as people write them, and what they mean.

This module needs no redis-py, so it is imported quickly.
"""

import logging
import re
import secrets
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple, TypedDict, Unpack

from streamq import cpus, units
from streamq.errors import InvalidValue
from streamq.model import LEVEL, LIMIT, MAX_PART, Policy, Spec
from streamq.queue.options import Named, policy
from streamq.records import outputs
from streamq.records.names import FORMATS, Dialect, absolute, expand, format_of
from streamq.records.references import MOST_REFERRED
from streamq.records.splitting import PartSize
from streamq.runs.plan import STANDARD, Plan
from streamq.worker import program
from streamq.worker.channel import check_capacity

log = logging.getLogger(__name__)

#: Is called with a sentence about something that should be mended.
Warn = Callable[[str], object]


class RequestOptions(TypedDict, total=False):
    """How files become a request. Each option has the name and the default of the command's."""

    #: auto (by the name of the first file), lines, csv, jsonl or file.
    format: str
    #: A part holds whole records up to this size: ``"256KiB"``.
    bytes: str | int
    #: A part holds so many records; used instead of ``bytes``.
    lines: int
    #: For CSV: the character between fields; the one around fields, "" for none; the one before a
    #: character that is meant literally.
    delimiter: str
    quote: str
    escape: str
    #: Names of the columns, for a CSV without a header: ``"a,b,c"``.
    header: str
    #: The CSV has no header: a handler gets rows as lists.
    no_header: bool
    #: Parts hold no bytes; they say where in the files their bytes are, and workers read them
    #: there.
    by_reference: bool
    #: The priority: 0 goes first, 99 last.
    level: int
    #: At most so many starts of records (map) or parts in a time: ``"100/s"``.
    rate: str | None
    #: Attempts after the first.
    retries: int | None
    #: The longest time that a part may run: ``"30s"``.
    timeout: str | float | None
    #: More failures than this end the request as failed: ``10`` or ``"2%"``.
    max_failures: str | int | None


class Source(NamedTuple):
    """A request made of files: its policy, and the size of its parts."""

    policy: Policy
    size: PartSize


def describe_source(
    files: Iterable[str],
    *,
    handler: str,
    queue: str = "default",
    limit: int = LIMIT,
    keep: str | float = "7d",
    named: Named = str,
    warn: Warn = log.warning,
    **options: Unpack[RequestOptions],
) -> Source:
    """Return the request that the options describe.

    ``named`` returns what an option is called in messages. ``warn`` gets a sentence for each thing
    that should be mended.

    Raises:
        InvalidValue: an option is not allowed, or a file cannot be read.
    """
    form = check_format(options.get("format", "auto"), named)
    names = expand(files)
    if not names:
        raise InvalidValue("give a file")
    form = format_of(names[0]) if form == "auto" else form
    if form == "requests":
        what = named("format")
        raise InvalidValue(f"{what} requests makes many requests: that is for streamq load")
    is_referred = options.get("by_reference", False)
    if is_referred:
        names = [absolute(name, named("by_reference")) for name in names]
    spec = Spec(format=form, files=tuple(names), by_reference=is_referred)
    if form == "csv":
        dialect = Dialect(
            delimiter=options.get("delimiter", ""),
            quote=options.get("quote", '"'),
            escape=options.get("escape", ""),
            header=options.get("header", ""),
            has_no_header=options.get("no_header", False),
        )
        spec = dialect.applied(spec, named=named, warn=warn)
    return Source(
        policy(
            handler=handler,
            queue=queue,
            level=options.get("level", LEVEL),
            limit=limit,
            rate=options.get("rate"),
            retries=options.get("retries"),
            timeout=options.get("timeout"),
            max_failures=options.get("max_failures"),
            keep=keep,
            spec=spec,
            named=named,
        ),
        _size(options, named),
    )


def check_format(form: str, named: Named = str) -> str:
    """Return the format if it is a known one.

    Raises:
        InvalidValue: the format is not known.
    """
    if form not in FORMATS:
        raise InvalidValue(f"{named('format')} {form!r} is none of {', '.join(FORMATS)}")
    return form


def _size(options: RequestOptions, named: Named) -> PartSize:
    is_referred = options.get("by_reference", False)
    most = MOST_REFERRED if is_referred else MAX_PART
    given = options.get("bytes", "256KiB")
    size = units.size_bytes(given, named("bytes"))
    if size > most:
        raise InvalidValue(
            f"{named('bytes')} {given} is more than a part may have: {most // 2**20}MiB"
        )
    lines = units.whole(options.get("lines", 0), named("lines"), 0)
    is_file = options.get("format") == "file" and is_referred
    return PartSize(size, lines, most if is_file else max(size, MAX_PART))


def describe_run(  # noqa: PLR0913  the options of a run are many and flat
    files: Sequence[str],
    *,
    output: str,
    function: str = "",
    command: str = "",
    processes: int = 0,
    concurrency: int = 1,
    output_format: str = "",
    ordered: bool = True,
    limit: int = 0,
    window: str | int = "256MiB",
    force: bool = False,
    queue: str = "default",
    named: Named = str,
    warn: Warn = log.warning,
    **options: Unpack[RequestOptions],
) -> Plan:
    """Return a new run as the options describe it. ``output`` is a file, or ``-`` for stdout.

    Raises:
        InvalidValue: an option is not allowed, or a file cannot be read or written.
    """
    run_id, argv = secrets.token_hex(8), program.words_of(command, named("exec"))
    processes = processes or cpus.usable()
    check_capacity(processes, concurrency)
    form = _output_format(output_format, output, is_program=bool(argv), named=named)
    source = describe_source(
        files,
        handler=_handler(argv, function, run_id),
        queue=queue,
        limit=limit or processes * concurrency,
        named=named,
        warn=warn,
        **options,
    )
    plan = Plan(
        id=run_id,
        target=function,
        argv=argv,
        output=output if output == STANDARD else units.file_name(str(Path(output).absolute())),
        form=form,
        policy=source.policy,
        size=source.size,
        processes=processes,
        slots=concurrency,
        window_bytes=units.size_bytes(window, named("window")),
        is_ordered=ordered,
        force=force,
    )
    if plan.output != STANDARD:
        outputs.refuse_inputs(Path(plan.output), plan.policy.spec.files)
        outputs.check(Path(plan.output), force=force)
    return plan


def _handler(argv: Sequence[str], function: str, run_id: str) -> str:
    """Return a handler's name that no other run has, so that other runs' workers leave it."""
    what = argv[0] if argv else function.rpartition(":")[2].rpartition(".")[2]
    readable = re.sub(r"[^A-Za-z0-9_.-]", "_", Path(what).name)
    return f"{readable[:40]}-{run_id}"


def _output_format(given: str, output: str, *, is_program: bool, named: Named) -> str:
    """Return the form of the output: as asked for, or by the output's name."""
    if is_program and given not in ("", "raw"):
        raise InvalidValue(
            f"{named('output_format')} goes with {named('map')}: "
            "what a program prints is written as it is"
        )
    form = "raw" if is_program else given or outputs.form_of(output)
    if form not in outputs.FORMS:
        what, known = named("output_format"), ", ".join(outputs.FORMS)
        raise InvalidValue(f"{what} {form!r} is none of {known}")
    return form
