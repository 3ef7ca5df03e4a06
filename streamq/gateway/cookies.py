"""Sessions of browsers: a signed cookie that stands for a key. No gateway keeps a list of them."""

import hashlib
import hmac
import time
from base64 import urlsafe_b64decode, urlsafe_b64encode

import msgspec

from streamq.gateway.keys import Key, Keys

COOKIE = "streamq_session"
#: A session lasts so long.
SESSION_S = 12 * 3_600


class Session(msgspec.Struct, frozen=True, array_like=True):
    """Whose session it is, and until when."""

    name: str
    #: The beginning of the key's digest: with another key of that name the session ends.
    key: str
    until_s: int


def cookie_of(keys: Keys, key: Key) -> str:
    """Return the value of a cookie for a session with this key."""
    session = Session(key.name, key.sha256[:16], round(time.time()) + SESSION_S)
    body = _text(msgspec.json.encode(session))
    return f"{body}.{_signature(keys.secret, body)}"


def key_of(keys: Keys, cookie: str) -> Key | None:
    """Return the key that a session stands for; None if it is over, or was forged."""
    body, _, signature = cookie.partition(".")
    if not hmac.compare_digest(_signature(keys.secret, body).encode(), signature.encode()):
        return None
    session = msgspec.json.decode(urlsafe_b64decode(body + "=" * (-len(body) % 4)), type=Session)
    key = keys.named(session.name)
    if key is None or key.sha256[:16] != session.key or session.until_s <= time.time():
        return None
    return key


def header_of(cookie: str, *, is_secure: bool, lasts_s: int = SESSION_S) -> str:
    """Return the header that sets the cookie; with ``lasts_s`` 0 it is taken away."""
    secure = "; Secure" if is_secure else ""
    return f"{COOKIE}={cookie}; Path=/; Max-Age={lasts_s}; HttpOnly; SameSite=Strict{secure}"


def _signature(secret: bytes, body: str) -> str:
    # Another use of the secret than tickets: neither can be taken for the other.
    return _text(hmac.new(secret, b"session " + body.encode(), hashlib.sha256).digest())


def _text(data: bytes) -> str:
    return urlsafe_b64encode(data).rstrip(b"=").decode()
