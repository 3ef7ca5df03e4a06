"""``streamq run`` on local files: parts by reference, and results in spools."""

import gzip
import json
import os
import random
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import pytest

from tests.runs.running import COMMAND, EMBEDDED, Begin, Streamq, descendants, wait_for_the_end_of
from tests.support.waiting import is_alive, wait_until

pytestmark = [pytest.mark.commands, EMBEDDED]

CODE = '''
import os
import pathlib
import time
def held(line: bytes) -> bytes:
    """The first line waits until it may go: all that comes after it waits in spools."""
    while line == b"line 0" and not pathlib.Path("go").exists():
        time.sleep(0.01)
    if line == b"line 9077" and pathlib.Path("fails").exists():
        raise ValueError("not this time")
    return line
def wanders(line: bytes) -> bytes:
    os.chdir("/")
    return line
def picky(line: str) -> str:
    if line.endswith("77"):
        raise ValueError("sevens")
    return line
def slow(line: bytes) -> bytes:
    if line.endswith(b"00"):
        time.sleep(float(os.environ.get("PAUSE_S", "0")))
    return line
def same(row: bytes) -> bytes:
    return row
def ident(row: dict) -> int:
    return int(row["id"])
def named(line: str) -> dict:
    return {"name": line}
'''
RUN = ("in.txt", "--lines", "1000", "-p", "2")
LINES = 40_000


@pytest.fixture
def source(tmp_path: Path) -> Path:
    (tmp_path / "held.py").write_text(CODE)
    path = tmp_path / "in.txt"
    path.write_bytes(b"".join(b"line %d\n" % n for n in range(LINES)) + b"last")
    return path


def spools(folder: Path) -> list[Path]:
    return sorted(folder.glob(".streamq/*/spool/*"))


def spooled(folder: Path) -> int:
    """How many bytes wait in spools."""
    return sum(path.stat().st_size for path in spools(folder))


def killed_with_spools(begin: Begin, source: Path, *options: str) -> Path:
    """A run whose processes were all killed while its results waited in spools; its output."""
    folder = source.parent
    running = begin(*RUN, "--map", "held.py:held", "-o", "out.txt", *options)
    # All but the part that waits, and what waits behind it in the same hands.
    wait_until(lambda: spooled(folder) > source.stat().st_size * 0.8, 60)
    pids = [running.pid, *descendants(running.pid)]
    running.kill()
    running.communicate()
    wait_until(lambda: not any(is_alive(pid) for pid in pids), 15)
    (folder / "go").touch()
    return folder / "out.txt"


def resumed(streamq: Streamq, *options: str) -> str:
    done = streamq("run", *RUN, "--map", "held.py:held", "-o", "out.txt", *options)
    assert done.returncode == 0, done.stderr
    assert "going on with run" in done.stderr
    return done.stderr


def test_results_wait_in_spools_until_their_turn(
    begin: Begin, source: Path, tmp_path: Path
) -> None:
    running = begin(*RUN, "--map", "held.py:held", "-o", "out.txt")

    wait_until(lambda: spooled(tmp_path) > source.stat().st_size * 0.8, 60)
    server = sum(path.stat().st_size for path in tmp_path.glob(".streamq/*/server/*/*.aof"))
    (tmp_path / "go").touch()
    _, said = running.communicate(timeout=60)

    assert running.returncode == 0, said
    assert server < source.stat().st_size / 2
    assert (tmp_path / "out.txt").read_bytes() == source.read_bytes()
    assert not (tmp_path / ".streamq").exists()


def test_killed_it_takes_results_from_its_spools(
    streamq: Streamq, begin: Begin, source: Path
) -> None:
    output = killed_with_spools(begin, source)

    said = resumed(streamq)

    assert "runs again" not in said
    assert output.read_bytes() == source.read_bytes()


@pytest.mark.long
@pytest.mark.parametrize("damage", ["truncated", "overwritten", "removed"])
def test_what_is_lost_in_a_spool_runs_again(
    streamq: Streamq, begin: Begin, source: Path, tmp_path: Path, damage: str
) -> None:
    output = killed_with_spools(begin, source)
    chance = random.Random(7)
    for path in spools(tmp_path):
        at = chance.randrange(path.stat().st_size)
        if damage == "truncated":
            os.truncate(path, at)
        elif damage == "overwritten":
            data = path.read_bytes()
            path.write_bytes(data[:at] + bytes(min(5_000, len(data) - at)) + data[at + 5_000 :])
        else:
            path.unlink()

    said = resumed(streamq)

    assert "runs again" in said
    assert output.read_bytes() == source.read_bytes()
    assert not (tmp_path / ".streamq").exists()


def tear(path: Path, chance: random.Random) -> None:
    """Cut a spool off somewhere, as a power cut may."""
    os.truncate(path, chance.randrange(path.stat().st_size + 1))


@pytest.mark.timeout(600)
def test_killed_at_random_moments_with_torn_spools_it_gives_the_input_back(
    streamq: Streamq, begin: Begin, source: Path, tmp_path: Path
) -> None:
    kills = int(os.environ.get("STREAMQ_TEST_KILLS", "2"))
    chance = random.Random(os.environ.get("STREAMQ_TEST_SEED", kills))
    output, torn = tmp_path / "out.txt", 0
    marks = sorted(chance.randrange(source.stat().st_size) for _ in range(kills))
    words = [*RUN, "--map", "held.py:slow", "-o", "out.txt"]
    for mark in marks:
        running = begin(*words, PAUSE_S="0.02")
        while running.poll() is None and mark >= (output.stat().st_size if output.exists() else 0):
            time.sleep(0.001)
        time.sleep(chance.random() / 10)
        pids = [running.pid, *descendants(running.pid)]
        if chance.random() < 0.5:
            for pid in chance.sample(pids, len(pids)):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        running.kill()
        running.communicate()
        wait_for_the_end_of(pids)
        if chance.random() < 0.5:
            for path in spools(tmp_path):
                tear(path, chance)
                torn += 1

    done = streamq("run", *words)

    assert done.returncode == 0, done.stderr
    assert output.read_bytes() == source.read_bytes()
    assert not (tmp_path / ".streamq").exists()
    print(f"{kills} kills, {torn} spools torn")


@pytest.mark.long
def test_record_that_fails_when_its_lost_result_is_made_again_is_told(
    streamq: Streamq, begin: Begin, source: Path, tmp_path: Path
) -> None:
    output = killed_with_spools(begin, source, "--retries", "0")
    for path in spools(tmp_path):
        path.unlink()
    (tmp_path / "fails").touch()
    words = ("run", *RUN, "--map", "held.py:held", "-o", "out.txt", "--retries", "0")

    done = streamq(*words)

    assert done.returncode == 1, done.stderr
    assert "its part failed when it ran again" in done.stderr
    (tmp_path / "fails").unlink()
    assert streamq(*words).returncode == 0
    assert output.read_bytes() == source.read_bytes()


@pytest.mark.long
def test_in_any_order(streamq: Streamq, begin: Begin, source: Path) -> None:
    output = killed_with_spools(begin, source, "--unordered")

    resumed(streamq, "--unordered")

    found, given = output.read_bytes().splitlines(), source.read_bytes().splitlines()
    assert sorted(found) == sorted(given)


@pytest.mark.long
def test_without_a_folder_for_spools_results_go_to_the_server(
    streamq: Streamq, begin: Begin, source: Path, tmp_path: Path
) -> None:
    running = begin(*RUN, "--map", "held.py:held", "-o", "out.txt")
    wait_until(lambda: bool(spools(tmp_path)), 60)
    running.terminate()
    running.communicate()
    (folder,) = tmp_path.glob(".streamq/*/spool")
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()
    folder.write_bytes(b"no folder")
    (tmp_path / "go").touch()

    resumed(streamq)

    assert (tmp_path / "out.txt").read_bytes() == source.read_bytes()


@pytest.mark.long
def test_into_a_compressed_output(streamq: Streamq, source: Path, tmp_path: Path) -> None:
    (tmp_path / "go").touch()

    done = streamq("run", *RUN, "--map", "held.py:held", "-o", "out.txt.gz")

    assert done.returncode == 0, done.stderr
    assert gzip.decompress((tmp_path / "out.txt.gz").read_bytes()) == source.read_bytes()


@pytest.mark.long
def test_values_become_lines_of_json(streamq: Streamq, source: Path, tmp_path: Path) -> None:
    done = streamq("run", *RUN, "--map", "held.py:named", "-o", "out.jsonl")

    assert done.returncode == 0, done.stderr
    found = [json.loads(line)["name"] for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert found == source.read_text().split("\n")


@pytest.mark.long
def test_a_handler_may_go_to_another_folder(streamq: Streamq, source: Path, tmp_path: Path) -> None:
    done = streamq("run", *RUN, "--map", "held.py:wanders", "-o", "out.txt")

    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out.txt").read_bytes() == source.read_bytes()


@pytest.mark.long
def test_failures_have_their_record_and_a_retry_puts_results_in_their_place(
    streamq: Streamq, source: Path, tmp_path: Path
) -> None:
    done = streamq("run", *RUN, "--map", "held.py:picky", "-o", "out.txt")

    assert done.returncode == 1, done.stderr
    told = (tmp_path / "out.errors.jsonl").read_text()
    failures = [json.loads(line) for line in told.splitlines()]
    assert len(failures) == LINES // 100
    assert all(each["input"] == f"line {each['line'] - 1}" for each in failures)
    assert {each["source"] for each in failures} == {"in.txt"}
    assert not spools(tmp_path)

    (tmp_path / "held.py").write_text(CODE.replace('"77"', '"nothing"'))
    done = streamq("run", "--retry-failed", "last")

    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out.txt").read_bytes() == source.read_bytes()


def stopped_with_spools(begin: Begin, source: Path) -> None:
    """A run that was killed when some of its results were in spools."""
    running = begin(*RUN, "--map", "held.py:held", "-o", "out.txt")
    wait_until(lambda: bool(spools(source.parent)), 60)
    running.kill()
    running.communicate()
    (source.parent / "go").touch()


def test_an_input_that_changes_is_refused_in_words(
    streamq: Streamq, begin: Begin, source: Path
) -> None:
    stopped_with_spools(begin, source)
    source.write_bytes(source.read_bytes().replace(b"line 7\n", b"LINE 7\n") + b" and more\n")

    done = streamq("run", *RUN, "--map", "held.py:held", "-o", "out.txt")

    assert done.returncode != 0
    assert "loaded from another input" in done.stderr


@pytest.mark.long
def test_an_input_that_only_grows_is_read_as_it_was(
    streamq: Streamq, begin: Begin, source: Path, tmp_path: Path
) -> None:
    before = source.read_bytes()
    stopped_with_spools(begin, source)
    with source.open("ab") as file:
        file.write(b" and more\n")

    done = streamq("run", *RUN, "--map", "held.py:held", "-o", "out.txt")

    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out.txt").read_bytes() == before


@pytest.mark.long
def test_records_that_changed_while_the_run_went_on_fail_and_say_so(
    streamq: Streamq, begin: Begin, source: Path, tmp_path: Path
) -> None:
    """All parts are loaded at once. The only process reads the others when the first is done."""
    running = begin(*RUN[:3], "-p", "1", "--map", "held.py:held", "-o", "out.txt")
    wait_until(lambda: '"state":"open"' in streamq("ls", "--json").stdout, 60)
    source.write_bytes(source.read_bytes().replace(b"line 39999", b"LINE 39999"))
    (tmp_path / "go").touch()
    running.communicate(timeout=60)

    told = (tmp_path / "out.errors.jsonl").read_text()
    assert running.returncode == 1
    assert "in.txt has changed since it was loaded" in told


@pytest.mark.parametrize("name", ["/dev/stdin", "/dev/fd/0", "/proc/self/fd/0", "link"])
def test_a_name_that_means_another_file_in_each_process_is_read_by_the_loader(
    source: Path, tmp_path: Path, name: str
) -> None:
    (tmp_path / "link").symlink_to("/dev/stdin")
    command = [*COMMAND, "run", name, "--map", "held.py:slow", "-o", "out.txt", "-p", "1"]
    own = {key: value for key, value in os.environ.items() if not key.endswith("_URL")}

    with source.open("rb") as given:
        done = subprocess.run(
            command, stdin=given, cwd=tmp_path, env=own, capture_output=True, check=False
        )

    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out.txt").read_bytes() == source.read_bytes()


@pytest.mark.long
def test_without_spools_all_bytes_go_through_the_server(
    streamq: Streamq, source: Path, tmp_path: Path
) -> None:
    done = streamq("run", *RUN, "--no-spool", "--map", "held.py:picky", "-o", "out.txt")

    assert done.returncode == 1, done.stderr
    (plan,) = tmp_path.glob(".streamq/*/plan*")
    assert not json.loads(plan.read_bytes())["spools"]
    assert not json.loads(plan.read_bytes())["policy"]["spec"].get("by_reference")
    assert not spools(tmp_path)


@pytest.mark.long
def test_the_same_command_without_spools_goes_on_as_it_began(
    streamq: Streamq, begin: Begin, source: Path
) -> None:
    output = killed_with_spools(begin, source)

    resumed(streamq, "--no-spool")

    assert output.read_bytes() == source.read_bytes()


@pytest.mark.long
@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"])
def test_rows_of_a_csv_are_read_by_reference(
    streamq: Streamq, tmp_path: Path, source: Path, end: bytes
) -> None:
    """Raw output begins with the header, unless the first result is a value."""
    rows = [b'%d,"a%sb %d"' % (n, end, n) for n in range(10_000)]
    text = end.join([b"id,name", *rows, b""])
    (tmp_path / "in.csv").write_bytes(text)
    run = ("run", "in.csv", "--bytes", "64KiB", "-p", "2", "--output-format", "raw")

    assert streamq(*run, "--map", "held.py:same", "-o", "lines.txt").returncode == 0
    assert streamq(*run, "--map", "held.py:ident", "-o", "values.txt").returncode == 0

    shown = text if end == b"\n" else text.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
    found = (tmp_path / "lines.txt").read_bytes()
    assert found.replace(b"\r\n", b"\n").replace(b"\r", b"\n") == shown
    numbers = (tmp_path / "values.txt").read_bytes().split()
    assert numbers == [b"%d" % n for n in range(10_000)]
