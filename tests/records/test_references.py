"""Parts that say where their bytes are, and inputs behind URLs, through the commands."""

import gzip
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from streamq import Client, Protocol
from streamq.model import State
from tests.conftest import ONE_KIND
from tests.runs.loads import lines_of
from tests.support import warm
from tests.support.command import python_path
from tests.support.fleet import Fleet
from tests.support.secure import as_role
from tests.support.web import Login, serve

pytestmark = pytest.mark.commands
DATA = b"".join(b"line %d\r\n" % n for n in range(20_000)) + b"last"
Load = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def load(url: str, queue: str, tmp_path: Path) -> Load:
    """Runs ``streamq load`` to its end, in the test's folder."""
    environment = {"STREAMQ_URL": as_role(url, "load"), "STREAMQ_QUEUE": queue}

    def load(*words: Any, **more: str) -> "subprocess.CompletedProcess[str]":
        line = [*warm.MODULE, "load", *map(str, words)]
        return warm.run_text(line, env=os.environ | environment | more, cwd=tmp_path)

    return load


@ONE_KIND
def test_workers_read_the_bytes_themselves(
    fleet: Fleet, load: Load, client: Client, protocol: Protocol, tmp_path: Path
) -> None:
    (tmp_path / "in.txt").write_bytes(DATA)
    fleet.ready("--allow-read", str(tmp_path))

    done = load("in.txt", "--handler", "echo", "--by-reference", "--lines", 700)

    assert done.returncode == 0, done.stderr
    request = client.get(done.stdout.strip())
    assert request.wait(30).records.done == 20_001
    assert lines_of(request) == DATA
    assert protocol.inspect(request.id).count("bytes") < len(DATA) / 50


@ONE_KIND
def test_worker_refuses_what_it_may_not_read(
    fleet: Fleet, load: Load, client: Client, tmp_path: Path
) -> None:
    inside, outside = tmp_path / "inside", tmp_path / "outside"
    inside.mkdir()
    outside.mkdir()
    (inside / "good.txt").write_text("good\n")
    (outside / "secret.txt").write_text("secret\n")
    (inside / "link.txt").symlink_to(outside / "secret.txt")
    (inside / "folder").symlink_to(outside)
    names = ["inside/good.txt", "inside/link.txt", "inside/../outside/secret.txt"]
    names += ["inside/folder/secret.txt", "outside/secret.txt"]
    fleet.ready("--allow-read", str(inside))

    done = load(*names, "--handler", "echo", "--by-reference")

    request = client.get(done.stdout.strip())
    status = request.wait(30)
    assert (status.records.done, status.records.failed) == (1, 4)
    assert [result for _, result in request.results()] == [b"good"]
    failures = request.errors()
    assert [failure.part for failure in failures] == [2, 3, 4, 5]
    for failure, name in zip(failures, names[1:], strict=True):
        assert f"may not read {tmp_path / name}" in failure.message
        assert failure.attempts == 1


@ONE_KIND
def test_worker_that_was_allowed_nothing_refuses(
    fleet: Fleet, load: Load, client: Client, tmp_path: Path
) -> None:
    (tmp_path / "in.txt").write_text("a\n")
    fleet.ready()

    done = load("in.txt", "--handler", "echo", "--by-reference")

    request = client.get(done.stdout.strip())
    assert request.wait(30).records.failed == 1
    assert "--allow-read" in request.errors()[0].message


@ONE_KIND
def test_file_that_changed_since_is_not_read(
    fleet: Fleet, load: Load, client: Client, tmp_path: Path
) -> None:
    names = ("longer.txt", "other.txt", "gone.txt", "grown.txt", "touched.txt")
    files = [tmp_path / name for name in names]
    for file in files:
        file.write_text("a\nb\n")
    done = load(*files, "--handler", "echo", "--by-reference", "--lines", 1)
    files[0].write_text("A\nB\nc\n")
    files[1].write_text("A\nB\n")
    os.utime(files[1], (1, 1))
    files[2].unlink()
    files[3].write_text("a\nb\nc\n")
    os.utime(files[4], (1, 1))

    fleet.ready("--allow-read", str(tmp_path))

    request = client.get(done.stdout.strip())
    records = request.wait(30).records
    assert (records.done, records.failed) == (4, 6)
    failures = request.errors()
    assert [(each.source, each.line) for each in failures] == [
        (str(file), line) for file in files[:3] for line in (1, 2)
    ]
    assert "it had 4 bytes, and has 6" in failures[0].message
    assert "has changed since it was loaded: it was written to" in failures[2].message
    assert "cannot be read here" in failures[4].message


@ONE_KIND
def test_compressed_files_go_as_a_whole_only(
    fleet: Fleet, load: Load, client: Client, queue: str, tmp_path: Path
) -> None:
    (tmp_path / "in.gz").write_bytes(gzip.compress(DATA))
    words = ("in.gz", "--handler", "echo", "--by-reference")

    lines = load(*words)
    left = client.list(queue)
    whole = load(*words, "--format", "file")

    assert (lines.returncode, left) == (2, [])
    assert "in.gz is compressed" in lines.stderr
    fleet.ready("--allow-read", str(tmp_path))
    request = client.get(whole.stdout.strip())
    request.wait(30)
    assert [result for _, result in request.results()] == [DATA]


@ONE_KIND
def test_standard_input_cannot_be_referred_to(load: Load) -> None:
    done = load("-", "--handler", "echo", "--by-reference")

    assert done.returncode == 2
    assert "standard input" in done.stderr


@ONE_KIND
def test_url_is_loaded_as_a_file_is(
    fleet: Fleet, load: Load, client: Client, queue: str, request_id: str
) -> None:
    pytest.importorskip("obstore")
    files = {"in.txt": DATA, "in.gz": gzip.compress(DATA)}
    with serve(files) as web:
        plain = load(f"{web}/in.txt", "--handler", "echo", "--id", request_id)
        packed = load(f"{web}/in.gz", "--handler", "echo")
        missing = load(f"{web}/nowhere", "--handler", "echo")
        files["in.txt"] = DATA.replace(b"7", b"8")
        changed = load(f"{web}/in.txt", "--handler", "echo", "--id", request_id)

    assert (plain.returncode, packed.returncode) == (0, 0), plain.stderr + packed.stderr
    assert missing.returncode == 2
    assert f"{web}/nowhere: No such object" in missing.stderr
    assert changed.returncode == 1
    assert "has other content than it had" in changed.stderr
    fleet.ready()
    for done in (plain, packed):
        request = client.get(done.stdout.strip())
        request.wait(30)
        assert lines_of(request) == DATA


@ONE_KIND
def test_url_by_reference(fleet: Fleet, load: Load, client: Client) -> None:
    pytest.importorskip("obstore")
    files = {"open/in.txt": DATA, "closed/in.txt": DATA, "open/other.txt": DATA}
    words = ("--handler", "echo", "--by-reference", "--bytes", "64KiB", "--retries", 0)
    with serve(files) as web:
        names = [f"{web}/open/in.txt", f"{web}/closed/in.txt", f"{web}/open/../closed/in.txt"]
        names.append(f"{web}/open/other.txt")
        requests = [client.get(load(name, *words).stdout.strip()) for name in names[:2]]
        requests.append(client.get(load(names[3], *words).stdout.strip()))
        files["open/other.txt"] = DATA[::-1]
        fleet.ready("--allow-read", f"{web}/open")
        states = [request.wait(60).state for request in requests]

    assert states == [State.DONE] * 3
    assert lines_of(requests[0]) == DATA
    assert {e.message for e in requests[1].errors()} == {
        f"this worker may not read {names[1]}: --allow-read does not cover it"
    }
    assert {e.message for e in requests[2].errors()} == {
        f"{names[3]} has changed since it was loaded"
    }


@ONE_KIND
def test_objects_of_an_s3(
    fleet: Fleet, load: Load, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("obstore")
    login = Login("tester", "so secret")
    files = {"stock/2026/in.txt": DATA, "stock/2026/in.gz": gzip.compress(DATA)}
    files |= {"stock/2025/in.txt": DATA}
    with serve(files, login) as s3:
        monkeypatch.setenv("AWS_ENDPOINT_URL", s3)
        monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
        monkeypatch.setenv("AWS_REGION", "eu-central-1")
        keys = {"AWS_ACCESS_KEY_ID": login.key, "AWS_SECRET_ACCESS_KEY": login.secret}
        names = [f"s3://{name}" for name in files]
        words = ("--handler", "echo", "--bytes", "64KiB", "--retries", 0)
        loaded = [
            load(names[0], *words, **keys),
            load(names[1], *words, **keys),
            load(names[0], *words, "--by-reference", **keys),
            load(names[2], *words, "--by-reference", **keys),
        ]
        missing = load("s3://stock/2026/none.txt", *words, **keys)
        refused = load(names[0], *words, **keys | {"AWS_SECRET_ACCESS_KEY": "guessed"})
        for name, value in keys.items():
            monkeypatch.setenv(name, value)
        fleet.ready("--allow-read", "s3://stock/2026")
        requests = [client.get(done.stdout.strip()) for done in loaded]
        states = [request.wait(60).state for request in requests]

    assert states == [State.DONE] * 4
    assert [lines_of(request) for request in requests[:3]] == [DATA] * 3
    assert {e.message for e in requests[3].errors()} == {
        f"this worker may not read {names[2]}: --allow-read does not cover it"
    }
    assert (missing.returncode, refused.returncode) == (2, 2)
    assert "s3://stock/2026/none.txt: No such object" in missing.stderr
    assert f"{names[0]}: " in refused.stderr
    assert "403" in refused.stderr


@ONE_KIND
def test_without_the_extra_it_says_which(load: Load, tmp_path: Path) -> None:
    (tmp_path / "obstore.py").write_text("raise ImportError")

    done = load("s3://bucket/in.txt", "--handler", "echo", PYTHONPATH=python_path(tmp_path))

    assert done.returncode == 2
    assert "pip install 'streamq[remote]'" in done.stderr


def test_run_by_reference_needs_no_more_words(tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_bytes(DATA)
    (tmp_path / "job.py").write_text("def same(line: bytes) -> bytes:\n    return line\n")
    words = ["run", "in.txt", "--map", "job:same", "-o", "out.txt", "-p", "1", "--by-reference"]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("STREAMQ")}

    done = subprocess.run(
        [sys.executable, "-m", "streamq.cli", *words],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )

    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out.txt").read_bytes() == DATA


@ONE_KIND
def test_workers_read_rows_of_tables_that_they_may_read(
    fleet: Fleet, load: Load, client: Client, tmp_path: Path
) -> None:
    pq.write_table(pa.table({"id": range(100)}), tmp_path / "in.parquet", row_group_size=30)
    fleet.ready("--allow-read", str(tmp_path))

    done = load("in.parquet", "--handler", "echo", "--lines", 20)

    assert done.returncode == 0, done.stderr
    request = client.get(done.stdout.strip())
    assert request.wait(30).records.done == 100
    assert request.status().parts.total == 2 + 2 + 2 + 1
    rows = [row for _, part in request.results() for row in part]
    assert rows == [b'{"id":%d}' % n for n in range(100)]
