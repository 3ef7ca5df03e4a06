"""Writing files so that a power failure leaves them whole; and other versions of an output."""

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from streamq.records import output_note
from streamq.records.packing import packed_output

#: A compressed draft has members of this many bytes, before compression.
_MEMBER = 2**20


def write_draft(path: Path, packing: str, data: Iterable[bytes]) -> tuple[int, str, str]:
    """Write a file, and return its size, a digest of its last bytes, and its inode.

    Raises:
        OSError: the file cannot be written.
    """
    with path.open("wb+", buffering=0) as file:
        held = bytearray()
        for block in data:
            held += block
            if len(held) >= _MEMBER:
                write_all_bytes(file, packed_output(packing, bytes(held)))
                held.clear()
        if held or not file.tell():
            write_all_bytes(file, packed_output(packing, bytes(held)))
        sync_to_disk(file.fileno())
        size = file.tell()
        return (
            size,
            output_note.digest_of_output_tail(file.fileno(), size),
            output_note.inode_of_output(file.fileno()),
        )


def is_draft_committed(path: Path, written: tuple[int, str, str]) -> bool:
    """Return whether the file is there, and is exactly what was committed."""
    try:
        with path.open("rb") as file:
            fd, size = file.fileno(), os.fstat(file.fileno()).st_size
            return written == (
                size,
                output_note.digest_of_output_tail(fd, size),
                output_note.inode_of_output(fd),
            )
    except FileNotFoundError:
        return False


def write_all_bytes(file: BinaryIO, data: bytes) -> None:
    """Write all bytes to a file without a buffer.

    Raises:
        OSError: they cannot be written.
    """
    rest = memoryview(data)
    while rest:
        rest = rest[file.write(rest) :]


def sync_to_disk(fd: int) -> None:
    """Make sure that what was written is on the disk. macOS has no ``fdatasync``."""
    getattr(os, "fdatasync", os.fsync)(fd)


def sync_folder(folder: Path) -> None:
    """Sync the folder, so that a new file in it is still there after a power failure.

    Some file systems cannot sync a folder: they do it together with the file, or not at all.
    """
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
