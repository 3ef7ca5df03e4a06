"""Garbage in the server, beside a real pool: it goes on, others' requests run, commands answer."""

import io
import logging
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout, suppress
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from streamq import Client, Janitor, Protocol, Request, StreamqError, units
from streamq.driver.connection import Connection
from streamq.protocol.keys import QueueKeys, RequestKeys, token_list_of
from tests.conftest import KINDS
from tests.fuzz.profile import IS_ASKED, anything, fuzz, garbage
from tests.support.fleet import Fleet
from tests.support.simulated import make_due
from tests.support.waiting import wait_until

Spoil = Callable[[Any, RequestKeys, QueueKeys, bytes], Any]
META = (
    *("state", "handler", "unit", "queue", "paused", "level", "limit", "total", "bytes", "done"),
    *("delivered", "records", "records_done", "out", "due_ms", "hold_ms", "rate_ms", "rate_at_ms"),
    "hold_from_ms",
    *("failed", "records_failed", "retries", "poison", "max_failures", "max_percent", "keep_ms"),
    *("finished_ms", "created_ms", "started_ms", "spec", "digest", "cursor", "source", "sealed"),
    *("committed", "redrives", "rate_charge_ms", "lease_ms", "suspected_ms", "looked_ms"),
    *("weight", "ceiling", "eased", "eased_ms", "labels", "reason", "strays"),
    *("deadline_ms", "calls", "owes", "settled", "outlive_ms", "parent"),
    "protocol",
)
REQUEST_KEYS = (
    *("meta", "parts", "left", "leases", "holders", "retry", "tries", "partial", "results"),
    *("failed", "gone", "pace"),
)


def _meta(field: str) -> Spoil:
    return lambda redis, keys, _, junk: redis.hset(keys.meta, field, junk)


def _wrong(name: str) -> Spoil:
    """A key of another type."""

    def spoil(redis: Any, keys: RequestKeys, queue: QueueKeys, junk: bytes) -> None:
        key = getattr(keys if name in REQUEST_KEYS else queue, name)
        redis.delete(key)
        redis.sadd(key, junk)

    return spoil


def _spoil_heartbeats(redis: Any, _: RequestKeys, queue: QueueKeys, junk: bytes) -> None:
    """What each live worker says of itself becomes a key of another type."""
    for key in redis.keys(queue.worker.replace("{", "?").replace("}", "?") + "*"):
        redis.delete(key)
        redis.set(key, junk)


def _register(redis: Any, _: RequestKeys, queue: QueueKeys, junk: bytes) -> None:
    redis.zadd(queue.open, {junk: 0})
    redis.zadd(queue.due, {junk: 0})


SPOILS: dict[str, Spoil] = {
    **{f"meta {field}": _meta(field) for field in META},
    **{f"wrong type of {name}": _wrong(name) for name in REQUEST_KEYS},
    **{f"wrong type of {name}": _wrong(name) for name in ("tokens", "due", "open", "closed")},
    **{f"wrong type of {name}": _wrong(name) for name in ("used", "news", "watch")},
    "wrong type of workers": _wrong("workers"),
    "no meta": lambda redis, keys, _, __: redis.delete(keys.meta),
    "no spec": lambda redis, keys, _, __: redis.hdel(keys.meta, "spec", "queue", "created_ms"),
    "left": lambda redis, keys, _, junk: redis.set(keys.left, junk),
    "lease": lambda redis, keys, _, junk: redis.zadd(keys.leases, {junk: 2e12}),
    "lease that is over": lambda redis, keys, _, junk: redis.zadd(keys.leases, {junk: 0}),
    "holder": lambda redis, keys, _, junk: redis.hset(keys.holders, junk, junk),
    "retry": lambda redis, keys, _, junk: redis.zadd(keys.retry, {junk: 0, b"007": 0, b"99": 0}),
    "tries": lambda redis, keys, _, junk: redis.hset(keys.tries, mapping={"1": junk, junk: junk}),
    "retry with tries": lambda redis, keys, _, junk: [
        redis.zadd(keys.retry, {b"1": 0}),
        redis.hset(keys.tries, "1", junk),
    ],
    "partial": lambda redis, keys, _, junk: [
        redis.zadd(keys.retry, {b"1": 0}),
        redis.hset(keys.partial, mapping={"1": junk, junk: junk}),
    ],
    "mark": lambda redis, keys, _, junk: [
        redis.zadd(keys.retry, {b"1": 0}),
        redis.hset(keys.partial, mapping={"1@": junk, junk: junk}),
    ],
    "debt that nobody can read": lambda redis, keys, _, junk: redis.hset(
        keys.meta, mapping={"state": "done", "owes": 1, "settled": 0, "calls": junk}
    ),
    "deadline that is over": lambda redis, keys, _, junk: redis.hset(
        keys.meta, mapping={"deadline_ms": 1, "reason": junk}
    ),
    "result": lambda redis, keys, _, junk: redis.hset(keys.results, "1", junk),
    "result of no part": lambda redis, keys, _, junk: redis.hset(
        keys.results, mapping={junk: junk, b"1." + junk: junk}
    ),
    "failure": lambda redis, keys, _, junk: redis.hset(keys.failed, "1", junk),
    "curve": lambda redis, keys, _, junk: redis.set(keys.pace, junk * 9),
    "failure of no part": lambda redis, keys, _, junk: redis.hset(keys.failed, junk, junk),
    "stream entry": lambda redis, keys, _, junk: redis.xadd(keys.parts, {junk: junk}),
    "stream entry of many fields": lambda redis, keys, _, junk: redis.xadd(
        keys.parts, {b"a": junk, b"b": junk, junk: b"c"}, id="5-7"
    ),
    "event": lambda redis, keys, _, junk: redis.execute_command("SPUBLISH", keys.events, junk),
    "token": lambda redis, _, queue, junk: redis.rpush(queue.tokens, junk),
    "list in use": lambda redis, _, queue, junk: redis.zadd(queue.used, {junk: 0}),
    "news": lambda redis, _, queue, junk: redis.rpush(queue.news, junk),
    "index": _register,
    "closed": lambda redis, _, queue, junk: redis.zadd(queue.closed, {junk: 0}),
    "worker": lambda redis, _, queue, junk: [
        redis.zadd(queue.workers, {junk: 1, b"odd": 1}),
        redis.hset(queue.worker + "odd", "details", junk),
    ],
    "heartbeats of another type": _spoil_heartbeats,
    "worker of another type": lambda redis, _, queue, junk: [
        redis.zadd(queue.workers, {b"odd": 1}),
        redis.set(queue.worker + "odd", junk),
    ],
}
#: What a pool must have said something about.
REPORTED = {"token", "index", "closed", "stream entry", "stream entry of many fields"} | {
    f"wrong type of {name}" for name in ("meta", "parts", "tokens", "due", "open", "closed")
}


#: Of these it does not matter whether the garbage could be a name.
NEVER_NAMES = REPORTED - {"token", "index", "closed"}


def is_name(junk: bytes) -> bool:
    """Whether it could be a request id, and so is no garbage in a list of them."""
    try:
        return bool(units.name(junk.decode(), "it"))
    except ValueError:
        return False


class Farm:
    """A pool that must outlive everything, and the way to its server."""

    def __init__(self, url: str, folder: Path) -> None:
        self.url = url
        self.queue = "fuzzed"
        self.fleet = Fleet(url, self.queue, folder)
        self.pool = self.fleet.start("-c", "2", audit_ms=200)
        wait_until(lambda: "ready" in self.said(), 60)
        self.client = Client(url)
        self.protocol = Protocol(Connection(url))
        self.redis = self.protocol.connection.redis
        self.children = self.fleet.children(self.pool)

    def said(self) -> str:
        return self.fleet.errors(self.pool)

    def held_request(self) -> Request:
        """Five parts that are not to start yet."""
        parts = [b"part %d" % number for number in range(5)]
        return self.client.submit(
            parts, handler="echo", queue=self.queue, level=1, delay="1h", keep="0s"
        )

    def let_go(self, request: Request) -> None:
        """Invite the pool to a request, whatever became of it."""
        keys, queue = (
            RequestKeys(request.id),
            QueueKeys(self.queue, to=token_list_of("echo", 1)),
        )
        with suppress(Exception):
            if self.redis.hget(keys.meta, "hold_ms") != b"junk":
                self.redis.hset(keys.meta, "hold_ms", 0)
        with suppress(Exception):
            self.redis.rpush(queue.tokens, request.id)

    def clean_request(self) -> None:
        """A request of somebody else: it must go through."""
        end = time.monotonic() + 20
        while True:
            try:
                request = self.client.submit([b"x"] * 3, handler="echo", queue=self.queue, level=1)
                break
            except StreamqError:
                # Its index may be of another type until the pool has put that aside.
                assert time.monotonic() < end
                time.sleep(0.05)
        status = request.wait(20)
        assert (status.state, status.parts.done) == ("done", 3)
        assert [value for _, value in request.results()] == [b"x"] * 3
        request.purge()

    def sweep(self) -> None:
        with suppress(StreamqError):
            make_due(self.protocol, self.queue)
        with suppress(StreamqError):
            Janitor(self.protocol, self.queue).sweep()

    def clear(self, request: Request) -> None:
        """Take the garbage away."""
        found = self.redis.keys(f"sq:{{r:{request.id}}}:*")
        found += [
            key
            for key in self.redis.keys(f"sq:{{q:{self.queue}}}:*")
            if not key.endswith(self.pool_name())
        ]
        if found:
            self.redis.delete(*found)

    def pool_name(self) -> bytes:
        return f".{self.pool.pid}".encode()


@pytest.fixture(scope="module", params=KINDS if IS_ASKED else KINDS[:1])
def server_url(request: pytest.FixtureRequest, urls: Callable[[str], str]) -> str:
    """In CI one kind of server must do."""
    return urls(request.param)


@pytest.fixture(scope="module")
def farm(server_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Farm]:
    farm = Farm(server_url, tmp_path_factory.mktemp("farm"))
    yield farm
    farm.fleet.end()
    farm.client.close()
    farm.protocol.connection.close()


@cache
def entry_point() -> Callable[[], None]:
    """Look up once what ``streamq`` calls: the search reads the metadata of every package."""
    (main,) = entry_points(group="console_scripts", name="streamq")
    found: Callable[[], None] = main.load()
    return found


def command(url: str, queue: str, *words: str) -> tuple[int, str]:
    """Run a command as its entry point does. Returns the exit code and what it said."""
    out = io.TextIOWrapper(io.BytesIO(), "utf-8", "replace")
    errors = io.StringIO()
    before = sys.argv
    sys.argv = ["streamq", *words]
    os.environ |= {"STREAMQ_URL": url, "STREAMQ_QUEUE": queue}
    try:
        with redirect_stdout(out), redirect_stderr(errors):
            entry_point()()
    except SystemExit as end:
        return int(end.code or 0), errors.getvalue()
    finally:
        sys.argv = before
        del os.environ["STREAMQ_URL"], os.environ["STREAMQ_QUEUE"]
    raise AssertionError("a command ends with an exit code")


@pytest.mark.parametrize("name", SPOILS)
@fuzz(0)
@example(junk=b"\xff not ours\n")
@given(junk=garbage)
def test_pool_and_commands_outlive(farm: Farm, name: str, junk: bytes) -> None:
    victim = farm.held_request()
    before = len(farm.said())
    try:
        SPOILS[name](
            farm.redis,
            RequestKeys(victim.id),
            QueueKeys(farm.queue, to=token_list_of("echo", 1)),
            junk,
        )
        farm.let_go(victim)

        farm.clean_request()
        if name not in REPORTED:
            farm.sweep()
        for words in (
            ("status", victim.id),
            ("status", victim.id, "--json"),
            ("status",),
            ("ls", "--all"),
            ("workers",),
            ("errors", victim.id),
            ("results", victim.id),
            ("results", victim.id, "--output-format", "csv"),
        ):
            code, said = command(farm.url, farm.queue, *words)
            assert code in (0, 1, 3, 5), (words, said)
            assert code == 0 or said.startswith("streamq: "), (words, said)
        if name in REPORTED and (name in NEVER_NAMES or not is_name(junk)):
            wait_until(lambda: "WARNING" in farm.said()[before:], 5)
        said_since = farm.said()[before:]
        assert "Traceback" not in said_since
        assert len(said_since.splitlines()) < 50
        assert farm.pool.poll() is None
        assert farm.fleet.children(farm.pool) == farm.children
    finally:
        farm.clear(victim)


@pytest.mark.parametrize("name", SPOILS)
@fuzz(0)
@example(junk=b"\xff not ours\n")
@given(junk=garbage)
def test_client_says_what_is_damaged(
    server_url: str, tmp_path_factory: pytest.TempPathFactory, name: str, junk: bytes
) -> None:
    folder = tmp_path_factory.mktemp("client")
    source = folder / "in.txt"
    source.write_bytes(b"a\nb\n")
    queue = f"q{secrets.token_hex(6)}"
    with Client(server_url) as client:
        redis = client._protocol.connection.redis
        load = ("load", str(source), "--handler", "echo", "--queue", queue)
        for id_ in ("load-a", "load-b"):
            done, said = command(server_url, queue, *load, "--id", f"{queue}-{id_}")
            assert done == 0, said
        for id_ in ("load-a", "load-b"):
            keys = RequestKeys(f"{queue}-{id_}")
            redis.hdel(keys.meta, "sealed")
            redis.hset(keys.meta, "state", "loading")
            SPOILS[name](redis, keys, QueueKeys(queue, to=token_list_of("echo", 1)), junk)
        request = Request(client._protocol, f"{queue}-load-a")
        calls: list[Callable[[], Any]] = [
            lambda: request.wait(0.01),
            lambda: list(request.results(timeout=0.01)),
            request.errors,
            lambda: request.set(level=3, limit=2, rate="5/s"),
            request.pause,
            request.resume,
            request.retry,
            lambda: client.submit([b"a\nb\n"], handler="echo", queue=queue, id=request.id),
            lambda: client.list(queue, ended=True),
            request.cancel,
            request.retry,
            lambda: client.list(queue, ended=True),
            request.purge,
        ]
        for call in calls:
            with suppress(StreamqError):
                call()
        other = f"{queue}-load-b"
        for words in (
            (*load, "--id", other),
            ("results", other, "-o", str(folder / "out.txt")),
            ("results", other, "-o", str(folder / "any.csv"), "--unordered"),
            ("wait", other, "--timeout", "10ms"),
            ("set", other, "--level", "3"),
            ("cancel", other),
            ("retry", other),
        ):
            code, said = command(server_url, queue, *words)
            assert code in (0, 1, 2, 3, 5, 124), (words, said)
            assert code == 0 or "streamq: " in said, (words, said)


def test_janitor_command_takes_everything_in_its_stride(server_url: str) -> None:
    name = f"q{secrets.token_hex(6)}"
    queue = QueueKeys(name)
    with Client(server_url) as client:
        redis = client._protocol.connection.redis
        damaged = client.submit([b"x"], handler="h", queue=name)
        other = client.submit([b"x"], handler="h", queue=name)
        redis.hset(RequestKeys(damaged.id).meta, "state", b"\xff")
        redis.delete(queue.closed)
        redis.set(queue.closed, "not ours")
        _register(redis, RequestKeys(damaged.id), queue, b"\xff not ours")
        for _ in range(2):
            make_due(client._protocol, name)
            done = subprocess.run(
                [sys.executable, "-m", "streamq.cli", "janitor", "--once", "--queue", name],
                env=os.environ | {"STREAMQ_URL": server_url},
                capture_output=True,
                text=True,
                check=False,
            )
            assert done.returncode == 0, done.stderr
            assert "Traceback" not in done.stderr
        assert f"request {damaged.id} is damaged" in done.stderr
        # Both may be of the same millisecond.
        assert sorted(client._protocol.ids(name)) == sorted([damaged.id, other.id])


OPTIONS = (
    *("level", "limit", "rate", "delay", "start_at", "retries", "backoff", "timeout"),
    *("max_failures", "keep", "poison", "durable", "queue", "handler", "id"),
)


@fuzz(60)
@given(options=st.dictionaries(st.sampled_from(OPTIONS), anything, max_size=3))
def test_option_of_a_request_is_understood_or_refused(
    server_url: str, options: dict[str, Any]
) -> None:
    with Client(server_url) as client, suppress(StreamqError):
        given_ = {"handler": "h", "queue": "options"} | options
        if options.get("durable"):
            given_ |= {"durable": 0}  # nobody is to wait for replicas
        request = client.submit([b"x"], **given_)
        assert request.status().parts.total == 1
        request.set(
            level=options.get("level"), limit=options.get("limit"), rate=options.get("rate")
        )
        request.cancel()
        request.purge()


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)
