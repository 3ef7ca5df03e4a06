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
from urllib.parse import quote, unquote

from streamq.errors import InvalidValue, StreamqError

_URL = re.compile(r"(s3a?|gs|az|adl|azure|abfss?|https?|memory)://", re.IGNORECASE)
#: What URL parsers drop or take for a slash, so that what is read is not what is written.
_TREACHEROUS = re.compile(r"[\x00-\x1f\x7f-\x9f\\]")
_DEFAULT_PORTS = {"http": ":80", "https": ":443"}
#: A name that is percent-encoded more often than this is nobody's.
_MOST_ENCODED = 5
#: What stands for itself in the path of a URL, besides letters and digits.
_PLAIN = "!$&'()*+,;=:@"
#: How often a stream that breaks off is taken up again where it broke.
_ATTEMPTS = 3


class RemoteMissing(InvalidValue):
    """A URL cannot be read: it names nothing, or nobody is let in, or the extra is missing."""


class RemoteUnreachable(StreamqError):
    """Whoever has the object does not answer; later it may."""


class RemoteChanged(InvalidValue):
    """The object is not what it was."""


class Object(NamedTuple):
    """What is known of an object without reading it."""

    size: int
    #: Another one for other content, as far as its server tells.
    version: str


def is_remote(name: str) -> bool:
    """Return whether it is the URL of an object, not the name of a file."""
    return _URL.match(name) is not None


class Location(NamedTuple):
    """What a URL names, in the one spelling under which it is compared and read."""

    scheme: str
    host: str
    #: Of the path, as the store calls them: nothing in them is encoded.
    segments: tuple[str, ...]

    def covers(self, other: "Location") -> bool:
        """Return whether the other one is this object, or is below this folder."""
        own = len(self.segments)
        return self[:2] == other[:2] and self.segments == other.segments[:own]

    @property
    def folder(self) -> str:
        """The URL of what holds it, encoded so that no parser can take it for another one."""
        path = "".join(f"/{quote(each, safe=_PLAIN)}" for each in self.segments[:-1])
        return f"{self.scheme}://{self.host}{path}"


def locate(url: str) -> Location:
    """Take a URL apart. On the web ``%20`` is a space; in a cloud a name is what is written.

    Raises:
        RemoteMissing: it is not ``scheme://place/path``, or a parser could take it for another.
    """
    scheme, _, rest = url.partition("://")
    scheme = scheme.lower()
    host, _, path = rest.partition("/")
    if "?" in url or "#" in url or (not host and scheme != "memory"):
        raise RemoteMissing(f"{url}: it is to be scheme://place/object, with no ? and no #")
    if scheme in _DEFAULT_PORTS:
        login, at, host = host.rpartition("@")
        host = login + at + host.lower().removesuffix(_DEFAULT_PORTS[scheme])
    written = tuple(path.removesuffix("/").split("/")) if path else ()
    if " " in host or any(map(_leads_astray, (host or "-", *written))):
        raise RemoteMissing(
            f"{url}: its path has an empty part, . or .., a backslash or a control character"
        )
    return Location(
        scheme, host, tuple(map(unquote, written)) if scheme in _DEFAULT_PORTS else written
    )


def _leads_astray(part: str) -> bool:
    """Return whether anybody could read a part of a URL as a way to elsewhere.

    Who gets it may decode it once more, so it is looked at again for as long as that changes it.
    """
    for depth in range(_MOST_ENCODED):
        if part != part.strip() or part in ("", ".", "..") or _TREACHEROUS.search(part):
            return True
        if depth and "/" in part:
            return True
        decoded = unquote(part)
        if decoded == part:
            return False
        part = decoded
    return True


def head(url: str) -> Object:
    """Return the object as it is now.

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
            raise _changed(url)

    def read(self, size: int = -1, /) -> bytes:
        """Return the next bytes, perhaps fewer than that many; none at the end."""
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
        """Return how many bytes were read."""
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
            except RemoteChanged:
                raise
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
            raise _changed(self._url)
        return iter(result.stream(min_chunk_size=size))


def read_range(url: str, offset: int, length: int, then: Object) -> bytes:
    """Some bytes of an object.

    Raises:
        RemoteMissing: it is not there, or cannot be read.
        RemoteChanged: it is not what it was.
    """
    if length == 0:
        if head(url) != then:
            raise _changed(url)
        return b""
    store, path = _store(url)
    try:
        # What is told with the bytes is of the object they are from, whatever came of it since.
        options = {"range": (offset, offset + length)}
        result = _obstore(url).get(store, path, options=options)
        found, data = _described(result.meta), bytes(result.bytes())
    except Exception as error:  # noqa: BLE001  obstore's errors have no base of their own
        # A shorter one may not have those bytes.
        if head(url) != then:
            raise _changed(url) from None
        raise RemoteUnreachable(f"{url}: at byte {offset}: {_brief(error)}") from None
    if found != then:
        raise _changed(url)
    return data


def _changed(url: str) -> RemoteChanged:
    return RemoteChanged(f"{url} has changed since it was first looked at")


def _obstore(url: str) -> Any:
    try:
        return importlib.import_module("obstore")
    except ImportError:
        raise RemoteMissing(f"{url}: reading URLs takes pip install 'streamq[remote]'") from None


def _store(url: str) -> tuple[Any, str]:
    """Return the object's store, and its path there."""
    location = locate(url)
    if not location.segments or url.endswith("/"):
        raise RemoteMissing(f"{url}: it is to be scheme://place/object, with no ? and no #")
    _obstore(url)
    try:
        return _folder(location.folder), location.segments[-1]
    except Exception as error:  # noqa: BLE001  obstore's errors have no base of their own
        raise _missing(url, error) from None


@lru_cache
def _folder(url: str) -> Any:
    """Return the store of a folder's objects."""
    stores: Any = importlib.import_module("obstore.store")
    options: dict[str, Any] = {
        "retry_config": {"max_retries": 3, "retry_timeout": timedelta(seconds=20)}
    }
    if url.startswith("http:"):
        options["client_options"] = {"allow_http": True}
    if url.startswith("memory:"):
        options = {}
    return stores.from_url(url, **options)


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
    """Return the first line of what obstore says: the others are for those who debug it."""
    return str(error).strip().partition("\n")[0] or type(error).__name__
