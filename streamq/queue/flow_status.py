"""A flow at one moment: each stage, what holds it, and the whole."""

from collections.abc import Sequence

import msgspec

from streamq.errors import StreamqError
from streamq.model import PartCounts, RecordCounts, StageStatus, Status
from streamq.protocol.protocol import Protocol
from streamq.protocol.snapshot import Snapshot


def places_of_flow_stages(found: Snapshot) -> list[str]:
    """Return the places of a request: itself, and the later stages of its flow."""
    later = range(2, found.count("stages") + 1)
    return [found.id, *(f"{found.id}/{stage}" for stage in later)]


def place_of_flow_stage(request_id: str, stage: int) -> str:
    """Return the place of a stage; that of the first is called as the request."""
    return f"{request_id}/{stage}" if stage > 1 else request_id


def name_of_flow_stage(stage: Snapshot) -> str:
    """Return how users call a stage: the name of its handler.

    In a run that is without the run's own id, which is part of what the server calls it.
    """
    request_id = stage.id.partition("/")[0]
    return stage.text("handler").removesuffix(f"-{request_id}")


def status_of_request_or_flow(protocol: Protocol, found: Snapshot) -> Status:
    """Return what users are told of a request; of a flow with its stages.

    Raises:
        Damaged: something that is needed for that cannot be read.
    """
    if not found.count("stages"):
        return found.status()
    told = stages_of_flow(protocol, found)
    whole = found.status()
    parts = PartCounts(
        *(sum(counts) for counts in zip(*map(_part_counts_of_flow, told), strict=True))
    )
    records = RecordCounts(
        *(sum(counts) for counts in zip(*map(_record_counts_of_flow, told), strict=True))
    )
    # Only children that a join waits for are in groups: other flows are not asked for any.
    has_join = any(each.kind == "join" for each in told)
    # The first items of a canary may be in later stages still.
    is_through = not any(_unfinished_parts_of_flow(each) for each in told[1:])
    opened, blocked = protocol.group_counts(found.id) if has_join else (0, 0)
    return msgspec.structs.replace(
        whole,
        parts=parts,
        records=records,
        eta_s=told[-1].eta_s,
        waits_for_release=whole.waits_for_release and is_through,
        flow=found.fields.get("flow", ""),
        stages=told,
        groups={"open": opened, "blocked": blocked},
    )


def stages_of_flow(protocol: Protocol, found: Snapshot) -> list[StageStatus]:
    """Return the stages of a flow; none for a plain request.

    Raises:
        Damaged: something that is needed for that cannot be read.
    """
    if not found.count("stages"):
        return []
    stages = _snapshots_of_flow_stages(protocol.inspect_all(places_of_flow_stages(found)))
    return [_status_of_flow_stage(each, stages) for each in stages]


def _snapshots_of_flow_stages(found: Sequence[Snapshot | StreamqError]) -> list[Snapshot]:
    for each in found:
        if isinstance(each, StreamqError):
            raise each
    return [each for each in found if isinstance(each, Snapshot)]


def _unfinished_parts_of_flow(stage: Status) -> int:
    return stage.parts.waiting + stage.parts.running + stage.parts.retry


def _part_counts_of_flow(stage: Status) -> tuple[int, ...]:
    return msgspec.structs.astuple(stage.parts)


def _record_counts_of_flow(stage: Status) -> tuple[int, ...]:
    return msgspec.structs.astuple(stage.records)


def _status_of_flow_stage(found: Snapshot, stages: list[Snapshot]) -> StageStatus:
    status = found.status()
    number = stages.index(found) + 1
    own = {name: getattr(status, name) for name in Status.__struct_fields__}
    own |= {"id": stages[0].id}
    return StageStatus(
        **own,
        number=number,
        name=name_of_flow_stage(found),
        kind=found.fields.get("kind", ""),
        place=found.id,
        leases=found.count("leases"),
        held_by=_flow_stage_held_by(found, status, number, stages),
    )


def _flow_stage_held_by(
    found: Snapshot, status: Status, number: int, stages: list[Snapshot]
) -> str:
    """Return in some words why a stage starts nothing now; "" if nothing holds it."""
    waiting = status.parts.waiting > 0
    behind = stages[number] if number < len(stages) else None
    reasons = {
        "paused": status.paused,
        "canary": status.waits_for_release and number == 1,
        "delay or snooze": status.held_until_ms is not None,
        f"waits for 1 to {number - 1}": found.fields.get("kind") == "reduce"
        and not status.parts.total,
        f"window of {number + 1}": waiting
        and behind is not None
        and _is_flow_stage_full(found, behind),
        "limit": waiting and found.count("leases") >= status.limit,
        "rate": waiting and found.number("rate_at_ms") > found.number("now_ms"),
    }
    return next((why for why, is_so in reasons.items() if is_so and status.state.is_live), "")


def _is_flow_stage_full(found: Snapshot, behind: Snapshot) -> bool:
    """Return whether the next stage has no room, as ``lua/lib/window.lua`` works it out."""
    window = float(behind.fields.get("window") or 0)
    if not window:
        return False
    if size := float(behind.fields.get("window_bytes") or 0):
        mean = behind.number("bytes") / max(1, behind.count("total"))
        window = min(window, size / mean if mean else window)
    backlog = behind.count("total") - behind.count("done") - behind.count("failed")
    in_hand = found.count("delivered") - found.count("done") - found.count("failed")
    each = max(1.0, behind.count("total") / max(1, found.count("done")))
    return (window - backlog) / each - (in_hand - found.count("retry")) < 1
