"""``streamq run`` through its command: the whole job at once."""

import bz2
import gzip
import json
import lzma
import random
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from streamq import Client
from streamq.servers.local import LocalServer
from tests.runs.running import Begin, Streamq
from tests.support.waiting import wait_until

pytestmark = pytest.mark.commands


def processes_in(folder: Path) -> list[int]:
    """Ids of the processes whose current folder it is."""
    found = []
    for link in Path("/proc").glob("[0-9]*/cwd"):
        with suppress(OSError):
            if link.readlink() == folder:
                found.append(int(link.parent.name))
    return found


@pytest.mark.parametrize("target", ["job:same", "job.py:same"])
def test_identity_gives_the_input_back_and_leaves_nothing(
    streamq: Streamq, source: Path, tmp_path: Path, target: str
) -> None:
    done = streamq("run", "in.txt", "--map", target, "-o", "out.txt", "-p", 2, "--lines", 100)

    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out.txt").read_bytes() == source.read_bytes()
    assert not (tmp_path / ".streamq").exists()
    assert "3,001 records in 31 parts, 0 failed" in done.stderr


def test_too_many_failures_end_it_though_more_is_to_be_loaded(
    streamq: Streamq, tmp_path: Path
) -> None:
    (tmp_path / "in.txt").write_bytes(b"line 7\n" * 2_000_000)
    words = ("--retries", 0, "--max-failures", 5, "--window", "1MiB", "--lines", 100, "--keep", 0)

    done = streamq("run", "in.txt", "--map", "job:picky", "-o", "out.txt", "-p", 1, *words)

    assert done.returncode == 1
    assert "failed in " in done.stderr
    assert "go on with" not in done.stderr
    assert "seven" in (tmp_path / "out.errors.jsonl").read_text()
    assert not (tmp_path / ".streamq").exists()


@pytest.mark.parametrize(
    ("output", "lines"), [("out.csv", "result\na\n\u00e4\n"), ("out.jsonl", '"a"\n"\u00e4"\n')]
)
def test_bytes_are_text_in_formats_of_text(
    streamq: Streamq, tmp_path: Path, output: str, lines: str
) -> None:
    (tmp_path / "in.txt").write_text("a\n\u00e4\n")

    done = streamq("run", "in.txt", "--map", "job:same", "-o", output)

    assert (done.returncode, (tmp_path / output).read_text()) == (0, lines)


def test_quoted_csv_comes_back_with_its_header(streamq: Streamq, tmp_path: Path) -> None:
    rows = b"".join(b'%d,"say ""hi"",\r\nthen go"\r\n' % n for n in range(500))
    (tmp_path / "in.csv").write_bytes(b"number,note\r\n" + rows)

    done = streamq("run", "in.csv", "--map", "job:same", "-o", "out", "--lines", 7)

    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out").read_bytes() == (tmp_path / "in.csv").read_bytes()


def test_window_holds_what_is_not_collected_too(
    begin: Begin, streamq: Streamq, tmp_path: Path
) -> None:
    """The first part keeps all others from being written: the load waits, not the memory grows."""
    window = 4 * 2**20
    (tmp_path / "in.txt").write_bytes(b"".join(b"%099d\n" % n for n in range(200_000)))
    words = ["in.txt", "--map", "job:swollen", "-o", "out", "-p", "2", "--lines", "100"]
    with LocalServer.start() as server, Client(server.url) as client:
        running = begin(*words, "--window", window, "--url", server.url)
        (name,) = wait_until(lambda: list((tmp_path / ".streamq").glob("*/plan.json")), 60)
        request = client.get(wait_until(lambda: client.list(), 60)[0].id)

        totals: list[int] = []

        def is_at_rest() -> bool:
            """Everything but the first part is done, and nothing was loaded for fifty looks."""
            parts = request.status().parts
            totals.append(parts.total if parts.done == parts.total - 1 else -len(totals))
            return parts.done > 0 and len(set(totals[-50:])) == 1 and len(totals) > 50

        wait_until(is_at_rest, 60)
        stalled = request.status()
        (tmp_path / "go").touch()
        _, said = running.communicate(timeout=60)

    assert name.parent.name == stalled.id
    assert running.returncode == 0, said
    assert stalled.state == "loading"
    assert stalled.parts.done * 40_000 < 3 * window
    with (tmp_path / "out").open("rb") as out:
        assert sum(len(line) == 397 for line in out) == 200_000


def test_failures_are_written_beside_and_the_code_is_1(
    streamq: Streamq, source: Path, tmp_path: Path
) -> None:
    done = streamq(
        "run", "in.txt", "--map", "job:picky", "-o", "out.jsonl", "--retries", 0, "--json"
    )

    assert done.returncode == 1, done.stderr
    summary = json.loads(done.stdout)
    assert (summary["records"]["done"], summary["records"]["failed"]) == (2701, 300)
    lines = (tmp_path / "out.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines[:2]] == ["LINE 0", "LINE 1"]
    failures = [
        json.loads(line) for line in (tmp_path / "out.errors.jsonl").read_text().splitlines()
    ]
    assert [(f["line"], f["error"]) for f in failures[:2]] == [
        (8, "ValueError"),
        (18, "ValueError"),
    ]


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (("run", "in.txt", "-o", "out.txt"), 2, "one of --map"),
        (
            ("run", "in.txt", "--map", "job:same", "--exec", "cat", "-o", "out.txt"),
            2,
            "one of --map",
        ),
        (("run", "in.txt", "--map", "job:same", "--json"), 2, "-o FILE"),
        (("run", "in.txt", "--exec", "no-such-program -x"), 4, "no program 'no-such-program'"),
        (("run", "in.txt", "--exec", "tr 'a"), 2, "No closing quotation"),
        (("run", "in.txt", "--exec", "cat", "--output-format", "csv"), 2, "--map"),
        (("run", "none.txt", "--map", "job:same", "-o", "out.txt"), 2, "none.txt: No such file"),
        (("run", "in.txt", "--map", "job:nothing", "-o", "out.txt"), 4, "no 'nothing'"),
        (("run", "in.txt", "--map", "nowhere:f", "-o", "out.txt"), 4, "no module 'nowhere'"),
        (("run", "in.txt", "--map", "job", "-o", "out.txt"), 4, "'job' names no function"),
        (("run", "in.txt", "--map", "job.py", "-o", "out.txt"), 4, "write job.py:function"),
        (("run", "in.txt", "--map", ":same", "-o", "out.txt"), 4, "':same' names no function"),
        (("run", "in.txt", "--map", "../job:f", "-o", "out.txt"), 4, "no module '../job'"),
        (("run", "in.txt", "--map", "/:f", "-o", "out.txt"), 4, "no module '/'"),
        (("run", "in.txt", "--map", "job:app", "-o", "out.txt"), 4, "job:shout or job:later"),
        (
            ("run", "in.txt", "--map", "job:app.shout", "-o", "out.txt"),
            4,
            "app has 'shout', 'later'",
        ),
        (("run", "in.txt", "--map", "job:NUMBER", "-o", "out.txt"), 4, "int, not a function"),
        (("run", "in.txt", "--map", "job:same", "-o", "no/out.txt"), 2, "there is no folder"),
        (("run", "in.txt", "--map", "job:same", "-o", "in.txt"), 2, "of the inputs"),
        (("run", "in.txt", "--map", "job:same", "-o", "."), 2, "is a folder"),
        (("run", "in.txt", "--map", "job:same", "-o", "in.txt", "--force"), 2, "of the inputs"),
        (("run", "", "--map", "job:same", "-o", "out.txt"), 2, "a file has no name"),
        (("run", "--resume", "other"), 2, "no run other was stopped"),
    ],
)
def test_mistakes_are_named_and_leave_nothing(
    streamq: Streamq, source: Path, tmp_path: Path, words: tuple[str, ...], code: int, says: str
) -> None:
    done = streamq(*words)

    assert done.returncode == code, done.stderr
    assert says in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / ".streamq").exists()
    assert processes_in(tmp_path) == []


def test_file_with_the_name_of_a_module_of_python(streamq: Streamq, tmp_path: Path) -> None:
    (tmp_path / "gc.py").write_text(
        "import gc\ndef up(line: str) -> str:\n    return f'{line} {gc.isenabled()}'\n"
    )
    (tmp_path / "in.txt").write_text("a\nb\n")

    by_module = streamq("run", "in.txt", "--map", "gc:up", "-o", "out.txt")
    by_file = streamq("run", "in.txt", "--map", "gc.py:up", "-o", "out.txt")

    assert by_module.returncode == 4
    assert "gc has no 'up': gc is a module of Python; write gc.py:up" in by_module.stderr
    assert by_file.returncode == 0, by_file.stderr
    assert (tmp_path / "out.txt").read_text() == "a True\nb True\n"


def test_files_in_the_folder_do_not_take_the_place_of_modules_of_python(tmp_path: Path) -> None:
    for name in ("json", "queue", "selectors", "secrets"):
        (tmp_path / f"{name}.py").write_text("raise RuntimeError('imported by mistake')\n")
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "job.py").write_text("from words import up\n")
    (tmp_path / "words.py").write_text("def up(line: str) -> str:\n    return line.upper()\n")
    (tmp_path / "in.txt").write_text("a\nb\n")
    # As the installed command does: -m alone would put this folder first, for all modules.
    command = [sys.executable, "-P", "-m", "streamq.cli", "run", "in.txt", "-o", "out.txt"]

    done = subprocess.run([*command, "--map", "code/job.py:up"], cwd=tmp_path, capture_output=True)

    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out.txt").read_text() == "A\nB\n"


def test_killed_while_it_starts_it_leaves_no_process(
    begin: Begin, streamq: Streamq, source: Path, tmp_path: Path
) -> None:
    words = ["in.txt", "--map", "job:same", "-o", "out.txt", "-p", "2"]
    running = begin(*words)
    wait_until(lambda: len(processes_in(tmp_path)) == 3, 30)

    running.kill()
    running.wait()

    wait_until(lambda: not processes_in(tmp_path), 15)


def test_bad_input_is_what_is_told_of_whoever_finds_out_first(
    streamq: Streamq, tmp_path: Path
) -> None:
    (tmp_path / "long.txt").write_bytes(b"short\n" + b"x" * 1_500_000)

    for _ in range(5):
        done = streamq("run", "long.txt", "--map", "job:same", "-o", "out.txt", "--strict")

        assert done.returncode == 2, done.stderr
        assert "long.txt" in done.stderr
        assert not (tmp_path / ".streamq").exists()
        assert not (tmp_path / "out.txt").exists()


def test_window_of_a_few_bytes_is_slow_but_ends(streamq: Streamq, tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_text("a\nb\nc\n")

    done = streamq(
        "run", "in.txt", "--map", "job:same", "-o", "out.txt", "--lines", 1, "--window", 3
    )

    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out.txt").read_text() == "a\nb\nc\n"


class TestWords:
    def test_failures_are_among_the_records(self, streamq: Streamq, tmp_path: Path) -> None:
        (tmp_path / "in.txt").write_text("1\nnan\ninf\n2\n-inf\n")

        done = streamq("run", "in.txt", "--map", "job:endless", "-o", "out.jsonl")

        assert "5 records in 5 parts, 3 of them failed" in done.stderr

    def test_record_that_does_not_decode_or_encode_says_so(
        self, streamq: Streamq, tmp_path: Path
    ) -> None:
        (tmp_path / "in.jsonl").write_text('{"a":1}\n[1]\n{"a"\n')
        (tmp_path / "in.csv").write_text("a,b\n1\n")
        (tmp_path / "in.txt").write_text("nan\n")

        for name, function, errors in (
            ("in.jsonl", "typed", ["DecodeError"] * 2),
            ("in.csv", "rowed", ["DecodeError"]),
            ("in.txt", "endless", ["EncodeError"]),
        ):
            out = f"{name}.out"
            done = streamq("run", name, "--map", f"job:{function}", "-o", out, "--retries", 0)
            assert done.returncode == 1, done.stderr
            lines = (tmp_path / f"{name}.errors.jsonl").read_text().splitlines()
            found = [json.loads(line) for line in lines]
            assert [each["error"] for each in found] == errors
            assert {each.get("traceback", "") for each in found} == {""}

    @pytest.mark.parametrize("suffix", ["gz", "bz2", "xz"])
    def test_compressed_file_that_is_cut_is_named(
        self, streamq: Streamq, tmp_path: Path, suffix: str
    ) -> None:
        text = random.Random(1).randbytes(50_000).hex().encode()
        whole = {"gz": gzip.compress(text), "bz2": bz2.compress(text), "xz": lzma.compress(text)}[
            suffix
        ]
        (tmp_path / f"in.{suffix}").write_bytes(whole[: len(whole) // 2])

        done = streamq("run", f"in.{suffix}", "--map", "job:same", "-o", "out.txt")

        assert done.returncode == 2
        assert f"in.{suffix}: " in done.stderr
        assert "the file is cut off" in done.stderr
