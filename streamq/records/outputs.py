"""The output: a file that can be continued, or a stream that cannot.

A file is cut to the length that was committed before more is added. A stream (a pipe, a terminal, a
device) only ever grows, so after a crash its writer begins anew.
"""

import fcntl
import os
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from streamq.errors import InvalidValue
from streamq.records import arrow_tables, drafts, output_note
from streamq.records.drafts import sync_folder, sync_to_disk, write_all_bytes
from streamq.records.errors_file import check_errors_file, errors_beside
from streamq.records.output import OutputError, OutputExists, Written
from streamq.records.output_note import OutputNote
from streamq.records.packing import name_without_compression, packed_output, packing_of, zstd
from streamq.records.ranges import Range, copy_range, merged_ranges
from streamq.records.remote import is_remote

#: How results are written.
FORMS = ("jsonl", "csv", "tsv", "raw", "parquet")


class FileOutput:
    """A regular file: cut to what was committed, and synced to the disk after each write."""

    def __init__(self, path: Path, request_id: str, note: OutputNote | None = None) -> None:
        """``note``: where a run notes which file it writes."""
        self._path = path
        self.name = str(path.resolve())
        self.inode = ""
        self.packing = packing_of(path.name)
        self._id = request_id
        self._note = note
        self._is_ours = False
        self._file: BinaryIO | None = None

    def open(self, offset: int, *, has_begun: bool, force: bool) -> None:
        """Open and lock the file. It stays as it is until it is cut.

        Raises:
            OutputExists: the file is not ours, or is shorter than what was written to it.
            OutputError: the file cannot be written to.
        """
        try:
            size = self._path.stat().st_size if self._path.exists() else -1
            # After a power failure the server may have forgotten that this file was begun.
            self._is_ours = self._note is not None and self._note.fits(self._path)
            if has_begun:
                self._refuse_shorter(size, offset)
            elif not self._is_ours:
                check_new_output(self._path, force=force)
            file = self._path.open("r+b" if size >= 0 else "a+b", buffering=0)
            # In a file that is only appended to, ``copy_file_range`` copies nothing.
            fcntl.fcntl(file, fcntl.F_SETFL, fcntl.fcntl(file, fcntl.F_GETFL) & ~os.O_APPEND)
            self._lock(file)
            sync_folder(self._path.parent)
            self.inode = output_note.inode_of_output(file.fileno())
        except OSError as error:
            raise self._failed(error) from None
        self._file = file

    def lacks(self, written: Written) -> bool:
        """Return whether the file is gone, shorter or another one; once it is open, the open file.

        Raises:
            OutputError: the file cannot be looked at, and may well be there.
        """
        try:
            if self._file:
                return _is_other_file(self._file.fileno(), written)
            with self._path.open("rb") as file:
                return _is_other_file(file.fileno(), written)
        except FileNotFoundError:
            return written.offset > 0
        except OSError as error:
            raise self._failed(error) from None

    def cut(self, written: Written, *, has_begun: bool) -> None:
        """Cut the file to what was written; what is cut off is set aside if the file has begun.

        Raises:
            OutputExists: the file is shorter than that, or another one.
            OutputError: the file cannot be written to.
        """
        assert self._file is not None
        offset = written.offset
        try:
            size = os.fstat(self._file.fileno()).st_size
            self._refuse_shorter(size, offset)
            if _is_other_file(self._file.fileno(), written):
                raise OutputExists(
                    f"{self._path} is not the file that was written for request {self._id}: "
                    "put that one back, or say --force to begin it anew with the results that "
                    "the server still has"
                )
            if size > offset and (has_begun or self._is_ours):
                output_note.set_output_aside(self._path, self._id, offset)
            self._draft.unlink(missing_ok=True)  # it was never committed
            self._file.truncate(offset)
            self._file.seek(offset)
            if self._note:
                self._note.write(self._file.fileno())
        except OSError as error:
            raise self._failed(error) from None

    def tail(self, offset: int) -> str:
        """Return a digest of the last bytes before that offset.

        Raises:
            OutputError: the file cannot be read.
        """
        assert self._file is not None
        try:
            return output_note.digest_of_output_tail(self._file.fileno(), offset)
        except OSError as error:
            raise self._failed(error) from None

    def settle(self) -> None:
        """Delete what was set aside and has been written again; log where the rest is."""
        output_note.settle_output_set_aside(self._path, self._id)

    def _refuse_shorter(self, size: int, offset: int) -> None:
        if max(size, 0) >= offset:
            return
        if size < 0:
            what = f"{self._path} is gone, and {offset} bytes were written"
        else:
            what = f"{self._path} has {size} bytes, but {offset} were written"
        raise OutputExists(
            f"{what} for request {self._id}: put it back, or say --force to begin it anew with "
            "the results that the server still has"
        )

    def _lock(self, file: BinaryIO) -> None:
        """Lock the file against other processes of streamq, where the file system can."""
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            raise OutputExists(
                f"{self._path} is just being written by somebody else: wait, or name another file"
            ) from None
        except OSError:
            pass

    def write(self, data: bytes, *, is_last: bool = False) -> int:
        """Add to the file. Return by how many bytes it has grown.

        ``is_last``: an empty file that is compressed gets an empty member, as it must have one.

        Raises:
            OutputError: the disk is full, or the file was moved or removed.
        """
        assert self._file is not None
        packed = packed_output(self.packing, data) if data or is_last else b""
        try:
            write_all_bytes(self._file, packed)
            sync_to_disk(self._file.fileno())
            if self._note:
                self._note.write(self._file.fileno())
        except OSError as error:
            raise self._failed(error) from None
        self.look()
        return len(packed)

    def add(self, pieces: Iterable[bytes | Range]) -> int:
        """Add bytes, and ranges of other files. Return by how many bytes the file has grown.

        Raises:
            OutputError: as of ``write``.
        """
        assert self._file is not None
        if self.packing:
            blocks = [each.read() if isinstance(each, Range) else each for each in pieces]
            return self.write(b"".join(blocks))
        grown = 0
        try:
            for each in merged_ranges(pieces):
                if isinstance(each, Range):
                    copy_range(each, self._file.fileno())
                    grown += each.length
                else:
                    write_all_bytes(self._file, each)
                    grown += len(each)
        except OSError as error:
            raise self._failed(error) from None
        self.write(b"")
        return grown

    def draft(self, copy: Callable[[BinaryIO], Iterator[bytes]]) -> Written:
        """Write another version of the file beside it. Return what that has.

        ``copy`` is given the open file and yields the other version. The caller commits what is
        returned, and then calls ``replace``. After a crash in between ``recover`` does that.

        Raises:
            OutputError: the draft cannot be written.
        """
        try:
            with self._path.open("rb") as source:
                written = drafts.write_draft(self._draft, self.packing, copy(source))
            self._draft.chmod(stat.S_IMODE(self._path.stat().st_mode))
            sync_folder(self._draft.parent)
        except OSError as error:
            raise self._failed(error) from None
        return Written(*written)

    def replace(self) -> None:
        """Put the draft in the place of the file, and go on in it.

        Raises:
            OutputError: that is not possible.
        """
        assert self._file is not None
        try:
            file = self._draft.open("r+b", buffering=0)
            self._lock(file)
            self._draft.replace(self._path.resolve())
            sync_folder(self._path.parent)
            file.seek(0, os.SEEK_END)
            self._file.close()
            self._file = file
            self.inode = output_note.inode_of_output(file.fileno())
            if self._note:
                self._note.write(file.fileno())
        except OSError as error:
            raise self._failed(error) from None

    def recover(self, written: Written) -> None:
        """Put a draft in its place that was committed, if a crash came between the two.

        Raises:
            OutputError: that is not possible.
        """
        try:
            if drafts.is_draft_committed(self._draft, written):
                self._draft.replace(self._path.resolve())
        except OSError as error:
            raise self._failed(error) from None

    @property
    def _draft(self) -> Path:
        # Beside the file that a link leads to, which is to be replaced; the link stays.
        path = self._path.resolve()
        return path.with_name(f".{path.name}.{self._id}.draft")

    def look(self) -> None:
        """Check that the file is still where it was.

        Raises:
            OutputError: the file was moved or removed.
        """
        assert self._file is not None
        try:
            there = self._path.stat()
        except OSError:
            there = None
        if there is None or not os.path.samestat(there, os.fstat(self._file.fileno())):
            raise OutputError(
                f"{self._path} was moved or removed while it was written; put it back to go on"
            )

    def remove(self) -> None:
        """Delete the file, if this output has opened it."""
        if self._file is not None:
            with suppress(OSError):
                self._path.unlink()

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()

    def _failed(self, error: OSError) -> OutputError:
        return OutputError(f"cannot write {self._path}: {error.strerror}")


def _is_other_file(descriptor: int, written: Written) -> bool:
    """Return whether an open file is shorter than what was written, or has other content.

    Where nothing was written yet, a file that is not empty has to be the one that was begun.
    """
    size = os.fstat(descriptor).st_size
    if not written.offset:
        has_other_inode = written.inode and written.inode != output_note.inode_of_output(descriptor)
        return size > 0 and bool(has_other_inode)
    if size < written.offset:
        return True
    return bool(written.tail) and written.tail != output_note.digest_of_output_tail(
        descriptor, written.offset
    )


#: Names that promise what is not written, and what to do instead.
_NOT_WRITTEN = {
    ".bz2": "is not written: name it .gz or .zst, or compress it later",
    ".xz": "is not written: name it .gz or .zst, or compress it later",
    ".zip": "is not written: name it .gz or .zst, or pack it later",
    ".arrow": "is not written: name it .parquet",
    ".feather": "is not written: name it .parquet",
    ".xlsx": "is not written: name it .csv",
    ".json": "promises one JSON value, and results are lines: name it .jsonl",
}
_AS_LINES = "is not written, and results are lines: name it .jsonl"
_NOT_WRITTEN |= dict.fromkeys((".xls", ".ods"), _NOT_WRITTEN[".xlsx"])
_NOT_WRITTEN |= dict.fromkeys((".avro", ".orc"), _NOT_WRITTEN[".arrow"])
_NOT_WRITTEN |= dict.fromkeys((".pkl", ".pickle", ".npy", ".db", ".sqlite"), _AS_LINES)
_NOT_WRITTEN |= dict.fromkeys((".lz4", ".br", ".7z", ".tgz", ".tar"), _NOT_WRITTEN[".xz"])


def check_output_name(name: str, given_form: str = "", *, may_upload: bool = False) -> None:
    """Check that an output of that name holds what the name promises.

    ``given_form``: the form that was asked for. A ``.json`` may then hold lines. ``may_upload``: it
    may be behind a URL.

    Raises:
        InvalidValue: it does not.
    """
    if is_remote(name) and not may_upload:
        raise InvalidValue(f"{name}: only a run writes to URLs: name a file, and copy it")
    suffix = Path(name).suffix.lower()
    if suffix in _NOT_WRITTEN and not (given_form and suffix == ".json"):
        raise InvalidValue(f"{name}: {suffix} {_NOT_WRITTEN[suffix]}")
    _check_parquet(name, given_form)
    if packing_of(name) == "zstd":
        zstd(name)
    elif packing_of(name) and name_without_compression(Path(name)).suffix.lower() == ".tar":
        raise InvalidValue(f"{name}: .tar {_NOT_WRITTEN['.tar']}")


def _check_parquet(name: str, given_form: str) -> None:
    """Raise InvalidValue unless a name and a form agree on whether an output is Parquet."""
    if form_by_output_name(name) == "parquet":
        if packing_of(name):
            raise InvalidValue(f"{name}: Parquet is compressed inside: name it .parquet")
        arrow_tables.check_pyarrow_installed(name)
        if given_form not in ("", "parquet"):
            raise InvalidValue(f"{name}: .parquet promises a table, and {given_form} is text")
    elif given_form == "parquet":
        raise InvalidValue(f"{name}: Parquet is wanted: name it .parquet")


def form_by_output_name(name: str) -> str:
    """Return the form for a file of that name: raw, lines as handlers return them, by default."""
    forms = {".jsonl": "jsonl", ".csv": "csv", ".tsv": "tsv", ".parquet": "parquet"}
    return forms.get(name_without_compression(Path(name)).suffix.lower(), "raw")


def check_output_keys(form: str, what: str) -> None:
    """Raise InvalidValue if lines of that form have no room for keys; ``what`` asks for them."""
    if form in ("raw", "parquet"):
        raise InvalidValue(
            f"{what} needs lines that can be told apart: name the output .jsonl or .csv, or give "
            "the format"
        )


def refuse_inputs_as_output(path: Path, inputs: Iterable[str]) -> None:
    """Raise InvalidValue if an output or the failures beside it would replace an input."""
    for place in (path, errors_beside(path)):
        if not place.is_file():
            continue
        found = place.stat()
        for name in inputs:
            with suppress(OSError):
                if os.path.samestat(found, Path(name).stat()):
                    raise InvalidValue(f"{place} is one of the inputs: give -o another name")


def check_new_output(path: Path, *, force: bool) -> None:
    """Check that a new output may be written there.

    Raises:
        InvalidValue: there is no such folder, or the path is a folder.
        OutputExists: the file has content already.
    """
    if not path.parent.is_dir():
        raise InvalidValue(f"there is no folder {path.parent}")
    if path.is_dir():
        raise InvalidValue(f"{path} is a folder")
    if path.is_file() and path.stat().st_size and not force:
        raise OutputExists(f"{path} exists: remove it, or say --force")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise InvalidValue(f"{path} cannot be written: Permission denied")
    if not force:
        check_errors_file(path)


def is_stream_output(path: Path) -> bool:
    """Return whether the path is a pipe or a device, whose output cannot be continued."""
    return path.exists() and not path.is_file() and not path.is_dir()
