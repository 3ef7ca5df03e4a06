"""Sessions of browsers: signed cookies that stand for a key. No gateway keeps a list of them."""

import hashlib
import hmac
import time
from base64 import urlsafe_b64decode, urlsafe_b64encode

import msgspec

from streamq.gateway.keys import Key, Keys

COOKIE = "streamq_session"
#: The cookie of a browser that came by a link to one request.
SHARE_COOKIE = "streamq_share"
#: How long a session lasts.
SESSION_S = 12 * 3_600
#: How many days a link to one request lasts: by default, and at most.
SHARE_DAYS, MOST_SHARE_DAYS = 7, 90
_SHARE = b"share "


class Session(msgspec.Struct, frozen=True, array_like=True):
    """Whose session it is, and until when."""

    name: str
    #: The beginning of the key's digest: with another key of that name the session ends.
    key: str
    until_s: int


def cookie_of(keys: Keys, key: Key) -> str:
    """Return the value of a cookie for a session with this key."""
    session = Session(key.name, key.sha256[:16], round(time.time()) + SESSION_S)
    body = _base64_of_cookie(msgspec.json.encode(session))
    return f"{body}.{_cookie_signature(keys.secret, body)}"


def key_of_cookie(keys: Keys, cookie: str) -> Key | None:
    """Return the key that a session stands for; None if it is over, or was forged."""
    body, _, signature = cookie.partition(".")
    if not hmac.compare_digest(_cookie_signature(keys.secret, body).encode(), signature.encode()):
        return None
    session = msgspec.json.decode(urlsafe_b64decode(body + "=" * (-len(body) % 4)), type=Session)
    key = keys.named(session.name)
    if key is None or key.sha256[:16] != session.key or session.until_s <= time.time():
        return None
    return key


class Share(msgspec.Struct, frozen=True, array_like=True):
    """A link to one request: which, who made it, and until when it is good."""

    request: str
    by: str
    until_s: int


def share_of_request(secret: bytes, request_id: str, by: str, days: int) -> str:
    """Return the end of a link to one request. A browser that has the link needs no key."""
    share = Share(request_id, by, round(time.time()) + days * 86_400)
    body = _base64_of_cookie(msgspec.json.encode(share))
    return f"{body}.{_cookie_signature(secret, body, _SHARE)}"


def request_of_share_link(secret: bytes, text: str) -> Share | None:
    """Return which request a link is for; None if it is over, or was forged."""
    body, _, signature = text.partition(".")
    if not hmac.compare_digest(
        _cookie_signature(secret, body, _SHARE).encode(), signature.encode()
    ):
        return None
    share = msgspec.json.decode(urlsafe_b64decode(body + "=" * (-len(body) % 4)), type=Share)
    return share if share.until_s > time.time() else None


def set_cookie_header(
    cookie: str, *, is_secure: bool, lasts_s: int = SESSION_S, name: str = COOKIE
) -> str:
    """Return the header that sets the cookie; with ``lasts_s`` 0 it is taken away."""
    secure = "; Secure" if is_secure else ""
    return f"{name}={cookie}; Path=/; Max-Age={lasts_s}; HttpOnly; SameSite=Strict{secure}"


def _cookie_signature(secret: bytes, body: str, use: bytes = b"session ") -> str:
    # The first word tells a cookie from a ticket: neither can be used as the other.
    return _base64_of_cookie(hmac.new(secret, use + body.encode(), hashlib.sha256).digest())


def _base64_of_cookie(data: bytes) -> str:
    return urlsafe_b64encode(data).rstrip(b"=").decode()
