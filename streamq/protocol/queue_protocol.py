"""The life of a queue: one method for each script of ``lua/queue/``, and waiting for tokens.

A method that finds a key of the queue to be of another type than streamq writes has it renamed.
"""

from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any

import msgspec

from streamq import units
from streamq.driver.connection import Connection
from streamq.driver.errors import translating_driver_errors
from streamq.errors import Damaged, FlowUntold
from streamq.flows.shape import Shape
from streamq.model import LAST_LEVEL, PREFIX, News
from streamq.protocol import queue_calls
from streamq.protocol.call import Call
from streamq.protocol.reads import Reads
from streamq.protocol.replies import Beaten, MintMode, Register, Tick, Token, Tokens
from streamq.protocol.scripts import Scripts

_EVERY_LEVEL = tuple(range(LAST_LEVEL + 1))


class QueueProtocol(Reads):
    """Every transition of a queue's indexes and lists of tokens."""

    def __init__(self, connection: Connection, prefix: str = PREFIX) -> None:
        super().__init__(connection, prefix)
        self._scripts = Scripts(connection, self._retold)
        self._do, self._do_apart = self._scripts.do, self._scripts.do_apart

    def _retold(self, call: Call[Any], told: FlowUntold) -> Call[Any]:
        """Return the call with the keys that it needs, for a script said which flow it is."""
        place = str(call.keys.id)
        request_id, _ = units.place(place)
        self.learn(request_id, Shape.read(str(told)) if str(told) else None)
        return msgspec.structs.replace(call, keys=self.keys(place))

    def mint(
        self,
        queue: str,
        request_id: str,
        tokens: Tokens,
        *,
        mode: MintMode = "push",
        register: Register = "no",
    ) -> int:
        """Push tokens of a request and register its next look. Returns how many were pushed."""
        keys = self._space.queue(queue, tokens.to)
        return self._do(queue_calls.mint(keys, request_id, tokens, mode=mode, register=register))

    def push(self, queue: str, request_id: str, tokens: Tokens) -> None:
        """Do what a script asked its caller to do in the queue, if anything."""
        if not tokens:
            return
        if tokens.count > 0 or tokens.look_ms > 0:
            self.mint(queue, request_id, tokens)
        for each in tokens.others:
            self.mint(each.queue, each.place, each.tokens)

    def tick(
        self,
        queue: str,
        limit: int = 100,
        every_ms: int = 5_000,
        looked: Sequence[str] = (),
        lent: int = 0,
    ) -> Tick:
        """Take the requests that are due for a look, and those that may be purged.

        They are lent for ``every_ms``. Those of the last tick that were looked at are given back
        with the next: ``looked``, and until when they were ``lent``.
        """
        return self._do(queue_calls.tick(self._space.queue(queue), limit, every_ms, looked, lent))

    def close(self, queue: str, request_id: str | bytes, score: float, purge_at: int) -> bool:
        """Take an ended request out of the open ones, or a purged one (0) out of all."""
        return self._do(queue_calls.close(self._space.queue(queue), request_id, score, purge_at))

    def beat(
        self,
        queue: str,
        worker: str,
        ttl_ms: int,
        details: bytes = b"",
        lease_ms: int = 20_000,
        requests: Sequence[str] = (),
    ) -> Beaten:
        """Say that a worker lives and what it holds; with a TTL of 0, that it goes."""
        keys = self._space.worker(queue, worker)
        try:
            return self._do(queue_calls.beat(keys, worker, ttl_ms, details, lease_ms, requests))
        except Damaged as error:
            renamed = self.set_aside(queue, worker=keys.worker)
            raise Damaged(f"{error}; renamed {renamed}") from None

    def note(self, queue: str, change: bytes) -> None:
        """Write down what somebody has changed."""
        self._do(queue_calls.note(self._space.queue(queue), change))

    def watch(self, queue: str, most: int, ttl_ms: int) -> None:
        """Have each worker of the queue tell so many spans a second, for a while."""
        self._do(queue_calls.watch(self._space.queue(queue), most, ttl_ms))

    def show(self, queue: str, told: bytes) -> None:
        """Tell spans of a worker to those who look at the timeline."""
        self._do(queue_calls.show(self._space.queue(queue), told))

    # Tokens. A script cannot block.

    def take(
        self,
        queue: str,
        handlers: tuple[str, ...],
        block_s: float,
        levels: tuple[int, ...] = _EVERY_LEVEL,
    ) -> Token | None:
        """Return the next token for one of these handlers, best level first, or None in time.

        It waits at every list that there may be. Tokens of one level come in their order.
        """
        reply = self._pop(queue, self._space.token_lists(queue, handlers, levels), block_s)
        return reply and self._token(queue, *reply)

    def take_used(
        self,
        queue: str,
        handlers: tuple[str, ...],
        block_s: float,
        levels: tuple[int, ...],
        used: frozenset[str],
    ) -> Token | News | None:
        """Return the next token from lists that are in use (``used_lists``), or news of others.

        News come before any token.
        """
        lists = self._space.used_lists(queue, handlers, levels, used)
        reply = self._pop(queue, lists, block_s)
        if reply is None:
            return None
        name, value = reply
        if name.startswith(self._space.queue(queue).tokens.encode()):
            return self._token(queue, name, value)
        return News(value.decode("utf-8", "replace"))

    def used_lists(self, queue: str, handlers: Iterable[str]) -> frozenset[str]:
        """Return the lists of these handlers that tokens came into, as ``list_of`` calls them."""
        key = self._space.queue(queue).used
        try:
            with translating_driver_errors(self.connection.where):
                found = self.connection.call("ZRANGE", key, 0, -1)
        except Damaged as error:
            raise Damaged(f"{error}; renamed {self.set_aside(queue)}") from None
        named = {b"%s:" % name.encode() for name in handlers}
        ours = (each for each in found if each[:-2] in named and each[-2:].isdigit())
        return frozenset(each.decode() for each in ours)

    def tell_again(self, queue: str, to: str) -> None:
        """Push news of a list once more, if it has tokens, is new, and there are no news."""
        self.mint(queue, "", Tokens(0, to), mode="ensure")

    def heard(self, queue: str, to: str) -> None:
        """Remove news of a list: every process that waits has been told of it."""
        self.mint(queue, "", Tokens(0, to), mode="heard")

    def forget_lists(self, queue: str, before_ms: int) -> None:
        """Forget lists that came into use before that and are empty; the next token is news."""
        key = self._space.queue(queue).used
        with translating_driver_errors(self.connection.where):
            old = self.connection.redis.zrange(key, "-inf", before_ms, byscore=True)
        for to in old:
            # A list of another type is put aside by a process that waits there.
            with suppress(Damaged):
                self.mint(queue, "", Tokens(0, to.decode("utf-8", "replace")), mode="forget")

    def drop_former_lists(self, queue: str) -> None:
        """Remove lists of one level for all handlers, which an earlier version pushes to.

        No worker of that version may be left that takes from them. Should there be one, the next
        audits of that version push what is missing.
        """
        with translating_driver_errors(self.connection.where):
            self.connection.redis.unlink(*self._space.former_lists(queue))

    def _pop(
        self, queue: str, lists: tuple[str, ...], block_s: float
    ) -> tuple[bytes, bytes] | None:
        try:
            reply: tuple[bytes, bytes] | None = self.connection.pop(lists, block_s)
        except Damaged as error:
            raise Damaged(f"{error}; renamed {self.set_aside(queue, lists)}") from None
        return reply

    @staticmethod
    def _token(queue: str, name: bytes, token: bytes) -> Token:
        _, handler, level = name.decode().rsplit(":", 2)
        try:
            place = token.decode()
            units.place(place)
            return Token(place, handler, int(level))
        except ValueError:
            raise Damaged(f"a token of {queue} is no request id: {token!r:.100}") from None

    # Keys that are of another type than streamq writes

    def aside(self, queue: str, name: str, type: str) -> bool:
        """Rename a key of the queue, if it is there and of another type than this."""
        return self._do(queue_calls.aside(self._space.spoilt(queue, name), type))

    def set_aside(self, queue: str, lists: tuple[str, ...] = (), worker: str = "") -> list[str]:
        """Rename keys of a queue that are of another type. Returns their names since then.

        ``lists`` and ``worker``: keys to look at besides the indexes.
        """
        keys = self._space.queue(queue)
        sets = (keys.due, keys.open, keys.closed, keys.workers, keys.used)
        indexes = dict.fromkeys(sets, "zset")
        of_worker = {worker: "hash", keys.watch: "string"} if worker else {}
        wanted = indexes | dict.fromkeys(lists, "list") | of_worker
        redis = self.connection.redis
        with (
            translating_driver_errors(self.connection.where),
            redis.pipeline(transaction=False) as pipe,
        ):
            for key in wanted:
                pipe.type(key)
            found = dict(zip(wanted, pipe.execute(), strict=True))
        names = {key: key.partition("}:")[2] for key in wanted}
        return [
            self._space.spoilt(queue, names[key]).aside
            for key, type_ in wanted.items()
            if found[key].decode() not in (type_, "none") and self.aside(queue, names[key], type_)
        ]
