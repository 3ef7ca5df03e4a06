"""``streamq results`` through its command: every result once, whatever happens to who writes."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from streamq import Client, Protocol
from streamq.protocol.replies import Terms
from streamq.records.encoding import encode_result
from streamq.records.outputs import FileOutput
from streamq.runs.collect import Collector
from tests.conftest import FIRST_KIND, ONE_KIND
from tests.support import warm
from tests.support.by_hand import RequestByHand
from tests.support.fleet import Fleet
from tests.support.secure import as_role
from tests.support.waiting import kill_on_the_way, wait_until

pytestmark = pytest.mark.commands
Streamq = Callable[..., "subprocess.CompletedProcess[bytes]"]


@pytest.fixture
def environment(url: str, queue: str) -> dict[str, str]:
    return os.environ | {"STREAMQ_URL": as_role(url, "results"), "STREAMQ_QUEUE": queue}


@pytest.fixture
def streamq(environment: dict[str, str]) -> Streamq:
    def streamq(*words: Any) -> "subprocess.CompletedProcess[bytes]":
        return warm.run([*warm.MODULE, *map(str, words)], env=environment)

    return streamq


def test_identity_map_gives_the_input_back(fleet: Fleet, streamq: Streamq, tmp_path: Path) -> None:
    source, target = tmp_path / "in.txt", tmp_path / "out.txt"
    source.write_bytes(b"".join(b"line %d\r\n" % n for n in range(20_000)) + b"last")
    fleet.ready("-p", "2")
    request_id = streamq("load", source, "--handler", "echo", "--bytes", "8KiB").stdout.strip()

    done = streamq("results", request_id.decode(), "-o", target, "--follow")

    assert done.returncode == 0, done.stderr
    assert target.read_bytes() == source.read_bytes()
    status = json.loads(streamq("status", request_id.decode(), "--json").stdout)
    assert status["records"]["done"] == 20_001


@ONE_KIND
def test_summary_as_json_says_how_far_the_file_is(
    fleet: Fleet, client: Client, streamq: Streamq, queue: str, tmp_path: Path
) -> None:
    target = tmp_path / "out.jsonl"
    request = client.submit(["a", "b"], handler="shout", queue=queue)
    before = json.loads(streamq("results", request.id, "-o", target, "--json").stdout)
    fleet.ready()

    after = json.loads(streamq("results", request.id, "-o", target, "-f", "--json").stdout)

    assert (before["is_complete"], before["records"]["done"]) == (False, 0)
    assert after == {
        "request": request.id,
        "state": "done",
        "is_complete": True,
        "parts": after["parts"],
        "records": {"total": 2, "done": 2, "failed": 0},
        "output": str(target),
        "errors_file": None,
    }
    refused = streamq("results", request.id, "--json")
    assert (refused.returncode, b"-o FILE" in refused.stderr) == (2, True)


@ONE_KIND
def test_csv_comes_back_with_its_header(fleet: Fleet, streamq: Streamq, tmp_path: Path) -> None:
    source, target = tmp_path / "in.csv", tmp_path / "out.txt"
    source.write_bytes(b"a,b\r\n" + b'1,"x\ny"\r\n' * 500)
    fleet.ready()
    request_id = streamq("load", source, "--handler", "echo", "--lines", "7").stdout.strip()

    streamq("results", request_id.decode(), "-o", target, "--follow")

    assert target.read_bytes() == source.read_bytes()


@ONE_KIND
def test_unordered_has_the_same_lines(fleet: Fleet, streamq: Streamq, tmp_path: Path) -> None:
    source, target = tmp_path / "in.txt", tmp_path / "out.txt"
    source.write_bytes(b"".join(b"line %d\n" % n for n in range(9_000)))
    fleet.ready("-p", "2")
    request_id = streamq("load", source, "--handler", "echo", "--lines", "5").stdout.strip()

    streamq("results", request_id.decode(), "-o", target, "--follow", "--unordered")

    assert sorted(target.read_bytes().splitlines()) == sorted(source.read_bytes().splitlines())


@ONE_KIND
@pytest.mark.parametrize("name", ["out.jsonl", "out.txt"])
def test_killed_before_its_first_word_it_can_begin_again(
    fleet: Fleet, streamq: Streamq, client: Client, queue: str, tmp_path: Path, name: str
) -> None:
    target = tmp_path / name
    request = client.submit([b"a", b"b"], handler="echo", queue=queue)
    streamq("results", request.id, "-o", target)  # there are none yet
    target.write_bytes(b"half of the first re")  # and it is killed when there are

    fleet.start("--burst").wait(30)
    again = streamq("results", request.id, "-o", target)

    assert again.returncode == 0, again.stderr
    assert target.read_bytes().split() in ([b"a", b"b"], [b'"a"', b'"b"'])


@ONE_KIND
def test_json_lines_csv_and_failures(
    fleet: Fleet, streamq: Streamq, client: Client, queue: str, tmp_path: Path
) -> None:
    orders = [{"item": "a", "count": 1}, {"item": "b"}, {"item": "c", "count": 3}]
    fleet.ready()
    first = client.submit(orders, handler="priced", queue=queue)
    second = client.submit(orders, handler="priced", queue=queue)
    third = client.submit(["x", "y"], handler="shout", queue=queue)
    for request in (first, second, third):
        request.wait(20)

    streamq("results", first.id, "-o", tmp_path / "out.jsonl")
    streamq("results", second.id, "-o", tmp_path / "prices.csv")
    shown = streamq("results", third.id)

    assert (tmp_path / "out.jsonl").read_text() == '{"a":3}\n{"c":9}\n'
    (failure,) = map(json.loads, (tmp_path / "out.errors.jsonl").read_text().splitlines())
    assert failure["part"] == 2
    assert (tmp_path / "prices.csv").read_text() == 'a\n3\n""\n'
    assert shown.stdout == b"X\nY\n"


@ONE_KIND
def test_file_that_exists_is_not_written_over(
    fleet: Fleet, streamq: Streamq, client: Client, queue: str, tmp_path: Path
) -> None:
    target = tmp_path / "out.txt"
    target.write_text("precious\n")
    fleet.ready()
    request = client.submit(["x"], handler="shout", queue=queue)
    request.wait(20)

    refused = streamq("results", request.id, "-o", target)
    nowhere = streamq("results", request.id, "-o", tmp_path / "no" / "out.txt")
    forced = streamq("results", request.id, "-o", target, "--force")

    assert (refused.returncode, nowhere.returncode) == (2, 2)
    assert b"--force" in refused.stderr
    assert forced.returncode == 0
    assert target.read_text() == "X\n"


@ONE_KIND
def test_what_a_retry_yields_is_appended(
    fleet: Fleet, streamq: Streamq, client: Client, queue: str, tmp_path: Path
) -> None:
    fleet.ready()
    request = client.submit(["snooze", "abandon"], handler="tells", queue=queue)
    request.wait(20)
    target = tmp_path / "out.txt"
    streamq("results", request.id, "-o", target)
    before = target.read_bytes()

    streamq("retry", request.id)
    request.wait(20)
    again = streamq("results", request.id, "-o", target)

    assert again.returncode == 0, again.stderr
    assert target.read_bytes() == before, "it failed again, and nothing was written twice"


@FIRST_KIND
def test_collector_killed_at_random_moments_writes_every_line_once(
    fleet: Fleet, streamq: Streamq, environment: dict[str, str], tmp_path: Path
) -> None:
    source, target = tmp_path / "in.txt", tmp_path / "out.txt"
    source.write_bytes(b"".join(b"line %d\n" % n for n in range(50_000)))
    fleet.ready("-p", "2")
    request_id = (
        streamq("load", source, "--handler", "echo", "--lines", "5").stdout.decode().strip()
    )
    line = [sys.executable, "-m", "streamq.cli", "results", request_id, "-o", str(target), "-f"]

    def how_far() -> int:
        return target.stat().st_size if target.exists() else 0

    kills = kill_on_the_way(line, environment, how_far, source.stat().st_size)

    done = streamq(*line[3:])

    assert done.returncode == 0, done.stderr
    assert kills > 0
    assert target.read_bytes() == source.read_bytes()


@ONE_KIND
@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
def test_stopped_it_goes_on(
    fleet: Fleet,
    streamq: Streamq,
    environment: dict[str, str],
    client: Client,
    tmp_path: Path,
    number: int,
    code: int,
) -> None:
    request = client.submit(["a", "b"], handler="shout", queue=fleet.queue)
    target = tmp_path / "out.txt"
    line = [sys.executable, "-m", "streamq.cli", "results", request.id, "-o", str(target), "-f"]
    running = subprocess.Popen(line, env=environment, stderr=subprocess.PIPE, text=True)
    wait_until(target.exists, 30)

    running.send_signal(number)
    _, said = running.communicate(timeout=30)

    assert (running.returncode, said) == (code, "stopped; the same command goes on\n")
    fleet.ready()
    done = streamq("results", request.id, "-o", target, "--follow")
    assert done.returncode == 0, done.stderr
    assert target.read_bytes() == b"A\nB\n"


@ONE_KIND
def test_another_file_is_not_cut_to_what_was_written(
    fleet: Fleet, streamq: Streamq, client: Client, tmp_path: Path
) -> None:
    request = client.submit(["a", "b"], handler="shout", queue=fleet.queue)
    fleet.ready()
    target, other = tmp_path / "out.txt", tmp_path / "other.txt"
    streamq("results", request.id, "-o", target, "--follow")
    other.write_bytes(b"precious\n" * 1_000)

    refused = streamq("results", request.id, "-o", other)
    other_form = streamq("results", request.id, "-o", target, "--output-format", "csv")

    assert (refused.returncode, other_form.returncode) == (2, 2)
    assert f"are written to {target}".encode() in refused.stderr
    assert b"as raw, not as csv" in other_form.stderr
    assert other.read_bytes() == b"precious\n" * 1_000
    target.rename(tmp_path / "moved.txt")
    moved = streamq("results", request.id, "-o", tmp_path / "moved.txt", "--force")
    assert moved.returncode == 0, moved.stderr
    assert (tmp_path / "moved.txt").read_bytes() == b"A\nB\n"


@ONE_KIND
def test_failures_never_replace_an_input(fleet: Fleet, streamq: Streamq, tmp_path: Path) -> None:
    kept = tmp_path / "out.errors.jsonl"
    kept.write_bytes(b'"precious"\n')
    fleet.ready()
    request_id = streamq("load", kept, "--handler", "echo").stdout.decode().strip()

    done = streamq("results", request_id, "-o", tmp_path / "out.jsonl", "--follow")

    assert (done.returncode, kept.read_bytes()) == (2, b'"precious"\n')
    assert b"is one of the inputs" in done.stderr


@ONE_KIND
def test_collected_then_retried_and_collected_again_it_has_every_line_once(
    fleet: Fleet, streamq: Streamq, tmp_path: Path
) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_bytes(b"".join(b"%d\n" % n for n in range(1, 201)))
    fleet.ready("-p", "1")
    words = ("--handler", "abandons_tenths", "--lines", 1, "--limit", 1, "--max-failures", 3)
    request_id = streamq("load", source, *words).stdout.decode().strip()
    assert streamq("wait", request_id).returncode == 1
    first = streamq("results", request_id, "-o", target)
    assert first.returncode == 0, first.stderr
    before, status = target.read_bytes(), accounted(streamq, request_id)
    assert status["state"] == "failed"
    assert before.count(b"\n") == status["records"]["done"] < 180
    assert (tmp_path / "out.errors.jsonl").exists()

    Path(f"{fleet.log}.mended").touch()
    streamq("retry", request_id)
    assert streamq("wait", request_id).returncode == 0
    again = streamq("results", request_id, "-o", target)

    assert again.returncode == 0, again.stderr
    assert accounted(streamq, request_id)["records"] == {"total": 200, "done": 200, "failed": 0}
    after = target.read_bytes()
    assert [*map(int, after.split())] == [*range(1, 201)]
    assert not (tmp_path / "out.errors.jsonl").exists()
    assert streamq("results", request_id, "-o", target).returncode == 0
    assert target.read_bytes() == after


def accounted(streamq: Streamq, request_id: str) -> Any:
    """The status of an ended request; of one that is done every record is done or failed."""
    status = json.loads(streamq("status", request_id, "--json").stdout)
    records = status["records"]
    is_all = records["done"] + records["failed"] == records["total"]
    assert is_all or status["state"] == "failed"
    return status


@ONE_KIND
def test_stdout_has_what_a_retry_yielded(
    fleet: Fleet, streamq: Streamq, client: Client, queue: str
) -> None:
    fleet.ready()
    request = client.submit([10, 11, 12], handler="abandons_tenths", queue=queue)
    request.wait(20)
    Path(f"{fleet.log}.mended").touch()
    streamq("retry", request.id)
    request.wait(20)

    shown = streamq("results", request.id)

    assert shown.stdout == b"11\n12\n10\n"
    assert list(request.results()) == [(2, 11), (3, 12), (1, 10)]


@ONE_KIND
@pytest.mark.parametrize(
    ("handler", "places", "failed", "listed_as"),
    [
        ("deadly", [[350, None, None], [450, None, None]], 2, "350"),
        ("deadly_in_parts", [[301, 400, 100], [401, 500, 100]], 200, "301-400 (100 records)"),
    ],
)
def test_what_kills_or_never_ends_has_file_and_lines(
    fleet: Fleet,
    streamq: Streamq,
    client: Client,
    tmp_path: Path,
    handler: str,
    places: list[list[int | None]],
    failed: int,
    listed_as: str,
) -> None:
    source, target = tmp_path / "in.txt", tmp_path / "out.txt"
    source.write_bytes(b"".join(b"%d\n" % n for n in range(1, 1_001)))
    fleet.ready("-p", "2")
    words = ("--handler", handler, "--lines", 100, "--timeout", "1s", "--retries", 0)
    request_id = streamq("load", source, *words).stdout.decode().strip()

    done = streamq("results", request_id, "-o", target, "--follow")

    assert done.returncode == 0, done.stderr
    failures = [
        json.loads(line) for line in (tmp_path / "out.errors.jsonl").read_text().splitlines()
    ]
    assert [each["error"] for each in failures] == ["Poison", "Timeout"]
    names = ("line", "last_line", "records")
    assert [[each.get(name) for name in names] for each in failures] == places
    assert {each["source"] for each in failures} == {str(source)}
    status = accounted(streamq, request_id)
    assert status["records"] == {"total": 1_000, "done": 1_000 - failed, "failed": failed}
    if handler == "deadly":
        assert target.read_bytes().count(b"\n") == 998
    listed = streamq("errors", request_id).stdout.decode()
    assert f"{source}:{listed_as}" in listed
    assert [each.line for each in client.get(request_id).errors()] == [one[0] for one in places]


@ONE_KIND
def test_failures_never_replace_what_is_not_theirs(
    fleet: Fleet, streamq: Streamq, client: Client, queue: str, tmp_path: Path
) -> None:
    target, beside = tmp_path / "out.txt", tmp_path / "out.errors.jsonl"
    precious = tmp_path / "precious"
    precious.write_text("precious\n")
    fleet.ready()
    request = client.submit([1, 2], handler="abandons_tenths", queue=queue)
    request.wait(20)
    beside.symlink_to(precious)
    linked = streamq("results", request.id, "-o", target)
    beside.unlink()
    beside.write_text("precious\n")
    refused = streamq("results", request.id, "-o", target)

    assert (linked.returncode, refused.returncode) == (2, 2)
    assert b"out.errors.jsonl exists" in refused.stderr
    assert (beside.read_text(), precious.read_text()) == ("precious\n", "precious\n")
    assert not target.exists()
    forced = streamq("results", request.id, "-o", target, "--force")
    assert (forced.returncode, target.read_bytes(), beside.exists()) == (0, b"1\n2\n", False)


def finish(driver: RequestByHand, holder: str, number: int, text: str, most: int = 0) -> None:
    """Finish a part whose handler returned a text."""
    results: list[bytes | int] = [number, encode_result([text])]
    driver.protocol.finish(driver.id, holder, driver.call(holder), results, 1, Terms(most))


@ONE_KIND
def test_stdout_tells_what_is_not_among_it(
    client: Client, driver: RequestByHand, streamq: Streamq, tmp_path: Path
) -> None:
    driver.load(3, retries=0)
    holder, _ = driver.claim(2)
    finish(driver, holder, 1, "one", most=1)
    driver.fail(holder, 2)
    assert streamq("results", driver.id, "-o", tmp_path / "out.txt").returncode == 0
    finish(driver, holder, 3, "three")

    shown = streamq("results", driver.id)

    assert shown.stdout == b"three\n"
    assert f"written to {tmp_path / 'out.txt'} are not shown".encode() in shown.stderr
    assert f"1 record failed: streamq errors {driver.id}".encode() in shown.stderr


@ONE_KIND
@pytest.mark.parametrize("is_shown", [True, False])
def test_request_that_was_cancelled_is_not_taken_for_complete(
    client: Client, driver: RequestByHand, streamq: Streamq, tmp_path: Path, is_shown: bool
) -> None:
    driver.load(3)
    holder, _ = driver.claim()
    finish(driver, holder, 1, "one")
    client.get(driver.id).cancel()
    where = () if is_shown else ("-o", tmp_path / "out.txt")

    ended = streamq("results", driver.id, "--follow", *where)

    assert ended.returncode == 5
    assert b"was cancelled: 1 of 3 parts were done" in ended.stderr
    assert (ended.stdout or (tmp_path / "out.txt").read_bytes()) == b"one\n"


@ONE_KIND
@pytest.mark.parametrize("numbers", [[1, 2, 10], [1, 2]])
def test_failures_never_replace_what_took_their_place(
    fleet: Fleet, streamq: Streamq, client: Client, queue: str, tmp_path: Path, numbers: list[int]
) -> None:
    target, beside = tmp_path / "out.txt", tmp_path / "out.errors.jsonl"
    fleet.ready()
    request = client.submit(numbers, handler="abandons_tenths", queue=queue)
    request.wait(20)
    first = streamq("results", request.id, "-o", target)
    ours = beside.read_bytes() if beside.exists() else None
    again = streamq("results", request.id, "-o", target)
    beside.write_text("precious\n")

    refused = streamq("results", request.id, "-o", target)

    assert (first.returncode, again.returncode, refused.returncode) == (0, 0, 2)
    assert b"out.errors.jsonl exists" in refused.stderr
    assert b"--force" in refused.stderr
    assert beside.read_text() == "precious\n"
    forced = streamq("results", request.id, "-o", target, "--force")
    assert forced.returncode == 0
    assert (beside.read_bytes() if beside.exists() else None) == ours


@ONE_KIND
def test_failures_of_before_are_replaced_also_after_a_kill(
    fleet: Fleet, streamq: Streamq, client: Client, queue: str, protocol: Protocol, tmp_path: Path
) -> None:
    target, beside = tmp_path / "out.txt", tmp_path / "out.errors.jsonl"
    fleet.ready()
    request = client.submit([1, 10], handler="abandons_tenths", queue=queue)
    request.wait(20)
    streamq("results", request.id, "-o", target)
    Path(f"{fleet.log}.mended").touch()
    request.retry()
    request.wait(20)
    # As one that is killed when everything is committed, and before it replaces the failures.
    collector = Collector(protocol, request.id, FileOutput(target, request.id), "raw")
    assert collector.run(is_ordered=True, follow=False, force=False)
    assert beside.exists()

    done = streamq("results", request.id, "-o", target)

    assert done.returncode == 0, done.stderr
    assert (target.read_bytes(), beside.exists()) == (b"1\n10\n", False)


@ONE_KIND
def test_file_that_is_gone_is_missed_and_begun_anew_by_force(
    streamq: Streamq, driver: RequestByHand, tmp_path: Path
) -> None:
    target = tmp_path / "out.txt"
    driver.load(4, limit=4)
    for number, text in enumerate(("one", "two"), 1):
        finish(driver, driver.claim()[0], number, text)
    assert streamq("results", driver.id, "-o", target).returncode == 0
    assert target.read_bytes() == b"one\ntwo\n"
    target.unlink()
    finish(driver, driver.claim()[0], 3, "three")

    missed = streamq("results", driver.id, "-o", target)

    assert missed.returncode == 2
    assert b"out.txt is gone" in missed.stderr
    assert b"put it back" in missed.stderr
    assert b"--force" in missed.stderr
    assert not target.exists()
    forced = streamq("results", driver.id, "-o", target, "--force")
    assert forced.returncode == 0, forced.stderr
    assert b"results of parts 1 to 2 are gone" in forced.stderr
    assert target.read_bytes() == b"three\n"
    again = streamq("results", driver.id, "-o", target)
    assert (again.returncode, target.read_bytes()) == (0, b"three\n")


@ONE_KIND
def test_file_that_is_gone_before_a_result_was_in_it_is_no_loss(
    streamq: Streamq, driver: RequestByHand, tmp_path: Path
) -> None:
    target = tmp_path / "out.txt"
    driver.load(1)
    streamq("results", driver.id, "-o", target)
    target.unlink()
    finish(driver, driver.claim()[0], 1, "one")

    done = streamq("results", driver.id, "-o", target)

    assert (done.returncode, target.read_bytes()) == (0, b"one\n"), done.stderr
