"""Flows of every kind, through a pool as users start it."""

from pathlib import Path

import pytest

from streamq import Client, Request, load
from tests.conftest import FIRST_KIND
from tests.support.apps import flows
from tests.support.fleet import Fleet

pytestmark = [FIRST_KIND]
WORDS = ["ab", "c!d", "", "e"]


@pytest.fixture
def requests(client: Client, fleet: Fleet, queue: str) -> dict[str, Request]:
    """A request of each flow, all at once, and all of them ended."""
    made = {
        flow.name: client.submit(lines, flow=flow, queue=queue)
        for flow, lines in (
            (flows.maps, ["one", "drop", "three"]),
            (flows.tolerant, WORDS),
            (flows.strict, WORDS),
            (flows.unjoined, WORDS),
        )
    }
    made["reduced"] = client.submit(WORDS, flow=flows.reduced, queue=queue)
    fleet.start("-c", "2", target="flows:app")
    for request in made.values():
        request.wait(60)
    return made


def test_every_kind_of_stage(requests: dict[str, Request], client: Client) -> None:
    assert list(requests["maps"].results(5)) == [(1, 3), (3, 5)]

    tolerant = [value for _, value in requests["tolerant"].results(5)]
    assert tolerant == [
        {"word": "ab", "sum": 195, "failed": 0},
        {"word": "c!d", "sum": 199, "failed": 1},
        {"word": "", "sum": 0, "failed": 0},
        {"word": "e", "sum": 101, "failed": 0},
    ]
    assert [part for part, _ in requests["strict"].results(5)] == [1, 3, 4]
    assert [(each.stage, each.item, each.error) for each in requests["strict"].errors()] == [
        ("code", "2/2", "Abandon"),
        ("merge", "2", "ChildFailed"),
    ]
    assert list(requests["unjoined"].results(5)) == [(1, 97), (1, 98), (2, 99), (2, 100), (4, 101)]
    (found,) = requests["reduced"].results(5)
    assert found == (1, "[('ab', 195), ('c!d', 199), ('', 0), ('e', 101)] 0")

    # The join that failed for want of a child comes back with it.
    assert requests["strict"].retry() == 1
    assert requests["strict"].wait(60).parts.failed == 2
    stages = requests["strict"].status().stages or []
    assert [(each.name, each.kind, each.parts.failed) for each in stages] == [
        ("letters", "spread", 0),
        ("code", "map", 1),
        ("merge", "join", 1),
    ]


def test_too_many_children_are_a_failure_that_says_so(
    client: Client, fleet: Fleet, queue: str
) -> None:
    flow = flows.app.flow("wide").spread(flows.many).map(flows.size)
    request = client.submit(["1001"], flow=flow, queue=queue, retries=0)
    fleet.start(target="flows:app")
    request.wait(60)

    (failure,) = request.errors()
    assert (failure.error, failure.stage) == ("TooManyChildren", "many")
    assert "more than the 1,000 children allowed" in failure.message


@pytest.mark.parametrize("stages", [1, 2])
def test_part_of_many_lines_is_handed_over(
    client: Client, fleet: Fleet, queue: str, tmp_path: Path, stages: int
) -> None:
    """Its lines are run block by block, and that has a result of its own kind."""
    lines = [f"line {number:014}" for number in range(8_000)]
    source = tmp_path / "lines.txt"
    source.write_text("\n".join(lines) + "\n")
    flow = flows.app.flow("long").map(flows.shout)
    fleet.ready("-p", "1", target="flows:app")

    request = load(client, str(source), flow=flow if stages == 1 else flow.map(flows.size),
                   lines=len(lines), queue=queue)  # fmt: skip

    assert request.wait(20).state == "done"
    assert [stage.parts.total for stage in request.status().stages or []] == [1] * stages
    ((_, found),) = request.results()
    assert found == [line.upper() if stages == 1 else len(line) for line in lines]


def test_inputs_that_a_handler_did_not_ask_for_fail_at_once_and_are_named(
    client: Client, fleet: Fleet, queue: str
) -> None:
    requests = [
        client.submit(["ab"], flow=flow, queue=queue)
        for flow in (flows.misjoined, flows.misreduced)
    ]
    fleet.start(target="flows:app")
    for request in requests:
        request.wait(30)

    told = [(each.error, each.message, each.attempts) for one in requests for each in one.errors()]
    assert [(error, message.partition(":")[0], count) for error, message, count in told] == [
        ("DecodeError", "what 1/1 returned does not decode", 1),
        ("DecodeError", "what 1 came to does not decode", 1),
    ]


def test_tree_adds_up_everything_once(client: Client, fleet: Fleet, queue: str) -> None:
    request = client.submit(["x" * n for n in range(500)], flow=flows.summed, queue=queue)
    fleet.start("-c", "4", target="flows:app")

    assert request.wait(60).state == "done"
    assert list(request.results(5)) == [(1, sum(range(500)))]


def test_record_that_takes_too_long_or_kills_ends_alone_and_its_join_is_told(
    client: Client, fleet: Fleet, queue: str
) -> None:
    request = client.submit(["as", "bk", "cd"], flow=flows.endangered, queue=queue)
    fleet.start("-p", "2", target="flows:app")

    assert request.wait(60).state == "done"
    assert [value for _, value in request.results(5)] == [
        "as:a,Timeout",
        "bk:b,Poison",
        "cd:c,d",
    ]
    assert [(each.stage, each.item, each.error) for each in request.errors()] == [
        ("slowly", "1/2", "Timeout"),
        ("deadly", "2/2", "Poison"),
    ]


def test_wide_spreads_go_through_in_one_go(client: Client, fleet: Fleet, queue: str) -> None:
    """Handed over together, their children are more than a script has room for on its stack."""
    flow = flows.app.flow("wide").spread(flows.many).map(flows.size_of).reduce(flows.add)
    fleet.ready("-p", "1", target="flows:app", audit_ms=60_000)
    request = client.submit(["1000"] * 24, flow=flow, queue=queue)

    assert request.wait(30).state == "done"
    assert [value for _, value in request.results(5)] == [24 * sum(range(1_000))]
