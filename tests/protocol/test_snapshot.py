"""What ``inspect`` tells of a request, read field by field."""

import pytest

from streamq import Protocol
from streamq.errors import Damaged
from streamq.model import State
from streamq.protocol.snapshot import Snapshot
from tests.support.by_hand import RequestByHand

FIELDS = {
    "now_ms": "5000",
    "left": "4",
    "leases": "3",
    "alive": "0",
    "retry": "1",
    "results": "2",
    "state": "open",
    "queue": "q",
    "handler": "h",
    "level": "7",
    "limit": "8",
    "total": "9",
    "delivered": "6",
    "done": "2",
    "failed": "1",
    "records": "90",
    "records_done": "20",
    "records_failed": "10",
    "created_ms": "1000",
    "started_ms": "2000",
    "spec": "{}",
}


def snapshot(**changes: str) -> Snapshot:
    return Snapshot("r", FIELDS | changes)


def without(name: str) -> Snapshot:
    return Snapshot("r", {field: text for field, text in FIELDS.items() if field != name})


def test_status_is_made_of_it() -> None:
    status = snapshot().status()

    assert (status.id, status.queue, status.handler, status.state) == ("r", "q", "h", State.OPEN)
    parts = status.parts
    assert (parts.total, parts.waiting, parts.running, parts.retry) == (9, 3, 2, 1)
    assert (status.rate, status.eta_s) == (10.0, 6.0)


def test_a_field_that_is_spoilt_matters_where_it_is_needed() -> None:
    spoilt = snapshot(level="high")

    assert spoilt.state is State.OPEN
    assert spoilt.count("limit") == 8
    for read in (lambda: spoilt.count("level"), lambda: spoilt.number("level"), spoilt.status):
        with pytest.raises(Damaged, match="what the server has of r cannot be read"):
            read()


@pytest.mark.parametrize("text", ["inf", "nan", "", "1.5"])
def test_number_that_is_not_whole(text: str) -> None:
    with pytest.raises(Damaged):
        snapshot(total=text).known_count("total")


def test_what_is_not_there() -> None:
    assert without("done").count("done") == 0
    assert without("spec").optional_text("spec") == ""
    for read in (
        lambda: without("total").known_count("total"),
        lambda: without("queue").text("queue"),
        lambda: without("state").state,
        lambda: without("spec").spec,
        lambda: without("handler").status(),
    ):
        with pytest.raises(Damaged):
            read()


def test_state_that_is_none() -> None:
    with pytest.raises(Damaged, match="'asleep' is not a valid State"):
        _ = snapshot(state="asleep").state


@pytest.mark.parametrize(
    ("changes", "is_held"),
    [
        ({}, False),
        ({"paused": "1"}, True),
        ({"paused": "0"}, False),
        ({"hold_ms": "5000"}, False),
        ({"hold_ms": "5001"}, True),
    ],
)
def test_held(changes: dict[str, str], is_held: bool) -> None:
    assert snapshot(**changes).is_held is is_held


def test_of_a_request_on_a_server(driver: RequestByHand, protocol: Protocol) -> None:
    driver.open(level=7)
    driver.append(3, records=10)
    driver.claim(2)

    found = protocol.inspect(driver.id)

    assert (found.state, found.is_sealed, found.count("alive")) == (State.LOADING, False, 1)
    assert (found.count("total"), found.count("leases"), found.count("level")) == (3, 1, 7)
    assert found.spec.retries is None or found.spec.retries >= 0
    assert found.status().parts.total == 3
