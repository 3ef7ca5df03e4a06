"""What ``load`` and ``run`` are told about a request: the same options, read the same way."""

import glob
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from streamq import units
from streamq.errors import InvalidValue
from streamq.model import LAST_LEVEL, LEVEL, MAX_PART, Policy, Spec
from streamq.records.boundaries import bare_header, fields_of, mask_of, names_of
from streamq.records.inputs import COMPRESSED, STDIN
from streamq.records.references import MOST_REFERRED
from streamq.records.remote import is_remote
from streamq.records.splitting import Size, header_of

from . import render

FORMATS = ("auto", "lines", "csv", "jsonl", "requests", "file")
_BY_SUFFIX = {".csv": "csv", ".tsv": "csv", ".jsonl": "jsonl", ".ndjson": "jsonl"}


class Wishes(msgspec.Struct, kw_only=True):
    """The options as they were typed. What is described as one is an option of both commands."""

    files: list[str] = []
    handler: str = ""
    queue: str = "default"
    limit: int = 1
    keep: str = "7d"
    form: Annotated[
        str, typer.Option("--format", metavar="|".join(FORMATS), help="auto goes by the name.")
    ] = "auto"
    part_bytes: Annotated[
        str, typer.Option("--bytes", metavar="SIZE", help="Whole records up to this in a part.")
    ] = "256KiB"
    lines: Annotated[
        int, typer.Option("--lines", min=0, help="So many records in a part, instead of --bytes.")
    ] = 0
    delimiter: Annotated[
        str, typer.Option("--delimiter", metavar="CHAR", help="Between the fields of a CSV.")
    ] = ""
    quote: Annotated[
        str, typer.Option("--quote", metavar="CHAR", help="Around fields of a CSV; '' for none.")
    ] = '"'
    escape: Annotated[
        str, typer.Option("--escape", metavar="CHAR", help="Before a character meant as it is.")
    ] = ""
    header: Annotated[
        str,
        typer.Option("--header", metavar="A,B,C", help="Names for a CSV that begins with data."),
    ] = ""
    has_no_header: Annotated[
        bool, typer.Option("--no-header", help="The CSV begins with data: rows come as lists.")
    ] = False
    by_reference: Annotated[
        bool,
        typer.Option(
            "--by-reference", help="Parts say where their bytes are, and workers read them there."
        ),
    ] = False
    level: Annotated[int, typer.Option("--level", "--priority", help="0 goes first, 99 last.")] = (
        LEVEL
    )
    rate: Annotated[
        str, typer.Option("--rate", metavar="N/s", help="Records (of a map) or parts in a time.")
    ] = ""
    retries: Annotated[int | None, typer.Option("--retries", help="Attempts after the first.")] = (
        None
    )
    timeout: Annotated[str, typer.Option("--timeout", metavar="TIME", help="For each part.")] = ""
    max_failures: Annotated[
        str,
        typer.Option(
            "--max-failures",
            metavar="N|P%",
            help="More than this ends the request; P% is judged from 1,000 on and at the end.",
        ),
    ] = ""

    def policy(self) -> Policy:
        """The request that is meant.

        Raises:
            InvalidValue: an option that cannot be, or a file that cannot be read.
        """
        names = self.names()
        form = _form_of(names[0]) if self.form == "auto" else self.form
        if form == "requests":
            raise InvalidValue("--format requests makes many requests: that is for streamq load")
        if self.by_reference:
            names = [_absolute(name) for name in names]
        spec = msgspec.structs.replace(
            self._spec(), format=form, files=tuple(names), by_reference=self.by_reference
        )
        if form == "csv":
            spec = self._csv(spec)
        return self._policy(spec)

    def _csv(self, spec: Spec) -> Spec:
        """The spec with what a CSV is written with, and with its header."""
        name = spec.files[0]
        delimiter = self.delimiter or ("\t" if ".tsv" in Path(name).suffixes else ",")
        given = {
            "delimiter": "\t" if delimiter in ("\\t", "tab") else delimiter,
            "quote": self.quote,
            "escape": self.escape,
        }
        for option, value in given.items():
            is_one = len(value) == 1 and value.isascii() and value not in "\r\n"
            if not is_one and (value or option == "delimiter"):
                raise InvalidValue(f"--{option} {value!r} is not one character of ASCII")
        used = [value for value in given.values() if value]
        if len(set(used)) < len(used):
            raise InvalidValue("--delimiter, --quote and --escape are the same character")
        spec = msgspec.structs.replace(spec, **given)
        if self.header:
            return msgspec.structs.replace(spec, names=tuple(_names(self.header, spec)))
        if self.has_no_header:
            return spec
        spec = msgspec.structs.replace(spec, header=_header_of(name, spec))
        _warn_of_doubles(name, spec)
        return spec

    def policy_of_each(self) -> Policy:
        """What the requests of ``--format requests`` have in common."""
        return self._policy(self._spec())

    def names(self) -> list[str]:
        """The files that are meant.

        Raises:
            InvalidValue: a folder is empty, or standard input has files beside it.
        """
        if self.form not in FORMATS:
            raise InvalidValue(f"--format {self.form!r} is none of {', '.join(FORMATS)}")
        names = [units.file_name(name) for name in _expand(self.files)]
        if STDIN in names and len(names) > 1:
            raise InvalidValue("- stands for standard input, and goes alone: no files beside it")
        return names

    def _spec(self) -> Spec:
        return Spec(
            retries=None if self.retries is None else units.whole(self.retries, "--retries", 0),
            timeout_ms=units.duration_ms(self.timeout, "--timeout") if self.timeout else 0,
        )

    def _policy(self, spec: Spec) -> Policy:
        tolerated, percent = units.tolerance(self.max_failures or None)
        return Policy(
            handler=units.name(self.handler, "handler"),
            queue=units.name(self.queue, "queue"),
            level=units.whole(self.level, "--level", 0, LAST_LEVEL),
            limit=units.whole(self.limit, "--limit", 1),
            max_failures=tolerated,
            max_percent=percent,
            keep_ms=units.duration_ms(self.keep, "--keep"),
            rate_ms=units.rate_ms(self.rate, "--rate") if self.rate else 0.0,
            spec=spec,
        )

    def size(self) -> Size:
        """How large parts are meant to be."""
        most = MOST_REFERRED if self.by_reference else MAX_PART
        part_bytes = units.size_bytes(self.part_bytes, "--bytes")
        if part_bytes > most:
            raise InvalidValue(
                f"--bytes {self.part_bytes} is more than a part may have: {most // 2**20}MiB"
            )
        is_file = self.form == "file" and self.by_reference
        return Size(part_bytes, self.lines, most if is_file else max(part_bytes, MAX_PART))


def _header_of(name: str, spec: Spec) -> str:
    header = header_of(name, spec)
    # In quotes it may stand.
    if b"\r" in mask_of(spec)(header.rstrip(b"\r\n")):
        raise InvalidValue(
            f"{name}: record 1: there is a carriage return without a newline behind it: lines end "
            "in \\n or \\r\\n. If it is an old file of a Mac: tr '\\r' '\\n' mends it"
        )
    try:
        return header.decode()
    except UnicodeDecodeError as error:
        raise InvalidValue(f"{name}: record 1: the header is not UTF-8: {error}") from None


def _warn_of_doubles(name: str, spec: Spec) -> None:
    own, called = fields_of(bare_header(spec), spec), names_of(spec)
    for column, (first, second) in enumerate(zip(own, called, strict=True), 1):
        if first != second:
            render.warning(
                f"{name}: the header has the column {first!r} more than once: "
                f"column {column} is {second!r}"
            )


def _names(header: str, spec: Spec) -> list[str]:
    names = fields_of(header.encode(), spec)
    if not all(names) or len(set(names)) < len(names):
        raise InvalidValue(f"--header {header!r}: a name is empty or comes twice")
    return names


def _expand(files: list[str]) -> list[str]:
    """Files as given, those that patterns match, and those in folders: each time by name."""
    names: list[str] = []
    for name in files:
        if not name:
            raise InvalidValue("a file has no name: ''")
        if is_remote(name):
            names.append(name)
            continue
        found = [name.removeprefix("file://")]
        if not Path(found[0]).exists() and glob.has_magic(found[0]):
            found = sorted(glob.glob(found[0], recursive=True))  # noqa: PTH207  absolute ones too
            if not found:
                raise InvalidValue(f"{name} matches no file")
        for each in found:
            names += _inside(each) if Path(each).is_dir() else [each]
    return names


def _absolute(name: str) -> str:
    """The name that workers elsewhere find a file under."""
    if name == STDIN:
        raise InvalidValue("--by-reference: nobody else can read standard input")
    return name if is_remote(name) else str(Path(name).absolute())


def _inside(folder: str) -> list[str]:
    """The files in a folder and in those below; hidden ones are left out, as in patterns."""
    found = sorted(
        str(path)
        for path in Path(folder).rglob("*")
        if path.is_file() and not any(p.startswith(".") for p in path.relative_to(folder).parts)
    )
    if not found:
        raise InvalidValue(f"{folder} is an empty folder")
    return found


def _form_of(name: str) -> str:
    suffixes = [suffix.lower() for suffix in Path(name).suffixes]
    if suffixes and suffixes[-1] in COMPRESSED:
        suffixes.pop()
    return _BY_SUFFIX.get(suffixes[-1], "lines") if suffixes else "lines"
