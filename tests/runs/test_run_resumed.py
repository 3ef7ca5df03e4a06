"""``streamq run`` that is stopped or killed, and goes on."""

import fcntl
import importlib
import os
import pty
import random
import signal
import subprocess
import termios
import time
from pathlib import Path

import pytest

from tests.runs.running import (
    COMMAND,
    EMBEDDED,
    Begin,
    Streamq,
    begin_slowly,
    descendants,
    go_on,
    run_left_in,
    wait_for_the_end_of,
)
from tests.support.waiting import wait_until

pytestmark = pytest.mark.commands
STOPS = pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)


@STOPS
def test_stopped_it_goes_on(
    streamq: Streamq,
    begin: Begin,
    source: Path,
    tmp_path: Path,
    number: int,
    code: int,
) -> None:
    running, output = begin_slowly(begin, tmp_path, 1_000, "-c", "2")

    running.send_signal(number)
    _, said = running.communicate(timeout=100)

    assert running.returncode == code
    go_on(streamq, said, tmp_path)
    assert output.read_bytes() == source.read_bytes()
    assert not (tmp_path / ".streamq").exists()


@EMBEDDED
@pytest.mark.parametrize(
    ("suffix", "unpack"),
    [("gz", "gzip"), pytest.param("zst", "backports.zstd", marks=pytest.mark.long)],
)
def test_killed_it_goes_on_in_a_compressed_output(
    streamq: Streamq, begin: Begin, source: Path, tmp_path: Path, suffix: str, unpack: str
) -> None:
    output = tmp_path / f"out.txt.{suffix}"
    for limit in (500, 2_000, 4_000):
        running = begin(
            *("in.txt", "--map", "job:slow", "-o", output, "-p", "1", "--lines", "10", "-c", "1")
        )
        pids = [running.pid]
        wait_until(lambda: output.exists() and output.stat().st_size > limit, 60)  # noqa: B023
        pids += descendants(running.pid)
        running.kill()
        running.communicate()
        wait_for_the_end_of(pids)
    done = streamq(
        *("run", "in.txt", "--map", "job:slow", "-o", output, "-p", "1", "--lines", "10", "-c", "1")
    )

    assert done.returncode == 0, done.stderr
    text = importlib.import_module(unpack).decompress(output.read_bytes())
    assert text == source.read_bytes()
    assert len(output.read_bytes()) < len(text)


@EMBEDDED
@STOPS
def test_stopped_before_it_works_it_goes_on(
    streamq: Streamq,
    begin: Begin,
    source: Path,
    tmp_path: Path,
    number: int,
    code: int,
) -> None:
    words = ["in.txt", "--map", "job:same", "-o", "out.txt", "-p", "1"]
    running = begin(*words)
    wait_until(lambda: list((tmp_path / ".streamq").glob("*/server")), 60)

    running.send_signal(number)
    _, said = running.communicate(timeout=60)

    assert running.returncode == code
    assert "Traceback" not in said
    go_on(streamq, said, tmp_path)
    assert (tmp_path / "out.txt").read_bytes() == source.read_bytes()


@pytest.mark.timeout(600)
def test_run_killed_at_random_moments_gives_the_input_back(
    begin: Begin, streamq: Streamq, source: Path, tmp_path: Path
) -> None:
    """Nothing is lost or doubled, no part is blamed, and nothing is left running."""
    kills = int(os.environ.get("STREAMQ_TEST_KILLS", "3"))
    chance = random.Random(kills)
    output = tmp_path / "out.txt"
    marks = sorted(chance.randrange(source.stat().st_size) for _ in range(kills))
    words = ["in.txt", "--map", "job:slow", "-o", "out.txt", "-p", "2", "--lines", "10"]
    for mark in [0, *marks]:
        running = begin(*words)
        while running.poll() is None and mark >= (output.stat().st_size if output.exists() else 0):
            time.sleep(0.001)
        time.sleep(chance.random() / 20)
        below = descendants(running.pid)
        running.kill()
        _, said = running.communicate()
        assert running.returncode == -9, said
        wait_for_the_end_of(below)
        request_id = run_left_in(tmp_path)
        words = ["--resume", request_id]

    done = streamq("run", *words)

    assert done.returncode == 0, done.stderr
    assert output.read_bytes() == source.read_bytes()
    assert not (tmp_path / ".streamq").exists()


@EMBEDDED
def test_no_part_is_blamed_for_the_death_of_the_whole_run(
    begin: Begin, streamq: Streamq, source: Path, tmp_path: Path
) -> None:
    """What ran when everything was killed is taken over, not found expired: that would count."""
    words = ["in.txt", "--map", "job:stuck_thrice", "-o", "out.txt", "-p", "1"]
    for times in (1, 2, 3):
        running = begin(*words)
        wait_until((tmp_path / f"stuck{times}").exists, 30)
        running.kill()
        running.wait()
        request_id = run_left_in(tmp_path)
        words = ["--resume", request_id]

    done = streamq("run", *words)

    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out.txt").read_bytes() == source.read_bytes()


@pytest.mark.parametrize("is_ignored", [False, True])
def test_terminal_that_is_closed_stops_it_unless_it_is_not_to_care(
    streamq: Streamq,
    environment: dict[str, str],
    source: Path,
    tmp_path: Path,
    is_ignored: bool,
) -> None:
    ours, its = pty.openpty()

    def sit_at_the_terminal() -> None:
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)
        if is_ignored:  # as nohup does
            signal.signal(signal.SIGHUP, signal.SIG_IGN)

    words = ["run", "in.txt", "--map", "job:slow", "-o", "out.txt", "-p", "2", "--lines", "10"]
    running = subprocess.Popen(
        [*COMMAND, *words],
        env=environment,
        cwd=tmp_path,
        stdin=its,
        stdout=its,
        stderr=its,
        start_new_session=True,
        preexec_fn=sit_at_the_terminal,
    )
    os.close(its)
    output = tmp_path / "out.txt"
    wait_until(lambda: output.exists() and output.stat().st_size > 1_000, 60)

    os.close(ours)

    assert running.wait(60) == (0 if is_ignored else 129)
    if not is_ignored:
        done = streamq("run", "--resume", run_left_in(tmp_path))
        assert done.returncode == 0, done.stderr
    assert output.read_bytes() == source.read_bytes()
