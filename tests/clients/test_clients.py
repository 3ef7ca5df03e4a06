"""The clients of other languages: whole jobs, and jobs through deaths of workers and gateways."""

import signal
import subprocess
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from streamq import Client, Request
from tests.clients.conftest import KINDS, Site, kill_group, missing
from tests.conftest import ONE_KIND
from tests.support.waiting import wait_until

pytestmark = ONE_KIND

#: What a busy machine may take besides.
SLACK_S = 5.0
WorkerOf = Callable[[str], list[str]]
of_all_kinds = pytest.mark.skipif(bool(missing(*KINDS)), reason=missing(*KINDS))
each_language = [
    pytest.param(kind, marks=pytest.mark.skipif(bool(missing(kind)), reason=missing(kind)))
    for kind in KINDS
]


@pytest.mark.timeout(300)  # the first build of the Go programs takes long
@pytest.mark.parametrize("language", each_language)
def test_whole_job_by_the_examples(
    language: str,
    site: Site,
    client: Client,
    request_id: str,
    examples_of: Callable[[str], tuple[list[str], list[str]]],
) -> None:
    worker_command, loader_command = examples_of(language)
    lines = [f"line {n} of Zoë" for n in range(600 if language != "bash" else 8)]
    text = "".join(f"{line}\n" for line in lines)
    command = [*loader_command, request_id, "shout"]
    worker, loader = site.run(worker_command), site.run(command)

    printed, _ = loader.communicate(text, timeout=120)

    assert loader.returncode == 0
    # ``tr`` knows single bytes only.
    expected = [line.replace("ë", "\0").upper().replace("\0", "ë") for line in lines]
    assert printed.replace("Ë", "ë").splitlines() == expected
    # The same load again finds the first.
    again, _ = site.run(command).communicate(text, timeout=120)
    assert again == printed
    assert client.get(request_id).status().parts.total == len(lines)
    assert stopped(worker) == 0


def stopped(worker: "subprocess.Popen[str]") -> int:
    """Stop a worker politely, in less time than its call would wait."""
    worker.send_signal(signal.SIGTERM)
    return worker.wait(20)


def has_done(request: Request, parts: int) -> bool:
    return request.status().parts.done >= parts


def check(request: Request, lines: list[str]) -> None:
    """Nothing is lost, and nothing is counted twice."""
    parts = request.wait(timeout=110).parts
    assert (parts.done, parts.failed, parts.total) == (len(lines), 0, len(lines))
    assert [*request.results()] == [(n, line.upper()) for n, line in enumerate(lines, 1)]


@of_all_kinds
@pytest.mark.timeout(300)
def test_parts_of_killed_workers_run_again_within_ten_seconds(
    site: Site, client: Client, tmp_path: Path, worker_of: WorkerOf
) -> None:
    lines = [f"line {n}" for n in range(20)]
    request = client.submit([line.encode() for line in lines], handler="shout", queue=site.queue)
    hang = tmp_path / "hang"
    hang.mkdir()
    workers = [site.run(worker_of(kind), HANG=str(hang)) for kind in KINDS]
    wait_until(lambda: len([*hang.iterdir()]) == len(KINDS), 60)
    # Another worker is there already, so that nobody waits for its start. It runs the rest.
    site.run(worker_of("node"))
    wait_until(partial(has_done, request, len(lines) - len(KINDS)), 60)
    killed = time.monotonic()
    for worker in workers:
        kill_group(worker)

    check(request, lines)

    assert time.monotonic() - killed < 10 + SLACK_S


@of_all_kinds
@pytest.mark.timeout(300)
@pytest.mark.long
def test_gateway_killed_during_a_job(site: Site, client: Client, worker_of: WorkerOf) -> None:
    lines = [f"line {n}" for n in range(300)]
    request = client.submit([line.encode() for line in lines], handler="shout", queue=site.queue)
    workers = [
        site.run(worker_of(kind), SLOTS="2", PAUSE_MS="20", PAUSE_S="0.02") for kind in KINDS
    ]
    for done in (20, 120):
        wait_until(partial(has_done, request, done), 60)
        site.kill()
        site.start()

    check(request, lines)

    assert [stopped(worker) for worker in workers] == [0, 0, 0]


@of_all_kinds
@pytest.mark.long
@pytest.mark.timeout(600)
def test_gateways_killed_every_second(site: Site, client: Client, worker_of: WorkerOf) -> None:
    lines = [f"line {n}" for n in range(5_000)]
    request = client.submit([line.encode() for line in lines], handler="shout", queue=site.queue)
    for kind in KINDS:
        site.run(worker_of(kind), SLOTS="2", PAUSE_MS="5", PAUSE_S="0.005")
    kills, until = 0, time.monotonic() + 400
    while request.status().state.is_live and time.monotonic() < until:
        time.sleep(1)
        site.kill()
        kills += 1
        site.start()

    check(request, lines)

    assert kills >= 5
