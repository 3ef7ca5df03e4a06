"""Starting the callbacks of a request that has ended, each once.

A callback is a request of its own, in a slot of its own: so it is leased, retried and visible like
any other. A request that has ended and whose callbacks are not started *owes* them. Janitors find
that debt, and any number of them may find it at once. Four rules see to it that each callback is
started once (``lua/README.md``, rules K1 to K4):

* K1: its id is made from the parent's, so the second one who submits it finds the first.
* K2: the debt is struck (``settle``) after the callback is there, not before.
* K3: a submission is refused 60 s after the debt was read, by the server's clock.
* K4: a callback is kept for 10 minutes after its end, and while its parent owes it.
"""

import logging
from typing import Any

import msgspec

from streamq.errors import RequestExists, RequestUnknown
from streamq.model import Callback, Policy
from streamq.protocol.protocol import Protocol
from streamq.protocol.snapshot import Snapshot
from streamq.queue.submission import encoded_parts

log = logging.getLogger(__name__)

#: A submission is refused when the debt was read longer ago than this (rule K3).
FENCE_MS = 60_000


def settle_callbacks(protocol: Protocol, request_id: str) -> None:
    """Start the callbacks that a request owes, and note that they are started.

    It may be called any number of times, by any number of processes, and be cut short anywhere.

    Raises:
        SubmissionLate: this process was asleep for a minute; the next look tries again.
    """
    found = protocol.inspect(request_id)
    if not found.is_owed:
        return
    run = found.count("redrives")
    for call in found.calls:
        if call.fits(found.state):
            _start_callback(protocol, found, call, run)
    protocol.settle(request_id, found.count("created_ms"), run)


def parent_owes(protocol: Protocol, request_id: str) -> bool:
    """Return whether a callback may still be started by its parent, so that it must stay (K4)."""
    try:
        text = protocol.inspect(request_id).optional_text("parent")
        parent, created_ms, run = text.split() if text else ("", "0", "0")
        found = protocol.inspect(parent) if parent else None
    except RequestUnknown:
        return False
    if found is None or found.count("created_ms") != int(created_ms):
        return False
    return found.is_owed and found.count("redrives") == int(run)


def message_of_callback(found: Snapshot, call: Callback, run: int) -> dict[str, Any]:
    """Return what a callback is told of the end."""
    status = found.status()
    return {
        "id": found.id,
        "event": call.event,
        "state": status.state.value,
        "run": run,
        "reason": status.reason,
        "handler": status.handler,
        "queue": status.queue,
        "labels": status.labels,
        "parts": {
            "total": status.parts.total,
            "done": status.parts.done,
            "failed": status.parts.failed,
        },
        "records": msgspec.to_builtins(status.records),
        "created_ms": status.created_ms,
        "finished_ms": status.finished_ms,
    }


def _start_callback(protocol: Protocol, found: Snapshot, call: Callback, run: int) -> None:
    child, parent = call.id_of(found.id, run), f"{found.id} {found.count('created_ms')} {run}"
    message = message_of_callback(found, call, run)
    if call.url:
        key = f"{found.id}:{call.event}:{run}"
        payloads: list[Any] = [{"url": call.url, "key": key, "message": message}]
    else:
        payloads = [message] if call.payloads is None else call.payloads
    policy = _callback_policy(call.policy, parent, found.count("now_ms") + FENCE_MS)
    try:
        protocol.submit(child, policy, lambda: encoded_parts(payloads))
    except RequestExists:
        # A process that was quicker may have read other counts, so only the parent is compared.
        if protocol.inspect(child).optional_text("parent") != parent:
            log.error(
                "%s: its callback is not started: another request has the id %s", found.id, child
            )
        return
    log.info("%s is %s: started %s", found.id, found.state.value, child)


def _callback_policy(policy: Policy, parent: str, not_after: int) -> Policy:
    return msgspec.structs.replace(policy, parent=parent, not_after=not_after)
