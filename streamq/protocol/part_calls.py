"""The scripts that hand out parts and take them back (``lua/request/``), as calls.

``claim`` and ``finish`` are made for every batch of parts: what reads their replies is quick.
"""

import struct
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec

from streamq.model import Failure, Part, State
from streamq.protocol.call import Call
from streamq.protocol.keys import RequestKeys
from streamq.protocol.replies import (
    Audit,
    FailKind,
    Grant,
    Outcome,
    PassedPart,
    Reaped,
    Renewed,
    Terms,
    Tokens,
    read_other_stages,
    read_tokens,
    two_by_two,
)

_POISON = msgspec.json.encode(
    [Failure(error="Poison", message="it was running each time its worker died")]
)


def claim(
    keys: RequestKeys,
    holder: str,
    terms: Terms,
    handlers: Sequence[str],
    level: int = -1,
    known: int = 0,
) -> Call[Grant]:
    """Ask for a lease and parts to run under it.

    It must not be sent again: a copy that came late would grant a lease under a name that is over.
    """
    args = {
        "holder": holder,
        "level": level,
        "most": terms.most,
        "max_bytes": terms.max_bytes,
        "lease_ms": terms.lease_ms,
        "known": known,
        "handlers": handlers,
    }
    return Call("claim", keys, args, _read_claimed, False)


def finish(
    keys: RequestKeys,
    holder: str,
    call: int,
    results: Sequence[bytes | int],
    records: int,
    terms: Terms,
    created_ms: int = 0,
) -> Call[Grant]:
    """Record results (number, result, number, ...) and ask for the next parts."""
    given = len(results) // 2
    numbers: Any = results[::2]
    values: Any = results[1::2]
    args = {
        "holder": holder,
        "call": call,
        "most": terms.most,
        "max_bytes": terms.max_bytes,
        "lease_ms": terms.lease_ms,
        "created": created_ms,
        "records": records,
        "numbers": struct.pack(f"<{given}Q", *numbers),
        "sizes": struct.pack(f"<{given}I", *map(len, values)),
        "results": b"".join(values),
    }
    return Call("finish", keys, args, _read_finished)


def pass_on(
    keys: RequestKeys,
    holder: str,
    call: int,
    passed: Sequence[PassedPart],
    records: int,
    terms: Terms,
    created_ms: int,
    facts: str,
) -> Call[Grant]:
    """Hand finished parts of a stage over to the next, and ask for the next parts."""
    payloads = [payload for part in passed for payload in part.payloads]
    asked = (holder, call, terms.most, terms.max_bytes, terms.lease_ms, created_ms, records)
    handed = sum(part.handed for part in passed)
    args = {
        "terms": " ".join(map(str, (*asked, handed))),
        "facts": facts,
        "numbers": struct.pack(f"<{len(passed)}Q", *(part.number for part in passed)),
        "origins": " ".join([part.origin for part in passed]),
        "counts": struct.pack(f"<{len(passed)}I", *(len(part.payloads) for part in passed)),
        "sizes": struct.pack(f"<{len(payloads)}I", *map(len, payloads)),
        "labels": "\n".join([label for part in passed for label in part.labels]),
        "payloads": b"".join(payloads),
    }
    return Call("pass_on", keys, args, _read_passed)


def fail(
    keys: RequestKeys,
    holder: str,
    call: int,
    number: int,
    failures: Sequence[Failure],
    *,
    kind: FailKind = "retry",
    delay_ms: int = 0,
    records: tuple[int, int] = (0, 1),
    result: bytes = b"",
    partial: bytes = b"",
) -> Call[Outcome]:
    """Put a part off, or give it up. ``records``: of the part, done and failed (-1: all)."""
    args = {
        "holder": holder,
        "call": call,
        "number": number,
        "kind": kind,
        "delay_ms": delay_ms,
        "records_done": records[0],
        "records_failed": records[1],
        "failure": msgspec.json.encode(failures),
        "result": result,
        "partial": partial,
        "late": failures[0].record if kind == "late" else "",
    }
    return Call("fail", keys, args, _read_outcome_of_part_call)


def keep(
    keys: RequestKeys,
    holder: str,
    call: int,
    number: int,
    partial: bytes,
    mark: bytes,
    created_ms: int,
) -> Call[str]:
    """Keep what the records of a running part came to, and which of them are about to run."""
    args = {
        "holder": holder,
        "call": call,
        "created": created_ms,
        "number": number,
        "partial": partial,
        "mark": mark,
    }
    return Call("keep", keys, args, _read_word_of_part_call)


def handback(keys: RequestKeys, holder: str, call: int, numbers: Iterable[int]) -> Call[Outcome]:
    """Give back parts that were not started."""
    args = {"holder": holder, "call": call, "numbers": list(numbers)}
    return Call("handback", keys, args, _read_outcome_of_part_call)


def release(keys: RequestKeys, holder: str, call: int, crashed: int | None = None) -> Call[Outcome]:
    """End a lease. ``crashed``: the part that was running when its process died."""
    args = {
        "holder": holder,
        "call": call,
        "crashed": "" if crashed is None else crashed,
        "failure": _POISON,
    }
    return Call("release", keys, args, _read_outcome_of_part_call)


def renew(keys: RequestKeys, lease_ms: int, running: Mapping[str, int | None]) -> Call[Renewed]:
    """Move the deadlines of leases. ``running``: of each holder, the part that it runs."""
    flat = [value for pair in running.items() for value in pair]
    args = {"lease_ms": lease_ms, "holders": ["" if value is None else value for value in flat]}
    return Call("renew", keys, args, partial(_read_renewed, running))


def reap(
    keys: RequestKeys, limit: int = 100, heard: Mapping[str, int] | None = None
) -> Call[Reaped]:
    """Take back what dead holders left. ``heard``: how many ms ago each live pool was heard."""
    flat = [value for pair in (heard or {}).items() for value in pair]
    return Call("reap", keys, {"limit": limit, "failure": _POISON, "heard": flat}, _read_reaped)


def audit(keys: RequestKeys, pushed: int = 0) -> Call[Audit]:
    """Work out which tokens should be out, and which holders seem to be dead."""
    return Call("audit", keys, {"pushed": pushed}, _read_audited)


def _read_claimed(reply: Sequence[Any]) -> Grant:
    word, count, to, look, handler, spec, created, waited, troubles, *told = reply
    return Grant(
        word.decode(),
        Tokens(count, to.decode(), look),
        _unpacked_parts(told, troubles),
        retried=len(troubles) // 4,
        handler=handler.decode(),
        spec=spec or b"",
        created_ms=created,
        waited_ms=waited,
    )


def _read_finished(reply: Sequence[Any]) -> Grant:
    word, count, to, look, counted, troubles, *told = reply
    return Grant(
        word.decode(),
        Tokens(count, to.decode(), look),
        _unpacked_parts(told, troubles),
        retried=len(troubles) // 4,
        counted=counted,
    )


def _read_word_of_part_call(reply: bytes) -> str:
    return reply.decode()


def _read_passed(reply: Sequence[Any]) -> Grant:
    word, count, to, look, counted, troubles, others, *told = reply
    return Grant(
        word.decode(),
        Tokens(count, to.decode(), look, read_other_stages(others)),
        _unpacked_parts(told, troubles),
        retried=len(troubles) // 4,
        counted=counted,
    )


def _read_outcome_of_part_call(reply: Sequence[Any]) -> Outcome:
    word, *tokens = reply
    return Outcome(word.decode(), read_tokens(tokens))


def _read_renewed(running: Mapping[str, int | None], reply: Sequence[Any]) -> Renewed:
    state, paused, *stands = reply
    answers = dict(zip(running, map(bool, stands), strict=True))
    return State(state.decode()), bool(paused), answers


def _read_reaped(reply: Sequence[Any]) -> Reaped:
    leases, parts, state, *tokens = reply
    return Reaped(leases, parts, State(state.decode()), read_tokens(tokens))


def _read_audited(reply: Sequence[Any]) -> Audit:
    state, queue, want, to, look, *rest = reply
    tokens = Tokens(want, to.decode(), look)
    more = {name.decode(): value for name, value in two_by_two(rest[5:])}
    return Audit(State(state.decode()), queue.decode(), tokens, *rest[:5], **more)


def _unpacked_parts(told: Sequence[bytes], troubles: Sequence[Any]) -> list[Part]:
    """Return the parts that ``lua/lib/hand.lua`` packed. The id of each ends in ``-0``."""
    if not told:
        return []
    ids, abouts, sizes, *chunks = told
    if len(sizes) == 4 and len(chunks) == 1 and not troubles:  # one part, as is often so
        return [Part(int(ids[:-2]), chunks[0], abouts)]
    parts = []
    chunks = [chunk for chunk in reversed(chunks) if chunk]
    chunk, at = b"", 0
    sized = struct.unpack(f"<{len(sizes) // 4}I", sizes)
    for id_, about, size in zip(ids.split(), abouts.split(b"\n"), sized, strict=True):
        if size and at == len(chunk):
            chunk, at = chunks.pop(), 0
        parts.append(Part(int(id_[:-2]), chunk[at : at + size], about))
        at += size
    if troubles:
        _add_troubles_to_part_call(parts, troubles)
    return parts


def _add_troubles_to_part_call(parts: Sequence[Part], troubles: Sequence[Any]) -> None:
    """Tell the parts that failed or crashed before what became of them then."""
    by_number = {part.number: part for part in parts}
    for number, tries, outcomes, mark in zip(*[iter(troubles)] * 4, strict=True):
        part = by_number[int(number)]
        errors, part.crashes, alone, part.run, _, *poison = map(int, tries.split())
        part.attempt = errors + 1
        part.is_suspect = part.crashes > 0 or alone > 0
        part.partial, part.mark = outcomes, mark
        part.poison = poison[0] if poison else 0
