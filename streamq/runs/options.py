"""Options of ``load`` and ``run`` as people write them, and what they mean.

This module needs no redis-py, so it is imported quickly.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, TypedDict, Unpack

import msgspec

from streamq import cpus, units
from streamq.errors import InvalidValue
from streamq.flows.flow import Flow
from streamq.model import LEVEL, LIMIT, MAX_PART, WEIGHT, Policy, Spec
from streamq.queue.flow_policy import flow_policy, follow_of_stage
from streamq.queue.options import Named, policy_of_options
from streamq.records import outputs
from streamq.records.arrow_tables import TABLE_FORMATS, check_pyarrow_installed
from streamq.records.inputs import STDIN, encoding_named
from streamq.records.keys import KeyField
from streamq.records.names import FORMATS, Dialect, absolute_file_name, expand_file_names, format_of
from streamq.records.partitions import file_of_partitions
from streamq.records.references import MOST_REFERRED
from streamq.records.remote import is_remote
from streamq.records.sizes import PartSize
from streamq.runs.plan import STANDARD, Plan
from streamq.runs.plan_differences import code_file_and_digest
from streamq.runs.upload import file_of_upload
from streamq.settings import Settings
from streamq.worker import program
from streamq.worker.channel import check_capacity_of_pool
from streamq.worker.flow_reader import read_flow_apart

#: How long a run that is done with failures is kept by default; and its request, at least.
KEEP = "1d"
_LEAST_KEPT_MS = 7 * 86_400_000


class RequestOptions(TypedDict, total=False):
    """How files become a request. Each option has the name and the default of the command's."""

    #: auto (by the name of the first file), lines, csv, jsonl or file.
    format: str
    #: A part holds whole records up to this size: ``"256KiB"``. Without ``bytes`` and ``lines`` a
    #: part holds what takes about a quarter of a second, up to 256 KiB.
    bytes: str | int
    #: How many records a part holds, instead of ``bytes``.
    lines: int
    #: For CSV: the character between fields; the one around fields, "" for none; the one before a
    #: character that is meant literally.
    delimiter: str
    quote: str
    escape: str
    #: Names of the columns, for a CSV without a header: ``"a,b,c"``.
    header: str
    #: Rows of a CSV that are left out at the beginning of each file.
    skip_rows: int
    #: How files are encoded: ``"latin-1"``. UTF-8 is made of it.
    encoding: str
    #: The CSV has no header: a handler gets rows as lists.
    no_header: bool
    #: Parts hold no bytes; they say where in the files their bytes are, and workers read them
    #: there.
    by_reference: bool
    #: A file that cannot be read or is too large ends the load, instead of being one failure.
    strict: bool
    #: The field by which ``find`` knows a record, as ``sku`` or ``user.id``; ``.`` for all of it.
    #: Then a part is one record, unless ``bytes`` or ``lines`` say otherwise.
    key: str
    #: Of a flow: keep where each item is, which ``key`` does, too; and what it came to in each
    #: stage.
    track: bool
    trace: bool
    #: The priority: level 0 goes first, level 99 last.
    level: int
    #: The share among requests of the same level: 1 to 64, a 4 gets half as many turns as an 8.
    weight: int
    #: How many records (map) or parts may start in a time: ``"100/s"``.
    rate: str | None
    #: Attempts after the first.
    retries: int | None
    #: The longest time that a record may take, or a part of a handler: ``"30s"``.
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
    **options: Unpack[RequestOptions],
) -> Source:
    """Return the request that the options describe.

    ``named`` returns what an option is called in messages.

    Raises:
        InvalidValue: an option is not allowed, or a file cannot be read.
    """
    form, key = check_format(options.get("format", "auto"), named), options.get("key", "")
    names = expand_file_names(files)
    if not names:
        raise InvalidValue("give a file")
    form = format_of(names[0]) if form == "auto" else form
    if form == "requests":
        what = named("format")
        raise InvalidValue(f"{what} requests makes many requests: that is for streamq load")
    is_table = form in TABLE_FORMATS
    if is_table:
        _check_tables(form, names, options, named)
    is_referred = is_table or options.get("by_reference", False)
    if is_referred:
        names = [absolute_file_name(name, named("by_reference")) for name in names]
    encoding = encoding_named(options.get("encoding", ""), named("encoding"))
    if encoding and is_referred:
        first, second = named("encoding"), named("by_reference")
        raise InvalidValue(
            f"{first} cannot be combined with {second}: workers read the bytes as they are"
        )
    spec = Spec(
        format=form,
        files=tuple(names),
        by_reference=is_referred,
        encoding=encoding,
        is_strict=options.get("strict", False),
    )
    if form == "csv":
        dialect = Dialect(
            delimiter=options.get("delimiter", ""),
            quote=options.get("quote", '"'),
            escape=options.get("escape", ""),
            header=options.get("header", ""),
            has_no_header=options.get("no_header", False),
            skip_rows=units.whole(options.get("skip_rows", 0), named("skip_rows"), 0),
        )
        spec = dialect.applied(spec, named=named, is_strict=spec.is_strict)
    _check_key(options, spec, named)
    if is_table:
        options["by_reference"] = True  # of the size
    return Source(
        policy_of_options(
            handler=handler,
            key=key,
            queue=queue,
            level=options.get("level", LEVEL),
            limit=limit,
            weight=options.get("weight", WEIGHT),
            rate=options.get("rate"),
            retries=options.get("retries"),
            timeout=options.get("timeout"),
            max_failures=options.get("max_failures"),
            keep=keep,
            spec=spec,
            named=named,
        ),
        _part_size(options, named),
    )


def describe_flow(
    flow: Flow,
    files: Iterable[str],
    *,
    queue: str = "default",
    limit: int = LIMIT,
    keep: str | float = "7d",
    served: Mapping[str, str] = MappingProxyType({}),
    named: Named = str,
    **options: Unpack[RequestOptions],
) -> Source:
    """Return the request that a flow and the options describe; as ``describe_source``.

    ``served``: names of handlers, each with the name under which it serves in the queue.

    Raises:
        InvalidValue: there can be no such flow, an option is not allowed, or a file cannot be read.
    """
    # One part of a spread has at most 1,000 children, and a join waits for the children of a part:
    # so there a part is one record.
    if "spread" in flow.shape.kinds and not options.get("lines") and not options.get("bytes"):
        options["lines"] = 1
    common: dict[str, Any] = {"queue": queue, "limit": limit, "keep": keep, "named": named}
    for name in ("level", "weight", "rate", "retries", "timeout", "max_failures", "key"):
        if options.get(name) not in (None, ""):
            common[name] = options.get(name)
    first = served.get(flow.stages[0].handler, flow.stages[0].handler)
    has_key, is_tracked = options.get("key", ""), options.pop("track", False)
    follow = follow_of_stage(key=has_key, track=is_tracked, trace=options.pop("trace", False))
    policy, size = describe_source(
        files, handler=first, queue=queue, limit=limit, keep=keep, named=named, **options
    )
    return Source(flow_policy(flow, common, policy.spec, served, follow), size)


def _check_tables(form: str, names: list[str], options: RequestOptions, named: Named) -> None:
    """Raise InvalidValue if files of tables cannot be read, or not as the options say."""
    check_pyarrow_installed(names[0])
    if names == [STDIN]:
        raise InvalidValue(f"{form} is read from files: workers read their rows there themselves")
    for option in ("encoding", "key"):
        if options.get(option):
            raise InvalidValue(f"{named(option)} is for text: it cannot be combined with {form}")


def check_format(form: str, named: Named = str) -> str:
    """Return the format if it is a known one.

    Raises:
        InvalidValue: the format is not known.
    """
    if form not in FORMATS:
        raise InvalidValue(f"{named('format')} {form!r} is none of {', '.join(FORMATS)}")
    return form


def _check_key(options: RequestOptions, spec: Spec, named: Named) -> None:
    """Raise InvalidValue if records cannot be found by what the options say."""
    if options.get("track") or options.get("trace"):
        raise InvalidValue(f"{named('track')} and {named('trace')} are for flows")
    if key := options.get("key", ""):
        if spec.by_reference:
            raise InvalidValue(f"{named('key')} cannot be combined with {named('by_reference')}")
        KeyField(key, spec).check()


def _part_size(options: RequestOptions, named: Named) -> PartSize:
    is_referred = options.get("by_reference", False)
    most = MOST_REFERRED if is_referred else MAX_PART
    given = options.get("bytes", "")
    size = units.size_bytes("256KiB" if given == "" else given, named("bytes"))
    if size > most:
        raise InvalidValue(
            f"{named('bytes')} {given} is more than a part may have: {most // 2**20}MiB"
        )
    lines = units.whole(options.get("lines", 0), named("lines"), 0)
    if options.get("key") and given == "":
        lines = lines or 1
    is_file = options.get("format") == "file" and is_referred
    is_automatic = msgspec.UNSET if given != "" or lines else True
    return PartSize(size, lines, most if is_file else max(size, MAX_PART), is_automatic)


class Capacity(NamedTuple):
    """How many parts a run's processes run at once."""

    processes: int
    #: Of each process.
    slots: int
    #: Of all processes together.
    at_once: int


def capacity_options(processes: int, concurrency: int) -> Capacity:
    """Return what ``-p`` and ``-c`` mean; 0 is an option that was not given.

    With ``-p``, ``-c`` is for each process. Without it, so many run at once in all, spread over
    as many processes as there are CPUs. Without both, each CPU has a process that runs one.

    Raises:
        InvalidValue: a pool cannot look after so many.
    """
    if concurrency and not processes:
        processes = min(cpus.usable_cpus(), concurrency)
        slots, at_once = -(-concurrency // processes), concurrency
    else:
        processes, slots = processes or cpus.usable_cpus(), concurrency or 1
        at_once = processes * slots
    check_capacity_of_pool(processes, slots)
    return Capacity(processes, slots, at_once)


def describe_run(  # noqa: PLR0913  the options of a run are many and flat
    files: Sequence[str],
    *,
    output: str,
    function: str = "",
    flow: str = "",
    command: str = "",
    processes: int = 0,
    concurrency: int = 0,
    output_format: str = "",
    ordered: bool = True,
    limit: int = 0,
    window: str | int = "256MiB",
    force: bool = False,
    keep: str | float = KEEP,
    manifest: bool = False,
    partition_by: Sequence[str] = (),
    queue: str = "default",
    named: Named = str,
    **options: Unpack[RequestOptions],
) -> Plan:
    """Return a new run as the options describe it.

    ``output`` is a file, ``-`` for stdout, or the URL of an object.

    ``function`` and ``flow`` name what the records go through, unless ``command`` is a program.

    Whether the output may be written is not checked here: a run that was stopped may have begun it.

    Raises:
        InvalidValue: an option is not allowed, or a file cannot be read.
        AppLoadError: the flow cannot be loaded.
    """
    run_id = units.request_id(None, Settings.from_env().team)
    argv = program.words_of_program(command, named("exec"))
    room, keep_ms = capacity_options(processes, concurrency), units.duration_ms(keep, named("keep"))
    upload = output if is_remote(output) else ""
    if partition_by:
        if output == STANDARD or manifest:
            what = named("manifest") if manifest else "standard output"
            raise InvalidValue(f"{named('partition_by')} makes a folder, and {what} has none")
        upload = upload.rstrip("/")
        output = file_of_partitions(file_of_upload(upload) if upload else output)
    form = _output_format(output_format, output, is_program=bool(argv), named=named)
    output = file_of_upload(upload) if upload and not partition_by else output
    stages = read_flow_apart(flow, has_handlers=True) if flow else None
    serves = _handlers_of_this_run(stages, run_id) if stages else {}
    common: dict[str, Any] = {
        "queue": queue,
        "limit": limit or room.at_once,
        "keep": max(keep_ms, _LEAST_KEPT_MS) / 1e3,
        "named": named,
        **options,
    }
    source = (
        describe_flow(stages, files, served=serves, **common)
        if stages
        else describe_source(files, handler=_handler_of_this_run(argv, function, run_id), **common)
    )
    plan = Plan(
        id=run_id,
        target=function or flow,
        serves={name: own for own, name in serves.items()},
        argv=argv,
        output=output if output == STANDARD else units.file_name(str(Path(output).absolute())),
        upload=upload,
        partition_by=tuple(partition_by),
        form=form,
        policy=source.policy,
        size=source.size,
        processes=room.processes,
        slots=room.slots,
        window_bytes=units.size_bytes(window, named("window")),
        is_ordered=ordered,
        force=force,
        keep_ms=keep_ms,
        has_manifest=manifest,
        code=code_file_and_digest(function or flow, argv),
        folder=str(Path.cwd()),
    )
    if form == "parquet" and plan.is_piped:
        raise InvalidValue("Parquet is written to a file, and not to a pipe")
    if manifest and plan.is_piped:
        raise InvalidValue(f"{named('manifest')} goes with an output that is a file")
    if plan.output != STANDARD:
        outputs.refuse_inputs_as_output(Path(plan.output), plan.policy.spec.files)
    return plan


def _handlers_of_this_run(flow: Flow, run_id: str) -> dict[str, str]:
    """Return for each handler of a flow a name that no other run has."""
    found: dict[str, str] = {}
    for name in dict.fromkeys(stage.handler for stage in flow.stages):
        short = name[: 63 - len(run_id)]
        if f"{short}-{run_id}" in found.values():
            short = f"{short[:-2]}{len(found):02d}"
        found[name] = f"{short}-{run_id}"
    return found


def _handler_of_this_run(argv: Sequence[str], function: str, run_id: str) -> str:
    """Return a handler's name that no other run has, so that other runs' workers leave it."""
    what = argv[0] if argv else function.rpartition(":")[2].rpartition(".")[2]
    readable = re.sub(r"[^A-Za-z0-9_.-]", "_", Path(what).name)
    return f"{readable[: min(40, 63 - len(run_id))]}-{run_id}"


def _output_format(given: str, output: str, *, is_program: bool, named: Named) -> str:
    """Return the form of the output: as asked for, or by the output's name."""
    if is_program and given not in ("", "raw"):
        raise InvalidValue(
            f"{named('output_format')} goes with {named('map')}: "
            "what a program prints is written as it is"
        )
    if output != STANDARD:
        form = given or ("raw" if is_program else "")
        outputs.check_output_name(output, form, may_upload=True)
    form = "raw" if is_program else given or outputs.form_by_output_name(output)
    if form not in outputs.FORMS:
        what, known = named("output_format"), ", ".join(outputs.FORMS)
        raise InvalidValue(f"{what} {form!r} is none of {known}")
    return form
