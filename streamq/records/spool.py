"""Spools: results of a run that wait in files on its disk, instead of in the server.

A process writes the lines of a part, as the output will have them, to a spool of its own in the
run's folder. The server is told only where they are. The collector copies them from there to the
output, inside the kernel, and removes a spool when all of it is copied.

A spool is not synced. After a crash of any process its bytes are still there; after a power cut
they may not be, so a collector that goes on compares a checksum before it takes lines that an
earlier one was told of. It has the part run again if they are not what they were.
"""

import logging
import os
import re
import secrets
import time
import zlib
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from threading import Lock

import msgspec

from streamq.errors import damaged_if_unreadable
from streamq.records import encoding as codec
from streamq.records.ranges import Range
from streamq.records.writer import Writer

log = logging.getLogger(__name__)

#: Smaller results go through the server: to tell it where they are would take almost as long.
LEAST_BYTES = 4096
#: After this many bytes a process begins a new spool, so that the one before can be removed.
ROLL_BYTES = 2**25
_NAME = re.compile(r"\d+-[0-9a-f]{8}\.\d+", re.ASCII)
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
#: In a folder of several machines, bytes are there after so long at the latest, if at all.
_VISIBLE_S = 2.0
_LOOK_S = 0.05
#: Forms whose lines do not depend on the lines before them. The columns of a CSV do.
FORMS = ("raw", "jsonl", "parquet")


class Spooled(msgspec.Struct, frozen=True, array_like=True):
    """The result that the server keeps of a part whose lines are in a spool: where they are."""

    spool: str
    offset: int
    length: int
    check: int
    #: The part itself, so that it can be run again: what it was claimed with.
    payload: bytes
    about: bytes
    #: Whether the first record yielded a value, and no line of the kind that the input has.
    is_value: bool = False


class SpoolWriter:
    """Writes results to the spools of one process. Any of its threads may."""

    def __init__(self, folder: str, form: str, *, mode: int = 0o600) -> None:
        """``mode``: who may read them, as far as the process lets others read its files."""
        self._folder = Path(folder)
        self._form = form
        self._mode = mode
        self._name = f"{os.getpid()}-{secrets.token_hex(4)}"
        self._number = self._size = 0
        self._fd = -1
        self._lock = Lock()
        self._is_broken = False

    def keep(self, result: bytes, payload: bytes, about: bytes) -> bytes | None:
        """Write the lines of a result. Return what the server is told instead of the result.

        Return None where the result itself has to go to the server: it is small, its lines depend
        on those before them, or the disk takes no more.
        """
        if len(result) < LEAST_BYTES or self._is_broken:
            return None
        writer = Writer(self._form, [])
        lines = writer.lines(result)
        if writer.is_open or writer.garbled:
            return None
        return self._keep([lines], payload, about, is_value=writer.is_value)

    def keep_lines(
        self, blocks: Sequence[bytes], payload: bytes, about: bytes, *, is_text: bool
    ) -> bytes | None:
        """Do the same with a result that consists of these lines."""
        if self._form != "raw":
            return self.keep(codec.encode_lines(blocks, is_text=is_text), payload, about)
        return self._keep(blocks, payload, about)

    def _keep(
        self, blocks: Sequence[bytes], payload: bytes, about: bytes, *, is_value: bool = False
    ) -> bytes | None:
        size = sum(map(len, blocks))
        if size < LEAST_BYTES or self._is_broken:
            return None
        try:
            spool, offset = self._write(blocks)
        except OSError as error:
            # The server has the results from now on. If there is no room for the output either,
            # the collector says so.
            log.debug("no result can be spooled: %s", error)
            self._is_broken = True
            return None
        check = 0
        for block in blocks:
            check = zlib.crc32(block, check)
        found = Spooled(spool, offset, size, check, payload, about, is_value)
        return codec.encode_spooled(msgspec.msgpack.encode(found))

    def _write(self, blocks: Sequence[bytes]) -> tuple[str, int]:
        """Write lines behind all others. Return in which spool they are, and where."""
        with self._lock:
            # A collector removes the spools of a fleet's request when it has ended. A worker may go
            # on with it after a retry: nobody could read what it writes to a file without a name.
            if self._fd < 0 or self._size >= ROLL_BYTES or not os.fstat(self._fd).st_nlink:
                self._begin()
            offset = self._size
            for block in blocks:
                rest = memoryview(block)
                while rest:
                    done = os.pwrite(self._fd, rest, self._size)
                    self._size += done
                    rest = rest[done:]
            return _spool_name(self._name, self._number), offset

    def _begin(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
        self._number, self._size, self._fd = self._number + 1, 0, -1
        path = self._folder / _spool_name(self._name, self._number)
        self._fd = os.open(path, _NEW, self._mode)

    def __del__(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)


def is_spool_name(name: str) -> bool:
    """Return whether a spool may have that name. Whoever sends results can name any file."""
    return _NAME.fullmatch(name) is not None


def _spool_name(process: str, number: int) -> str:
    return f"{process}.{number}"


class _Spool:
    """A spool that is read: the open file, and how much of it was copied."""

    def __init__(self, path: Path, *, is_checked: bool) -> None:
        self.path = path
        self.fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        #: Whether ranges of it are compared with their checksums.
        self.is_checked = is_checked
        self.copied = 0

    def is_done(self, *, is_growing: bool) -> bool:
        """Return whether all of it was copied, and no more comes.

        ``is_growing``: its process lives. Then no more comes when it has begun another spool.
        """
        process, _, number = self.path.name.rpartition(".")
        if self.copied < os.fstat(self.fd).st_size:
            return False
        return not is_growing or self.path.with_name(_spool_name(process, int(number) + 1)).exists()


class SpoolReader:
    """Finds lines in the spools of a run."""

    def __init__(
        self,
        folder: Path,
        live: Callable[[], Iterable[int]] = tuple,
        *,
        is_shared: bool = False,
    ) -> None:
        """Spools that are there already are compared with checksums: they may be damaged.

        ``live`` returns the ids of the processes that write now. ``is_shared``: processes of other
        machines write, too. Then all bytes are compared, and each spool may grow.
        """
        self._folder = folder
        self._is_shared = is_shared
        self._damaged: set[str] = set()
        self._live = live
        self._earlier = {each.name for each in folder.glob("*.*")} if folder.is_dir() else set()
        self._open: dict[str, _Spool] = {}

    def find(self, spooled: Spooled) -> Range | None:
        """Return where the lines are; None if they are not there as they were written."""
        found, until = self._find(spooled), time.monotonic() + _VISIBLE_S
        is_late = self._is_shared and spooled.spool not in self._damaged
        while found is None and is_late and time.monotonic() < until:
            time.sleep(_LOOK_S)
            found = self._find(spooled)
        if found is None:
            # Nobody waits for it a second time: most of what else it lacks is lost, too.
            self._damaged.add(spooled.spool)
        return found

    def _find(self, spooled: Spooled) -> Range | None:
        spool = self._spool(spooled.spool)
        if spool is None:
            return None
        found = Range(spool.fd, spooled.offset, spooled.length)
        if spool.is_checked:
            return found if zlib.crc32(found.read()) == spooled.check else None
        end = spooled.offset + spooled.length
        return found if os.fstat(spool.fd).st_size >= end else None

    def copied(self, ranges: "list[Spooled]") -> None:
        """Say which lines are in the output for good. Remove spools of which nothing is left."""
        for each in ranges:
            if spool := self._open.get(each.spool):
                spool.copied += each.length
        live = set(self._live())
        for name in {each.spool for each in ranges} & self._open.keys():
            spool = self._open[name]
            if spool.is_done(is_growing=self._is_growing(name, live)):
                with suppress(OSError):
                    spool.path.unlink()
                os.close(self._open.pop(name).fd)

    def size(self) -> int:
        """Return about how many bytes wait in spools of live processes.

        A spool of a dead process may have lines that nobody was told of. They are never copied.
        """
        total, spools, live = 0, self._open.copy(), set(self._live())
        with suppress(OSError), os.scandir(self._folder) as found:
            for each in found:
                if self._is_growing(each.name, live):
                    with suppress(OSError):
                        total += each.stat().st_size
                        total -= spools[each.name].copied if each.name in spools else 0
        return max(0, total)

    def _is_growing(self, name: str, live: set[int]) -> bool:
        """Return whether the process that made a spool is there to write more.

        A process of an earlier attempt at the run is not, even if another one has its id now, as
        after a restart of a container.
        """
        if self._is_shared:
            return True
        pid = name.partition("-")[0]
        return name not in self._earlier and pid.isdecimal() and int(pid) in live

    def close(self) -> None:
        """Close all spools."""
        for spool in self._open.values():
            os.close(spool.fd)
        self._open.clear()

    def _spool(self, name: str) -> _Spool | None:
        if name not in self._open:
            if not is_spool_name(name):
                return None
            try:
                spool = _Spool(
                    self._folder / name, is_checked=self._is_shared or name in self._earlier
                )
            except OSError:
                return None
            self._open[name] = spool
        return self._open[name]


def spooled_of(result: bytes) -> Spooled | None:
    """Return where the lines of a result are; None for a result that holds its items itself.

    Raises:
        Damaged: the result is damaged.
    """
    data = codec.spooled_lines(result)
    if data is None:
        return None
    with damaged_if_unreadable("a result"):
        return msgspec.msgpack.decode(data, type=Spooled)
