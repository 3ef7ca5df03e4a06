"""Patterns of messages, and groups of failures."""

import pytest

from streamq import Client, Protocol
from streamq.dashboard.failures import (
    SHORT_RANGE,
    failures_in_range,
    parts_of_failure_group,
    pattern_of_failures,
    read_failure_groups,
)
from streamq.model import Part
from tests.support.simulated import Worker


@pytest.mark.parametrize(
    ("message", "pattern"),
    [
        ("no answer from part 17 in 2.5 s", "no answer from part <n> in <n> s"),
        ("'sku-17'", "<text>"),
        ("GET https://api.example/a/17?x=1 failed", "GET <url> failed"),
        ("cannot open /srv/data/eu.csv", "cannot open <path>"),
        ("object at 0x7f3a9b", "object at <hex>"),
        ("id 123e4567-e89b-12d3-a456-426614174000", "id <id>"),
        ("mail to al@example.org bounced", "mail to <mail> bounced"),
        ("plain words stay", "plain words stay"),
        ("", ""),
    ],
)
def test_pattern(message: str, pattern: str) -> None:
    assert pattern_of_failures(message) == pattern


def test_groups_tell_how_many_and_where(
    client: Client, protocol: Protocol, queue: str, request_id: str
) -> None:
    client.submit(list(range(120)), handler="h", queue=queue, id=request_id, retries=0)

    def refuse(part: Part) -> bytes:
        raise ValueError(f"no answer from {part.number}" if part.number > 60 else "x")

    Worker(protocol, queue, refuse).drain()
    groups = read_failure_groups(protocol, request_id, traces=False)
    assert (groups.parts, groups.sample) == (120, 120)
    first, second = groups.groups
    assert {(g.pattern, g.count, g.about) for g in (first, second)} == {
        ("no answer from <n>", 60, 60),
        ("x", 60, 60),
    }
    late = next(g for g in groups.groups if g.pattern != "x")
    assert (late.first_part, late.last_part) == (61, 120)
    assert (sum(late.where[:30]), sum(late.where[30:])) == (0, 60)
    assert len(late.samples) == 3
    chosen = set(parts_of_failure_group(protocol.failures(request_id), late.error, late.pattern))
    assert chosen == set(range(61, 121))


def test_short_range_reads_none_of_the_other_failures(
    client: Client, protocol: Protocol, queue: str, request_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    client.submit(list(range(1_300)), handler="h", queue=queue, id=request_id, retries=0)

    def refuse(part: Part) -> bytes:
        if part.number % 100 == 0:
            raise ValueError("x")
        return b"yes"

    Worker(protocol, queue, refuse).drain()

    def found(first: int, last: int) -> list[int]:
        return [number for number, _ in failures_in_range(protocol, request_id, first, last)]

    assert sorted(found(101, 101 + SHORT_RANGE)) == list(range(200, 1_301, 100))
    ranges = [(101, 300), (1, SHORT_RANGE), (300, 300), (301, 399), (2, 1)]
    monkeypatch.setattr(Protocol, "failures", None)  # a scan would read all of them
    assert [found(*each) for each in ranges] == [
        [200, 300],
        list(range(100, 1_301, 100)),
        [300],
        [],
        [],
    ]
