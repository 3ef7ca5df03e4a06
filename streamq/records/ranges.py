"""Ranges of open files, and copying them inside the kernel."""

import errno
import os
from collections.abc import Iterable, Iterator
from typing import NamedTuple

#: Errors of ``copy_file_range`` that say only that it cannot copy between these two files.
_NO_COPY = (errno.EXDEV, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL, errno.EBADF, errno.EPERM)
_BLOCK = 2**20


class Range(NamedTuple):
    """Bytes of an open file."""

    fd: int
    offset: int
    length: int

    @property
    def end(self) -> tuple[int, int]:
        """Return the file, and where in it they end."""
        return self.fd, self.offset + self.length

    def read(self) -> bytes:
        """Return the bytes; fewer where the file ends before them."""
        return os.pread(self.fd, self.length, self.offset)


def merged_ranges(pieces: Iterable[bytes | Range]) -> Iterator[bytes | Range]:
    """Yield the same bytes in fewer pieces: ranges that follow one another as one, nothing empty.

    Parts that a process runs one after another are beside each other in its spool.
    """
    last: Range | None = None
    for each in pieces:
        if isinstance(each, Range) and last and last.end == (each.fd, each.offset):
            last = last._replace(length=last.length + each.length)
        elif each:
            if last:
                yield last
            last = each if isinstance(each, Range) else None
            if isinstance(each, bytes):
                yield each
    if last:
        yield last


def copy_range(source: Range, target: int) -> None:
    """Copy bytes to the end of a file, whose position is there, without reading them if possible.

    Raises:
        OSError: they cannot be written, or the source is shorter.
    """
    fd, offset, left = source
    while left and (in_kernel := getattr(os, "copy_file_range", None)):
        try:
            done = in_kernel(fd, target, left, offset)
        except OSError as error:
            if error.errno not in _NO_COPY:
                raise
            break
        if not done:
            break
        offset, left = offset + done, left - done
    while left:
        block = os.pread(fd, min(_BLOCK, left), offset)
        if not block:
            raise OSError(errno.EIO, "a spool is shorter than it was")
        offset, left = offset + len(block), left - len(block)
        rest = memoryview(block)
        while rest:
            rest = rest[os.write(target, rest) :]
