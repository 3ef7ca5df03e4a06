"""Tells whether a file is still the one that was written, and keeps what others added to it.

A writer that goes on after a crash cuts its file to what was committed. Before that it makes sure
that the file is its own: the bytes before the cut are compared by a digest. The bytes behind the
cut are most often results that were written and not committed, and come again. They may as well
be lines that somebody added, so they are set aside in a file. That file is deleted in the end if
the same bytes were written again at the same place.
"""

import glob
import hashlib
import logging
import os
import shutil
from pathlib import Path

import msgspec

log = logging.getLogger(__name__)

#: How many bytes are compared: before the end of what was committed, and of a file's beginning.
_SAMPLE = 4096
_COPY = 2**20


def digest_of_output_tail(descriptor: int, offset: int) -> str:
    """Return a digest of the last bytes before an offset; "" for none."""
    size = min(_SAMPLE, offset)
    return _digest_of_tail(os.pread(descriptor, size, offset - size))


def inode_of_output(descriptor: int) -> str:
    """Return what tells an open file from all others that exist at the same time."""
    found = os.fstat(descriptor)
    return f"{found.st_dev}:{found.st_ino}"


def _digest_of_tail(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest() if data else ""


def set_output_aside(path: Path, request_id: str, offset: int) -> None:
    """Copy what a file has from an offset on into a new file beside it.

    Raises:
        OSError: the copy cannot be written.
    """
    number = 1
    while True:
        place = path.with_name(f"{path.name}.aside-{request_id}-{offset}-{number}")
        try:
            with path.open("rb") as source, place.open("xb") as copy:
                source.seek(offset)
                try:
                    shutil.copyfileobj(source, copy, _COPY)
                    copy.flush()
                    os.fsync(copy.fileno())
                except BaseException:
                    place.unlink()
                    raise
            return
        except FileExistsError:
            number += 1


def settle_output_set_aside(path: Path, request_id: str) -> None:
    """Delete what was set aside and then written again; log where the rest is kept."""
    for place in sorted(path.parent.glob(f"{glob.escape(path.name)}.aside-{request_id}-*-*")):
        offset = place.name.rsplit("-", 2)[1]
        try:
            is_back = offset.isdigit() and _output_has_bytes_at(path, place, int(offset))
            if is_back:
                place.unlink()
        except OSError:
            is_back = False
        if not is_back:
            log.warning(
                "%s had %d bytes that were not committed, and what is written there now differs: "
                "they are kept in %s. Delete it unless somebody else has added lines",
                path,
                place.stat().st_size,
                place,
            )


def _output_has_bytes_at(path: Path, piece: Path, offset: int) -> bool:
    """Return whether a file has the bytes of another one at an offset."""
    with path.open("rb") as whole, piece.open("rb") as part:
        whole.seek(offset)
        while data := part.read(_COPY):
            if whole.read(len(data)) != data:
                return False
    return True


class _Noted(msgspec.Struct, frozen=True):
    """Which file an output is: its inode, and a digest of its first bytes."""

    inode: str = ""
    length: int = 0
    head: str = ""


class OutputNote:
    """A note of a run about which file its output is, for when the server knows nothing of it."""

    def __init__(self, place: Path) -> None:
        self._place = place
        self._noted: _Noted | None = None

    @property
    def is_written(self) -> bool:
        """Whether the run has opened its output before."""
        return self._read() is not None

    def fits(self, path: Path) -> bool:
        """Return whether the file at the path is the one that was noted, as far as can be told."""
        noted = self._read()
        try:
            with path.open("rb") as file:
                if noted is None or inode_of_output(file.fileno()) != noted.inode:
                    return False
                if not noted.length:
                    return os.fstat(file.fileno()).st_size == 0
                return _digest_of_tail(file.read(noted.length)) == noted.head
        except OSError:
            return False

    def write(self, descriptor: int) -> None:
        """Note the open file. Once some bytes of its beginning are noted there is no more to note.

        Raises:
            OSError: the note cannot be written.
        """
        noted = self._noted
        inode = inode_of_output(descriptor)
        if noted and noted.length and noted.inode == inode:
            return
        head = os.pread(descriptor, _SAMPLE, 0)
        self._noted = _Noted(inode, len(head), _digest_of_tail(head))
        if self._noted == noted:
            return
        draft = self._place.with_name(f"{self._place.name}.new")
        with draft.open("wb") as file:
            file.write(msgspec.json.encode(self._noted))
            file.flush()
            os.fsync(file.fileno())
        draft.rename(self._place)

    def _read(self) -> _Noted | None:
        try:
            return msgspec.json.decode(self._place.read_bytes(), type=_Noted)
        except (OSError, msgspec.DecodeError):
            return None
