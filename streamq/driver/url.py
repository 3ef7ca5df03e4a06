"""Reads the URL of a server. Nothing of it that could be secret gets into an error message."""

import ipaddress
import re
from collections.abc import Callable
from typing import Any
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from streamq.errors import InvalidValue

SCHEMES = (
    "redis:// rediss:// valkey:// valkeys:// unix:// redis+cluster:// rediss+cluster:// "
    "redis+sentinel:// rediss+sentinel:// (or valkey for redis) and local://"
)


def _positive_number_in_url(text: str) -> int:
    if not 0 < int(text) < 2**31:
        raise ValueError
    return int(text)


def _database_number_in_url(text: str) -> int:
    return _positive_number_in_url(text) if int(text) else 0


def _positive_seconds_in_url(text: str) -> float:
    if not 0 < float(text) < 10**9:
        raise ValueError
    return float(text)


# What a URL may say after its question mark, and how it is read.
_OPTIONS: dict[str, Callable[[str], Any]] = {
    "db": _database_number_in_url,
    "username": str,
    "password": str,
    "client_name": str,
    "max_connections": _positive_number_in_url,
    "health_check_interval": _positive_number_in_url,
    "socket_timeout": _positive_seconds_in_url,
    "socket_connect_timeout": _positive_seconds_in_url,
    "ssl_ca_certs": str,
    "ssl_ca_path": str,
    "ssl_certfile": str,
    "ssl_keyfile": str,
    "ssl_password": str,
    "ssl_cert_reqs": lambda text: {each: each for each in ("none", "optional", "required")}[text],
    "ssl_check_hostname": lambda text: {"true": True, "false": False}[text.lower()],
}
_SCHEME = re.compile("[a-z+]*:?//", re.IGNORECASE)
_SECRET = re.compile(r"(password=)[^&#]*", re.IGNORECASE)


def mask_passwords_of_url(url: str) -> str:
    """Return the URL without its passwords, fit to be shown. It need not be a good URL."""
    scheme = _SCHEME.match(url)
    rest = url[scheme.end() :] if scheme else url
    # A path has no credentials before it. In doubt too much is hidden: a password that was
    # not percent-encoded may hold any character.
    if "@" in rest and not rest.startswith("/"):
        before, _, host = rest.rpartition("@")
        user = re.split("[:/?#]", before)[0] if scheme else ""
        rest = f"{user}:***@{host}"
    return _SECRET.sub(r"\1***", (scheme[0] if scheme else "") + rest)


class ServerURL:
    """A parsed URL: where to connect, in which way, and with which options.

    ``kind`` is single, cluster, sentinel, unix or local; ``path`` is that of a socket or, for
    local, of a directory.

    Raises:
        InvalidValue: the URL is not a valid one.
    """

    def __init__(self, url: str) -> None:
        if not isinstance(url, str):
            raise InvalidValue(f"a URL is text, not {type(url).__name__}")
        try:
            self._read(url)
        except ValueError as error:
            raise InvalidValue(f"bad URL {mask_passwords_of_url(url)}: {error}") from None

    def _read(self, url: str) -> None:
        split = _split_url(url)
        if "://" not in url:
            raise ValueError(f"it has no scheme; known are {SCHEMES}")
        if "@" in split.path + split.fragment and split.scheme not in ("unix", "local"):
            raise ValueError("percent-encode the special characters in its password")
        self.kind, is_tls = _kind_of_url(split)
        self.path = unquote(split.path)
        self.service = ""
        self.hosts: list[tuple[str, int]] = []
        self.options = _url_credentials(split) | _url_options(split.query)
        if is_tls:
            self.options["ssl"] = True
        if self.kind == "local":
            self.path = unquote(split.netloc + split.path)
        elif self.kind == "unix":
            if split.netloc.rpartition("@")[2] or not self.path:
                raise ValueError("write unix:///path/of/the/socket")
        else:
            self.hosts = _url_hosts(split.netloc, 26379 if self.kind == "sentinel" else 6379)
            self._read_path()

    @property
    def is_open(self) -> bool:
        """Whether the server is on another machine, and the URL has no password or certificate."""
        is_known = "password" in self.options or "ssl_certfile" in self.options
        return not is_known and not all(_is_url_of_this_machine(host) for host, _ in self.hosts)

    def _read_path(self) -> None:
        """Read the service of a sentinel and the number of the database from the path."""
        database = self.path.strip("/")
        if self.kind == "sentinel":
            self.service, _, database = database.partition("/")
            if not self.service:
                raise ValueError("it wants a service: write redis+sentinel://host/service")
        if self.kind == "single" and len(self.hosts) > 1:
            raise ValueError("several hosts need redis+cluster:// or redis+sentinel://")
        if not re.fullmatch("[0-9]*", database):
            raise ValueError("after the host comes the number of a database")
        if database:
            self.options["db"] = _url_options(f"db={database}")["db"]
        if self.kind == "cluster" and self.options.pop("db", 0):
            raise ValueError("a cluster has no other database than 0")


def _is_url_of_this_machine(host: str) -> bool:
    """Return whether the host can only be this machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost" or host.lower().endswith(".localhost")


def _split_url(url: str) -> SplitResult:
    try:
        if "\0" in unquote(url):
            raise ValueError
        return urlsplit(url)
    except ValueError:
        raise ValueError("it cannot be read") from None


def _kind_of_url(split: SplitResult) -> tuple[str, bool]:
    """Return how to connect, and whether with TLS."""
    scheme, plus, way = split.scheme.partition("+")
    if split.scheme in ("unix", "local"):
        return split.scheme, False
    if scheme in ("redis", "valkey", "rediss", "valkeys"):
        is_tls = scheme in ("rediss", "valkeys")
        if not plus:
            return "single", is_tls
        if way in ("cluster", "sentinel"):
            return way, is_tls
    raise ValueError(f"no such scheme; known are {SCHEMES}")


def _url_hosts(netloc: str, default_port: int) -> list[tuple[str, int]]:
    hosts = []
    for address in netloc.rpartition("@")[2].split(","):
        try:
            parsed = urlsplit(f"//{address}")
            (parsed.hostname or "").encode("idna")  # as the resolver will
            hosts.append((parsed.hostname or "localhost", parsed.port or default_port))
        except ValueError:
            raise ValueError("a host or port in it is not valid") from None
    return hosts


def _url_credentials(split: SplitResult) -> dict[str, Any]:
    name, _, password = split.netloc.rpartition("@")[0].partition(":")
    found = {"username": unquote(name), "password": unquote(password)}
    return {key: value for key, value in found.items() if value}


def _url_options(query: str) -> dict[str, Any]:
    found = {}
    for name, text in parse_qsl(query, keep_blank_values=True):
        if name not in _OPTIONS:
            raise ValueError(f"no such option; known are {', '.join(_OPTIONS)}")
        try:
            found[name] = _OPTIONS[name](text)
        except (KeyError, ValueError):
            raise ValueError(f"the value of the option {name} is not allowed") from None
    return found
