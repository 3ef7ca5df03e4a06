"""The doctor finds each thing that can be wrong, and mends what it may."""

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from redis import Redis

from streamq import Client, Connection
from streamq.admin import acl
from streamq.driver.server_versions import first_version_without_faults, known_faults
from streamq.protocol import lua
from streamq.protocol.keys import QueueKeys, RequestKeys, token_list_of
from streamq.servers.local import LocalServer
from streamq.servers.local_cluster import LocalCluster
from tests.conftest import KINDS
from tests.support import warm
from tests.support.by_hand import HANDLER, RequestByHand
from tests.support.command import python_path
from tests.support.fleet import Fleet
from tests.support.secure import as_role
from tests.support.waiting import wait_until

pytestmark = pytest.mark.commands


PLAIN = [kind for kind in KINDS if "cluster" not in kind]
#: For what the doctor reads from keys, by scripts: it is the same on all of them.
ONE_KIND = pytest.mark.parametrize("kind", PLAIN[:1], indirect=True)


@pytest.fixture(params=PLAIN)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def binary(kind: str) -> str | None:
    """The server's program."""
    return None if kind == "valkey" else shutil.which("redis-server")


def doctor(url: str, *options: str, **variables: str) -> tuple[int, list[dict[str, Any]]]:
    """The exit code, and what was found. Who mends is the administrator."""
    url = url if "--fix" in options else as_role(url, "doctor")
    words = [*warm.MODULE, "doctor", "--json", *options]
    ran = warm.run_text(words, env=os.environ | {"STREAMQ_URL": url} | variables)
    assert ran.stdout, ran.stderr
    return ran.returncode, json.loads(ran.stdout)


def found(findings: list[dict[str, Any]], check: str) -> tuple[str, str]:
    """The worst verdict of a check, and what it says."""
    of_it = [each for each in findings if each["check"] == check]
    assert of_it, f"nothing about {check} in {findings}"
    worst = max(of_it, key=lambda each: ["ok", "warn", "fail"].index(each["verdict"]))
    assert worst["verdict"] == "ok" or worst["remedy"]
    return worst["verdict"], worst["says"]


@pytest.fixture
def server(binary: str | None) -> Iterator[LocalServer]:
    """A server of one's own."""
    server = LocalServer.start(port=0, binary=binary)
    yield server
    server.stop()


def test_eviction_policy(server: LocalServer) -> None:
    redis: Any = Redis.from_url(server.url)
    redis.config_set("maxmemory-policy", "allkeys-lru")

    code, findings = doctor(server.url)
    assert code == 1
    assert found(findings, "eviction")[0] == "fail"
    assert "allkeys-lru" in found(findings, "eviction")[1]

    code, findings = doctor(server.url, "--fix")
    assert (code, found(findings, "eviction")[0]) == (0, "ok")
    assert redis.config_get("maxmemory-policy") == {"maxmemory-policy": "noeviction"}
    redis.close()


def test_no_append_only_file(server: LocalServer, binary: str | None, tmp_path: Path) -> None:
    code, findings = doctor(server.url)
    with LocalServer.start(tmp_path, persist=True, binary=binary) as keeping:
        _, others = doctor(keeping.url)

    assert (code, found(findings, "persistence")[0]) == (0, "warn")
    assert found(others, "persistence")[0] == "ok"


@pytest.fixture
def submitted(client: Client, driver: RequestByHand, fleet: Fleet) -> RequestByHand:
    """A request of three parts; a worker has their handler and takes nothing."""
    fleet.ready("--levels", "99")
    client.submit([b"1", b"2", b"3"], handler="shout", id=driver.id, queue=driver.queue)
    wait_until(lambda: fleet.command("workers")[0]["handlers"])
    return driver


@ONE_KIND
def test_lost_token(url: str, submitted: RequestByHand) -> None:
    redis = submitted.redis
    tokens = QueueKeys(submitted.queue, to=token_list_of("shout", 50)).tokens
    # The pool's janitor would push it again within a moment: it is kept from looking.
    due = QueueKeys(submitted.queue).due
    redis.zadd(due, {submitted.id: 9e15})
    healthy = doctor(url, "--queue", submitted.queue)[1]
    redis.unlink(tokens)

    findings = doctor(url, "--queue", submitted.queue)[1]
    mended = doctor(url, "--queue", submitted.queue, "--fix")[1]

    assert not [each for each in healthy if each["check"] == "token"]
    assert found(findings, "token")[0] == "warn"
    assert submitted.id in found(findings, "token")[1]
    assert found(mended, "token")[0] == "ok"
    assert redis.llen(tokens) > 0


@ONE_KIND
def test_orphaned_lease(url: str, client: Client, protocol: Any, queue: str) -> None:
    request = client.submit([1, 2], handler=HANDLER, queue=queue, limit=1)
    driver = RequestByHand(protocol, queue, request.id)
    holder, _ = driver.claim()
    protocol.connection.redis.zadd(RequestKeys(request.id).leases, {holder: 1})

    code, findings = doctor(url, "--queue", queue)
    assert (code, found(findings, "lease")[0]) == (1, "fail")
    assert holder in found(findings, "lease")[1]

    assert found(doctor(url, "--queue", queue, "--fix")[1], "lease")[0] == "ok"
    assert request.status().parts.running == 0


@ONE_KIND
def test_request_without_a_worker_for_its_handler(
    url: str, submitted: RequestByHand, client: Client
) -> None:
    other = client.submit([1], handler="unheard_of", queue=submitted.queue)

    code, findings = doctor(url, "--queue", submitted.queue)

    verdict, says = found(findings, "handler")
    assert (code, verdict) == (1, "fail")
    assert other.id in says
    assert "unheard_of" in says
    assert submitted.id not in says


def test_missing_slot(binary: str | None) -> None:
    cluster = LocalCluster.start(primaries=3, replicas=0, binary=binary)
    connection = Connection(cluster.url)
    redis = connection.redis
    _, before = doctor(cluster.url)
    node = redis.get_node_from_key("{q:default}")
    slot = redis.keyslot("{q:default}")

    redis.get_redis_connection(node).execute_command("CLUSTER", "DELSLOTS", slot)
    code, after = doctor(cluster.url)

    assert found(before, "slots")[0] == "ok"
    assert found(before, "replicas")[0] == "warn"
    assert (code, found(after, "slots")[0]) == (1, "fail")
    assert re.search(rf"\b{slot}\b", found(after, "slots")[1])
    connection.close()
    cluster.stop()


@ONE_KIND
@pytest.mark.parametrize(("ahead_s", "verdict"), [(5, "warn"), (-5, "warn"), (3600, "fail")])
def test_clock_skew(url: str, tmp_path: Path, ahead_s: int, verdict: str) -> None:
    # A process whose clock is wrong.
    (tmp_path / "sitecustomize.py").write_text(
        f"import time\nright = time.time\ntime.time = lambda: right() + {ahead_s}\n"
    )

    _, findings = doctor(url, PYTHONPATH=python_path(tmp_path))

    assert found(findings, "clock")[0] == verdict
    assert ("behind" if ahead_s > 0 else "ahead") in found(findings, "clock")[1]
    assert found(doctor(url)[1], "clock")[0] == "ok"


def test_bad_acl(server: LocalServer) -> None:
    redis: Any = Redis.from_url(server.url)
    rights = acl.acl_rights_of_role("worker", acl.AclScope(queues=("shop",)))
    digest = lua.script_digest("finish")
    key = QueueKeys("shop").open
    wrong = {
        "finish": [right for right in rights if right != f"+evalsha|{digest}"],
        "brpop": [right for right in rights if right != "+brpop"],
        "xreadgroup": [right for right in rights if right != "+xreadgroup"],
        key: [right for right in rights if right != f"~{key}"],
    }

    def as_user(rights: list[str], *options: str, user: str = "worker") -> tuple[int, str, str]:
        redis.execute_command("ACL", "SETUSER", user, "reset", "on", ">" + "x" * 20, *rights)
        code, findings = doctor(server.url.replace("//", f"//{user}:{'x' * 20}@"), *options)
        return code, *found(findings, "rights")

    for lacking, those in wrong.items():
        code, verdict, says = as_user(those, "--queue", "shop")
        assert (code, verdict) == (1, "fail"), lacking
        assert "user worker can be nobody; as worker it may not" in says
        assert lacking in says
    code, verdict, says = as_user(rights, "--queue", "shop")
    assert verdict == "ok"
    assert says.endswith("may be worker")
    assert as_user(rights, "--queue", "other")[:2] == (1, "fail")
    # Who has another name may be anything, here a janitor.
    assert as_user(wrong["finish"], "--queue", "shop", user="me")[2].endswith("may be janitor")
    assert as_user(wrong[key], "--queue", "shop", user="me")[:2] == (1, "fail")
    # Without the right to ask there is no answer.
    asking = [right for right in rights if right != "+acl|dryrun"]
    assert as_user(asking, "--queue", "shop")[:2] == (0, "warn")
    redis.close()


@pytest.mark.parametrize(
    ("kind", "version", "wrong"),
    [
        ("redis", (7, 0, 15), {"not maintained": (7, 2, 0)}),
        ("redis", (7, 2, 10), {"CVE-2025-49844": (7, 2, 11)}),
        ("redis", (8, 2, 2), {}),
        ("valkey", (8, 0, 5), {"CVE-2025-49844": (8, 0, 6), "CVE-2026-56684": (8, 0, 10)}),
        ("valkey", (8, 0, 10), {}),
        ("valkey", (9, 1, 2), {}),
    ],
)
def test_bad_versions(
    kind: str, version: tuple[int, ...], wrong: dict[str, tuple[int, ...]]
) -> None:
    said = known_faults(kind, version)

    assert list(said.values()) == list(wrong.values())
    assert all(word in text for word, text in zip(wrong, said, strict=True))


def test_what_to_upgrade_to_is_good_itself() -> None:
    assert first_version_without_faults("redis", (7, 0, 15)) == (7, 2, 11)
    assert first_version_without_faults("valkey", (8, 0, 1)) == (8, 0, 10)


@ONE_KIND
def test_request_in_no_index(server: LocalServer) -> None:
    with Client(server.url) as client:
        request = client.submit([1], handler="h", queue="q")
        client._protocol.connection.redis.zrem(QueueKeys("q").open, request.id)

        findings = doctor(server.url)[1]
        mended = doctor(server.url, "--fix")[1]

        assert found(findings, "orphan")[0] == "warn"
        assert request.id in found(findings, "orphan")[1]
        assert found(mended, "orphan")[0] == "ok"
        assert found(doctor(server.url)[1], "orphans")[0] == "ok"


@ONE_KIND
def test_request_that_does_not_say_its_queue(server: LocalServer) -> None:
    with Client(server.url) as client:
        request = client.submit([1], handler="h", queue="q")
        client._protocol.connection.redis.hdel(RequestKeys(request.id).meta, "queue")

        findings = doctor(server.url)[1]

        assert found(findings, "damage")[0] == "fail"
        assert request.id in found(findings, "damage")[1]


@ONE_KIND
def test_books_that_do_not_add_up(url: str, submitted: RequestByHand) -> None:
    submitted.redis.set(RequestKeys(submitted.id).left, 7)

    code, findings = doctor(url, "--queue", submitted.queue)

    assert (code, found(findings, "count")[0]) == (1, "fail")
    assert "7 parts" in found(findings, "count")[1]


@ONE_KIND
def test_busy_queue_is_well(url: str, fleet: Fleet, client: Client, queue: str) -> None:
    fleet.ready("-p", "2", "-c", "4")
    request = client.submit([0.02] * 5_000, handler="nap", queue=queue, limit=6)
    wait_until(lambda: fleet.command("workers")[0]["handlers"])

    code, findings = doctor(url, "--queue", queue)

    wrong = [each for each in findings if each["verdict"] != "ok"]
    assert code == 0
    assert {each["check"] for each in wrong} - {"version"} == {"persistence"}, wrong
    request.cancel()


@ONE_KIND
def test_without_a_server_and_for_people(server: LocalServer) -> None:
    def streamq(*words: str) -> "subprocess.CompletedProcess[str]":
        return warm.run_text([*warm.MODULE, *words], env=dict(os.environ))

    nobody = streamq("doctor", "--url", "redis://127.0.0.1:1")
    ran = streamq("doctor", "--url", server.url)

    assert nobody.returncode == 3
    assert len(nobody.stderr.splitlines()) == 1
    assert ran.returncode == 0
    lines = ran.stdout.splitlines()
    assert all(line.startswith(("ok  ", "warn", "fail", "    ")) for line in lines)
