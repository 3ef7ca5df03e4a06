"""Parts that say where their bytes are: which file, from where, how many.

The worker reads them itself, so the data never pass through the server. Who can submit
could thereby ask for any file, so a worker reads only what it was allowed to.
"""

import os
import stat
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path

import msgspec

from streamq.app import Abandon
from streamq.errors import InvalidValue
from streamq.records.inputs import Identity, open_input
from streamq.records.remote import Object, RemoteChanged, RemoteMissing, is_remote, read_range

#: Largest part by reference, in bytes.
MOST_REFERRED = 2**30


class Reference(msgspec.Struct, frozen=True, array_like=True):
    """What the payload of such a part is."""

    offset: int
    length: int
    #: Of the file when it was loaded: its size, and what tells it from a changed one.
    size: int
    version: str


class Reader:
    """Reads what parts refer to, within the folders and URLs that are allowed."""

    def __init__(self, allowed: Iterable[str]) -> None:
        self._urls = tuple(each.rstrip("/") for each in allowed if is_remote(each))
        self._paths = {os.path.realpath(each) for each in allowed if not is_remote(each)}

    def read(self, name: str, payload: bytes, *, is_whole: bool) -> bytes:
        """The bytes a part refers to; of a whole file, what it holds when decompressed.

        Raises:
            Abandon: it is not allowed, is not there, or has changed since it was loaded.
        """
        reference = msgspec.json.decode(payload, type=Reference)
        try:
            if is_remote(name):
                return self._read_url(name, reference, is_whole=is_whole)
            return self._read_file(name, reference, is_whole=is_whole)
        except (FileNotFoundError, RemoteMissing) as error:
            raise Abandon(f"{name} cannot be read here: {error}") from None
        except RemoteChanged:
            raise Abandon(f"{name} has changed since it was loaded") from None
        except InvalidValue as error:
            raise Abandon(str(error)) from None

    def _read_url(self, url: str, reference: Reference, *, is_whole: bool) -> bytes:
        is_inside = any(url == each or url.startswith(f"{each}/") for each in self._urls)
        if not is_inside or "/.." in url:
            raise self._refusal(url)
        then = Object(reference.size, reference.version)
        if not is_whole:
            return read_range(url, reference.offset, reference.length, then)
        now = Identity.of(url)
        if (now.size, now.digest) != then:
            raise RemoteChanged
        return _whole(url)

    def _read_file(self, name: str, reference: Reference, *, is_whole: bool) -> bytes:
        path = Path(os.path.realpath(name))
        if not any(str(each) in self._paths for each in (path, *path.parents)):
            raise self._refusal(name)
        # The resolved name, and no link even if one was put in its place meanwhile.
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
            state = os.fstat(file.fileno())
            if not stat.S_ISREG(state.st_mode):
                raise Abandon(f"{name} is no regular file")
            if (state.st_size, str(state.st_mtime_ns)) != (reference.size, reference.version):
                raise Abandon(
                    f"{name} has changed since it was loaded: it had {reference.size} bytes, "
                    f"and has {state.st_size}"
                    if state.st_size != reference.size
                    else f"{name} has changed since it was loaded: it was written to"
                )
            if is_whole:
                return _whole(str(path))
            file.seek(reference.offset)
            data = file.read(reference.length)
        if len(data) != reference.length:
            raise Abandon(f"{name} has changed since it was loaded: it was cut short")
        return data

    def _refusal(self, name: str) -> Abandon:
        return Abandon(f"this worker may not read {name}: --allow-read does not cover it")


def _whole(name: str) -> bytes:
    blocks, size = [], 0
    with closing(open_input(name)) as source:
        while block := source.read(2**22):
            blocks.append(block)
            size += len(block)
            if size > MOST_REFERRED:
                raise Abandon(f"{name} holds more than the {MOST_REFERRED} bytes a part may have")
    return b"".join(blocks)
