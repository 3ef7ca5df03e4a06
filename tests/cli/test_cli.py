"""The command: what it shows, what it changes, how it fails, and how it ends."""

import json
import os
import pty
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest

from cli import main, render
from cli.app import COMMANDS
from streamq import Client, Protocol
from streamq.model import Failure
from streamq.protocol.keys import QueueKeys
from streamq.protocol.replies import Token, Tokens
from streamq.queue.fleet import Running, WorkerDetails
from streamq.servers.local import LocalServer
from tests.conftest import KINDS
from tests.support.by_hand import HANDLER, Driver
from tests.support.secure import as_role
from tests.support.waiting import wait_until

pytestmark = pytest.mark.commands
_INSTALLED = Path(sys.executable).with_name("streamq")
COMMAND = [str(_INSTALLED)] if _INSTALLED.exists() else [sys.executable, "-m", "streamq.cli"]
NOBODY = "redis://127.0.0.1:1"
ALL_KINDS = pytest.mark.parametrize("kind", KINDS)
STATUS = ["id", "queue", "handler", "state", "paused", "level", "limit", "parts", "records"]
STATUS += ["created_ms", "started_ms", "finished_ms", "rate", "eta_s"]

Ran = subprocess.CompletedProcess[str]
Streamq = Callable[..., Ran]


@pytest.fixture(params=KINDS[:1])
def kind(request: pytest.FixtureRequest) -> str:
    """One kind of server is enough for most of what a command does."""
    return str(request.param)


def environment(**variables: str) -> dict[str, str]:
    """As it is, without what would change a command's mind."""
    ours = ("STREAMQ_", "REDIS_URL", "VALKEY_URL", "NO_COLOR", "FORCE_COLOR", "TERM")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    return {**kept, "COLUMNS": "200", "TERM": "xterm", **variables}


def run(*words: str, **variables: str) -> Ran:
    return subprocess.run(
        [*COMMAND, *words],
        env=environment(**variables),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.fixture
def streamq(url: str, queue: str) -> Streamq:
    """Runs the command with the server and queue of the test in its environment."""

    def streamq(*words: str, **variables: str) -> Ran:
        own = as_role(url, words[0])
        return run(*words, **{"STREAMQ_URL": own, "STREAMQ_QUEUE": queue, **variables})

    return streamq


@pytest.fixture
def running(url: str, queue: str) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts the command and lets it run; what still does at the end is killed."""
    started: list[subprocess.Popen[str]] = []

    def start(*words: str, **options: Any) -> subprocess.Popen[str]:
        env = environment(STREAMQ_URL=as_role(url, words[0]), STREAMQ_QUEUE=queue)
        pipes = {"stdin": subprocess.DEVNULL, "stderr": subprocess.PIPE} | options
        started.append(subprocess.Popen([*COMMAND, *words], env=env, text=True, **pipes))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


class Terminal:
    """A terminal with a person before it, who reads and types."""

    def __init__(self) -> None:
        self._ours, self.file = pty.openpty()
        os.set_blocking(self._ours, False)
        self._seen = bytearray()

    def __enter__(self) -> "Terminal":
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._ours)
        os.close(self.file)

    def seen(self) -> str:
        """All that was written so far."""
        with suppress(OSError):  # nothing more, for now or for ever
            while chunk := os.read(self._ours, 65536):
                self._seen.extend(chunk)
        return self._seen.decode()

    def type(self, text: str) -> None:
        os.write(self._ours, text.encode())


@pytest.fixture
def submitted(client: Client, driver: Driver) -> Driver:
    """A request of three parts that nobody has touched yet."""
    client.submit([b"1", b"2", b"3"], handler=HANDLER, id=driver.id, queue=driver.queue)
    return driver


@pytest.fixture
def done(submitted: Driver) -> Driver:
    """The same, all finished."""
    holder, _ = submitted.claim(3)
    submitted.finish(holder, [1, 2, 3])
    return submitted


@pytest.fixture
def failed(submitted: Driver) -> Driver:
    """The same, with two parts given up."""
    submitted.give_up(1, 2)
    holder, _ = submitted.claim()
    submitted.finish(holder, [3])
    return submitted


def beat(protocol: Protocol, queue: str, **changes: Any) -> WorkerDetails:
    """A live worker."""
    now = round(time.time() * 1e3)
    values: dict[str, Any] = {
        "name": "web-3.4711",
        "host": "web-3",
        "pid": 4711,
        "version": "1.2.3",
        "queue": queue,
        "handlers": [HANDLER],
        "slots": 8,
        "busy": 1,
        "started_ms": now - 90_000,
        "beat_ms": now - 2_000,
        "levels": "0-99",
        "running": [
            Running(request="nightly", part=17, since_ms=now - 61_000, handler=HANDLER, pid=4712)
        ],
    }
    details = WorkerDetails(**(values | changes))
    protocol.beat(queue, details.name, 60_000, msgspec.json.encode(details))
    return details


def fact(text: str, name: str) -> str:
    """A line of ``status``, by its name."""
    lines = dict(line.split(maxsplit=1) for line in text.splitlines())
    return lines[name]


def rows(text: str) -> list[list[str]]:
    """The words of a table's lines, without the headers."""
    return [line.split() for line in text.splitlines()[1:]]


# The command as such


def test_help_is_quick() -> None:
    """Counted in time of the processor: how long it takes also depends on what else runs here."""

    def spent() -> float:
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        return used.ru_utime + used.ru_stime

    before, began = spent(), time.perf_counter()
    assert run("--help").returncode == 0

    took = spent() - before
    print(f"streamq --help: {took:.3f} s, {time.perf_counter() - began:.3f} s by the clock")
    assert took < 1.5


@pytest.mark.parametrize("name", COMMANDS)
def test_help_of_a_command_begins_with_an_example(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["streamq", name, "--help"])
    monkeypatch.setenv("COLUMNS", "200")

    with pytest.raises(SystemExit) as ended:
        main()

    usage, example, *rest = filter(None, map(str.strip, capsys.readouterr().out.splitlines()))
    assert ended.value.code == 0
    assert usage.startswith(f"Usage: streamq {name} ")
    assert example.startswith(f"streamq {name}")
    if name not in ("server", "demo", "acl", "config"):
        assert any("STREAMQ_URL" in line for line in rest)


def test_a_typo_in_a_command_is_named() -> None:
    ran = run("stauts")

    assert (ran.returncode, ran.stdout) == (2, "")
    assert "Did you mean 'status'" in ran.stderr


def test_without_a_url_the_three_ways_to_give_one_are_named() -> None:
    ran = run("ls")

    assert (ran.returncode, ran.stdout) == (2, "")
    for way in ("--url", "STREAMQ_URL=", "STREAMQ_URL_FILE="):
        assert way in ran.stderr


def test_nobody_at_the_url() -> None:
    ran = run("status", "--url", NOBODY)

    assert (ran.returncode, ran.stdout) == (3, "")
    assert ran.stderr.startswith(f"streamq: {NOBODY} does not answer")
    assert len(ran.stderr.splitlines()) == 1


def test_a_url_that_cannot_be() -> None:
    ran = run("ls", STREAMQ_URL="http://localhost")

    assert (ran.returncode, ran.stdout) == (2, "")
    assert "no such scheme" in ran.stderr
    assert len(ran.stderr.splitlines()) == 1


def test_a_password_in_the_option_warns_and_is_not_shown() -> None:
    url = "redis://me:hush@127.0.0.1:1"

    ran = run("--url", url, "ls")

    assert ran.returncode == 3
    assert "warning" in ran.stderr
    assert "ps shows it" in ran.stderr
    assert "hush" not in ran.stderr
    assert "warning" not in run("ls", STREAMQ_URL=url).stderr


@pytest.mark.parametrize("name", ["STREAMQ_URL", "STREAMQ_URL_FILE", "REDIS_URL", "toml"])
def test_a_password_from_elsewhere_does_not_warn(name: str, tmp_path: Path) -> None:
    url = NOBODY.replace("//", "//:hushhush@")
    (tmp_path / "url").write_text(url)
    (tmp_path / "streamq.toml").write_text('url_file = "url"')
    found = {"STREAMQ_URL_FILE": tmp_path / "url", "toml": tmp_path / "streamq.toml"}
    variable = "STREAMQ_CONFIG" if name == "toml" else name

    ran = run("ls", **{variable: str(found.get(name, url))})

    assert ran.returncode == 3
    assert len(ran.stderr.splitlines()) == 1


def test_options_stand_before_the_command_or_behind_it(url: str) -> None:
    """And an option counts more than the environment, the nearer one more than the other."""
    assert run("--url", url, "ls", STREAMQ_URL=NOBODY).returncode == 0
    assert run("--url", NOBODY, "ls", "-u", url).returncode == 0
    assert run("ls", STREAMQ_URL=url, STREAMQ_PREFIX="a:b").returncode == 2


def test_the_url_may_be_in_a_file(url: str, tmp_path: Path) -> None:
    (tmp_path / "url").write_text(f"{url}\n")

    assert run("ls", STREAMQ_URL_FILE=str(tmp_path / "url")).returncode == 0
    assert run("ls", STREAMQ_URL_FILE=str(tmp_path / "none")).returncode == 2


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("status a:b", "request id 'a:b'"),
        ("status --queue a:b", "queue 'a:b'"),
        ("status --prefix a:b", "prefix 'a:b'"),
        ("ls --queue a:b", "queue 'a:b'"),
        ("ls --state gone", "'gone'"),
        ("ls -n -1", "-n"),
        ("workers --queue a:b", "queue 'a:b'"),
        ("wait r --timeout 5x", "timeout '5x'"),
        ("set r", "--level, --limit or --rate"),
        ("set r --level 100", "level 100"),
        ("set r --priority high", "--level"),
        ("set r --limit 0", "limit 0"),
        ("set r --rate 5", "rate '5'"),
        ("pause a:b", "request id 'a:b'"),
        ("janitor --interval 0", "interval '0'"),
        ("janitor --log-level loud", "loud"),
    ],
)
def test_bad_values(
    words: str,
    says: str,
    url: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["streamq", *words.split()])
    monkeypatch.setenv("STREAMQ_URL", as_role(url, words.split()[0]))
    monkeypatch.setenv("COLUMNS", "200")

    with pytest.raises(SystemExit) as ended:
        main()

    out, err = capsys.readouterr()
    assert (ended.value.code, out) == (2, "")
    assert says in err


@pytest.mark.parametrize(
    "words", ["status", "wait", "errors", "set --level 1", "pause", "resume", "cancel", "retry"]
)
def test_an_unknown_request(
    words: str,
    url: str,
    request_id: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    command, *options = words.split()
    monkeypatch.setattr(sys, "argv", ["streamq", command, request_id, *options])
    monkeypatch.setenv("STREAMQ_URL", as_role(url, command))

    with pytest.raises(SystemExit) as ended:
        main()

    out, err = capsys.readouterr()
    assert (ended.value.code, out) == (5, "")
    assert err == f"streamq: {request_id}: no such request, or it was purged\n"


def test_a_reader_that_has_gone_gets_no_traceback(url: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)

    with os.fdopen(writer, "w") as gone:
        ran = subprocess.run(
            [*COMMAND, "ls"],
            env=environment(STREAMQ_URL=as_role(url, "ls")),
            stdout=gone,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
            check=False,
        )

    assert (ran.returncode, ran.stderr) == (141, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_one_line(url: str, running: Callable[..., subprocess.Popen[str]]) -> None:
    with Path("/dev/full").open("w") as full:
        _, err = running("status", stdout=full).communicate(timeout=60)

    assert err.startswith("streamq: ")
    assert "Traceback" not in err


# Looking


@ALL_KINDS
def test_status_of_a_request_as_json(streamq: Streamq, failed: Driver) -> None:
    ran = streamq("status", failed.id, "--json")

    status = json.loads(ran.stdout)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert list(status) == STATUS
    assert status["state"] == "done"
    assert status["parts"] == {
        "total": 3,
        "waiting": 0,
        "running": 0,
        "retry": 0,
        "done": 1,
        "failed": 2,
    }
    assert status["records"] == {"total": 3, "done": 1, "failed": 2}


def test_status_says_when_no_live_worker_has_the_handler(
    streamq: Streamq, submitted: Driver, protocol: Protocol
) -> None:
    beat(protocol, submitted.queue, handlers=["other"])
    lonely = streamq("status", submitted.id)
    beat(protocol, submitted.queue)
    served = streamq("status", submitted.id)

    assert fact(lonely.stdout, "handler") == f"{HANDLER} (no live worker has handler {HANDLER})"
    assert fact(served.stdout, "handler") == f"{HANDLER} (1 live worker with it)"
    assert fact(served.stdout, "parts").startswith("0 of 3 done, 3 waiting, 0 running")


def test_status_tells_a_persons_whole_story(
    streamq: Streamq, client: Client, driver: Driver
) -> None:
    client.submit(
        [b"1"],
        handler=HANDLER,
        id=driver.id,
        queue=driver.queue,
        rate="30/m",
        delay="1h",
        max_failures="2%",
        keep="2d",
    ).pause()

    out = streamq("status", driver.id).stdout

    assert fact(out, "state") == "open, paused"
    assert fact(out, "rate") == "at most 30/m"
    assert fact(out, "held").startswith("until ")
    assert fact(out, "tolerates") == "2 % of failures"
    assert fact(out, "kept") == "2d after its end"


@ALL_KINDS
def test_parts_that_were_handed_back_wait_and_are_not_in_retry(
    streamq: Streamq, client: Client, submitted: Driver
) -> None:
    holder, _ = submitted.claim(2)
    other, grant = submitted.claim()
    submitted.fail(other, grant.parts[0].number, delay_ms=60_000)
    submitted.release(holder)

    text = streamq("status", submitted.id).stdout

    assert "0 of 3 done, 2 waiting, 0 running, 1 in retry, 0 failed" in fact(text, "parts")
    counts = client.get(submitted.id).status().parts
    assert (counts.waiting, counts.retry) == (2, 1)


@ALL_KINDS
def test_status_of_the_queue(streamq: Streamq, submitted: Driver, protocol: Protocol) -> None:
    submitted.claim()
    beat(protocol, submitted.queue)

    text = streamq("status").stdout
    summary = json.loads(streamq("status", "--json").stdout)

    assert fact(text, "requests") == "0 loading, 1 open, 0 paused"
    assert fact(text, "parts") == "2 waiting, 1 running, 0 in retry"
    assert fact(text, "workers") == "1 live, 1 of 8 slots busy"
    assert summary == {
        "queue": submitted.queue,
        "requests": {"loading": 0, "open": 1, "paused": 0},
        "parts": {"waiting": 2, "running": 1, "retry": 0},
        "workers": 1,
        "slots": {"total": 8, "busy": 1},
    }


def test_status_of_a_long_queue_says_how_far_it_has_read(
    running: Callable[..., subprocess.Popen[str]], protocol: Protocol, queue: str, request_id: str
) -> None:
    ids = {f"{request_id}-{number}": number for number in range(1_200)}
    protocol.connection.redis.zadd(QueueKeys(queue).open, ids)
    with Terminal() as terminal:
        asking = running("status", stdout=subprocess.PIPE, stderr=terminal.file)

        text, _ = asking.communicate(timeout=60)

        assert fact(text, "requests") == "0 loading, 0 open, 0 paused"
        assert "read 1,000 of 1,200 requests" in terminal.seen()
        assert terminal.seen().endswith("\r\x1b[K")


@ALL_KINDS
def test_ls_shows_what_is_open_newest_first(
    streamq: Streamq, client: Client, failed: Driver
) -> None:
    for name in ("1-old", "2-new"):  # by name where both are of the same millisecond
        client.submit([b"1"], handler=HANDLER, id=f"{failed.id}-{name}", queue=failed.queue)

    ran = streamq("ls")

    headers = "ID HANDLER STATE LEVEL LIMIT PARTS RECORDS FAILED RATE ETA AGE"
    assert ran.stdout.splitlines()[0].split() == headers.split()
    assert [row[0] for row in rows(ran.stdout)] == [f"{failed.id}-2-new", f"{failed.id}-1-old"]
    assert rows(ran.stdout)[0][1:10] == [HANDLER, "open", "50", "8", "0/1", "1", "0", "-", "-"]
    assert ran.stderr == ""


def test_requests_of_one_millisecond_are_listed_by_id(
    streamq: Streamq, client: Client, protocol: Protocol, queue: str, request_id: str
) -> None:
    ids = [f"{request_id}-{name}" for name in "abc"]
    for each in ids:
        driver = Driver(protocol, queue, each)
        driver.open()
        driver.set_meta(created_ms=1_000)
    order = {ids[1]: 1, ids[2]: 2, ids[0]: 3}
    protocol.connection.redis.zadd(QueueKeys(queue).open, order)

    listed = [row[0] for row in rows(streamq("ls").stdout)]

    assert listed == ids[::-1]
    assert [status.id for status in client.list(queue)] == ids


def test_ls_shows_ended_requests_when_asked(
    streamq: Streamq, client: Client, failed: Driver, protocol: Protocol
) -> None:
    open_id = f"{failed.id}-open"
    client.submit([b"1"], handler=HANDLER, id=open_id, queue=failed.queue)
    before = streamq("ls", "--all").stdout
    score = protocol.registered(failed.queue, failed.id)
    assert score is not None
    assert protocol.close(failed.queue, failed.id, score, round(time.time() * 1e3) + 60_000)

    after = streamq("ls", "--all").stdout
    done = streamq("ls", "--state", "done").stdout
    listed = json.loads(streamq("ls", "--state", "open", "--json").stdout)

    assert [row[0] for row in rows(before)] == [open_id, failed.id]
    assert [row[0] for row in rows(after)] == [open_id, failed.id]
    assert [row[:3] for row in rows(done)] == [[failed.id, HANDLER, "done"]]
    assert [(list(status), status["id"]) for status in listed] == [(STATUS, open_id)]


def test_ls_shows_what_was_just_closed_before_what_is_kept_longest(
    client: Client, failed: Driver, protocol: Protocol
) -> None:
    now_ms = round(time.time() * 1e3)
    old = f"{failed.id}-old"
    client.submit([], handler=HANDLER, id=old, queue=failed.queue)
    for id_, purge_at in ((failed.id, now_ms + 180_000), (old, now_ms + 9_000_000)):
        score = protocol.registered(failed.queue, id_)
        assert score is not None
        assert protocol.close(failed.queue, id_, score, purge_at)
    for number in range(5):
        protocol.close(failed.queue, f"{failed.id}-{number}", -1, now_ms + 7_000_000)

    found = list(protocol.newest(failed.queue, closed=True, page=2))

    assert found[:2] == [failed.id, old]
    assert len(found) == 7


def test_ls_costs_what_it_shows(
    streamq: Streamq, protocol: Protocol, queue: str, request_id: str
) -> None:
    ids = [f"{request_id}-{number:02d}" for number in range(30)]
    for each in ids:
        protocol.mint(queue, each, Tokens(), register="yes")
        Driver(protocol, queue, each).open()
    redis = protocol.connection.redis

    def calls() -> int:
        stats = redis.info("commandstats")
        return sum(
            stats.get(f"cmdstat_{name}", {"calls": 0})["calls"] for name in ("eval", "evalsha")
        )

    before = calls()
    ran = streamq("ls", "-n", "3")

    assert calls() - before <= 6
    assert {row[0] for row in rows(ran.stdout)} <= set(ids)
    assert len(rows(ran.stdout)) == 3
    assert "newest 3" in ran.stderr


def test_workers(streamq: Streamq, protocol: Protocol, queue: str) -> None:
    worker = beat(protocol, queue)
    protocol.beat(queue, "stranger", 60_000, b"of another version")

    text = streamq("workers").stdout
    listed = json.loads(streamq("workers", "--json").stdout)

    stranger, known = rows(text)
    assert known[:6] == ["web-3.4711", "web-3", "4711", "1.2.3", HANDLER, "1/8"]
    assert known[6].startswith("1m3")
    assert known[-2:] == ["nightly/17", known[-1]]
    assert known[-1].startswith("1m")
    assert stranger[0] == "stranger"
    assert msgspec.convert(listed[1], WorkerDetails) == worker


def test_errors_by_part(streamq: Streamq, failed: Driver) -> None:
    by_part = streamq("errors", failed.id)
    first = streamq("errors", failed.id, "--limit", "1", "--json")

    assert [row[0] for row in rows(by_part.stdout)] == ["1", "2"]
    assert "ValueError: no" in by_part.stdout
    assert by_part.stderr == ""
    assert [(f["part"], f["error"], f["message"]) for f in json.loads(first.stdout)] == [
        (1, "ValueError", "no")
    ]
    assert first.stderr == "1 of 2 are shown; --limit 0 shows every one\n"


def test_errors_by_kind(streamq: Streamq, failed: Driver) -> None:
    text = streamq("errors", failed.id, "--group").stdout
    groups = json.loads(streamq("errors", failed.id, "--group", "--json").stdout)

    assert text.startswith("2x ValueError: no (e.g. part 1")
    assert [(g["count"], g["error"], g["message"]) for g in groups] == [(2, "ValueError", "no")]
    assert groups[0]["example"]["part"] == 1


def test_errors_with_their_tracebacks(streamq: Streamq, submitted: Driver) -> None:
    holder, _ = submitted.claim()
    failure = Failure(error="ValueError", message="no", traceback="Traceback:\n  x = \x1b[2J\n")
    submitted.protocol.fail(submitted.id, holder, 1, 1, [failure], kind="abandon")

    out = streamq("errors", submitted.id, "--traceback").stdout

    assert out == "part 1: ValueError: no\n    Traceback:\n      x = \\x1b[2J\n"


# Waiting


def test_wait_for_what_is_done(streamq: Streamq, done: Driver) -> None:
    ran = streamq("wait", done.id)
    assert (ran.returncode, ran.stdout) == (0, "")
    assert f"{done.id}: done, 3 records, 0 failed" in ran.stderr


@ALL_KINDS
def test_wait_until_it_is_done(
    running: Callable[..., subprocess.Popen[str]], submitted: Driver, protocol: Protocol
) -> None:
    waiting = running("wait", submitted.id, "--quiet")
    holder, _ = submitted.claim(3)
    submitted.finish(holder, [1, 2, 3])

    _, err = waiting.communicate(timeout=30)
    assert (waiting.returncode, err) == (0, "")


def test_wait_tells_failures_from_cancelled(
    streamq: Streamq, client: Client, failed: Driver
) -> None:
    cancelled = client.submit([b"1"], handler=HANDLER, queue=failed.queue)
    cancelled.cancel()

    assert streamq("wait", failed.id).returncode == 1
    assert streamq("wait", failed.id, cancelled.id).returncode == 5


def test_wait_no_longer_than_asked(streamq: Streamq, submitted: Driver) -> None:
    ran = streamq("wait", submitted.id, "--timeout", "200ms")

    assert (ran.returncode, ran.stdout) == (124, "")
    assert ran.stderr == f"streamq: request {submitted.id} is not finished\n"


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
def test_wait_shows_progress_on_a_terminal_and_can_be_stopped(
    running: Callable[..., subprocess.Popen[str]], submitted: Driver, number: int, code: int
) -> None:
    with Terminal() as terminal:
        files = dict.fromkeys(("stdin", "stdout", "stderr"), terminal.file)
        waiting = running("wait", submitted.id, **files)
        wait_until(lambda: "0/3 parts" in terminal.seen(), timeout=30)

        waiting.send_signal(number)

        assert waiting.wait(timeout=30) == code
        wait_until(lambda: "the same command waits again" in terminal.seen())
        assert "Traceback" not in terminal.seen()


# Steering


def test_set_pause_and_resume(streamq: Streamq, submitted: Driver) -> None:
    ran = streamq("set", submitted.id, "--priority", "10", "--limit", "2", "--rate", "5/s")
    assert (ran.returncode, ran.stdout) == (0, "")
    assert ran.stderr == f"{submitted.id}: level 10, limit 2, rate 5/s\n"
    assert [submitted.meta(f) for f in ("level", "limit", "rate_ms")] == ["10", "2", "200"]
    assert submitted.tokens(10) == [submitted.id, submitted.id]

    assert streamq("pause", submitted.id).stderr == f"{submitted.id}: paused\n"
    assert [row[2] for row in rows(streamq("ls", "--state", "paused").stdout)] == ["paused"]
    assert streamq("resume", submitted.id).stderr == f"{submitted.id}: resumed\n"
    assert streamq("set", submitted.id, "--rate", "off").returncode == 0
    assert [submitted.meta(f) for f in ("paused", "rate_ms")] == ["0", "0"]


def test_what_has_ended_cannot_be_steered(streamq: Streamq, done: Driver) -> None:
    ran = streamq("set", done.id, "--level", "10")

    assert (ran.returncode, ran.stdout) == (1, "")
    assert ran.stderr == f"streamq: {done.id}: the request is done\n"


def test_one_that_refuses_does_not_stop_the_others(streamq: Streamq, submitted: Driver) -> None:
    ran = streamq("pause", "nobody-knows-it", submitted.id)

    assert ran.returncode == 5
    assert submitted.meta("paused") == "1"


def test_cancel(streamq: Streamq, submitted: Driver) -> None:
    ran = streamq("cancel", submitted.id)

    assert (ran.returncode, ran.stdout) == (0, "")
    assert ran.stderr == f"{submitted.id}: cancelled, 3 parts not finished\n"
    assert submitted.meta("state") == "cancelled"


def test_cancel_asks_on_a_terminal_when_there_are_several(
    running: Callable[..., subprocess.Popen[str]], client: Client, submitted: Driver
) -> None:
    other = client.submit([b"1"], handler=HANDLER, queue=submitted.queue)

    with Terminal() as terminal:
        files = dict.fromkeys(("stdin", "stdout", "stderr"), terminal.file)
        asking = running("cancel", submitted.id, other.id, **files)
        wait_until(lambda: "Cancel 2 requests?" in terminal.seen(), timeout=30)
        terminal.type("n\n")
        assert asking.wait(timeout=30) == 1
        assert submitted.meta("state") == "open"

        sure = running("cancel", submitted.id, other.id, "--yes", **files)
        assert sure.wait(timeout=30) == 0

    assert submitted.meta("state") == "cancelled"


@ALL_KINDS
def test_retry_runs_again_what_failed(streamq: Streamq, failed: Driver) -> None:
    ran = streamq("retry", failed.id)

    assert (ran.returncode, ran.stdout) == (0, "2 parts run again\n")
    assert failed.meta("state") == "open"


# The janitor


@ALL_KINDS
def test_the_janitor_puts_back_a_lost_token(streamq: Streamq, submitted: Driver) -> None:
    for _ in range(3):
        assert submitted.protocol.take(submitted.queue, ("h",), 1.0) == Token(submitted.id, "h", 50)
    assert submitted.tokens() == []

    ran = streamq("janitor", "--once")

    assert (ran.returncode, ran.stdout) == (0, "")
    assert len(submitted.tokens()) == 3


def test_the_janitor_says_what_it_took_back(streamq: Streamq, submitted: Driver) -> None:
    holder, _ = submitted.claim()
    submitted.expire(holder)

    ran = streamq("janitor", "--once", STREAMQ_LOG_FORMAT="json")

    line = json.loads(ran.stderr)
    assert line["event"] == f"reaped 1 parts of {submitted.id}"
    assert (line["level"], line["logger"]) == ("info", "streamq.queue.janitor")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_janitor_ends_politely(
    number: signal.Signals, running: Callable[..., subprocess.Popen[str]]
) -> None:
    janitor = running("janitor", "--interval", "1m")
    assert janitor.stderr is not None
    assert "sweeping" in janitor.stderr.readline()

    janitor.send_signal(number)

    _, rest = janitor.communicate(timeout=30)
    assert janitor.returncode == 0
    assert rest.count("\n") == 1
    assert rest.endswith(" stopped\n")


def test_the_janitor_outlives_its_server(tmp_path: Path) -> None:
    with LocalServer.start(tmp_path) as server:
        janitor = subprocess.Popen(
            [*COMMAND, "janitor", "--interval", "100ms", "--url", server.url],
            env=environment(),
            stderr=subprocess.PIPE,
            text=True,
        )
        assert janitor.stderr is not None
        assert "sweeping" in janitor.stderr.readline()
    lost = janitor.stderr.readline()
    with LocalServer.start(tmp_path):
        found = janitor.stderr.readline()
        janitor.terminate()
        _, rest = janitor.communicate(timeout=30)

    assert "queue default: unix:" in lost
    assert "queue default is swept again" in found
    assert rest.splitlines()[0].endswith("stopped")
    assert janitor.returncode == 0


# What people and programs read


@pytest.mark.parametrize(("variables", "has_colour"), [({}, True), ({"NO_COLOR": "1"}, False)])
def test_colour_only_for_those_who_want_it(
    variables: dict[str, str], has_colour: bool, url: str, submitted: Driver
) -> None:
    with Terminal() as terminal:
        shown = subprocess.run(
            [*COMMAND, "ls", "--queue", submitted.queue, "--url", url],
            env=environment(**variables),
            stdin=terminal.file,
            stdout=terminal.file,
            timeout=60,
            check=False,
        )
        text = terminal.seen()

    assert shown.returncode == 0
    assert ("\x1b[" in text) == has_colour
    assert "open" in text


@pytest.mark.parametrize(
    ("ms", "text"),
    [
        (-5, "0ms"),
        (999, "999ms"),
        (1_400, "1s"),
        (60_000, "1m"),
        (85_000, "1m25s"),
        (7_500_000, "2h05m"),
        (604_800_000, "7d"),
    ],
)
def test_spans(ms: float, text: str) -> None:
    assert render.span(ms) == text


@pytest.mark.parametrize(
    ("per_second", "text"),
    [(1234.5, "1,234/s"), (12.5, "12.5/s"), (0.5, "30/m"), (0.001, "3.6/h"), (0.0, "0/h")],
)
def test_rates(per_second: float, text: str) -> None:
    assert render.rate(per_second) == text


def test_a_table_lets_no_text_move_the_cursor() -> None:
    text = render.table(("NAME", ">COUNT"), [("a\x1b[2Jb\nc", "1"), ("é", "1000")])

    assert text.splitlines() == [
        "NAME          COUNT",
        r"a\x1b[2Jb\nc      1",
        "é              1000",
    ]


def test_load_warns_of_a_handler_that_no_worker_has(
    streamq: Streamq, protocol: Protocol, queue: str, tmp_path: Path
) -> None:
    (tmp_path / "in.txt").write_text("a line\n")

    def warned(*handlers: str) -> str:
        details = WorkerDetails(name="w", queue=queue, handlers=list(handlers))
        protocol.beat(queue, "w", 60_000, msgspec.json.encode(details))
        ran = streamq("load", str(tmp_path / "in.txt"), "--handler", "shuot")
        assert ran.returncode == 0
        return ran.stderr

    assert "warning" not in warned(), "a pool that has just started"
    assert "there is shout" in warned("shout")
    assert "warning" not in warned("shuot")
