"""Protocol versions: written into each request, and one that is too new is left alone."""

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from streamq import Client, Janitor, Protocol, RequestNewer
from streamq.model import State
from streamq.protocol.replies import Tokens
from streamq.queue.janitor import log as janitor_log
from tests.admin.test_doctor import doctor, found
from tests.conftest import ONE_KIND
from tests.support.by_hand import RequestByHand
from tests.support.fleet import Fleet
from tests.support.secure import as_role

FUTURE = 7
WORDS = f"protocol version {FUTURE}, and this streamq knows versions up to 3: upgrade"


def age(protocol: Protocol, request_id: str, version: int = FUTURE) -> None:
    """Let a request be one that another version made."""
    protocol.connection.redis.hset(protocol.keys(request_id).meta, "protocol", version)


def test_open_and_submit_write_the_version(
    client: Client, protocol: Protocol, driver: RequestByHand, queue: str
) -> None:
    driver.open()
    small = client.submit([b"x"], handler="h", queue=queue)
    meta = protocol.keys(small.id).meta

    assert driver.meta("protocol") == "1"
    assert protocol.connection.redis.hget(meta, "protocol") == b"1"


def test_request_without_a_version_is_of_the_first_and_runs(driver: RequestByHand) -> None:
    driver.load(1)
    driver.redis.hdel(driver.keys.meta, "protocol")

    holder, grant = driver.claim()
    driver.finish(holder, [part.number for part in grant.parts])

    assert driver.meta("state") == State.DONE


CALLS: dict[str, Callable[[RequestByHand], Any]] = {
    "append": lambda d: d.append(1, first=3),
    "audit": lambda d: d.protocol.audit(d.id),
    "cancel": lambda d: d.protocol.cancel(d.id),
    "claim": lambda d: d.claim(),
    "collect": lambda d: d.protocol.collect(d.id, next_number=1),
    "expire": lambda d: d.protocol.expire(d.id),
    "fail": lambda d: d.fail("w", 1),
    "finish": lambda d: d.finish("w", [1]),
    "handback": lambda d: d.handback("w", [1]),
    "inspect": lambda d: d.protocol.inspect(d.id),
    "open": lambda d: d.open(),
    "pause": lambda d: d.protocol.pause(d.id),
    "purge": lambda d: d.protocol.purge(d.id, force=True),
    "reap": lambda d: d.reap(),
    "redrive": lambda d: d.redrive(1),
    "release": lambda d: d.release("w"),
    "renew": lambda d: d.protocol.renew(d.id, 20_000, {"w": 1}),
    "resume": lambda d: d.protocol.resume(d.id),
    "seal": lambda d: d.protocol.seal(d.id, 2, "c2"),
    "settle": lambda d: d.protocol.settle(d.id, 0, 0),
    "set": lambda d: d.protocol.set(d.id, 3, None, None),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("ended", [False, True], ids=["live", "ended"])
def test_script_refuses_a_newer_request_and_changes_nothing(
    driver: RequestByHand, name: str, ended: bool
) -> None:
    driver.load(2)
    driver.claim(holder="w")
    if ended:
        driver.set_meta(state="done", finished_ms=1)
    age(driver.protocol, driver.id)
    before = driver.snapshot()

    with pytest.raises(RequestNewer, match=WORDS):
        CALLS[name](driver)

    assert driver.snapshot() == before


def test_same_small_submission_is_refused_too(
    client: Client, protocol: Protocol, queue: str, request_id: str
) -> None:
    client.submit([b"x"], handler="h", queue=queue, id=request_id)
    age(protocol, request_id)

    with pytest.raises(RequestNewer, match=WORDS):
        client.submit([b"x"], handler="h", queue=queue, id=request_id)


def test_janitor_says_so_once_and_looks_at_the_others(
    client: Client, protocol: Protocol, queue: str, caplog: pytest.LogCaptureFixture
) -> None:
    newer, other = (client.submit([b"x"], handler="h", queue=queue) for _ in range(2))
    age(protocol, newer.id)
    while protocol.take(queue, ("h",), 0.01):
        pass
    janitor = Janitor(protocol, queue, every_ms=0)

    with caplog.at_level("WARNING", janitor_log.name):
        for _ in range(3):
            janitor.sweep()

    assert caplog.text.count(f"request {newer.id} is newer, and passed over") == 1
    taken = protocol.take(queue, ("h",), 0.01)
    assert taken
    assert taken.request_id == other.id
    assert protocol.take(queue, ("h",), 0.01) is None


def test_worker_leaves_it_alone_until_it_is_upgraded(
    fleet: Fleet, client: Client, protocol: Protocol, queue: str
) -> None:
    newer = client.submit([b"1", b"2"], handler="shout", queue=queue)
    age(protocol, newer.id)
    # As many as a janitor that knows the version pushes in half a minute.
    for _ in range(5):
        protocol.mint(queue, newer.id, Tokens(8, "shout:50"))
    before = protocol.connection.redis.hgetall(protocol.keys(newer.id).meta)
    pool = fleet.ready("-p", "1")

    other = client.submit([b"3"], handler="shout", queue=queue)
    assert other.wait("30s").state is State.DONE

    said = fleet.errors(pool)
    assert said.count(f"request {newer.id} is left alone") == 1
    assert WORDS in said
    assert protocol.connection.redis.hgetall(protocol.keys(newer.id).meta) == before
    pool.terminate()
    assert pool.wait(30) == 0

    age(protocol, newer.id, 1)
    fleet.ready("-p", "1")
    assert newer.wait("30s").parts.done == 2


@ONE_KIND
def test_commands_tell_of_it(client: Client, protocol: Protocol, url: str, queue: str) -> None:
    newer = client.submit([b"1"], handler="h", queue=queue)
    age(protocol, newer.id)

    def run(*words: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [sys.executable, "-m", "streamq.cli", *words],
            env=os.environ | {"STREAMQ_URL": as_role(url, "admin"), "STREAMQ_QUEUE": queue},
            capture_output=True,
            text=True,
            check=False,
        )

    status, listed, summary = run("status", newer.id), run("ls"), run("status")
    _, findings = doctor(url, "--queue", queue)

    assert (status.returncode, listed.returncode, summary.returncode) == (1, 0, 0)
    assert all(WORDS in each.stderr for each in (status, listed, summary))
    verdict, says = found(findings, "version")
    assert verdict == "warn"
    assert WORDS in says
    assert not [each for each in findings if each["check"] == "damage"]
