"""Stages of a flow, run by workers of a gateway: each result is handed over under its own item."""

import asyncio
import time
from collections.abc import Callable
from typing import Any

import msgspec

from streamq import Client, Protocol
from streamq.flows.flow import Flow, Stage
from streamq.gateway.desk import Desk
from streamq.gateway.messages import Ask, Done, Failed, Report, Value
from streamq.gateway.roles import LOCAL
from streamq.queue.request import Request

Desks = Callable[[], Desk]


def flow(*kinds: str) -> Flow:
    """A flow with the handlers h1, h2, ..."""
    return Flow("f", [Stage(kind=kind, handler=f"h{n}") for n, kind in enumerate(kinds, 1)])  # type: ignore[arg-type]


async def serve(
    desk: Desk,
    queue: str,
    handlers: list[str],
    returns: Callable[[Any], Any],
    is_over: Callable[[], bool],
) -> int:
    """Run parts as a worker elsewhere, until all is done. Returns how many."""
    ask, ran = Ask(queue=queue, handlers=list(handlers), wait_s=0.2, quantum_ms=60_000), 0
    until = time.monotonic() + 30
    while not is_over() and time.monotonic() < until:
        granted = (await desk.take(LOCAL, ask)).granted
        while granted and granted.parts:
            ran += len(granted.parts)
            said = [_told(part.number, returns(_value(part))) for part in granted.parts]
            done = [each for each in said if isinstance(each, Done)]
            failed = [each for each in said if isinstance(each, Failed)]
            report = Report(ticket=granted.ticket, done=done, failed=failed, next=ask)
            granted = (await desk.report(LOCAL, report)).granted
    return ran


def _value(part: Any) -> Any:
    return part.text if isinstance(part.text, str) else msgspec.json.decode(part.json)


def _told(number: int, returned: Any) -> Done | Failed:
    if isinstance(returned, Exception):
        return Failed(part=number, kind="abandon", error=type(returned).__name__)
    return Done(number, Value(json=msgspec.Raw(msgspec.json.encode(returned))))


def run(
    desks: Desks,
    request: Request,
    handlers: list[str],
    returns: Callable[[Any], Any],
    is_over: Callable[[], bool] | None = None,
) -> int:
    """Run parts of a request until it has ended, or until something else is so."""
    is_over = is_over or (lambda: not request.status().state.is_live)
    queue = request.status().queue
    return asyncio.run(serve(desks(), queue, handlers, returns, is_over))


def results(request: Request) -> list[tuple[int, Any]]:
    return list(request.results(timeout=5))


def test_maps_hand_over_what_a_worker_returned(client: Client, queue: str, desks: Desks) -> None:
    request = client.submit(["ab", "", "c"], flow=flow("map", "map"), queue=queue)

    def work(value: Any) -> Any:
        return None if value == "" else {"n": len(value)} if isinstance(value, str) else value["n"]

    assert run(desks, request, ["h1", "h2"], work) == 5
    assert request.wait(5).state == "done"
    assert results(request) == [(1, 2), (3, 1)]


def test_children_of_a_spread_and_what_is_kept(
    client: Client, protocol: Protocol, queue: str, desks: Desks
) -> None:
    request = client.submit(["ab", "c"], flow=flow("spread", "map"), queue=queue)

    def work(value: Any) -> Any:
        return {"children": [[each] for each in value]} if isinstance(value, str) else value[0]

    run(desks, request, ["h1", "h2"], work)
    assert request.wait(5).state == "done"
    assert results(request) == [(1, "a"), (1, "b"), (2, "c")]


def test_what_is_no_list_of_children_fails_and_says_so(
    client: Client, queue: str, desks: Desks
) -> None:
    request = client.submit(["a", "b"], flow=flow("spread", "map"), queue=queue)

    run(desks, request, ["h1"], lambda value: 7 if value == "a" else list(range(1_001)))

    request.wait(5)
    assert [(each.error, each.item) for each in request.errors()] == [
        ("NoSpread", "1"),
        ("NoSpread", "2"),
    ]


def test_joins_and_reduces_are_left_to_native_workers(
    client: Client, queue: str, desks: Desks
) -> None:
    request = client.submit(["a"], flow=flow("map", "reduce"), queue=queue)

    def is_first_over() -> bool:
        stages = request.status().stages
        return isinstance(stages, list) and stages[0].parts.done == 1

    assert run(desks, request, ["h1", "h2"], lambda value: value, is_first_over) == 1

    status = request.status()
    assert status.stages
    assert (status.state, status.stages[1].parts.failed) == ("open", 0)
    assert status.stages[1].leases == 0
