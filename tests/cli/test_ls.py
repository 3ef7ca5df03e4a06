"""``streamq ls``: which requests it shows, in which order, and what that costs."""

import json
import time

import pytest

from streamq import Client, Protocol
from streamq.protocol.keys import QueueKeys
from streamq.protocol.replies import Tokens
from tests.cli.common import ALL_KINDS, STATUS, rows
from tests.support.by_hand import HANDLER, RequestByHand
from tests.support.command import Streamq

pytestmark = pytest.mark.commands


@ALL_KINDS
def test_ls_shows_what_is_open_newest_first(
    streamq: Streamq, client: Client, failed: RequestByHand
) -> None:
    for name in ("1-old", "2-new"):  # by name where both are of the same millisecond
        client.submit([b"1"], handler=HANDLER, id=f"{failed.id}-{name}", queue=failed.queue)

    ran = streamq("ls")

    headers = "ID HANDLER STATE LEVEL LIMIT PARTS RECORDS FAILED RATE ETA AGE"
    assert ran.stdout.splitlines()[0].split() == headers.split()
    assert [row[0] for row in rows(ran.stdout)] == [f"{failed.id}-2-new", f"{failed.id}-1-old"]
    assert rows(ran.stdout)[0][1:10] == [HANDLER, "open", "50", "8", "0/1", "1", "0", "-", "-"]
    assert ran.stderr == ""


def test_requests_of_one_millisecond_are_listed_by_id(
    streamq: Streamq, client: Client, protocol: Protocol, queue: str, request_id: str
) -> None:
    ids = [f"{request_id}-{name}" for name in "abc"]
    for each in ids:
        driver = RequestByHand(protocol, queue, each)
        driver.open()
        driver.set_meta(created_ms=1_000)
    order = {ids[1]: 1, ids[2]: 2, ids[0]: 3}
    protocol.connection.redis.zadd(QueueKeys(queue).open, order)

    listed = [row[0] for row in rows(streamq("ls").stdout)]

    assert listed == ids[::-1]
    assert [status.id for status in client.list(queue)] == ids


def test_ls_shows_ended_requests_when_asked(
    streamq: Streamq, client: Client, failed: RequestByHand, protocol: Protocol
) -> None:
    open_id = f"{failed.id}-open"
    client.submit([b"1"], handler=HANDLER, id=open_id, queue=failed.queue)
    before = streamq("ls", "--all").stdout
    score = protocol.registered(failed.queue, failed.id)
    assert score is not None
    assert protocol.close(failed.queue, failed.id, score, round(time.time() * 1e3) + 60_000)

    after = streamq("ls", "--all").stdout
    done = streamq("ls", "--state", "done").stdout
    listed = json.loads(streamq("ls", "--state", "open", "--json").stdout)

    assert [row[0] for row in rows(before)] == [open_id, failed.id]
    assert [row[0] for row in rows(after)] == [open_id, failed.id]
    assert [row[:3] for row in rows(done)] == [[failed.id, HANDLER, "done"]]
    assert [(list(status), status["id"]) for status in listed] == [(STATUS, open_id)]


def test_ls_shows_what_was_just_closed_before_what_is_kept_longest(
    client: Client, failed: RequestByHand, protocol: Protocol
) -> None:
    now_ms = round(time.time() * 1e3)
    old = f"{failed.id}-old"
    client.submit([], handler=HANDLER, id=old, queue=failed.queue)
    for id_, purge_at in ((failed.id, now_ms + 180_000), (old, now_ms + 9_000_000)):
        score = protocol.registered(failed.queue, id_)
        assert score is not None
        assert protocol.close(failed.queue, id_, score, purge_at)
    for number in range(5):
        protocol.close(failed.queue, f"{failed.id}-{number}", -1, now_ms + 7_000_000)

    found = list(protocol.newest(failed.queue, closed=True, page=2))

    assert found[:2] == [failed.id, old]
    assert len(found) == 7


def test_ls_costs_what_it_shows(
    streamq: Streamq, protocol: Protocol, queue: str, request_id: str
) -> None:
    ids = [f"{request_id}-{number:02d}" for number in range(30)]
    for each in ids:
        protocol.mint(queue, each, Tokens(), register="yes")
        RequestByHand(protocol, queue, each).open()
    redis = protocol.connection.redis

    def calls() -> int:
        stats = redis.info("commandstats")
        return sum(
            stats.get(f"cmdstat_{name}", {"calls": 0})["calls"] for name in ("eval", "evalsha")
        )

    before = calls()
    ran = streamq("ls", "-n", "3")

    assert calls() - before <= 6
    assert {row[0] for row in rows(ran.stdout)} <= set(ids)
    assert len(rows(ran.stdout)) == 3
    assert "newest 3" in ran.stderr
