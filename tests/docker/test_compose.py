"""Both compositions, with a worker's and a primary's container killed on the way."""

import json
import secrets
from typing import Any

import pytest
from redis.crc import key_slot

from tests.docker.conftest import LINES, Composition
from tests.support.waiting import wait_until

pytestmark = pytest.mark.timeout(900)

LOAD = ("--handler", "shout", "--lines", "50", "--limit", "100")


def shouted(lines: list[str]) -> list[str]:
    return [line.upper() for line in lines]


def parts_done(composition: Composition, request: str) -> int:
    return int(composition.status(request)["parts"]["done"])


@pytest.mark.parametrize("composition", ["compose.yaml"], indirect=True)
def test_one_server_and_a_worker_that_is_killed(composition: Composition, lines: list[str]) -> None:
    password = secrets.token_hex(16)
    composition.secret("server.conf", f"requirepass {password}\n")
    composition.secret("url", f"redis://:{password}@server:6379\n")
    composition.run("up", "-d", "--scale", "worker=2")
    wait_until(lambda: len(json.loads(composition.streamq("workers", "--json"))) == 2, 60)
    for container in composition.containers("worker"):
        config, host = container.attrs["Config"], container.attrs["HostConfig"]
        assert (config["User"], host["ReadonlyRootfs"]) == ("10001:10001", True)

    request = composition.streamq("load", "/data/input.txt", *LOAD).strip()
    done = parts_done(composition, request)
    assert done < LINES / 50
    composition.containers("worker")[0].kill()

    composition.streamq("wait", request, "--timeout", "3m")
    assert composition.streamq("results", request).splitlines() == shouted(lines)
    status = composition.status(request)
    assert (status["state"], status["records"]["done"]) == ("done", LINES)
    assert password not in composition.logs()
    print(f"killed a worker after {done} of {LINES // 50} parts; every result is there once")


@pytest.mark.parametrize("composition", ["compose.yaml"], indirect=True)
def test_a_server_that_is_killed_keeps_what_it_had(
    composition: Composition, lines: list[str]
) -> None:
    composition.secret("server.conf", "requirepass secret\n")
    composition.secret("url", "redis://:secret@server:6379\n")
    composition.run("up", "-d", "server")
    wait_until(lambda: "ready" in composition.logs().lower(), 60)
    request = composition.streamq("load", "/data/input.txt", *LOAD).strip()
    composition.run("up", "-d")
    wait_until(lambda: parts_done(composition, request) > 0, 60)

    (server,) = composition.containers("server")
    server.kill()
    server.start()

    composition.streamq("wait", request, "--timeout", "3m")
    assert composition.streamq("results", request).splitlines() == shouted(lines)


def cluster(composition: Composition) -> Any:
    return json.loads(composition.streamq("cluster", "status", "--json"))


@pytest.mark.parametrize("composition", ["compose.cluster.yaml"], indirect=True)
def test_a_cluster_and_a_primary_that_is_killed(composition: Composition, lines: list[str]) -> None:
    password = secrets.token_hex(16)
    hosts = ",".join(f"valkey-{n}:700{n}" for n in range(1, 7))
    composition.secret("server.conf", f"requirepass {password}\nmasterauth {password}\n")
    composition.secret("url", f"redis+cluster://:{password}@{hosts}\n")
    composition.run("up", "-d")
    (load,) = composition.containers("load")
    assert load.wait()["StatusCode"] == 0, composition.logs()

    # The primary that has the request.
    slot = key_slot(b"first")
    victim = next(
        node["address"].partition(":")[0]
        for node in cluster(composition)["nodes"]
        if any(first <= slot <= last for first, last in node["slots"])
    )
    (container,) = composition.containers(victim)
    (worker,) = composition.containers("worker")
    with composition.start("run", "--rm", "-T", "streamq", "wait", "first") as waiting:
        done = wait_until(lambda: parts_done(composition, "first"), 60)
        container.kill()
        worker.kill()
        worker.start()
        said = waiting.communicate()
    assert done < LINES / 50
    assert waiting.returncode == 0, (said, composition.logs())
    assert composition.streamq("results", "first").splitlines() == shouted(lines)
    status = composition.status("first")
    assert (status["state"], status["records"]["done"]) == ("done", LINES)
    print(f"killed {victim} and a worker, {done} parts done then; every result is there once")

    container.start()
    composition.run("up", "--no-deps", "create")
    assert cluster(composition)["state"] == "ok"
    assert password not in composition.logs()
    assert outside(composition) == status


def outside(composition: Composition) -> Any:
    """The request's status as a client sees it that is not in the composition's network."""
    said = composition.engine.containers.run(
        "streamq-test",
        ["status", "first", "--json"],
        network_mode="host",
        extra_hosts={f"valkey-{n}": "127.0.0.1" for n in range(1, 7)},
        environment={"STREAMQ_URL_FILE": "/run/url"},
        volumes={str(composition.folder / "secrets/url"): {"bind": "/run/url", "mode": "ro"}},
        remove=True,
    )
    return json.loads(said)
