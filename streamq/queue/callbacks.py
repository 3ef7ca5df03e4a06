"""Callbacks as users write them: a handler, a request or a webhook for the end of a request."""

import time
from collections.abc import Mapping
from datetime import datetime
from typing import Any

import msgspec

from streamq import units
from streamq.errors import InvalidValue, RequestExists, RequestUnknown
from streamq.model import CHUNK_BYTES, CHUNK_PARTS, LIMIT, Callback, Event, Policy
from streamq.protocol.protocol import Protocol
from streamq.queue.options import Named, policy_of_options

#: The handler that posts webhooks. Workers with ``--allow-post`` have it.
WEBHOOK = "streamq.webhook"
#: A callback waits behind nothing else.
_FIRST_LEVEL = 0
#: How often a webhook is tried again.
_WEBHOOK_RETRIES = 10
#: The longest id of a callback must be a name, too: ``ID.finally.9999``.
_LONGEST = ".finally.9999"


class Start(msgspec.Struct, frozen=True, kw_only=True):
    """Describe a request that is to be started when another one has ended.

    ``payloads`` are its parts, as JSON; without them it has one part, which tells of the end. Its
    queue and how long it is kept are those of the other request, unless they are given. The other
    options are those of ``Client.submit``.

    Example:
        client.submit(rows, handler="clean", then=Start(handler="report", retries=5))
    """

    handler: str
    payloads: list[Any] | None = None
    queue: str | None = None
    level: int = _FIRST_LEVEL
    limit: int = LIMIT
    rate: str | None = None
    delay: str | float | None = None
    retries: int | None = None
    backoff: str | float = "1s"
    timeout: str | float | None = None
    max_failures: str | int | None = None
    keep: str | float | None = None
    labels: Mapping[str, str] | None = None


class Webhook(msgspec.Struct, frozen=True):
    """Describe a URL that a worker posts to when a request has ended.

    Only workers that were started with ``--allow-post`` for the URL post to it.

    Example:
        client.submit(rows, handler="clean", on_failure=Webhook("https://ops.example/hooks/batch"))
    """

    url: str
    queue: str | None = None
    retries: int = _WEBHOOK_RETRIES


#: A handler's name, a URL, or one of the two above.
Target = str | Start | Webhook


def callbacks_of(
    *,
    queue: str,
    keep: str | float,
    then: Target | None = None,
    on_failure: Target | None = None,
    finally_: Target | None = None,
    named: Named = str,
) -> tuple[Callback, ...]:
    """Return the callbacks that the options describe, for a request of that queue.

    Raises:
        InvalidValue: one of them cannot be started.
    """
    given: dict[Event, tuple[str, Target | None]] = {
        "then": ("then", then),
        "failure": ("on_failure", on_failure),
        "finally": ("finally_", finally_),
    }
    return tuple(
        _callback_of_target(event, target, named(name), queue, keep)
        for event, (name, target) in given.items()
        if target is not None
    )


def callbacks_with_deadline(wanted: Policy, given: str | float, what: str) -> Policy:
    """Return the policy with a deadline: a duration from its creation, or a date and time.

    The server counts a duration, so it does not matter if the clock here is wrong.

    Raises:
        InvalidValue: it is neither, or the moment has passed.
    """
    try:
        moment = datetime.fromisoformat(str(given)).astimezone().timestamp()
    except ValueError:
        if (duration_ms := units.duration_ms(given, what)) <= 0:
            raise InvalidValue(f"{what} {given} has passed") from None
        return msgspec.structs.replace(wanted, deadline_in_ms=duration_ms)
    if moment <= time.time():
        raise InvalidValue(f"{what} {given} has passed")
    return msgspec.structs.replace(wanted, deadline_ms=round(moment * 1e3))


def refuse_taken_callback_ids(protocol: Protocol, request_id: str, wanted: Policy) -> None:
    """Refuse a new request if a callback of it could not be started: its id is taken, or too long.

    Raises:
        RequestExists: another request has the id.
        InvalidValue: the id would be too long.
    """
    if not wanted.calls:
        return
    units.name(f"{request_id}{_LONGEST}", "the id of a callback,")
    try:
        protocol.inspect(request_id)
    except RequestUnknown:
        ids = [each.id_of(request_id, 0) for each in wanted.calls]
        if taken := sorted(set(ids) - protocol.unknown(ids)):
            raise RequestExists(
                f"request {taken[0]} is there already, and a callback of {request_id} would have "
                "its id: purge it, or choose another id"
            ) from None


def _callback_of_target(
    event: Event, target: Target, name: str, queue: str, keep: str | float
) -> Callback:
    if isinstance(target, str):
        target = Webhook(target) if "://" in target else Start(handler=target)
    if isinstance(target, Webhook):
        made = policy_of_options(
            handler=WEBHOOK,
            queue=target.queue or queue,
            level=_FIRST_LEVEL,
            limit=1,
            retries=target.retries,
            timeout="1m",
            keep=keep,
        )
        return Callback(event=event, policy=made, url=_checked_webhook_url(target.url, name))
    if not isinstance(target, Start):
        raise InvalidValue(f"{name} is a {type(target).__name__}: give a handler, a Start or a URL")
    return Callback(
        event=event,
        policy=_policy_of_start(target, queue, keep),
        payloads=_callback_payloads(target, name),
    )


def _policy_of_start(target: Start, queue: str, keep: str | float) -> Policy:
    return policy_of_options(
        handler=target.handler,
        queue=target.queue or queue,
        level=target.level,
        limit=target.limit,
        rate=target.rate,
        delay=target.delay,
        retries=target.retries,
        backoff=target.backoff,
        timeout=target.timeout,
        max_failures=target.max_failures,
        keep=keep if target.keep is None else target.keep,
        labels=target.labels or {},
    )


def _callback_payloads(target: Start, name: str) -> list[Any] | None:
    if target.payloads is None:
        return None
    try:
        size = len(msgspec.json.encode(target.payloads))
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise InvalidValue(f"payloads of {name} cannot be written as JSON: {error}") from None
    if not 0 < len(target.payloads) <= CHUNK_PARTS or size > CHUNK_BYTES:
        raise InvalidValue(
            f"{name} has {len(target.payloads)} payloads of {size} bytes: 1 to {CHUNK_PARTS} of "
            f"{CHUNK_BYTES} bytes in all can be kept with a request"
        )
    return list(target.payloads)


def _checked_webhook_url(url: str, name: str) -> str:
    if not url.startswith(("http://", "https://")) or any(c <= " " or c > "~" for c in url):
        raise InvalidValue(f"{name} {url!r} is no URL that begins with https:// or http://")
    return url
