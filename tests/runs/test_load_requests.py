"""``streamq load`` of a file with many requests."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from streamq import Client, Protocol
from tests.conftest import ONE_KIND
from tests.runs.loads import Load
from tests.support.secure import as_role

pytestmark = pytest.mark.commands
SAMPLES = Path(__file__).parents[2] / "samples"


class TestRequests:
    @ONE_KIND
    def test_sample_runs_as_its_readme_says(
        self, command: tuple[list[str], dict[str, str]], client: Client, url: str, tmp_path: Path
    ) -> None:
        for file in SAMPLES.iterdir():
            if file.is_file():
                shutil.copy(file, tmp_path)
        readme = (SAMPLES / "README.md").read_text()
        (script,) = re.findall(r"```\n(streamq load requests.*?)```", readme, re.DOTALL)
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"

        done = subprocess.run(
            ["bash", "-ec", script],
            env=command[1] | {"PATH": path, "STREAMQ_URL": as_role(url, "run")},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=100,
        )

        assert done.returncode == 0, done.stderr
        words = (SAMPLES / "requests").read_text()
        lines = [line.split(":") for line in words.splitlines() if line and line[0] != "#"]
        assert done.stdout.split() == [word.upper() for _, *parts in lines for word in parts]
        ids = (tmp_path / "ids").read_text().split()
        assert [client.get(each).status().limit for each in ids] == [int(n) for n, *_ in lines]

    @ONE_KIND
    def test_same_again_makes_no_request_twice(
        self, load: Load, client: Client, queue: str, tmp_path: Path, request_id: str
    ) -> None:
        file = tmp_path / "in"
        file.write_bytes(b"# one\n1:a:b\r\n\n20:c::d: ")
        words = (file, "--handler", "echo", "--format", "requests", "--id", request_id)

        done = load(*words)
        again = load(*words)
        file.write_bytes(b"1:a:b\n20:c:d\n3:e\n")
        longer = load(*words)
        file.write_bytes(b"1:a:b\n21:c:d\n")
        other = load(*words)

        ids = [f"{request_id}-1", f"{request_id}-2"]
        assert done.stdout.split() == again.stdout.split() == ids
        assert longer.stdout.split() == [*ids, f"{request_id}-3"]
        assert other.returncode == 1
        assert "in: line 2: request" in other.stderr
        found = {status.id: (status.limit, status.parts.total) for status in client.list(queue)}
        assert found == dict(zip([*ids, f"{request_id}-3"], [(1, 2), (20, 2), (3, 1)], strict=True))

    def test_many_at_once_go_on_where_a_load_stood(
        self,
        load: Load,
        client: Client,
        protocol: Protocol,
        queue: str,
        tmp_path: Path,
        request_id: str,
    ) -> None:
        file, words = tmp_path / "in", ("--handler", "echo", "--format", "requests")
        lines = [b"%d:a%d:b\n" % (n, n) for n in range(1, 301)]
        file.write_bytes(b"\xef\xbb\xbf" + b"".join(lines[:100]))
        assert load(file, *words, "--id", request_id).returncode == 0
        file.write_bytes(b"".join(lines))

        done = load(file, *words, "--id", request_id)

        ids = [f"{request_id}-{n}" for n in range(1, 301)]
        assert done.stdout.split() == ids, done.stderr
        found = {each.id: (each.limit, each.parts.total) for each in client.list(queue)}
        assert found == {each: (n, 2) for n, each in enumerate(ids, 1)}
        assert protocol.unknown([*ids, f"{request_id}-301"]) == {f"{request_id}-301"}

    @ONE_KIND
    def test_many_lines_without_a_request_are_passed_over(
        self, load: Load, tmp_path: Path, request_id: str
    ) -> None:
        file = tmp_path / "in"
        file.write_bytes(b"# a comment\n" * 1_200 + b"1:a\n")

        done = load(file, "--handler", "echo", "--format", "requests", "--id", request_id)

        assert done.stdout.split() == [f"{request_id}-1"], done.stderr

    @ONE_KIND
    @pytest.mark.parametrize("line", [b"a:b", b"0:a", b"-1:a", b"3", b"3: :", b"1.5:a"])
    def test_bad_line_is_named_and_nothing_is_submitted(
        self, load: Load, client: Client, queue: str, tmp_path: Path, line: bytes
    ) -> None:
        (tmp_path / "in").write_bytes(b"1:a\n\n" + line + b"\n")

        done = load(tmp_path / "in", "--handler", "echo", "--format", "requests")

        assert (done.returncode, done.stdout) == (2, "")
        assert "in: line 3: " in done.stderr
        assert client.list(queue) == []
