"""``streamq run --flow``: files through several stages, stopped, killed and retried."""

import gzip
import json
import os
import signal
import subprocess
from pathlib import Path

import pytest

import streamq as package
from tests.conftest import FIRST_KIND
from tests.runs.running import COMMAND, EMBEDDED, Begin, Streamq, go_on
from tests.runs.test_run_found import kill_all
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.commands, EMBEDDED]
CODE = """
import os
import pathlib
import time
from collections.abc import Iterator
from streamq import App, Failed, Spread

app = App()
empty = App()

@app.map
def page(line: str) -> str:
    time.sleep(float(os.environ.get("PAUSE_S", "0")))
    return line.upper()

@app.map
def words(line: str) -> Spread:
    return Spread(line.split(), keep=line)

@app.map
def measure(word: str) -> int:
    if word == "7" and not pathlib.Path("mended").exists():
        raise ValueError("seven")
    return len(word)

@app.handler
def merge(kept: str, sizes: list[int | Failed]) -> dict:
    good = [size for size in sizes if not isinstance(size, Failed)]
    return {"line": kept, "sum": sum(good), "failed": len(sizes) - len(good)}

@app.handler
def total(lines: Iterator[dict]) -> int:
    return sum(line["sum"] for line in lines)

spread = app.flow("shop").map(page).spread(words).map(measure, retries=0, level=3, queue="gpu")
tolerant = spread.join(merge, on_failure="run")
strict = spread.join(merge)
sum_of_all = tolerant.reduce(total)
no_stages = app.flow("none")
no_spread = app.flow("joined").map(page).join(merge)
no_handler = app.flow("unknown").map(page).map("elsewhere")
long = app.flow("long")
for _ in range(17):
    long = long.map(page)
"""
LINES = [f"line {n}" for n in range(12)]
MERGED = [
    {"line": line.upper(), "sum": sum(len(word) for word in line.split()), "failed": 0}
    for line in LINES
]


@pytest.fixture(autouse=True)
def files(tmp_path: Path, streamq: Streamq) -> None:
    (tmp_path / "shop.py").write_text(CODE)
    (tmp_path / "in.txt").write_text("".join(f"{line}\n" for line in LINES))


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_output_is_in_input_order_and_failures_are_in_a_file(
    streamq: Streamq, tmp_path: Path
) -> None:
    ran = streamq("run", "in.txt", "--flow", "shop.py:tolerant", "-o", "out.jsonl")

    assert ran.returncode == 1, ran.stderr
    short = {"line": "LINE 7", "sum": 4, "failed": 1}
    assert lines(tmp_path / "out.jsonl") == [
        short if "7" in str(each["line"]) else each for each in MERGED
    ]
    (failure,) = lines(tmp_path / "out.errors.jsonl")
    wanted = {"stage": "measure", "item": "8/2", "source": "in.txt", "line": 8}
    assert {name: failure[name] for name in wanted} == wanted
    assert "12 records through 4 stages, 1 failure" in ran.stderr


def test_failed_parts_run_again_from_their_stage(streamq: Streamq, tmp_path: Path) -> None:
    ran = streamq("run", "in.txt", "--flow", "shop.py:strict", "-o", "out.jsonl")
    assert (ran.returncode, len(lines(tmp_path / "out.jsonl"))) == (1, 11)

    # A retry takes the code as it is now.
    (tmp_path / "mended").touch()
    ran = streamq("run", "--retry-failed", "last")

    assert ran.returncode == 0, ran.stderr
    found = lines(tmp_path / "out.jsonl")
    assert sorted(found, key=str) == sorted(MERGED, key=str)
    assert not (tmp_path / ".streamq").exists()


def test_what_was_joined_without_a_failed_part_is_told(streamq: Streamq, tmp_path: Path) -> None:
    streamq("run", "in.txt", "--flow", "shop.py:tolerant", "-o", "out.jsonl")
    before = (tmp_path / "out.jsonl").read_bytes()

    ran = streamq("run", "--retry-failed", "last")

    assert "no part runs again: their joins and reduces were made without" in ran.stderr
    assert (ran.returncode, (tmp_path / "out.jsonl").read_bytes()) == (1, before)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_stopped_or_killed_it_goes_on(
    streamq: Streamq, begin: Begin, tmp_path: Path, number: int
) -> None:
    (tmp_path / "mended").touch()
    many = [f"line {n}" for n in range(1_000)]
    (tmp_path / "in.txt").write_text("".join(f"{line}\n" for line in many))
    words = ("in.txt", "--flow", "shop.py:tolerant", "-o", "out.jsonl", "-p", "2")
    running = begin(*words, PAUSE_S="0.02")
    output = tmp_path / "out.jsonl"
    wait_until(lambda: output.exists() and output.stat().st_size > 2_000, 60)

    if number == signal.SIGINT:
        running.send_signal(number)
        _, said = running.communicate(timeout=100)
        assert running.returncode == 130
        go_on(streamq, said, tmp_path)
    else:
        kill_all(running)
        ran = streamq("run", *words)
        assert ran.returncode == 0, ran.stderr
        assert "going on with run" in ran.stderr

    assert [each["line"] for each in lines(output)] == [line.upper() for line in many]
    assert not (tmp_path / ".streamq").exists()


def test_another_flow_does_not_go_on_with_it(
    streamq: Streamq, begin: Begin, tmp_path: Path
) -> None:
    (tmp_path / "in.txt").write_text("line\n" * 1_000)
    running = begin("in.txt", "--flow", "shop.py:strict", "-o", "out.jsonl", PAUSE_S="0.02")
    wait_until(lambda: (tmp_path / "out.jsonl").exists(), 60)
    running.send_signal(signal.SIGINT)
    running.communicate(timeout=100)

    ran = streamq("run", "in.txt", "--flow", "shop.py:tolerant", "-o", "out.jsonl")
    assert ran.returncode == 2
    assert "the function was shop.py:strict, and is shop.py:tolerant" in ran.stderr

    ran = streamq("run", "in.txt", "--flow", "shop.py:strict", "-o", "out.jsonl", "--retries", "7")
    assert ran.returncode == 2
    assert "--retries was not given, and is 7" in ran.stderr


def test_file_of_a_flow_and_a_reduce(streamq: Streamq, tmp_path: Path) -> None:
    (tmp_path / "mended").touch()
    (tmp_path / "shop.toml").write_text(
        'app = "shop.py:app"\n'
        + "".join(
            f'[[stage]]\nkind = "{kind}"\nhandler = "{handler}"\n'
            for kind, handler in (
                ("spread", "words"),
                ("map", "measure"),
                ("join", "merge"),
                ("reduce", "total"),
            )
        )
    )
    ran = streamq("run", "in.txt", "--flow", "shop.toml", "-o", "out.txt")

    assert ran.returncode == 0, ran.stderr
    assert (tmp_path / "out.txt").read_text() == f"{sum(len(line) - 1 for line in LINES)}\n"


@pytest.mark.parametrize(
    ("flow", "code", "says"),
    [
        ("shop.py:no_stages", 2, "flow none: a flow needs a stage: add one with .map(...)"),
        ("shop.py:no_spread", 2, "flow joined: stage 2 is a join, and its spread is missing"),
        ("shop.py:no_handler", 4, "names a handler 'elsewhere' that is not there; there is page"),
        ("shop.py:long", 2, "flow long: a flow has 17 stages, more than the 16 allowed"),
        ("shop.py:app", 4, "shop.py:app is a App, not a streamq.Flow"),
        ("shop.py:nope", 4, "shop.py has no 'nope'"),
        ("shop.py", 4, "'shop.py' names no flow: write shop.py:flow"),
        ("nowhere.toml", 2, "nowhere.toml: "),
        ("bare.toml", 4, 'bare.toml does not say which app has its handlers: write app = "module'),
        ("boom.py:flow", 4, "boom.py:flow cannot be imported: RuntimeError('boom')"),
        ("ends.py:flow", 4, "ends.py:flow: its process ended with 3 while it loaded"),
    ],
)
def test_what_is_no_flow_is_refused_and_leaves_nothing(
    streamq: Streamq, tmp_path: Path, flow: str, code: int, says: str
) -> None:
    (tmp_path / "boom.py").write_text("raise RuntimeError('boom')\n")
    (tmp_path / "ends.py").write_text("import os\nprint('hello')\nos._exit(3)\n")
    (tmp_path / "bare.toml").write_text('[[stage]]\nhandler = "page"\n')

    ran = streamq("run", "in.txt", "--flow", flow, "-o", "out.jsonl")

    assert (ran.returncode, ran.stdout) == (code, "")
    assert says in ran.stderr
    assert not (tmp_path / "out.jsonl").exists()
    assert not (tmp_path / ".streamq").exists()


def test_damaged_file_ends_a_flow_and_leaves_nothing(streamq: Streamq, tmp_path: Path) -> None:
    (tmp_path / "bad.gz").write_bytes(gzip.compress(b"a b\n" * 5_000)[:-40])

    ran = streamq("run", "in.txt", "bad.gz", "--flow", "shop.py:strict", "-o", "out.jsonl")

    assert ran.returncode == 2, ran.stderr
    assert "bad.gz" in ran.stderr
    assert not (tmp_path / "out.jsonl").exists()


def test_run_takes_one_of_map_flow_and_exec(streamq: Streamq) -> None:
    ran = streamq("run", "in.txt", "--flow", "shop.py:strict", "--map", "shop.py:page", "-o", "o")
    assert (ran.returncode, ran.stdout) == (2, "")
    assert "one of --map MODULE:FUNCTION, --flow MODULE:FLOW and --exec 'PROGRAM'" in ran.stderr


def test_spread_of_many_records_has_few_children_in_a_part(
    streamq: Streamq, tmp_path: Path
) -> None:
    """With parts of many records, all their children together would be too many."""
    (tmp_path / "in.txt").write_text("a b c d e\n" * 500)

    ran = streamq("run", "in.txt", "--flow", "shop.py:spread", "-o", "out.txt")

    assert ran.returncode == 0, ran.stderr
    assert (tmp_path / "out.txt").read_text() == "1\n" * 2_500


def test_python_runs_a_flow_and_watches_its_stages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("STREAMQ_URL", raising=False)
    monkeypatch.setenv("PAUSE_S", "0.1")
    (tmp_path / "mended").touch()
    seen: list[list[str]] = []

    status = package.run(
        "in.txt",
        flow="shop.py:tolerant",
        output="out.jsonl",
        watch=lambda told: seen.append([stage.name for stage in told.stages]),
    )

    assert lines(tmp_path / "out.jsonl") == MERGED
    assert [stage.parts.done for stage in status.stages or ()] == [12, 12, 24, 12]
    assert seen[-1] == ["page", "words", "measure", "merge"]
    with pytest.raises(package.InvalidValue, match="one of map, flow and exec"):
        package.run("in.txt", "shop.py:page", "o", flow="shop.py:strict")
    with pytest.raises(package.InvalidValue, match="are names"):
        package.run("in.txt", flow=object(), output="o")  # type: ignore[arg-type]


@FIRST_KIND
def test_runs_of_the_same_flow_do_not_take_parts_of_each_other(
    tmp_path: Path, url: str, queue: str
) -> None:
    """On one server, in one queue: each has names of its own for its handlers."""
    (tmp_path / "mended").touch()
    words = ["--flow", "shop.py:tolerant", "--url", url, "--queue", queue, "-p", "1"]
    command = [*COMMAND, "run", "in.txt", *words]
    running = [
        subprocess.Popen(
            [*command, "-o", f"{name}.jsonl"], cwd=tmp_path, stderr=subprocess.PIPE, env=os.environ
        )
        for name in ("one", "two")
    ]
    for each in running:
        _, said = each.communicate(timeout=100)
        assert each.returncode == 0, said
    assert lines(tmp_path / "one.jsonl") == lines(tmp_path / "two.jsonl") == MERGED
