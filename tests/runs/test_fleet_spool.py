"""Results that the workers of a fleet keep in a folder which they share with the collector."""

import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from streamq import Client
from tests.conftest import ONE_KIND
from tests.support import warm
from tests.support.fleet import Fleet
from tests.support.secure import as_role
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.commands, ONE_KIND]

LINES = 40_000
Command = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    (tmp_path / "in.txt").write_bytes(b"".join(b"line %d\n" % n for n in range(LINES)))
    (tmp_path / "shared").mkdir()
    return tmp_path / "shared"


@pytest.fixture
def streamq(url: str, queue: str, tmp_path: Path) -> Command:
    def streamq(*words: str) -> "subprocess.CompletedProcess[str]":
        own = {"STREAMQ_URL": as_role(url, words[0]), "STREAMQ_QUEUE": queue}
        return warm.run_text([*warm.MODULE, *words], env=os.environ | own, cwd=tmp_path)

    return streamq


def load(streamq: Command, *words: str) -> str:
    options = ("--by-reference", "--lines", "1000", "--spool", "shared", "--spool-format", "raw")
    done = streamq("load", "in.txt", "--handler", "echo", *options, *words)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def allowed(folder: Path) -> tuple[str, ...]:
    return ("--allow-read", str(folder), "--spool", str(folder / "shared"))


def spools(folder: Path) -> list[Path]:
    return sorted(path for path in (folder / "shared").rglob("*") if path.is_file())


def test_results_wait_in_the_folder_and_are_copied_from_there(
    fleet: Fleet, streamq: Command, client: Client, shared: Path, tmp_path: Path
) -> None:
    fleet.ready(*allowed(tmp_path), "-p", "2")
    fleet.ready(*allowed(tmp_path))
    request = load(streamq)
    client.get(request).wait(60)
    size = sum(path.stat().st_size for path in spools(tmp_path))
    assert size == (tmp_path / "in.txt").stat().st_size
    assert client.protocol.result_bytes(request) < size / 4

    wrong = streamq("results", request, "-o", "out.jsonl", "--spool", "shared")
    keyed = streamq(*("results", request, "-o", "out.jsonl", "--spool", "shared", "--with-keys"))
    shown = streamq("results", request)
    done = streamq("results", request, "-o", "out.txt", "--spool", "shared")

    assert wrong.returncode == keyed.returncode == 2
    assert f"are kept in {shared / request} as raw without keys" in wrong.stderr
    assert shown.returncode != 0
    assert "streamq results -o FILE --spool DIR reads what workers keep" in shown.stderr
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out.txt").read_bytes() == (tmp_path / "in.txt").read_bytes()
    assert list(shared.iterdir()) == []


@pytest.mark.parametrize("damage", ["truncated", "overwritten", "cut to a tenth"])
def test_what_is_lost_in_the_folder_runs_again(
    fleet: Fleet, streamq: Command, client: Client, shared: Path, tmp_path: Path, damage: str
) -> None:
    fleet.ready(*allowed(tmp_path))
    request = load(streamq)
    client.get(request).wait(60)
    (path,) = spools(tmp_path)
    if damage == "truncated":
        os.truncate(path, path.stat().st_size - 10)
    elif damage == "overwritten":
        with path.open("r+b") as file:
            file.seek(20_000)
            file.write(b"?")
    else:
        os.truncate(path, 30_000)

    done = streamq("results", request, "-o", "out.txt", "--spool", "shared")

    assert done.returncode == 0, done.stderr
    assert "runs again" in done.stderr
    assert (tmp_path / "out.txt").read_bytes() == (tmp_path / "in.txt").read_bytes()


def test_a_worker_that_may_not_write_there_sends_results_to_the_server(
    fleet: Fleet, streamq: Command, client: Client, shared: Path, tmp_path: Path
) -> None:
    (tmp_path / "other").mkdir()
    fleet.ready("--allow-read", str(tmp_path), "--spool", str(tmp_path / "other"))
    request = load(streamq)
    client.get(request).wait(60)
    assert not spools(tmp_path)
    assert not list((tmp_path / "other").iterdir())

    done = streamq("results", request, "-o", "out.txt", "--spool", "shared")

    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out.txt").read_bytes() == (tmp_path / "in.txt").read_bytes()


def test_where_the_folder_is_not_there_nothing_runs_again(
    fleet: Fleet, streamq: Command, client: Client, shared: Path, tmp_path: Path
) -> None:
    fleet.ready(*allowed(tmp_path))
    request = load(streamq)
    client.get(request).wait(60)
    shared.rename(tmp_path / "elsewhere")

    refused = streamq("results", request, "-o", "out.txt", "--spool", "shared")

    assert refused.returncode == 1
    assert "and there is no such folder" in refused.stderr
    (tmp_path / "elsewhere").rename(shared)
    assert streamq("results", request, "-o", "out.txt", "--spool", "shared").returncode == 0
    assert (tmp_path / "out.txt").read_bytes() == (tmp_path / "in.txt").read_bytes()


def test_a_collector_reads_and_removes_only_spools_of_the_folder_that_it_was_told(
    fleet: Fleet, streamq: Command, client: Client, shared: Path, tmp_path: Path
) -> None:
    fleet.ready(*allowed(tmp_path))
    request = load(streamq)
    client.get(request).wait(60)
    (tmp_path / "other").mkdir()
    (shared / request / "precious.txt").write_text("mine")

    for words in ((), ("--spool", "other"), ("--spool", f"shared/{request}/../../other")):
        refused = streamq("results", request, "-o", "out.txt", *words)
        assert refused.returncode == 2
        assert f"say --spool {shared} if you trust who loaded it" in refused.stderr
    assert not (tmp_path / "out.txt").exists()
    done = streamq("results", request, "-o", "out.txt", "--spool", "shared")

    assert done.returncode == 0, done.stderr
    assert [path.name for path in spools(tmp_path)] == ["precious.txt"]


def test_what_cannot_be_kept_there_is_refused(streamq: Command, shared: Path) -> None:
    words = ("load", "in.txt", "--handler", "echo")
    for more, why in (
        (("--spool", "shared"), "goes with --by-reference"),
        (("--by-reference", "--spool", "nowhere"), "there is no such folder"),
        (("--by-reference", "--spool", "shared", "--spool-format", "csv"), "is none of"),
    ):
        refused = streamq(*words, *more)
        assert refused.returncode == 2, more
        assert why in refused.stderr
    assert not list(shared.iterdir())


def test_workers_that_are_killed_leave_nothing_out_and_nothing_twice(
    fleet: Fleet, streamq: Command, client: Client, shared: Path, tmp_path: Path
) -> None:
    first = fleet.ready(*allowed(tmp_path), "-p", "2")
    request = load(streamq)
    wait_until(lambda: bool(spools(tmp_path)), 30)
    for pid in (*fleet.children(first), first.pid):
        os.kill(pid, signal.SIGKILL)
    fleet.ready(*allowed(tmp_path))

    done = streamq("results", request, "-o", "out.txt", "--follow", "--spool", "shared")

    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out.txt").read_bytes() == (tmp_path / "in.txt").read_bytes()


def test_a_collector_that_follows_removes_what_it_has_copied(
    fleet: Fleet, streamq: Command, client: Client, shared: Path, tmp_path: Path
) -> None:
    fleet.ready(*allowed(tmp_path), "-p", "2")
    request = load(streamq)
    wait_until(lambda: bool(spools(tmp_path)), 30)

    done = streamq("results", request, "-o", "out.txt", "--follow", "--spool", "shared")

    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out.txt").read_bytes() == (tmp_path / "in.txt").read_bytes()
    assert not (shared / request).exists()
