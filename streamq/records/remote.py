"""Objects behind URLs, through obstore: s3, gs, az, http. The extra ``remote`` installs it.

obstore finds the credentials, in the same places as the cloud's own tools.
"""

import importlib
import io
import re
from collections.abc import Iterator
from datetime import timedelta
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote, unquote

from streamq.errors import InvalidValue, StreamqError

_URL = re.compile(r"(s3a?|gs|az|adl|azure|abfss?|https?|memory)://", re.IGNORECASE)
#: Characters that URL parsers drop or read as a slash. With them a parser could read another object
#: than the one that was checked.
_TREACHEROUS = re.compile(r"[\x00-\x1f\x7f-\x9f\\]")
_DEFAULT_PORTS = {"http": ":80", "https": ":443"}
#: A name that is percent-encoded more often than this is refused.
_MOST_ENCODED = 5
#: Characters that need no encoding in the path of a URL, besides letters and digits.
_PLAIN = "!$&'()*+,;=:@"
#: How often a stream that breaks off is opened again where it broke.
_ATTEMPTS = 3


class RemoteMissing(InvalidValue):
    """A URL cannot be read: no such object, access is denied, or the extra is not installed."""


class RemoteUnreachable(StreamqError):
    """The object's server does not answer now; it may later."""


class RemoteChanged(InvalidValue):
    """The object has changed."""


class Object(NamedTuple):
    """What is known of an object without reading it."""

    size: int
    #: Changes with the content, as far as the server tells: its ETag, or the time of the last
    #: change.
    version: str


def is_remote(name: str) -> bool:
    """Return whether the name is the URL of an object, not the name of a file."""
    return _URL.match(name) is not None


class RemoteLocation(NamedTuple):
    """What a URL names, in one spelling: that one is compared, and that one is read."""

    scheme: str
    host: str
    #: Parts of the path, decoded: the names that the store uses.
    segments: tuple[str, ...]

    def covers(self, other: "RemoteLocation") -> bool:
        """Return whether the other one is this object, or is below this folder."""
        own = len(self.segments)
        return self[:2] == other[:2] and self.segments == other.segments[:own]

    @property
    def folder(self) -> str:
        """The URL of the folder, encoded so that every parser reads it in the same way."""
        path = "".join(f"/{quote(each, safe=_PLAIN)}" for each in self.segments[:-1])
        return f"{self.scheme}://{self.host}{path}"


def locate_url(url: str) -> RemoteLocation:
    """Take a URL apart. For http ``%20`` is a space; in a cloud's URL a name stands as it is.

    Raises:
        RemoteMissing: the URL is not ``scheme://place/path``, or parsers could disagree about it.
    """
    scheme, _, rest = url.partition("://")
    scheme = scheme.lower()
    host, _, path = rest.partition("/")
    if "?" in url or "#" in url or (not host and scheme != "memory"):
        raise RemoteMissing(f"{url}: write scheme://place/object, with no ? and no #")
    if scheme in _DEFAULT_PORTS:
        login, at, host = host.rpartition("@")
        host = login + at + host.lower().removesuffix(_DEFAULT_PORTS[scheme])
    written = tuple(path.removesuffix("/").split("/")) if path else ()
    if " " in host or any(map(_remote_path_leads_astray, (host or "-", *written))):
        raise RemoteMissing(
            f"{url}: its path has an empty part, . or .., a backslash or a control character"
        )
    return RemoteLocation(
        scheme, host, tuple(map(unquote, written)) if scheme in _DEFAULT_PORTS else written
    )


def _remote_path_leads_astray(part: str) -> bool:
    """Return whether a program could read a part of a URL as the way to another place.

    A server may decode the part once more. So it is decoded and checked again until decoding
    changes nothing.
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


def head_of_object(url: str) -> Object:
    """Return size and version of the object as it is now.

    Raises:
        RemoteMissing: the object is not there, or cannot be read.
        RemoteUnreachable: the object's server does not answer.
    """
    store, path = _store_of_object(url)
    try:
        meta = _obstore(url).head(store, path)
    except Exception as error:  # noqa: BLE001  obstore's errors have no base of their own
        raise _object_missing(url, error) from None
    return _object_of_meta(meta)


def is_pattern_of_objects(url: str) -> bool:
    """Return whether a URL names a folder of a cloud's objects, or many of them by ``*``.

    A web server cannot say what it has, so there ``*`` is a character as any other.
    """
    return not is_web_url(url) and (url.endswith("/") or "*" in url)


def matching_objects(url: str) -> list[str]:
    """Return the URLs of the objects that a pattern names, sorted: ``s3://bucket/2026/*.csv``.

    ``*`` stands for anything within a name, ``**`` for any folders, and a ``/`` at the end for all
    that is below a folder. Names that begin with a dot are left out, unless they are spelled out.

    Raises:
        RemoteMissing: nothing matches, or the store may not be listed.
        RemoteUnreachable: the store does not answer.
    """
    location = locate_url(url)
    pattern = [*location.segments, "**", "*"] if url.endswith("/") else list(location.segments)
    fixed = next(index for index, each in enumerate(pattern) if "*" in each)
    scheme_and_host = f"{location.scheme}://{location.host}"
    base = RemoteLocation(location.scheme, location.host, (*location.segments[:fixed], "-")).folder
    _obstore(url)
    found = []
    try:
        for page in _obstore(url).list(_store_of_folder(base)):
            for meta in page:
                names = str(meta["path"]).split("/")
                if _remote_object_fits_pattern(names, pattern[fixed:]):
                    found.append("/".join((scheme_and_host, *location.segments[:fixed], *names)))
    except Exception as error:  # noqa: BLE001  obstore's errors have no base of their own
        raise _object_missing(url, error) from None
    if not found:
        raise RemoteMissing(f"{url} matches no object")
    return sorted(found)


def _remote_object_fits_pattern(names: list[str], pattern: list[str]) -> bool:
    """Return whether the names on the way to an object fit those of a pattern."""
    if not pattern or not names:
        return not names and all(each == "**" for each in pattern)
    if pattern[0] == "**":
        is_below = not names[0].startswith(".") and _remote_object_fits_pattern(names[1:], pattern)
        return is_below or _remote_object_fits_pattern(names, pattern[1:])
    words = map(re.escape, pattern[0].split("*"))
    is_hidden = names[0].startswith(".") and not pattern[0].startswith(".")
    is_fitting = not is_hidden and re.fullmatch(".*".join(words), names[0], re.DOTALL)
    return bool(is_fitting) and _remote_object_fits_pattern(names[1:], pattern[1:])


class RemoteFile:
    """An object as a stream of bytes that can be read from any place on."""

    def __init__(self, url: str, version: str | None = None) -> None:
        """``version``: the one that the object must have; None: any."""
        self._url = url
        self._store, self._path = _store_of_object(url)
        self._version = version
        self._position = 0
        self._rest = b""
        self._blocks: Iterator[Any] | None = None
        self.object = head_of_object(url)
        if version is not None and self.object.version != version:
            raise _object_changed(url)

    def read(self, size: int = -1, /) -> bytes:
        """Return the next bytes, perhaps fewer than that many; none at the end."""
        if not self._rest:
            self._rest = self._next(size)
        data = self._rest if size < 0 else self._rest[:size]
        self._rest = self._rest[len(data) :]
        self._position += len(data)
        return data

    def seek(self, offset: int, /) -> int:
        """Go to that byte."""
        self._position, self._rest, self._blocks = offset, b"", None
        return offset

    def tell(self) -> int:
        """Return how many bytes were read."""
        return self._position

    def close(self) -> None:
        """Stop reading."""
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
        raise RemoteUnreachable(
            f"{self._url}: at byte {self._position}: {_first_line_of_obstore(problem)}"
        )

    def _open(self, size: int) -> Iterator[Any]:
        # From the beginning we ask for the whole object: some servers do not know ranges.
        options = {"range": {"offset": self._position}} if self._position else None
        result = _obstore(self._url).get(self._store, self._path, options=options)
        if _object_of_meta(result.meta) != self.object:
            raise _object_changed(self._url)
        return iter(result.stream(min_chunk_size=size))


def is_web_url(url: str) -> bool:
    """Return whether a URL is of a web server: nothing there is listed or written."""
    return url.partition("://")[0].lower() in _DEFAULT_PORTS


def is_object(url: str) -> bool:
    """Return whether there is such an object, as far as this account may know.

    Raises:
        RemoteUnreachable: the object's server does not answer.
    """
    try:
        head_of_object(url)
    except RemoteMissing:
        return False
    return True


def upload_object(path: Path, url: str) -> None:
    """Write a file to an object, which is there when all of it is there.

    Raises:
        RemoteMissing: the account may not write there.
        RemoteUnreachable: the object's server does not answer.
    """
    store, name = _store_of_object(url)
    try:
        _obstore(url).put(store, name, path)
    except Exception as error:  # noqa: BLE001  obstore's errors have no base of their own
        raise _object_missing(url, error) from None


def delete_object(url: str) -> None:
    """Delete an object, if it is there.

    Raises:
        RemoteMissing: the account may not delete it.
        RemoteUnreachable: the object's server does not answer.
    """
    if not is_object(url):
        return
    store, name = _store_of_object(url)
    try:
        _obstore(url).delete(store, name)
    except Exception as error:  # noqa: BLE001  obstore's errors have no base of their own
        raise _object_missing(url, error) from None


class RemoteRangeFile(io.RawIOBase):
    """An object as a file of which any part can be read: each read asks for just that part."""

    def __init__(self, url: str, then: Object) -> None:
        """``then``: what the object must be, whenever it is read."""
        self._url = url
        self._then = then
        self._position = 0

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def tell(self) -> int:
        """Return where the next read begins."""
        return self._position

    def seek(self, offset: int, whence: int = 0, /) -> int:
        """Go to a byte: from the beginning, from here, or from the end."""
        self._position = offset + (0, self._position, self._then.size)[whence]
        return self._position

    def read(self, size: int | None = -1, /) -> bytes:
        """Return the next bytes, so many unless the end comes first.

        Raises:
            RemoteChanged: the object has changed.
            RemoteUnreachable: its server does not answer.
        """
        left = max(0, self._then.size - self._position)
        wanted = left if size is None or size < 0 else min(size, left)
        if not wanted:
            return b""
        data = read_range_of_object(self._url, self._position, wanted, self._then)
        self._position += len(data)
        return data

    def readinto(self, buffer: Any, /) -> int:
        """Read into a buffer."""
        data = self.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)


def read_range_of_object(url: str, offset: int, length: int, then: Object) -> bytes:
    """Return some bytes of an object.

    Raises:
        RemoteMissing: the object is not there, or cannot be read.
        RemoteChanged: the object has changed since it was loaded.
    """
    if length == 0:
        if head_of_object(url) != then:
            raise _object_changed(url)
        return b""
    store, path = _store_of_object(url)
    try:
        # Size and version in this reply belong to these very bytes, even if the object changes now.
        options = {"range": (offset, offset + length)}
        result = _obstore(url).get(store, path, options=options)
        found, data = _object_of_meta(result.meta), bytes(result.bytes())
    except Exception as error:  # noqa: BLE001  obstore's errors have no base of their own
        # The request also fails when the object has become shorter than the range.
        if head_of_object(url) != then:
            raise _object_changed(url) from None
        raise RemoteUnreachable(
            f"{url}: at byte {offset}: {_first_line_of_obstore(error)}"
        ) from None
    if found != then:
        raise _object_changed(url)
    return data


def _object_changed(url: str) -> RemoteChanged:
    return RemoteChanged(f"{url} has changed since it was first looked at")


def _obstore(url: str) -> Any:
    try:
        return importlib.import_module("obstore")
    except ImportError:
        raise RemoteMissing(f"{url}: reading URLs takes pip install 'streamq[remote]'") from None


def _store_of_object(url: str) -> tuple[Any, str]:
    """Return the object's store, and its path there."""
    location = locate_url(url)
    if not location.segments or url.endswith("/"):
        raise RemoteMissing(f"{url}: write scheme://place/object, with no ? and no #")
    _obstore(url)
    try:
        return _store_of_folder(location.folder), location.segments[-1]
    except Exception as error:  # noqa: BLE001  obstore's errors have no base of their own
        raise _object_missing(url, error) from None


@lru_cache
def _store_of_folder(url: str) -> Any:
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


def _object_of_meta(meta: Any) -> Object:
    return Object(int(meta["size"]), str(meta["e_tag"] or meta["last_modified"] or ""))


def _object_missing(url: str, error: Exception) -> StreamqError:
    kind = type(error).__name__
    if kind in ("FileNotFoundError", "NotFoundError"):
        return RemoteMissing(f"{url}: No such object")
    # obstore has a class for each kind of refusal. A GenericError may pass, so it can be retried.
    return (RemoteUnreachable if kind == "GenericError" else RemoteMissing)(
        f"{url}: {_first_line_of_obstore(error)}"
    )


def _first_line_of_obstore(error: Exception | None) -> str:
    """Return the first line of obstore's message: the others help only to debug obstore."""
    return str(error).strip().partition("\n")[0] or type(error).__name__
