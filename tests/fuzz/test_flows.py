"""Garbage in a flow that is half done, beside a pool: it goes on, and others' requests run."""

from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given

from streamq import Client, Janitor, Protocol, Request, StreamqError
from streamq.driver.connection import Connection
from streamq.protocol.keys import QueueKeys, token_list_of
from tests.conftest import KINDS
from tests.fuzz.profile import IS_ASKED, fuzz, garbage
from tests.fuzz.test_live import command
from tests.support.apps import flows
from tests.support.fleet import Fleet
from tests.support.simulated import make_due
from tests.support.waiting import wait_until

Spoil = Callable[[Any, "Keys", bytes], Any]
#: One part of the second stage runs, and the others wait for an hour.
HALF = (
    flows.app.flow("half").spread(flows.letters).map(flows.code, rate="1/h").join(flows.merge)
).reduce(flows.total)
STAGES = (("letters", 1), ("code", 2), ("merge", 3), ("total", 4))


class Keys:
    """The names of a flow's keys: ``keys("2:parts")``."""

    def __init__(self, request_id: str) -> None:
        self.id = request_id

    def __call__(self, name: str) -> str:
        return f"sq:{{r:{self.id}}}:{name}"


#: Fields of flows, and where they are.
META = {
    "meta": ("facts", "shape", "stages", "plan", "laid", "runs", "protocol", "key", "total"),
    "2:meta": ("state", "facts", "shape", "window", "window_bytes", "total", "bytes", "done",
               "failed", "weight", "out", "queue", "handler", "spec", "protocol", "kind"),
    "3:meta": ("state", "facts", "on_failure", "total", "limit", "level", "queue", "spec"),
    "4:meta": ("facts", "on_failure", "total", "width", "assigned", "arrived", "final", "spec"),
}  # fmt: skip
KEYS = (
    *("groups", "kids", "items", "trace", "keys", "left", "results"),
    *(f"{stage}:{name}" for stage in (2, 3, 4)
      for name in ("meta", "parts", "leases", "holders", "retry", "tries", "partial", "failed")),
    *("3:got", "4:got"),
)  # fmt: skip


def _meta(key: str, field: str) -> Spoil:
    return lambda redis, keys, junk: redis.hset(keys(key), field, junk)


def _gone(key: str, field: str) -> Spoil:
    return lambda redis, keys, _: redis.hdel(keys(key), field)


def _no_key(name: str) -> Spoil:
    return lambda redis, keys, _: redis.delete(keys(name))


def _wrong(name: str) -> Spoil:
    """A key of another type."""

    def spoil(redis: Any, keys: Keys, junk: bytes) -> None:
        redis.delete(keys(name))
        redis.sadd(keys(name), junk)

    return spoil


def _entry(about: Callable[[bytes], bytes]) -> Spoil:
    """A part of the second stage that nobody handed over, counted as if somebody had."""

    def spoil(redis: Any, keys: Keys, junk: bytes) -> None:
        number = redis.hincrby(keys("2:meta"), "total", 1)
        redis.xadd(keys("2:parts"), {about(junk): junk}, id=f"{number}-0")

    return spoil


SPOILS: dict[str, Spoil] = {
    **{f"{key} {field}": _meta(key, field) for key, fields in META.items() for field in fields},
    **{f"no {key} {field}": _gone(key, field) for key in META for field in ("facts", "spec")},
    **{f"wrong type of {name}": _wrong(name) for name in KEYS},
    **{f"no {n}:{name}": _no_key(f"{n}:{name}") for n in (2, 3, 4) for name in ("meta", "parts")},
    "no groups": lambda redis, keys, _: redis.delete(keys("groups")),
    "count of a group": lambda redis, keys, junk: redis.hset(keys("groups"), "1", junk),
    "size of a group": lambda redis, keys, junk: redis.hset(keys("groups"), "1#", junk),
    "join of a group": lambda redis, keys, junk: redis.hset(keys("groups"), "1@", junk),
    "group of nobody": lambda redis, keys, junk: redis.hset(keys("groups"), junk, junk),
    "what was kept": lambda redis, keys, junk: redis.hset(keys("3:got"), "1/0", junk),
    "input of a join": lambda redis, keys, junk: redis.hset(keys("3:got"), "1/1", junk),
    "failed input of a join": lambda redis, keys, junk: redis.hset(
        keys("3:got"), "1/1", b"\xc1" + junk
    ),
    "input of a reduce": lambda redis, keys, junk: redis.hset(keys("4:got"), "1", junk),
    "place of an item": lambda redis, keys, junk: redis.hset(
        keys("items"), mapping={"1": junk, "1/1": junk, junk: junk}
    ),
    "key of an item": lambda redis, keys, junk: redis.hset(keys("keys"), "ab", junk),
    "trace of an item": lambda redis, keys, junk: redis.hset(
        keys("trace"), mapping={"1:1": junk, "1/1:2": junk, junk: junk}
    ),
    "part of no group": _entry(lambda _: b"1@9/1"),
    "part of no item": _entry(lambda junk: b"1@" + junk),
    "part that says nothing": _entry(lambda junk: junk),
    "part that is there twice": _entry(lambda _: b"1@1/1"),
}  # fmt: skip

#: Those that have found something, or are of their own kind. `make test-long` has the others.
FIRST = {
    "meta shape", "2:meta spec", "2:meta total", "no 2:meta", "no groups", "wrong type of 3:got",
    "wrong type of groups", "wrong type of 2:parts", "count of a group", "size of a group",
    "input of a join", "failed input of a join", "place of an item", "key of an item",
    "part of no item", "part that is there twice",
}  # fmt: skip


class Farm:
    """A pool that must outlive everything, and the way to its server."""

    def __init__(self, url: str, folder: Path) -> None:
        self.url, self.queue = url, "fuzzed-flows"
        self.fleet = Fleet(url, self.queue, folder)
        self.pool = self.fleet.start("-c", "2", target="flows:app", audit_ms=200)
        wait_until(lambda: "ready" in self.said(), 60)
        self.client = Client(url)
        self.protocol = Protocol(Connection(url))
        self.redis = self.protocol.connection.redis
        self.children = self.fleet.children(self.pool)

    def said(self) -> str:
        return self.fleet.errors(self.pool)

    def half_done(self) -> Request:
        """A flow whose spread is done, and of whose children one."""
        request = self.client.submit(
            ["ab", "cd"], flow=HALF, queue=self.queue, keep="0s", key=".", trace=True
        )
        second = self.protocol.keys(f"{request.id}/2").meta
        wait_until(
            lambda: (
                int(self.redis.hget(second, "total")) == 4
                and int(self.redis.hget(second, "done") or 0) > 0
            ),
            20,
        )
        return request

    def let_go(self, request: Request) -> None:
        """Invite the pool to each stage, whatever became of it."""
        keys = Keys(request.id)
        with suppress(Exception):
            self.redis.hset(keys("2:meta"), mapping={"rate_ms": 0, "hold_ms": 0})
        for handler, number in STAGES:
            tokens = QueueKeys(self.queue, to=token_list_of(handler, 50)).tokens
            place = request.id if number == 1 else f"{request.id}/{number}"
            with suppress(Exception):
                self.redis.rpush(tokens, place)

    def clean_requests(self) -> None:
        """A plain request and a flow of somebody else: they must go through."""
        plain = self.client.submit(["x"] * 3, handler="shout", queue=self.queue)
        flow = self.client.submit(["ab"], flow=flows.tolerant, queue=self.queue)
        assert (plain.wait(20).state, flow.wait(20).state) == ("done", "done")
        assert [value for _, value in plain.results()] == ["X"] * 3
        assert [value for _, value in flow.results()] == [{"word": "ab", "sum": 195, "failed": 0}]
        for request in (plain, flow):
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
            if not key.endswith(f".{self.pool.pid}".encode())
        ]
        if found:
            self.redis.delete(*found)


@pytest.fixture(scope="module", params=KINDS if IS_ASKED else KINDS[:1])
def farm(
    request: pytest.FixtureRequest,
    urls: Callable[[str], str],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Farm]:
    farm = Farm(urls(request.param), tmp_path_factory.mktemp("farm"))
    yield farm
    farm.fleet.end()
    farm.client.close()
    farm.protocol.connection.close()


@pytest.mark.parametrize(
    "name",
    [name if name in FIRST else pytest.param(name, marks=pytest.mark.long) for name in SPOILS],
)
@fuzz(0)
@example(junk=b"\xff not ours\n")
@given(junk=garbage)
def test_pool_and_commands_outlive(farm: Farm, name: str, junk: bytes) -> None:
    victim = farm.half_done()
    before = len(farm.said())
    try:
        SPOILS[name](farm.redis, Keys(victim.id), junk)
        farm.let_go(victim)
        farm.clean_requests()
        farm.sweep()
        for words in (
            ("status", victim.id),
            ("status", victim.id, "--json"),
            ("errors", victim.id),
            ("results", victim.id),
            ("find", victim.id, ".=ab"),
            ("find", victim.id, "--item", "1/1"),
            ("set", f"{victim.id}/code", "--limit", "3"),
            ("pause", victim.id),
            ("resume", victim.id),
            ("retry", victim.id),
            ("cancel", victim.id),
            ("ls", "--all"),
        ):
            code, said = command(farm.url, farm.queue, *words)
            assert code in (0, 1, 2, 3, 5), (words, said)
            assert code == 0 or said.startswith("streamq: "), (words, said)
        farm.clean_requests()
        said_since = farm.said()[before:]
        assert "stumbled" not in said_since
        assert len(said_since.splitlines()) < 80
        assert farm.pool.poll() is None
        assert farm.fleet.children(farm.pool) == farm.children
    finally:
        farm.clear(victim)
