"""Finds out who makes a call, and refuses calls that a page of another site made a browser send.

A call says who it is with a key (``Authorization: Bearer``), a client certificate, or the cookie of
a session. A browser sends the latter two by itself, whichever page asks. So calls without a key in
the header must come from our own pages, and must name this gateway as their host.
"""

import hmac
import ipaddress
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping
from http.cookies import CookieError, SimpleCookie
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from streamq.errors import SettingsError
from streamq.gateway import cookies
from streamq.gateway import keys as key_file
from streamq.gateway.keys import Key, Keys
from streamq.gateway.problems import Problem
from streamq.gateway.roles import LOCAL, Caller, Role

log = logging.getLogger(__name__)

#: The shortest time between two looks at the file of keys.
LOOK_S = 1.0
#: How many calls without a good key an address may make in a minute. Further ones are answered 429,
#: and are not logged.
MOST_FAILURES = 10
_MINUTE_S = 60.0
#: How many such addresses are remembered.
_MOST_ADDRESSES = 10_000
_SCHEME = "bearer "
_SAFE_METHODS = ("GET", "HEAD", "OPTIONS")


class Visit(msgspec.Struct, frozen=True):
    """The parts of a call that tell where it comes from."""

    method: str
    headers: Mapping[str, str]
    address: str = ""
    #: The name in the client certificate, "" without one.
    certificate: str = ""


class Access:
    """Finds out who makes a call. Without a file of keys, every caller may do everything."""

    def __init__(
        self, path: Path | None = None, hosts: frozenset[str] = frozenset(), origin: str = ""
    ) -> None:
        """``hosts``: names of this gateway, besides addresses and localhost. ``origin``: the URL
        that browsers use, if a proxy is in front.

        Raises:
            SettingsError: the file cannot be read.
        """
        self._path = path
        self._keys = Keys(key_file.read_key_file(path)) if path else None
        self._seen = _key_file_state(path)
        self._look_at = 0.0
        self._hosts = hosts | {urlsplit(origin).hostname or "localhost", "localhost"}
        self._origin = origin.rstrip("/")
        self._failures = FailedLogins()
        #: Called with the new secret when the file has another.
        self.on_secret: Callable[[bytes], None] = lambda _: None

    @property
    def has_keys(self) -> bool:
        """Whether callers need a key."""
        return self._path is not None

    @property
    def secret(self) -> bytes | None:
        """What tickets are signed with, if there is a file."""
        return self._keys.secret if self._keys else None

    def caller(self, visit: Visit) -> Caller:
        """Return who makes a call.

        Raises:
            Problem: the call does not say, or a strange page has a browser make it.
        """
        keys = self._current()
        authorization = visit.headers.get("authorization", "")
        if keys and authorization:
            return self._of_key(keys, authorization, visit.address)
        self._check_host(visit)
        self._check_page(visit)
        if keys is None:
            return LOCAL
        key = _caller_by_certificate(keys, visit) or _caller_by_cookie(keys, visit)
        if key is None:
            share = cookies.request_of_share_link(
                keys.secret, _cookie_of_visit(visit, cookies.SHARE_COOKIE)
            )
            if share:
                return Caller(f"a link of {share.by}", Role.READER, only=share.request)
            raise refused_without_key("the call has no key: send Authorization: Bearer sqk_...")
        return key.caller

    def check_again(self, caller: Caller) -> None:
        """Raise a problem if the key of a caller was changed or taken away since, or has expired.

        Calls that wait and streams last longer than keys may.
        """
        keys = self._current()
        if keys is None or caller.only:
            return
        key = keys.named(caller.name)
        if key is None or _rights_of_caller(key.caller) != _rights_of_caller(caller):
            raise refused_without_key(f"the key {caller.name} is not what it was, or has expired")

    def is_over(self, caller: Caller) -> bool:
        """Return whether ``check_again`` would raise."""
        try:
            self.check_again(caller)
        except Problem:
            return True
        return False

    def log_in(self, visit: Visit, text: str) -> tuple[Key, str]:
        """Return the key that a browser logs in with, and the cookie of its session."""
        keys = self._current()
        if keys is None:
            raise Problem(409, "OPEN", "this gateway has no keys", "nobody needs to log in")
        self._check_host(visit)
        self._check_page(visit)
        key = keys.find(text)
        if key is None:
            raise self._failures.add(visit.address)
        return key, cookies.cookie_of(keys, key)

    def share(self, caller: Caller, request_id: str, days: int) -> str:
        """Return the end of a link that shows one request to everybody who has it.

        Raises:
            Problem: this gateway has no keys, so nobody needs a link.
        """
        keys = self._current()
        if keys is None:
            title = "this gateway has no keys"
            raise Problem(409, "OPEN", title, "whoever reaches it sees the page by its address")
        return cookies.share_of_request(keys.secret, request_id, caller.name, days)

    def shared(self, text: str) -> str:
        """Return which request a link is for; "" if it is over, or was forged."""
        keys = self._current()
        share = cookies.request_of_share_link(keys.secret, text) if keys else None
        return share.request if share else ""

    def is_secure(self, scheme: str) -> bool:
        """Return whether browsers reach this gateway by TLS."""
        return scheme == "https" or self._origin.startswith("https:")

    def has_key(self, authorization: str) -> bool:
        """Return whether a call with this header may be listened to at all."""
        keys = self._current()
        return keys is None or _key_in_header(keys, authorization) is not None

    def _of_key(self, keys: Keys, authorization: str, address: str) -> Caller:
        key = _key_in_header(keys, authorization)
        if key is None:
            raise self._failures.add(address)
        return key.caller

    def look_again(self) -> None:
        """Read the file again at the next call."""
        self._look_at, self._seen = 0.0, None

    def _current(self) -> Keys | None:
        """Return the keys; those of before, if the file cannot be read now."""
        now = time.monotonic()
        if self._path is None or now < self._look_at:
            return self._keys
        self._look_at = now + LOOK_S
        seen = _key_file_state(self._path)
        if seen != self._seen:
            self._seen = seen
            try:
                self._keys = Keys(key_file.read_key_file(self._path))
            except SettingsError as error:
                log.error("the keys stay as they were: %s", error)
            else:
                log.info("%s was read again", self._path)
                self.on_secret(self._keys.secret)
        return self._keys

    def _check_host(self, visit: Visit) -> None:
        host = visit.headers.get("host", "")
        name = urlsplit(f"//{host}").hostname or "" if _is_host_of_gateway(host) else ""
        if name not in self._hosts and not _is_ip_address(name):
            raise Problem(
                421,
                "HOST",
                "this gateway has another name",
                f"the call is for {host!r:.100}: use the address of the gateway, or start it with "
                "--origin and the URL that browsers use",
            )

    def _check_page(self, visit: Visit) -> None:
        """Refuse a call that a page of another site made a browser send."""
        if visit.method in _SAFE_METHODS:
            return
        site = visit.headers.get("sec-fetch-site")
        origin = visit.headers.get("origin", "")
        is_ours = site in (None, "same-origin", "none")
        if site is None and origin:
            is_ours = origin == self._origin or urlsplit(origin).netloc == visit.headers.get("host")
        if not is_ours:
            raise Problem(
                403,
                "SITE",
                "a page of another site asked for it",
                f"the browser says that the call comes from {origin or site!r:.100}",
            )


class FailedLogins:
    """Counts how often an address failed to say who it is."""

    def __init__(self) -> None:
        self._times: dict[str, deque[float]] = {}

    def add(self, address: str) -> Problem:
        """Count a failure, and return the answer for the caller. After too many it says to wait."""
        now = time.monotonic()
        if len(self._times) >= _MOST_ADDRESSES:
            self._times.clear()
        times = self._times.setdefault(address, deque(maxlen=MOST_FAILURES))
        if len(times) == MOST_FAILURES and now - times[0] < _MINUTE_S:
            wait_s = round(_MINUTE_S - (now - times[0])) or 1
            return Problem(
                429,
                "MANY",
                "too many wrong keys",
                f"{MOST_FAILURES} wrong keys came from this address in a minute",
                retry_after_s=wait_s,
            )
        times.append(now)
        log.warning("a wrong or expired key came from %s", address or "an unknown address")
        return refused_without_key("the key is unknown or has expired")


def _key_in_header(keys: Keys, authorization: str) -> Key | None:
    text = authorization[len(_SCHEME) :].strip()
    key = keys.find(text) if authorization[: len(_SCHEME)].lower() == _SCHEME else None
    # The digest is looked up in a table: how long that takes tells nothing about the key's bytes.
    if key is None or not hmac.compare_digest(key.sha256, key_file.digest_of_key(text)):
        return None
    return key


def _rights_of_caller(caller: Caller) -> tuple[object, ...]:
    return caller.sha256, caller.role, caller.queues


def refused_without_key(detail: str) -> Problem:
    """Return the answer to a caller that did not say who it is."""
    return Problem(401, "KEY", "a key is needed", detail)


def _caller_by_certificate(keys: Keys, visit: Visit) -> Key | None:
    return keys.named(visit.certificate) if visit.certificate else None


def _caller_by_cookie(keys: Keys, visit: Visit) -> Key | None:
    found = _cookie_of_visit(visit, cookies.COOKIE)
    return cookies.key_of_cookie(keys, found) if found else None


def _cookie_of_visit(visit: Visit, name: str) -> str:
    try:
        found = SimpleCookie(visit.headers.get("cookie", "")).get(name)
    except CookieError:
        return ""
    return found.value if found else ""


def _is_host_of_gateway(text: str) -> bool:
    return not set(text) & set("/@?#\\")


def _is_ip_address(name: str) -> bool:
    """Return whether it is an IP address: no page elsewhere can have one as its own name."""
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _key_file_state(path: Path | None) -> tuple[int, ...] | None:
    """Return inode, size and time of the file: they differ when the file has changed."""
    try:
        found = path.stat() if path else None
    except OSError:
        return ()
    return found and (found.st_mtime_ns, found.st_size, found.st_ino)
