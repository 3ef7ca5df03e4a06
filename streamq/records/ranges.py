"""Ranges of open files, and copying them inside the kernel."""

import errno
import os
from typing import NamedTuple

#: Errors of ``copy_file_range`` that say only that it cannot copy between these two files.
_NO_COPY = (errno.EXDEV, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL, errno.EBADF, errno.EPERM)
_BLOCK = 2**20


class Range(NamedTuple):
    """Bytes of an open file."""

    fd: int
    offset: int
    length: int

    def read(self) -> bytes:
        """Return the bytes; fewer where the file ends before them."""
        return os.pread(self.fd, self.length, self.offset)


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
