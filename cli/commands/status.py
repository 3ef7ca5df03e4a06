"""``streamq status``."""

from collections import Counter
from typing import Annotated

import msgspec
import typer

from streamq.model import WEIGHT, State, Status
from streamq.protocol.protocol import Protocol
from streamq.queue import backlog
from streamq.queue.fleet import live_workers
from streamq.queue.request import Request

from .. import render
from ..connecting import connected, naming_request
from ..finding import FoundPlace, is_server_named, place_of_request
from ..shared_options import JsonOption, PrefixOption, QueueOption, UrlOption

#: The progress line is updated after every 500 requests read.
STEP = 500


_EVENTS = {"then": "then", "failure": "on failure", "finally": "finally"}


class WaitingParts(msgspec.Struct, frozen=True):
    """Parts of a queue's requests that are still to be done."""

    waiting: int
    running: int
    retry: int


class Slots(msgspec.Struct, frozen=True):
    """Slots of all live workers."""

    total: int
    busy: int


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """What ``status`` shows of a queue."""

    queue: str
    #: Requests that are not finished: loading, open, and how many of these are paused.
    requests: dict[str, int]
    parts: WaitingParts
    workers: int
    slots: Slots


def status(
    request_id: Annotated[
        str | None,
        typer.Argument(
            metavar="ID",
            help="The request; without one, the queue, or the run that goes on in this folder.",
        ),
    ] = None,
    queue: QueueOption = "default",
    as_json: JsonOption = False,
    url: UrlOption = None,
    prefix: PrefixOption = None,
) -> None:
    """Show the state of a queue, or of one request.

    For a queue this reads every request that is not finished, one after another.

        streamq status nightly --json
    """
    if request_id is None and is_server_named(url):
        place = FoundPlace(url, prefix, queue=queue)
    else:
        place = place_of_request(request_id, url, prefix, queue=queue)
        request_id = place.ids[0]
    with connected(place.url, place.prefix) as protocol:
        if request_id is None:
            summary = _queue_status(protocol, queue)
            render.as_json(summary) if as_json else render.data(_queue_status_text(summary))
            return
        with naming_request(request_id):
            found = _status_with_workers(protocol, Request(protocol, request_id).status())
            able = _status_able_workers(protocol, found)
            if as_json:
                render.as_json(found.to_dict() | {"workers": able})
            else:
                render.data(_request_status_text(found, able))
                if found.stages:
                    render.data(_stage_status_lines(found))


def _status_with_workers(protocol: Protocol, found: Status) -> Status:
    """Return the same; stages whose parts wait for a worker say so."""
    stages = [
        msgspec.structs.replace(each, held_by="no live worker")
        if each.parts.waiting and not each.held_by and not _status_able_workers(protocol, each)
        else each
        for each in found.stages or ()
    ]
    is_over = not stages or not found.state.is_live
    return found if is_over else msgspec.structs.replace(found, stages=stages)


def _status_able_workers(protocol: Protocol, found: Status) -> int:
    """Return how many live workers have the handler."""
    return sum(found.handler in each.handlers for each in live_workers(protocol, found.queue))


def _queue_status(protocol: Protocol, queue: str) -> Summary:
    with render.StatusLine() as line:

        def show(number: int, total: int) -> None:
            if number % STEP == 0:
                line.show(f"read {number:,} of {total:,} requests")

        found = backlog.read_backlog(protocol, queue, show)
    live = found.requests
    states = Counter(status.state for status in live)
    for request_id, error in found.damaged:
        render.warning(f"{request_id}: {error}")
    return Summary(
        queue=queue,
        requests={
            "loading": states[State.LOADING],
            "open": states[State.OPEN],
            "paused": sum(status.paused for status in live),
        },
        parts=WaitingParts(
            sum(status.parts.waiting for status in live),
            sum(status.parts.running for status in live),
            sum(status.parts.retry for status in live),
        ),
        workers=len(found.workers),
        slots=Slots(
            sum(worker.slots for worker in found.workers),
            sum(worker.busy for worker in found.workers),
        ),
    )


def _queue_status_text(summary: Summary) -> str:
    requests, parts, slots = summary.requests, summary.parts, summary.slots
    return render.facts(
        [
            ("queue", summary.queue),
            ("requests", ", ".join(f"{number:,} {state}" for state, number in requests.items())),
            (
                "parts",
                f"{parts.waiting:,} waiting, {parts.running:,} running, {parts.retry:,} in retry",
            ),
            ("workers", f"{summary.workers:,} live, {slots.busy:,} of {slots.total:,} slots busy"),
        ]
    )


def _request_status_text(found: Status, able: int) -> str:
    parts, records = found.parts, found.records
    facts = [
        ("request", found.id),
        *([("flow", found.flow)] if found.flow else []),
        ("state", _status_in_words(found)),
        ("handler", _status_handler_in_words(found, able)),
        ("queue", found.queue),
        *([("labels", render.labels(found.labels))] if found.labels else []),
        ("level", f"{found.level}"),
        ("limit", f"{found.limit}"),
        *([("weight", f"{found.weight}")] if found.weight != WEIGHT else []),
        (
            "parts",
            f"{parts.done:,} of {parts.total:,} done, {parts.waiting:,} waiting, "
            f"{parts.running:,} running, {parts.retry:,} in retry, {parts.failed:,} failed",
        ),
        ("records", f"{records.done:,} of {records.total:,} done, {records.failed:,} failed"),
        *_status_facts_of_speed(found),
        *_status_facts_of_time(found),
        *_status_facts_of_policy(found),
    ]
    return render.facts(facts)


def _stage_status_lines(found: Status) -> str:
    """Return a line for each stage of a flow, and what holds it."""
    headers = (
        *("STAGE", "KIND", "QUEUE", ">LIMIT", ">WAITING", ">RUNNING", ">RETRY", ">DONE"),
        *(">FAILED", ">RATE", "HELD BY"),
    )
    rows = [
        (
            f"{each.number} {each.name}",
            each.kind,
            each.queue,
            f"{each.leases}/{each.limit}",
            f"{each.parts.waiting:,}",
            f"{each.parts.running:,}",
            f"{each.parts.retry:,}",
            f"{each.parts.done:,}",
            f"{each.parts.failed:,}",
            render.rate(each.rate) if each.rate else "",
            each.held_by,
        )
        for each in found.stages or ()
    ]
    groups = found.groups or {}
    more = f"\ngroups   {groups['open']:,} open, {groups['blocked']:,} with failed children"
    return render.table(headers, rows) + (more if any(groups.values()) else "")


def _status_in_words(found: Status) -> str:
    more = ", paused" if found.paused else ", all records failed" if found.is_all_failed else ""
    if found.reason:
        more += f", {found.reason}"
    if found.waits_for_release:
        more += f", canary: the first {found.canary:,} have ended, and the others wait for "
        more += f"`streamq release {found.id}`"
    elif found.canary is not None and found.state.is_live:
        more += f", canary: only the first {found.canary:,} run"
    return f"{found.state}{more}"


def _status_handler_in_words(found: Status, able: int) -> str:
    if able:
        return f"{found.handler} ({render.count(able, 'live worker')} with it)"
    if not found.state.is_live:
        return found.handler
    return f"{found.handler} {render.alarm(f'(no live worker has handler {found.handler})')}"


def _status_facts_of_speed(found: Status) -> list[tuple[str, str]]:
    if not found.rate:
        return []
    eta = "" if found.eta_s is None else f", about {render.span(found.eta_s * 1e3)} to go"
    return [("speed", f"{render.rate(found.rate)} records{eta}")]


def _status_facts_of_time(found: Status) -> list[tuple[str, str]]:
    named = {
        "created": found.created_ms,
        "started": found.started_ms,
        "finished": found.finished_ms,
    }
    return [
        (name, f"{render.moment(at)}, {render.age(at)} ago") for name, at in named.items() if at
    ]


def _status_facts_of_policy(found: Status) -> list[tuple[str, str]]:
    """Return the options of the request that are not at their default, and what is kept."""
    facts = []
    if found.held_until_ms is not None:
        facts.append(("held", f"until {render.moment(found.held_until_ms)}"))
    if found.rate_limit is not None:
        facts.append(("rate", f"at most {render.rate(found.rate_limit)}"))
    if found.max_failures is not None:
        facts.append(("tolerates", f"{found.max_failures:,} failures"))
    elif found.max_percent is not None:
        facts.append(("tolerates", f"{found.max_percent:g} % of failures"))
    if found.deadline_ms is not None and found.state.is_live:
        facts.append(("finish by", render.moment(found.deadline_ms)))
    for each in found.callbacks:
        started = f", started as {each.id}" if each.id else ""
        facts.append(("callback", f"{_EVENTS[each.event]}: {each.target}{started}"))
    if found.retried:
        facts.append(("retried", render.count(found.retried, "time")))
    facts.append(("results", f"{found.results:,} in the server"))
    facts.append(("kept", f"{render.span(found.keep_ms)} after its end"))
    return facts
