"""Manifests: what an output was made of and what came of it, and ``streamq verify``."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from streamq import Client
from tests.conftest import FIRST_KIND
from tests.runs.running import EMBEDDED, Begin, Streamq
from tests.support import warm
from tests.support.fleet import Fleet
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.commands]
CODE = """
import os
import pathlib
import time
def picky(line: str) -> str | None:
    time.sleep(float(os.environ.get("PAUSE_S", "0")))
    if line.endswith("7") and not pathlib.Path("mended").exists():
        raise ValueError("seven")
    return None if line.endswith("3") else line.upper()
"""
RUN = ("run", "in.txt", "--map", "picky.py:picky", "-o", "out.jsonl", "--retries", "0")


@pytest.fixture(autouse=True)
def files(tmp_path: Path, streamq: Streamq) -> None:
    (tmp_path / "picky.py").write_text(CODE)
    (tmp_path / "in.txt").write_text("".join(f"line {n}\n" for n in range(100)))


def manifest(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "out.manifest.json").read_text())
    return found


def counts(folder: Path) -> list[int]:
    found = manifest(folder)
    return [found[name] for name in ("records", "done", "failed", "dropped")]


@EMBEDDED
@pytest.mark.parametrize("way", ["--spool", "--no-spool"])
def test_run_writes_it_and_it_holds_until_a_byte_changes(
    streamq: Streamq, tmp_path: Path, way: str
) -> None:
    assert streamq(*RUN, way, "--manifest").returncode == 1
    assert counts(tmp_path) == [100, 90, 10, 10]
    ran = streamq("verify", "out.jsonl")
    assert (ran.returncode, ran.stderr) == (0, "")
    assert [line[:3] for line in ran.stdout.splitlines()] == ["ok "] * 4

    for name, what in (
        ("out.jsonl", "output"),
        ("in.txt", "input"),
        ("out.errors.jsonl", "failures"),
    ):
        path = tmp_path / name
        whole = path.read_bytes()
        path.write_bytes(whole[:20] + bytes([whole[20] ^ 1]) + whole[21:])
        ran = streamq("verify", "out.jsonl")
        assert ran.returncode == 1
        assert f"BAD {what} " in ran.stdout
        assert "has other bytes than it had" in ran.stdout
        assert ran.stderr == "streamq: 1 of 4 checks failed\n"
        path.write_bytes(whole[:-1])
        assert "bytes, and had" in streamq("verify", "out.jsonl").stdout
        path.write_bytes(whole)
    assert streamq("verify", "out.jsonl").returncode == 0
    (tmp_path / "in.txt").unlink()
    assert "BAD input in.txt: No such file" in streamq("verify", "out.jsonl").stdout


@EMBEDDED
def test_retry_writes_it_anew(streamq: Streamq, tmp_path: Path) -> None:
    streamq(*RUN, "--manifest")
    (tmp_path / "mended").touch()

    assert streamq("run", "--retry-failed", "last").returncode == 0

    assert counts(tmp_path) == [100, 100, 0, 10]
    assert manifest(tmp_path)["errors"] is None
    assert streamq("verify", "out.jsonl").returncode == 0


@EMBEDDED
def test_run_that_was_stopped_has_one_at_its_end(
    streamq: Streamq, begin: Begin, tmp_path: Path
) -> None:
    (tmp_path / "mended").touch()
    running = begin(*RUN[1:], "--manifest", "--lines", "1", PAUSE_S="0.05")
    output = tmp_path / "out.jsonl"
    wait_until(lambda: output.exists() and output.stat().st_size > 50, 60)
    running.send_signal(signal.SIGINT)
    running.communicate(timeout=60)
    assert not (tmp_path / "out.manifest.json").exists()

    ran = streamq(*RUN, "--manifest", "--lines", "1")

    assert ran.returncode == 0, ran.stderr
    assert counts(tmp_path) == [100, 100, 0, 10]
    assert streamq("verify", "out.jsonl", "--json").returncode == 0


@EMBEDDED
def test_compressed_output_and_one_in_another_folder(streamq: Streamq, tmp_path: Path) -> None:
    (tmp_path / "mended").touch()
    words = [*RUN[:5], "out.jsonl.gz", *RUN[6:]]
    assert streamq(*words, "--manifest").returncode == 0
    assert manifest(tmp_path)["output"]["lines"] == 90

    moved = tmp_path / "elsewhere"
    moved.mkdir()
    for name in ("out.jsonl.gz", "out.manifest.json", "in.txt"):
        (tmp_path / name).rename(moved / name)
    assert streamq("verify", "elsewhere/out.jsonl.gz").returncode == 0


@EMBEDDED
def test_what_cannot_be_is_refused(streamq: Streamq, tmp_path: Path) -> None:
    ran = streamq("verify", "out.jsonl")
    assert (ran.returncode, ran.stdout) == (2, "")
    assert "out.jsonl has no manifest to verify it by" in ran.stderr

    (tmp_path / "out.manifest.json").write_text("mine")
    assert "it cannot be read" in streamq("verify", "out.jsonl").stderr
    ran = streamq(*RUN, "--manifest")
    assert (ran.returncode, (tmp_path / "out.manifest.json").read_text()) == (2, "mine")
    assert "exists and is no manifest: remove it, or say --force" in ran.stderr

    ran = streamq(*RUN[:5], "-", "--manifest")
    assert ran.returncode == 2
    assert "--manifest goes with an output that is a file" in ran.stderr


@FIRST_KIND
def test_results_write_it_when_they_are_complete(
    client: Client, fleet: Fleet, url: str, queue: str, tmp_path: Path
) -> None:
    request = client.submit(["a", "b"], handler="echo", queue=queue)
    words = [*warm.MODULE, "results", request.id, "-o", "out.jsonl", "--manifest"]
    environment = os.environ | {"STREAMQ_URL": url, "STREAMQ_QUEUE": queue}
    warm.run(words, env=environment, cwd=tmp_path)
    assert not (tmp_path / "out.manifest.json").exists()

    fleet.start()
    request.wait(60)
    ran = warm.run(words, env=environment, cwd=tmp_path)

    assert ran.returncode == 0, ran.stderr
    assert counts(tmp_path)[:3] == [2, 2, 0]
    assert (
        warm.run([*warm.MODULE, "verify", "out.jsonl"], env=environment, cwd=tmp_path).returncode
        == 0
    )
