"""``streamq status``: what it shows of a request and of a queue."""

import json
import subprocess
from collections.abc import Callable
from typing import Any

import pytest

from streamq import Client, Protocol
from streamq.protocol.keys import QueueKeys
from tests.cli.common import ALL_KINDS, STATUS, beat
from tests.conftest import FIRST_KIND
from tests.support.by_hand import HANDLER, RequestByHand
from tests.support.command import Streamq, Terminal

pytestmark = pytest.mark.commands


def fact(text: str, name: str) -> str:
    """A line of ``status``, by its name."""
    lines = dict(line.split(maxsplit=1) for line in text.splitlines())
    return lines[name]


@ALL_KINDS
def test_status_of_a_request_as_json(streamq: Streamq, failed: RequestByHand) -> None:
    ran = streamq("status", failed.id, "--json")

    status = json.loads(ran.stdout)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert list(status) == [*STATUS, "workers"]
    assert status["state"] == "done"
    assert status["parts"] == {
        "total": 3,
        "waiting": 0,
        "running": 0,
        "retry": 0,
        "done": 1,
        "failed": 2,
    }
    assert status["records"] == {"total": 3, "done": 1, "failed": 2}


def test_status_says_when_no_live_worker_has_the_handler(
    streamq: Streamq, submitted: RequestByHand, protocol: Protocol
) -> None:
    beat(protocol, submitted.queue, handlers=["other"])
    lonely = streamq("status", submitted.id)
    beat(protocol, submitted.queue)
    served = streamq("status", submitted.id)

    assert fact(lonely.stdout, "handler") == f"{HANDLER} (no live worker has handler {HANDLER})"
    assert fact(served.stdout, "handler") == f"{HANDLER} (1 live worker with it)"
    assert fact(served.stdout, "parts").startswith("0 of 3 done, 3 waiting, 0 running")


def test_status_tells_a_persons_whole_story(
    streamq: Streamq, client: Client, driver: RequestByHand
) -> None:
    client.submit(
        [b"1"],
        handler=HANDLER,
        id=driver.id,
        queue=driver.queue,
        rate="30/m",
        delay="1h",
        max_failures="2%",
        keep="2d",
    ).pause()

    out = streamq("status", driver.id).stdout

    assert fact(out, "state") == "open, paused"
    assert fact(out, "rate") == "at most 30/m"
    assert fact(out, "held").startswith("until ")
    assert fact(out, "tolerates") == "2 % of failures"
    assert fact(out, "kept") == "2d after its end"


def test_json_of_a_request_has_all_that_the_text_tells(
    streamq: Streamq, client: Client, driver: RequestByHand, protocol: Protocol
) -> None:
    beat(protocol, driver.queue)
    request = client.submit(
        [b"1", b"2", b"3"],
        handler=HANDLER,
        id=driver.id,
        queue=driver.queue,
        max_failures="90%",
        keep="2d",
        labels={"user": "62", "env": "test"},
    )
    driver.give_up(1)
    holder, _ = driver.claim(2)
    driver.finish(holder, [2, 3])
    request.retry()
    request.set(rate="30/m")
    request.pause()
    driver.set_meta(hold_ms=driver.now_ms() + 3_600_000)

    text = streamq("status", driver.id).stdout
    told = json.loads(streamq("status", driver.id, "--json").stdout)

    # Where in the JSON each line of the text is, and what stands there.
    places: dict[str, dict[str, Any]] = {
        "request": {"id": driver.id},
        "state": {"state": "open", "paused": True},
        "handler": {"handler": HANDLER, "workers": 1},
        "queue": {"queue": driver.queue},
        "labels": {"labels": {"env": "test", "user": "62"}},
        "level": {"level": 50},
        "limit": {"limit": 8},
        "parts": {"parts": told["parts"]},
        "records": {"records": {"total": 3, "done": 2, "failed": 0}},
        "speed": {"rate": told["rate"], "eta_s": told["eta_s"]},
        "created": {"created_ms": told["created_ms"]},
        "started": {"started_ms": told["started_ms"]},
        "held": {"held_until_ms": told["held_until_ms"]},
        "rate": {"rate_limit": 0.5},
        "tolerates": {"max_failures": None, "max_percent": 90.0},
        "retried": {"retried": 1},
        "results": {"results": 2},
        "kept": {"keep_ms": 2 * 86_400_000},
    }
    assert {line.split()[0] for line in text.splitlines()} == set(places)
    assert {key: told[key] for place in places.values() for key in place} == {
        key: value for place in places.values() for key, value in place.items()
    }
    assert None not in (told["rate"], told["eta_s"], told["started_ms"], told["held_until_ms"])
    assert fact(text, "labels") == "env=test,user=62"
    assert fact(text, "retried") == "1 time"


def test_status_says_that_all_records_failed(
    streamq: Streamq, submitted: RequestByHand, client: Client
) -> None:
    submitted.give_up(1, 2, 3)

    status = client.get(submitted.id).status()

    assert fact(streamq("status", submitted.id).stdout, "state") == "done, all records failed"
    assert (status.state, status.has_failures, status.is_all_failed) == ("done", True, True)


@ALL_KINDS
def test_parts_that_were_handed_back_wait_and_are_not_in_retry(
    streamq: Streamq, client: Client, submitted: RequestByHand
) -> None:
    holder, _ = submitted.claim(2)
    other, grant = submitted.claim()
    submitted.fail(other, grant.parts[0].number, delay_ms=60_000)
    submitted.release(holder)

    text = streamq("status", submitted.id).stdout

    assert "0 of 3 done, 2 waiting, 0 running, 1 in retry, 0 failed" in fact(text, "parts")
    counts = client.get(submitted.id).status().parts
    assert (counts.waiting, counts.retry) == (2, 1)


@FIRST_KIND
def test_status_of_the_queue(
    streamq: Streamq, submitted: RequestByHand, protocol: Protocol
) -> None:
    submitted.claim()
    beat(protocol, submitted.queue)

    text = streamq("status").stdout
    summary = json.loads(streamq("status", "--json").stdout)

    assert fact(text, "requests") == "0 loading, 1 open, 0 paused"
    assert fact(text, "parts") == "2 waiting, 1 running, 0 in retry"
    assert fact(text, "workers") == "1 live, 1 of 8 slots busy"
    assert summary == {
        "queue": submitted.queue,
        "requests": {"loading": 0, "open": 1, "paused": 0},
        "parts": {"waiting": 2, "running": 1, "retry": 0},
        "workers": 1,
        "slots": {"total": 8, "busy": 1},
    }


def test_status_of_a_long_queue_says_how_far_it_has_read(
    running: Callable[..., subprocess.Popen[str]], protocol: Protocol, queue: str, request_id: str
) -> None:
    ids = {f"{request_id}-{number}": number for number in range(1_200)}
    protocol.connection.redis.zadd(QueueKeys(queue).open, ids)
    with Terminal() as terminal:
        asking = running("status", stdout=subprocess.PIPE, stderr=terminal.file)

        text, _ = asking.communicate(timeout=60)

        assert fact(text, "requests") == "0 loading, 0 open, 0 paused"
        assert "read 1,000 of 1,200 requests" in terminal.seen()
        assert terminal.seen().endswith("\r\x1b[K")
