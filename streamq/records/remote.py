"""Objects behind URLs, through obstore: s3, gs, az, http. The extra ``remote`` brings it.

Who may read them is obstore's matter: it takes credentials from where the cloud's own
tools take them.
"""

import importlib
import re
from collections.abc import Iterator
from datetime import timedelta
from functools import lru_cache
from typing import Any, NamedTuple

from streamq.errors import InvalidValue, StreamqError

_URL = re.compile(r"(s3a?|gs|az|adl|azure|abfss?|https?|memory)://", re.IGNORECASE)
#: How often a stream that breaks off is taken up again where it broke.
_ATTEMPTS = 3


class RemoteMissing(InvalidValue):
    """A URL cannot be read: it names nothing, or nobody is let in, or the extra is missing."""


class RemoteUnreachable(StreamqError):
    """Whoever has the object does not answer; later it may."""


class RemoteChanged(Exception):
    """The object is not what it was."""


class Object(NamedTuple):
    """What is known of an object without reading it."""

    size: int
    #: Another one for other content, as far as its server tells.
    version: str


def is_remote(name: str) -> bool:
    """Whether it is the URL of an object, not the name of a file."""
    return _URL.match(name) is not None


def head(url: str) -> Object:
    """The object as it is now.

    Raises:
        RemoteMissing: it is not there, or cannot be read.
        RemoteUnreachable: whoever has it does not answer.
    """
    store, path = _store(url)
    try:
        meta = _obstore(url).head(store, path)
    except Exception as error:  # noqa: BLE001  obstore's errors have no base of their own
        raise _missing(url, error) from None
    return _described(meta)


class RemoteFile:
    """An object as a stream of bytes that can be read from any place on."""

    def __init__(self, url: str, version: str | None = None) -> None:
        """With a version it must be that one."""
        self._url = url
        self._store, self._path = _store(url)
        self._version = version
        self._position = 0
        self._rest = b""
        self._blocks: Iterator[Any] | None = None
        self.object = head(url)
        if version is not None and self.object.version != version:
            raise RemoteChanged

    def read(self, size: int = -1, /) -> bytes:
        """The next bytes, perhaps fewer than that many; none at the end."""
        if not self._rest:
            self._rest = self._next(size)
        data = self._rest if size < 0 else self._rest[:size]
        self._rest = self._rest[len(data) :]
        self._position += len(data)
        return data

    def seek(self, offset: int, /) -> int:
        """Go on at that byte."""
        self._position, self._rest, self._blocks = offset, b"", None
        return offset

    def tell(self) -> int:
        """How many bytes were read."""
        return self._position

    def close(self) -> None:
        """Read no more."""
        self._blocks = None

    def _next(self, size: int) -> bytes:
        problem: Exception | None = None
        for _ in range(_ATTEMPTS):
            if self._position >= self.object.size:
                return b""
            try:
                if self._blocks is None:
                    self._blocks = self._open(max(size, 2**16))
                block = next(self._blocks, None)
            except Exception as error:  # noqa: BLE001  obstore's errors have no base of their own
                self._blocks, problem = None, error
                continue
            if block is not None:
                return bytes(block)
            self._blocks, problem = None, EOFError("it breaks off")
        raise RemoteUnreachable(f"{self._url}: at byte {self._position}: {_brief(problem)}")

    def _open(self, size: int) -> Iterator[Any]:
        # At the beginning all of it is asked for: some servers know no ranges.
        options = {"range": {"offset": self._position}} if self._position else None
        result = _obstore(self._url).get(self._store, self._path, options=options)
        if _described(result.meta) != self.object:
            raise RemoteChanged("it changed while it was read")
        return iter(result.stream(min_chunk_size=size))


def read_range(url: str, offset: int, length: int, then: Object) -> bytes:
    """Some bytes of an object.

    Raises:
        RemoteMissing: it is not there, or cannot be read.
        RemoteChanged: it is not what it was.
    """
    store, path = _store(url)
    if head(url) != then:
        raise RemoteChanged
    try:
        return bytes(_obstore(url).get_range(store, path, start=offset, length=length))
    except Exception as error:  # noqa: BLE001  obstore's errors have no base of their own
        raise RemoteUnreachable(f"{url}: at byte {offset}: {_brief(error)}") from None


def _obstore(url: str) -> Any:
    try:
        return importlib.import_module("obstore")
    except ImportError:
        raise RemoteMissing(f"{url}: reading URLs takes pip install 'streamq[remote]'") from None


@lru_cache
def _store(url: str) -> tuple[Any, str]:
    """The object's store, and its path there."""
    folder, _, name = url.rpartition("/")
    if "?" in url or "#" in url or not name or folder.endswith(":/"):
        raise RemoteMissing(f"{url}: it is to be scheme://place/object, with no ? and no #")
    _obstore(url)
    stores: Any = importlib.import_module("obstore.store")
    options: dict[str, Any] = {
        "retry_config": {"max_retries": 3, "retry_timeout": timedelta(seconds=20)}
    }
    if url.startswith("http:"):
        options["client_options"] = {"allow_http": True}
    if url.startswith("memory:"):
        options = {}
    try:
        return stores.from_url(folder, **options), name
    except Exception as error:  # noqa: BLE001  obstore's errors have no base of their own
        raise _missing(url, error) from None


def _described(meta: Any) -> Object:
    return Object(int(meta["size"]), str(meta["e_tag"] or meta["last_modified"] or ""))


def _missing(url: str, error: Exception) -> StreamqError:
    kind = type(error).__name__
    if kind in ("FileNotFoundError", "NotFoundError"):
        return RemoteMissing(f"{url}: No such object")
    # A refusal has a class of its own; what has none may pass.
    return (RemoteUnreachable if kind == "GenericError" else RemoteMissing)(
        f"{url}: {_brief(error)}"
    )


def _brief(error: Exception | None) -> str:
    """The first line of what obstore says: the others are for those who debug it."""
    return str(error).strip().partition("\n")[0] or type(error).__name__
