"""``streamq load``."""

import secrets
from pathlib import Path
from typing import Annotated

import typer

from streamq import units
from streamq.errors import InvalidValue
from streamq.loader import Load, header_of
from streamq.model import LAST_LEVEL, LEVEL, LIMIT, MAX_PART, Policy, Spec
from streamq.source import BOUNDARIES, Size

from . import render
from .context import PrefixOption, QueueOption, UrlOption, connected

FORMATS = ("auto", *BOUNDARIES, "file")
_COMPRESSED = {".gz", ".bz2", ".xz", ".zst"}
_BY_SUFFIX = {".csv": "csv", ".tsv": "csv", ".jsonl": "jsonl", ".ndjson": "jsonl"}


def load(  # noqa: PLR0913, PLR0917  the options of a request are many and flat
    files: Annotated[list[str], typer.Argument(metavar="FILE...", help="Files, or folders.")],
    handler: Annotated[str, typer.Option(metavar="NAME", help="Which handler is to run.")],
    form: Annotated[
        str, typer.Option("--format", metavar="|".join(FORMATS), help="auto goes by the name.")
    ] = "auto",
    part_bytes: Annotated[
        str, typer.Option("--bytes", metavar="SIZE", help="Whole records up to this in a part.")
    ] = "256KiB",
    lines: Annotated[
        int, typer.Option(min=0, help="So many records in a part, instead of --bytes.")
    ] = 0,
    delimiter: Annotated[
        str, typer.Option(metavar="CHAR", help="Between the fields of a CSV.")
    ] = "",
    request_id: Annotated[
        str, typer.Option("--id", metavar="ID", help="The same again goes on with a load.")
    ] = "",
    level: Annotated[int, typer.Option("--level", "--priority", help="0 goes first.")] = LEVEL,
    limit: Annotated[int, typer.Option(help="Parts that run at once, at most.")] = LIMIT,
    rate: Annotated[str, typer.Option(metavar="N/s", help="Records or parts in a time.")] = "",
    retries: Annotated[int | None, typer.Option(help="Attempts after the first.")] = None,
    timeout: Annotated[str, typer.Option(metavar="TIME", help="For each part.")] = "",
    max_failures: Annotated[
        str, typer.Option(metavar="N|P%", help="More than this ends the request.")
    ] = "",
    keep: Annotated[str, typer.Option(metavar="TIME", help="Retention after the end.")] = "7d",
    window: Annotated[
        str, typer.Option(metavar="SIZE", help="Bytes that wait in the server, at most.")
    ] = "",
    queue: QueueOption = "default",
    url: UrlOption = None,
    prefix: PrefixOption = None,
) -> None:
    """Split files into the parts of a request, and print its id.

    Workers run parts while later ones are still being read. Killed and run again with the
    same --id it goes on where it stood. Gzip, bzip2, xz and zstd are recognised.

        streamq load big.csv --handler clean --limit 20
    """
    if form not in FORMATS:
        raise InvalidValue(f"--format {form!r} is none of {', '.join(FORMATS)}")
    names = _expand(files)
    form = _form_of(names[0]) if form == "auto" else form
    delimiter = delimiter or ("\t" if ".tsv" in Path(names[0]).suffixes else ",")
    tolerated, percent = units.tolerance(max_failures or None)
    policy = Policy(
        handler=units.name(handler, "handler"),
        queue=units.name(queue, "queue"),
        level=units.whole(level, "--level", 0, LAST_LEVEL),
        limit=units.whole(limit, "--limit", 1),
        max_failures=tolerated,
        max_percent=percent,
        keep_ms=units.duration_ms(keep, "--keep"),
        rate_ms=units.rate_ms(rate, "--rate") if rate else 0.0,
        spec=Spec(
            retries=None if retries is None else units.whole(retries, "--retries", 0),
            timeout_ms=units.duration_ms(timeout, "--timeout") if timeout else 0,
            format=form,
            header=header_of(names[0]).decode() if form == "csv" else "",
            delimiter=delimiter,
            files=names,
        ),
    )
    size = Size(units.size_bytes(part_bytes, "--bytes"), lines, MAX_PART)
    if size.bytes > size.most:
        raise InvalidValue(f"--bytes {part_bytes} is more than a part may have: {MAX_PART} bytes")
    name = units.name(request_id, "--id") if request_id else secrets.token_hex(8)
    room = units.size_bytes(window, "--window") if window else 0
    with connected(url, prefix) as protocol:
        parts = Load(protocol, name, policy, size, window_bytes=room).run(lambda: typer.echo(name))
    render.note(f"loaded {', '.join(names[:3])}{' ...' if names[3:] else ''}: {parts} parts")


def _expand(files: list[str]) -> list[str]:
    """Files as given, and those in folders, in order."""
    names: list[str] = []
    for name in files:
        path = Path(name)
        inside = sorted(str(each) for each in path.rglob("*") if each.is_file())
        names += inside if path.is_dir() else [name]
        if path.is_dir() and not inside:
            raise InvalidValue(f"{name} is an empty folder")
    return names


def _form_of(name: str) -> str:
    suffixes = [suffix.lower() for suffix in Path(name).suffixes]
    if suffixes and suffixes[-1] in _COMPRESSED:
        suffixes.pop()
    return _BY_SUFFIX.get(suffixes[-1], "lines") if suffixes else "lines"
