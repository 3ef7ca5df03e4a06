"""Posting webhooks: the handler of callbacks that are URLs.

A URL comes with a request, so whoever may submit could have a worker post anywhere in its network.
So a worker posts only where ``--allow-post`` lets it, follows no redirect, and sends nothing to an
address that is not public, unless the operator named that very address.
"""

import hashlib
import hmac
import http.client
import ipaddress
import os
import socket
import ssl
import time
from base64 import b64encode
from typing import Any
from urllib.parse import SplitResult, urlsplit

import msgspec

from streamq.app import Abandon, Handler, Retry, Snooze, describe_handler
from streamq.errors import InvalidValue

#: The handler's name; ``queue/callbacks.py`` makes requests for it.
NAME = "streamq.webhook"
#: The variable that holds the secret which posts are signed with.
SECRET = "STREAMQ_WEBHOOK_SECRET"
#: How long the other side may take to answer (s).
ANSWER_S = 20.0
#: The longest that the other side can put a post off (s).
_MOST_AFTER_S = 3_600


class Post(msgspec.Struct, frozen=True):
    """What a callback is to post, and where."""

    url: str
    #: The same for every attempt: the receiver takes a post with a key it has seen as done.
    key: str
    message: dict[str, Any]


class Poster:
    """Posts to URLs below the prefixes that it was given."""

    def __init__(self, allowed: tuple[str, ...]) -> None:
        self._allowed = [urlsplit(each) for each in allowed]

    def handler(self) -> Handler:
        """Return it as a handler of an app."""
        return describe_handler(self.post, is_map=True, name=NAME)

    def post(self, post: Post) -> str:
        """Post a message once, and return the status that it was answered with."""
        url = urlsplit(post.url)
        by_address = self._permit(url)
        address = _webhook_address(url, may_be_private=by_address)
        body = msgspec.json.encode(post.message)
        status, after = _send_webhook(url, address, body, webhook_headers(post.key, body))
        if 200 <= status < 300:
            return str(status)
        if status in (429, 503) and after:
            raise Snooze(f"{url.netloc} answered {status}", after=min(after, _MOST_AFTER_S))
        if status == 410:
            raise Abandon(f"{url.netloc} answered 410: it wants no more of these")
        if 300 <= status < 400:
            raise Abandon(f"{url.netloc} answered {status}: redirects are not followed")
        raise Retry(f"{url.netloc} answered {status}")

    def _permit(self, url: SplitResult) -> bool:
        """Return whether the operator allowed the address itself, not only a name.

        Raises:
            Abandon: no prefix covers the URL.
        """
        path = url.path or "/"
        is_plain = not {"..", "."} & set(path.split("/")) and "%" not in path and "\\" not in path
        for each in self._allowed:
            is_place = (each.scheme, each.hostname, _webhook_port(each)) == (
                url.scheme,
                url.hostname,
                _webhook_port(url),
            )
            if is_place and is_plain and _is_below_prefix(path, each.path or "/"):
                return _literal_ip_address(url.hostname or "") is not None
        raise Abandon(f"this worker may not post to {url.netloc}: --allow-post does not cover it")


def webhook_headers(key: str, body: bytes) -> dict[str, str]:
    """Return the headers of a post: its key, the time, and the signature if there is a secret."""
    now = str(int(time.time()))
    headers = {
        "content-type": "application/json",
        "user-agent": "streamq",
        "webhook-id": key,
        "webhook-timestamp": now,
    }
    secret = os.environ.get(SECRET, "")
    if secret:
        headers["webhook-signature"] = webhook_signature(secret, key, now, body)
    return headers


def webhook_signature(secret: str, key: str, timestamp: str, body: bytes) -> str:
    """Return the signature of a post: HMAC-SHA256 over ``key.timestamp.body``, in base64."""
    signed = f"{key}.{timestamp}.".encode() + body
    return "v1," + b64encode(hmac.new(secret.encode(), signed, hashlib.sha256).digest()).decode()


def check_prefix(prefix: str, what: str) -> str:
    """Return the prefix of a URL if posts can be allowed by it.

    Raises:
        InvalidValue: it is none.
    """
    url = urlsplit(prefix)
    if url.scheme not in ("http", "https") or not url.hostname or url.query or url.fragment:
        raise InvalidValue(f"{what} {prefix!r} is no URL such as https://host/path/")
    return prefix


def _webhook_address(url: SplitResult, *, may_be_private: bool) -> str:
    """Return the address to connect to. Only this one is used, so its name cannot change later.

    Raises:
        Abandon: it is not a public one.
        Retry: the name cannot be resolved now.
    """
    host = url.hostname or ""
    try:
        found = socket.getaddrinfo(host, _webhook_port(url), type=socket.SOCK_STREAM)
    except OSError as error:
        raise Retry(f"{host} cannot be resolved: {error}") from None
    address = str(found[0][4][0])
    if not may_be_private and not _is_public(address):
        raise Abandon(
            f"{host} is {address}, which is no public address: to post there, start the worker "
            "with --allow-post and the address itself"
        )
    return address


def _is_public(address: str) -> bool:
    found = ipaddress.ip_address(address.partition("%")[0])
    mapped = getattr(found, "ipv4_mapped", None)
    return (mapped or found).is_global and not found.is_multicast


def _literal_ip_address(host: str) -> str | None:
    try:
        return str(ipaddress.ip_address(host))
    except ValueError:
        return None


def _webhook_port(url: SplitResult) -> int:
    return url.port or (443 if url.scheme == "https" else 80)


def _is_below_prefix(path: str, prefix: str) -> bool:
    return path == prefix or path.startswith(prefix if prefix.endswith("/") else f"{prefix}/")


def _send_webhook(
    url: SplitResult, address: str, body: bytes, headers: dict[str, str]
) -> tuple[int, float]:
    """Return the status, and after how many seconds to come again (0: not told).

    Raises:
        Retry: no answer came.
    """
    target = (url.path or "/") + (f"?{url.query}" if url.query else "")
    connection = http.client.HTTPConnection(
        url.hostname or "", _webhook_port(url), timeout=ANSWER_S
    )
    try:
        plain = socket.create_connection((address, _webhook_port(url)), timeout=ANSWER_S)
        connection.sock = plain
        if url.scheme == "https":
            connection.sock = ssl.create_default_context().wrap_socket(
                plain, server_hostname=url.hostname
            )
        connection.request("POST", target, body, headers | {"host": url.netloc.rpartition("@")[2]})
        answer = connection.getresponse()
        after = answer.getheader("retry-after", "")
        return answer.status, float(after) if after.isdigit() else 0.0
    except (OSError, http.client.HTTPException) as error:
        raise Retry(f"{url.netloc}: {error!r}") from None
    finally:
        connection.close()
