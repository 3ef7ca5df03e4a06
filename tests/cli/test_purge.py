"""``streamq purge``: which ended requests it removes, and that it asks before."""

import json
import subprocess
import time
from collections.abc import Callable

import pytest

from streamq import Client
from tests.cli.common import ALL_KINDS, rows
from tests.support.by_hand import HANDLER, RequestByHand
from tests.support.command import Streamq, Terminal
from tests.support.waiting import wait_until

pytestmark = pytest.mark.commands

HOUR_MS = 3_600_000


@ALL_KINDS
def test_purge_removes_ended_requests_and_refuses_others(
    streamq: Streamq, client: Client, done: RequestByHand
) -> None:
    live = f"{done.id}-live"
    client.submit([b"1"], handler=HANDLER, id=live, queue=done.queue)

    ran = streamq("purge", done.id, live, "nobody", "--yes")

    assert done.existing_keys() == set()
    assert ran.stdout == ""
    assert ran.stderr.splitlines() == [
        f"{done.id}: purged",
        f"streamq: {live}: the request is open: cancel it first",
        "streamq: nobody: no such request, or it was purged",
    ]
    assert ran.returncode == 5
    assert [row[0] for row in rows(streamq("ls", "-a").stdout)] == [live]


def test_purge_asks_before(
    streamq: Streamq, done: RequestByHand, running: Callable[..., subprocess.Popen[str]]
) -> None:
    unasked = streamq("purge", done.id)
    with Terminal() as terminal:
        asking = running("purge", done.id, stdin=terminal.file, stderr=terminal.file)
        wait_until(lambda: "Purge 1 request with all results? [y/N]" in terminal.seen())
        terminal.type("n\n")
        asking.wait(30)

        assert asking.returncode == 1
        assert done.existing_keys() != set()
        agreeing = running("purge", done.id, stdin=terminal.file, stderr=terminal.file)
        terminal.type("y\n")
        agreeing.wait(30)

    assert (agreeing.returncode, done.existing_keys()) == (0, set())
    assert unasked.returncode == 2
    assert "say --yes to purge 1 request with all results" in unasked.stderr


def test_purge_by_age_and_state(
    streamq: Streamq, client: Client, done: RequestByHand, queue: str
) -> None:
    now_ms = round(time.time() * 1e3)
    done.set_meta(finished_ms=now_ms - 3 * HOUR_MS)
    cancelled, live = f"{done.id}-cancelled", f"{done.id}-live"
    for each in (cancelled, live):
        client.submit([b"1"], handler=HANDLER, id=each, queue=queue)
    client.get(cancelled).cancel()

    def would(*words: str) -> set[str]:
        ran = streamq("purge", *words, "--dry-run", "--json")
        assert ran.returncode == 0, ran.stderr
        return {each["id"] for each in json.loads(ran.stdout)}

    assert would("--older-than", "2h") == {done.id}
    assert would("--older-than", "0s") == {done.id, cancelled}
    assert would("--older-than", "4h") == would("--state", "failed") == set()
    assert would("--state", "cancelled") == {cancelled}
    done.set_meta(records_done=0, records_failed=3)
    assert (would("--state", "done"), would("--state", "failed")) == (set(), {done.id})
    done.set_meta(records_done=3, records_failed=0)
    assert would("--state", "cancelled", "--older-than", "2h") == set()
    assert streamq("purge", "--state", "failed").stderr == "none fits\n"

    dry = streamq("purge", "--older-than", "2h", "--dry-run")
    assert [row[:3] for row in rows(dry.stdout)] == [[done.id, HANDLER, "done"]]
    assert dry.stderr == "1 request would be purged\n"
    ran = streamq("purge", "--older-than", "2h", "--yes", "--json")
    told = {"purged": True, "state": "done", "finished_ms": now_ms - 3 * HOUR_MS}
    assert json.loads(ran.stdout) == [{"id": done.id, "ok": True, **told}]
    assert [row[0] for row in rows(streamq("ls", "-a").stdout)] == [live, cancelled]


def test_purge_leaves_what_was_run_again_while_it_asked(
    done: RequestByHand, running: Callable[..., subprocess.Popen[str]]
) -> None:
    with Terminal() as terminal:
        asking = running("purge", "--state", "done", stdin=terminal.file, stderr=terminal.file)
        wait_until(lambda: "Purge 1 request" in terminal.seen())
        done.set_meta(finished_ms=round(time.time() * 1e3) + 5)
        terminal.type("y\n")
        asking.wait(30)

        assert "it was run again meanwhile, and is left alone" in terminal.seen()
    assert asking.returncode == 1
    assert done.existing_keys() != set()


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ([], "which requests? Give their ids, --older-than 7d or --state done"),
        (["a", "--state", "done"], "give either ids, or --older-than and --state"),
        (["--older-than", "soon"], "--older-than 'soon'"),
    ],
)
def test_purge_wants_to_be_told_which(streamq: Streamq, words: list[str], why: str) -> None:
    ran = streamq("purge", *words)

    assert ran.returncode == 2
    assert why in ran.stderr
