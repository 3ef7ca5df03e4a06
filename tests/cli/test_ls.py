"""``streamq ls``: which requests it shows, in which order, and what that costs."""

import json
import time

import pytest

from streamq import Client, Protocol
from streamq.protocol.keys import QueueKeys
from streamq.protocol.replies import Tokens
from streamq.queue.listing import list_requests
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


def test_ls_shows_the_newest_whenever_they_ended(
    streamq: Streamq, protocol: Protocol, queue: str, request_id: str
) -> None:
    ids = [f"{request_id}-{number}" for number in range(6)]
    now_ms = round(time.time() * 1e3)
    # The first submitted ended last; one that is kept for long was submitted in between.
    ends = dict(zip(ids, (60, 50, 40, 9_000, 20, 10), strict=True))
    for number, each in enumerate(ids):
        driver = RequestByHand(protocol, queue, each)
        driver.open()
        driver.set_meta(created_ms=1_000 + number, state="done", finished_ms=now_ms)
    scores = {each: now_ms + 180_000 + seconds * 1_000 for each, seconds in ends.items()}
    protocol.connection.redis.zadd(QueueKeys(queue).closed, scores)

    whole = [row[0] for row in rows(streamq("ls", "-a").stdout)]
    ran = streamq("ls", "-a", "-n", "3")

    assert whole == ids[::-1]
    assert [row[0] for row in rows(ran.stdout)] == ids[:2:-1]
    assert ran.stderr == "only the newest 3 are shown; -n 0 shows every one\n"


@ALL_KINDS
def test_ls_finds_requests_by_failures_handler_and_labels(
    streamq: Streamq, client: Client, failed: RequestByHand, queue: str
) -> None:
    mine, other = f"{failed.id}-mine", f"{failed.id}-other"
    client.submit([b"1"], handler=HANDLER, id=mine, queue=queue, labels={"user": "62", "env": "a"})
    client.submit([b"1"], handler="other", id=other, queue=queue, labels={"user": "7"})

    def ids(*words: str) -> set[str]:
        return {row[0] for row in rows(streamq("ls", *words).stdout)}

    assert ids() == {mine, other}
    assert ids("--failed") == {failed.id}
    assert ids("--handler", "other") == {other}
    assert ids("--all", "--handler", HANDLER) == {mine, failed.id}
    assert ids("--label", "user=62") == ids("--label", "user=62", "--label", "env=a") == {mine}
    assert ids("--label", "user=62", "--label", "env=b") == set()
    shown = streamq("ls", "--label", "user=62")
    assert shown.stdout.splitlines()[0].endswith("AGE  LABELS")
    assert shown.stdout.splitlines()[1].endswith("env=a,user=62")
    listed = json.loads(streamq("ls", "--label", "user=62", "--json").stdout)
    assert listed[0]["labels"] == {"user": "62", "env": "a"}
    wrong = streamq("ls", "--label", "user")
    assert (wrong.returncode, wrong.stderr) == (
        2,
        "streamq: --label 'user': write NAME=VALUE, such as user=62\n",
    )


def test_a_request_of_which_all_failed_is_among_the_failed(
    streamq: Streamq, submitted: RequestByHand, client: Client
) -> None:
    submitted.give_up(1, 2, 3)
    fine = client.submit([], handler=HANDLER, id=f"{submitted.id}-empty", queue=submitted.queue)

    text = streamq("ls", "--state", "failed").stdout
    listed = json.loads(streamq("ls", "--state", "failed", "--json").stdout)
    done = {row[0]: row[2] for row in rows(streamq("ls", "--state", "done").stdout)}

    assert [row[:3] for row in rows(text)] == [[submitted.id, HANDLER, "all-failed"]]
    assert [(each["id"], each["state"]) for each in listed] == [(submitted.id, "done")]
    assert done == {fine.id: "done"}


def test_a_search_is_bounded_and_says_where_it_stopped(
    client: Client, protocol: Protocol, queue: str, request_id: str
) -> None:
    for number in range(7):
        client.submit([b"1"], handler=HANDLER, id=f"{request_id}-{number}", queue=queue)

    cut = list_requests(protocol, queue, lambda _: True, ended=True, most=3)
    whole = list_requests(protocol, queue, lambda _: True, ended=True, most=None)
    none = list_requests(protocol, queue, lambda each: each.handler == "x", ended=True, most=3)

    assert (len(cut.requests), cut.looked, cut.total) == (3, 3, 7)
    assert (len(whole.requests), whole.looked, whole.total) == (7, 7, 7)
    assert (none.requests, none.looked, none.total) == ([], 3, 7)


def test_ls_says_when_it_stopped_looking(
    streamq: Streamq, client: Client, protocol: Protocol, queue: str, request_id: str
) -> None:
    client.submit([b"1"], handler=HANDLER, id=request_id, queue=queue)
    # Ids of which there is no request: they are looked at, too.
    strange = {f"{request_id}-{number}": number for number in range(10_500)}
    protocol.connection.redis.zadd(QueueKeys(queue).open, strange)

    ran = streamq("ls")
    whole = streamq("ls", "-n", "0")

    assert [row[0] for row in rows(ran.stdout)] == [row[0] for row in rows(whole.stdout)]
    assert ran.stderr == "looked at 10,000 of 10,501 requests; -n 0 looks at every one\n"
    assert whole.stderr == ""


def test_ls_passes_over_what_cannot_be_read(
    streamq: Streamq, submitted: RequestByHand, client: Client
) -> None:
    spoilt = f"{submitted.id}-spoilt"
    client.submit([b"1"], handler=HANDLER, id=spoilt, queue=submitted.queue)
    RequestByHand(submitted.protocol, submitted.queue, spoilt).set_meta(labels="{")

    ran = streamq("ls")

    assert [row[0] for row in rows(ran.stdout)] == [submitted.id]
    assert f"{spoilt}: what the server has of it cannot be read" in ran.stderr
