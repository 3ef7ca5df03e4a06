"""Names of files as users give them: patterns and folders, formats by suffix, CSV dialects."""

import glob
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec

from streamq import units
from streamq.errors import InvalidValue
from streamq.model import Spec
from streamq.records.boundaries import (
    csv_header_without_mark,
    fields_of_csv_row,
)
from streamq.records.inputs import COMPRESSED, STDIN
from streamq.records.remote import is_pattern_of_objects, is_remote, matching_objects
from streamq.records.splitting import header_of_csv

#: How files may be split into records. ``auto`` goes by the name of the first file.
FORMATS = ("auto", "lines", "csv", "jsonl", "parquet", "arrow", "requests", "file")
_BY_SUFFIX = {".csv": "csv", ".tsv": "csv", ".jsonl": "jsonl", ".ndjson": "jsonl"}
_BY_SUFFIX |= {".parquet": "parquet", ".arrow": "arrow", ".ipc": "arrow", ".feather": "arrow"}


def expand_file_names(files: Iterable[str]) -> list[str]:
    """Return the files that the arguments name: files, patterns that match, and files in folders.

    Objects behind URLs are named in the same ways.

    The files of one pattern or folder are sorted by name. Hidden files in folders are left out, as
    patterns leave them out.

    Raises:
        InvalidValue: a folder is empty, a pattern matches nothing, a name is no text, or standard
            input has files beside it.
    """
    names = [units.file_name(name) for given in files for name in _files_of_argument(given)]
    if STDIN in names and len(names) > 1:
        raise InvalidValue("- stands for standard input, which cannot be combined with files")
    return names


def _files_of_argument(name: str) -> list[str]:
    if not name:
        raise InvalidValue("a file has no name: ''")
    if is_remote(name):
        return matching_objects(name) if is_pattern_of_objects(name) else [name]
    found = [name.removeprefix("file://")]
    if not Path(found[0]).exists() and glob.has_magic(found[0]):
        found = sorted(glob.glob(found[0], recursive=True))  # noqa: PTH207  absolute ones too
        if not found:
            raise InvalidValue(f"{name} matches no file")
    return [
        inner
        for each in found
        for inner in (_files_inside_folder(each) if Path(each).is_dir() else [each])
    ]


def _files_inside_folder(folder: str) -> list[str]:
    """Return the files in a folder and in the folders below it."""
    found = sorted(
        str(path)
        for path in Path(folder).rglob("*")
        if path.is_file() and not any(p.startswith(".") for p in path.relative_to(folder).parts)
    )
    if not found:
        raise InvalidValue(f"{folder} is an empty folder")
    return found


def absolute_file_name(name: str, what: str = "by_reference") -> str:
    """Return the absolute name of a file, under which other workers find it."""
    if name == STDIN:
        raise InvalidValue(f"{what}: nobody else can read standard input")
    return name if is_remote(name) else str(Path(name).absolute())


def format_of(name: str) -> str:
    """Return the format by a file's suffix, ``lines`` for an unknown one; ``.csv.gz`` is a CSV."""
    suffixes = [suffix.lower() for suffix in Path(name).suffixes]
    if suffixes and suffixes[-1] in COMPRESSED:
        suffixes.pop()
    return _BY_SUFFIX.get(suffixes[-1], "lines") if suffixes else "lines"


class Dialect(msgspec.Struct, frozen=True, kw_only=True):
    """How a CSV is written, in the words of the options."""

    #: "": a tab for a ``.tsv``, else a comma. ``\\t`` and ``tab`` are tabs, too.
    delimiter: str = ""
    quote: str = '"'
    escape: str = ""
    #: Names of the fields, instead of a header: ``a,b,c``.
    header: str = ""
    #: Rows that are left out at the beginning of each file.
    skip_rows: int = 0
    #: The file begins with data, and a handler gets rows as lists.
    has_no_header: bool = False

    def applied(
        self, spec: Spec, *, named: Callable[[str], str] = str, is_strict: bool = False
    ) -> Spec:
        """Return the spec with the dialect of its files and the header of the first good file.

        ``named`` returns what an option is called in messages. ``is_strict``: the first file has
        to be good.

        Raises:
            InvalidValue: the options are no dialect, no file can be read, or columns share a name.
        """
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
                raise InvalidValue(f"{named(option)} {value!r} is not one character of ASCII")
        used = [value for value in given.values() if value]
        if len(set(used)) < len(used):
            first, second, third = map(named, given)
            raise InvalidValue(f"{first}, {second} and {third} are the same character")
        spec = msgspec.structs.replace(spec, **given, skip_rows=self.skip_rows)
        if self.header:
            return msgspec.structs.replace(spec, names=self._names(spec, named("header")))
        if self.has_no_header:
            return spec
        name, header = _first_header(spec, is_strict)
        spec = msgspec.structs.replace(spec, header=header)
        _refuse_file_given_twice(name, spec, named)
        return spec

    def _names(self, spec: Spec, what: str) -> tuple[str, ...]:
        names = fields_of_csv_row(self.header.encode(), spec)
        if not all(names) or len(set(names)) < len(names):
            raise InvalidValue(f"{what} {self.header!r}: a column name is empty or comes twice")
        return tuple(names)


def _first_header(spec: Spec, is_strict: bool) -> tuple[str, str]:
    """Return the first file that has a header, and that header."""
    errors = []
    for name in spec.files[:1] if is_strict else spec.files:
        try:
            return name, _header_of_file(name, spec)
        except InvalidValue as error:
            errors.append(error)
    raise errors[0]


def _header_of_file(name: str, spec: Spec) -> str:
    header = header_of_csv(name, spec)
    try:
        return header.decode()
    except UnicodeDecodeError as error:
        raise InvalidValue(
            f"{name}: line 1: the header is not UTF-8: {error}; say how the file is encoded, such "
            "as --encoding latin-1"
        ) from None


def _refuse_file_given_twice(name: str, spec: Spec, named: Callable[[str], str]) -> None:
    found = fields_of_csv_row(csv_header_without_mark(spec), spec)
    for first, column in enumerate(found, 1):
        others = [number for number, each in enumerate(found, 1) if each == column]
        if len(others) > 1:
            what = f"the name {column!r}" if column else "no name"
            raise InvalidValue(
                f"{name}: columns {first} and {others[1]} of the header have {what}: give all "
                f"columns names with {named('header')} a,b,c and leave the header out with "
                f"{named('skip_rows')} 1"
            )
