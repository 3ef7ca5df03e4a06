"""What ``load`` and ``run`` are told about a request: the same options, read the same way."""

from pathlib import Path
from typing import Annotated

import msgspec
import typer

from streamq import units
from streamq.errors import InvalidValue
from streamq.inputs import STDIN
from streamq.loader import header_of
from streamq.model import LAST_LEVEL, LEVEL, MAX_PART, Policy, Spec
from streamq.source import Size

FORMATS = ("auto", "lines", "csv", "jsonl", "requests", "file")
_COMPRESSED = {".gz", ".bz2", ".xz", ".zst"}
_BY_SUFFIX = {".csv": "csv", ".tsv": "csv", ".jsonl": "jsonl", ".ndjson": "jsonl"}

FormatOption = Annotated[
    str, typer.Option("--format", metavar="|".join(FORMATS), help="auto goes by the name.")
]
BytesOption = Annotated[
    str, typer.Option("--bytes", metavar="SIZE", help="Whole records up to this in a part.")
]
LinesOption = Annotated[
    int, typer.Option("--lines", min=0, help="So many records in a part, instead of --bytes.")
]
DelimiterOption = Annotated[
    str, typer.Option("--delimiter", metavar="CHAR", help="Between the fields of a CSV.")
]
LevelOption = Annotated[int, typer.Option("--level", "--priority", help="0 goes first, 99 last.")]
RateOption = Annotated[
    str, typer.Option("--rate", metavar="N/s", help="Records (of a map) or parts in a time.")
]
RetriesOption = Annotated[int | None, typer.Option("--retries", help="Attempts after the first.")]
TimeoutOption = Annotated[str, typer.Option("--timeout", metavar="TIME", help="For each part.")]
MaxFailuresOption = Annotated[
    str, typer.Option("--max-failures", metavar="N|P%", help="More than this ends the request.")
]
KeepOption = Annotated[
    str, typer.Option("--keep", metavar="TIME", help="How long it is kept after its end.")
]


class Wishes(msgspec.Struct, kw_only=True):
    """The options as they were typed."""

    files: list[str]
    handler: str
    queue: str = "default"
    form: str = "auto"
    part_bytes: str = "256KiB"
    lines: int = 0
    delimiter: str = ""
    level: int = LEVEL
    limit: int = 1
    rate: str = ""
    retries: int | None = None
    timeout: str = ""
    max_failures: str = ""
    keep: str = "7d"

    def policy(self) -> Policy:
        """The request that is meant.

        Raises:
            InvalidValue: an option that cannot be, or a file that cannot be read.
        """
        names = self.names()
        form = _form_of(names[0]) if self.form == "auto" else self.form
        if form == "requests":
            raise InvalidValue("--format requests makes many requests: that is for streamq load")
        spec = msgspec.structs.replace(
            self._spec(),
            format=form,
            delimiter=self.delimiter or ("\t" if ".tsv" in Path(names[0]).suffixes else ","),
            files=names,
        )
        if form == "csv":
            spec = msgspec.structs.replace(spec, header=_header_of(names[0], spec))
        return self._policy(spec)

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
        names = _expand(self.files)
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
        size = Size(units.size_bytes(self.part_bytes, "--bytes"), self.lines, MAX_PART)
        if size.bytes > size.most:
            raise InvalidValue(f"--bytes {self.part_bytes} is more than a part may have: 1MiB")
        return size


def _header_of(name: str, spec: Spec) -> str:
    try:
        return header_of(name, spec).decode()
    except UnicodeDecodeError as error:
        raise InvalidValue(f"{name}: record 1: the header is not UTF-8: {error}") from None


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
