"""The scripts that make, change, read and end a request (``lua/request/``), as calls."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from streamq.model import FlowPlan, Policy, State
from streamq.protocol.call import Call
from streamq.protocol.keys import RequestKeys, token_list_of
from streamq.protocol.replies import (
    Appended,
    Collected,
    Opened,
    Tokens,
    part_of_field,
    read_tokens,
    two_by_two,
)
from streamq.protocol.snapshot import Snapshot

#: What ``inspect`` works out and tells before the fields that are kept.
_COUNTS = ("now_ms", "left", "leases", "alive", "retry", "handed_back", "results")


def open(keys: RequestKeys, digest: str, policy: Policy, source: bytes = b"") -> Call[Opened]:
    """Create a request, or find the one of the same submission."""
    args = {
        "digest": digest,
        "delay_ms": policy.delay_ms,
        "fields": [*policy.fields, "source", source],
    }
    return Call("open", keys, args, _read_opened)


def lay(keys: RequestKeys, digest: str, flow: FlowPlan) -> Call[bool]:
    """Create the later stages of a request that was opened. The reply is whether they are new."""
    first = [*flow.stages[0].fields, b"flow", flow.name.encode(), b"stages", len(flow.stages)]
    if "reduce" in flow.shape:
        first += [b"outputs", b"one"]
    stages: list[list[Any]] = [[*first]]
    stages += [[*each.policy.fields, *each.fields] for each in flow.stages[1:]]
    args = {
        "digest": digest,
        "counts": " ".join(str(len(fields)) for fields in stages),
        "fields": [value for fields in stages for value in fields],
    }
    return Call("lay", keys, args, bool)


def append(
    keys: RequestKeys,
    first: int,
    after: str,
    cursor: str,
    records: int,
    entries: Sequence[bytes | int],
) -> Call[Appended]:
    """Add parts (payload, about, payload, ...) that were cut where the load stands: ``after``."""
    args = {
        "first": first,
        "after": after,
        "cursor": cursor,
        "records": records,
        "entries": entries,
    }
    return Call("append", keys, args, _read_appended)


def refuse(
    keys: RequestKeys, number: int, after: str, cursor: str, failure: bytes
) -> Call[tuple[bool, Tokens]]:
    """Count what cannot be loaded as a failed part. The reply is whether it is counted yet."""
    args = {"number": number, "after": after, "cursor": cursor, "failure": failure}
    return Call("refuse", keys, args, _read_refused)


def index(keys: RequestKeys, most: int, pairs: Sequence[str | int]) -> Call[int]:
    """Remember keys of parts (number, key, ...). The reply is how many had one that came before."""
    return Call("index", keys, {"most": most, "pairs": pairs}, int)


def forget_unadded(keys: RequestKeys, cursor: int) -> Call[int]:
    """Forget keys of parts that were never added. The reply is where to go on, or 0."""
    return Call("index", keys, {"most": 0, "pairs": [cursor]}, int)


def submit(keys: RequestKeys, policy: Policy, cursor: str, entries: Sequence[bytes]) -> Call[int]:
    """Create a request with all its parts. The reply is when to look at it again (ms), or 0."""
    args = {
        "digest": policy.digest,
        "cursor": cursor,
        "delay_ms": policy.delay_ms,
        "total": len(entries) // 2,
        "rest": [*policy.fields, *entries],
    }
    return Call("submit", keys, args, _look_ms)


def submit_new(
    keys: RequestKeys, policy: Policy, cursor: str, entries: Sequence[bytes]
) -> Call[tuple[bool, int]]:
    """Do the same. The reply is whether the request was not there before; and when to look."""
    call = submit(keys, policy, cursor, entries)
    return Call("submit", keys, call.args, _new_and_look_ms)


def first_tokens(policy: Policy) -> Tokens:
    """Return the tokens that ``submit`` asks for: a caller need not wait for its reply."""
    return Tokens(0 if policy.delay_ms else 1, token_list_of(policy.handler, policy.level))


def seal(keys: RequestKeys, total: int, cursor: str) -> Call[tuple[State, Tokens]]:
    """Say that the load is complete."""
    return Call("seal", keys, {"total": total, "cursor": cursor}, state_and_tokens)


def set(
    keys: RequestKeys,
    level: int | None = None,
    limit: int | None = None,
    rate_ms: float | None = None,
    weight: int | None = None,
    ceiling: int | None = None,
) -> Call[tuple[State, Tokens]]:
    """Change level, limit, rate, weight or ceiling of a request that runs; None: as it is."""
    given = {
        "level": level,
        "limit": limit,
        "rate_ms": rate_ms,
        "weight": weight,
        "ceiling": ceiling,
    }
    args = {name: "" if value is None else value for name, value in given.items()}
    return Call("set", keys, args, state_and_tokens)


def pause(keys: RequestKeys) -> Call[State]:
    """Start no more parts of a request."""
    return Call("pause", keys, {}, _read_state)


def resume(keys: RequestKeys) -> Call[tuple[State, Tokens]]:
    """Start parts of a request again."""
    return Call("resume", keys, {}, state_and_tokens)


def cancel(keys: RequestKeys) -> Call[int]:
    """End a request now. The reply is how many parts will not be finished."""
    return Call("cancel", keys, {}, int)


def redrive(keys: RequestKeys, numbers: Iterable[int]) -> Call[tuple[int, State, Tokens]]:
    """Run failed parts again. The reply is how many, the state, and tokens to push."""
    return Call("redrive", keys, {"numbers": list(numbers)}, _read_redriven)


def collect(
    keys: RequestKeys,
    *,
    next_number: int,
    most: int = 500,
    max_bytes: int = 2**22,
    commit: tuple[str, str] = ("", ""),
    forget: Sequence[str | int] = (),
    within: str = "",
) -> Call[Collected]:
    """Read results in input order; with ``commit`` (expected, new) forget earlier ones first."""
    args = {
        "expected": commit[0],
        "committed": commit[1],
        "next": within or next_number,
        "most": most,
        "max_bytes": max_bytes,
        "fields": forget,
    }
    return Call("collect", keys, args, _read_collected)


def commit(
    keys: RequestKeys, expected: str, committed: str, forget: Sequence[str | int]
) -> Call[Collected]:
    """Say how far results are written, and have the server forget them: ``collect`` of none."""
    return collect(keys, next_number=1, most=0, commit=(expected, committed), forget=forget)


def purge(keys: RequestKeys, *, force: bool = False, is_asked: bool = False) -> Call[int]:
    """Forget an ended request. The reply is 0, or when it may be forgotten (ms), or -1.

    -1: it is a callback, and its parent must be asked first (``is_asked``: that was done).
    """
    return Call("purge", keys, {"force": "asked" if is_asked else int(force)}, int)


def settle(keys: RequestKeys, created_ms: int, run: int) -> Call[bool]:
    """Note that the callbacks of an end are started. The reply is whether they were owed."""
    return Call("settle", keys, {"created": created_ms, "run": run}, bool)


def expire(keys: RequestKeys) -> Call[State]:
    """End a request that is past its deadline. The reply is its state."""
    return Call("expire", keys, {}, _read_state)


def inspect(keys: RequestKeys, request_id: str) -> Call[Snapshot]:
    """Read everything that is known of a request, at one moment."""
    return Call("inspect", keys, {}, partial(_read_snapshot, request_id))


def locate(keys: RequestKeys, numbers: Sequence[int]) -> Call[list[bytes]]:
    """Read where parts came from, as their entries say; b"" where one has none."""
    return Call("locate", keys, {"numbers": list(numbers)}, _list)


#: Reads a list as it is.
_list: Callable[[Any], list[bytes]] = list


def _read_opened(reply: Sequence[Any]) -> Opened:
    is_new, state, total, cursor = reply
    return Opened(bool(is_new), State(state.decode()), total, cursor.decode())


def _read_appended(reply: Sequence[Any]) -> Appended:
    total, cursor, *tokens = reply
    return total, cursor.decode(), read_tokens(tokens)


def _read_refused(reply: Sequence[Any]) -> tuple[bool, Tokens]:
    is_counted, *tokens = reply
    return bool(is_counted), read_tokens(tokens)


def _new_and_look_ms(reply: Sequence[Any]) -> tuple[bool, int]:
    # A request that was there asks for nothing.
    tokens, look_ms = reply
    return int(tokens) > 0 or int(look_ms) > 0, int(look_ms)


def _look_ms(reply: Sequence[Any]) -> int:
    _, look_ms = reply
    return int(look_ms)


def _read_state(reply: bytes) -> State:
    return State(reply.decode())


def state_and_tokens(reply: Sequence[Any]) -> tuple[State, Tokens]:
    """Read what most scripts answer that change a request."""
    state, *tokens = reply
    return State(state.decode()), read_tokens(tokens)


def _read_redriven(reply: Sequence[Any]) -> tuple[int, State, Tokens]:
    redriven, state, count, to, look_ms, *refused = reply
    tokens = Tokens(count, to.decode(), look_ms, (), *refused)
    return redriven, State(state.decode()), tokens


def _read_collected(reply: Sequence[Any]) -> Collected:
    state, next_, left, *flat = reply
    if isinstance(next_, bytes):
        return _collected_of_flow(State(state.decode()), next_.decode(), left, flat)
    results = [(int(number), result) for number, result in two_by_two(flat)]
    return Collected(State(state.decode()), next_, left, results)


def _collected_of_flow(state: State, next_: str, left: int, flat: Sequence[Any]) -> Collected:
    fields = [field.decode() for field in flat[::2]]
    results = [
        (part_of_field(field), result) for field, result in zip(fields, flat[1::2], strict=True)
    ]
    within = next_ if "/" in next_ else ""
    return Collected(state, part_of_field(next_), left, results, fields, within)


def _read_snapshot(request_id: str, reply: Sequence[Any]) -> Snapshot:
    counts = zip(_COUNTS, map(str, reply[: len(_COUNTS)]), strict=True)
    fields = {name.decode(): value.decode() for name, value in two_by_two(reply[len(_COUNTS) :])}
    return Snapshot(request_id, fields | dict(counts))
