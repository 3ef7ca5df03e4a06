"""The protocol in Python: one method for each script in ``lua/``.

A method passes what the script's header asks for and gives the reply a type. It
decides nothing: every rule is in the Lua.
"""

import re
import struct
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache, wraps
from typing import Any, ParamSpec, TypeVar

import msgspec

from streamq import units
from streamq.driver.connection import Connection
from streamq.driver.errors import translating_driver_errors as translated
from streamq.errors import UNREADABLE, Damaged, RequestUnknown, StreamqError, damaged_if_unreadable
from streamq.model import LAST_LEVEL, PREFIX, Failure, News, Part, Policy, State
from streamq.protocol.keys import QueueKeys, RequestKeys, list_of
from streamq.protocol.replies import (
    Audit,
    Collected,
    Grant,
    Opened,
    Outcome,
    Reaped,
    Terms,
    Tick,
    Token,
    Tokens,
)
from streamq.protocol.scripts import Ahead, Call, Scripts
from streamq.protocol.snapshot import Snapshot

_NUMBER = re.compile(rb"[1-9][0-9]{0,15}")
_FIELD = re.compile(rb"[1-9][0-9]{0,15}(\.[0-9]{1,15})?")
#: Who was woken for a request that is not there yet asks again for longer than this.
_SOON_S = 0.001
#: A request that was closed no longer ago than this may have the score of its second look.
_CLOSED_LATELY_MS = 600_000
_EVERY_LEVEL = tuple(range(LAST_LEVEL + 1))
_POISON = msgspec.json.encode(
    [Failure(error="Poison", message="it was running each time its worker died")]
)


#: The state of a request, whether it is paused, and of each holder whether its lease stands.
Renewed = tuple[State, bool, dict[str, bool]]

P = ParamSpec("P")
R = TypeVar("R")


def _typed(method: Callable[P, R]) -> Callable[P, R]:
    """The method, for which a reply that cannot be read is ``Damaged`` and no crash."""

    @wraps(method)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return method(*args, **kwargs)
        except StreamqError:
            raise
        except UNREADABLE as error:
            raise Damaged(f"what {method.__name__} was told cannot be read: {error}") from error

    return run


class Protocol:
    """Run the scripts of ``lua/``: one method for each transition of a request or a part.

    Example:
        Protocol(Connection("redis://localhost")).inspect("nightly")["state"]
    """

    def __init__(self, connection: Connection, prefix: str = PREFIX) -> None:
        self.connection = connection
        scripts = Scripts(connection)
        self._run, self._run_once, self._run_all = scripts.run, scripts.run_once, scripts.run_all
        self._run_many = scripts.run_many
        self._run_apart = scripts.run_apart
        self._prefix = prefix
        # Keys are spelled anew for every call otherwise, and a take may have hundreds of them.
        self._queue_keys = lru_cache(1024)(lambda queue, to="": QueueKeys(queue, prefix, to))
        self._token_lists = lru_cache(64)(self._spell_token_lists)
        self._used_lists = lru_cache(64)(self._spell_used_lists)

    def keys(self, request_id: str) -> RequestKeys:
        """The keys of a request."""
        return RequestKeys(request_id, self._prefix)

    def node_of(self, request_id: str) -> str:
        """The node of a cluster that has the request; "" where there is one server."""
        connection = self.connection
        return connection.node_of(self.keys(request_id).meta) if connection.is_cluster else ""

    def node_of_queue(self, queue: str) -> str:
        """The same of a queue."""
        return self.connection.node_of(self._queue_keys(queue).due)

    def hasty(self, reply_s: float) -> "Protocol":
        """The same over a connection of its own that waits so long for a reply, and never repeats
        a call. The caller closes it.
        """
        return Protocol(self.connection.hasty(reply_s), self._prefix)

    # Requests

    @_typed
    def open(self, request_id: str, digest: str, policy: Policy, source: bytes = b"") -> Opened:
        """Create a request, or find the one of the same submission.

        ``source`` is kept for whoever goes on with the load: what it was made from.

        Raises:
            RequestExists: the id is taken by another submission.
        """
        is_new, state, total, cursor = self._run(
            "open",
            self.keys(request_id),
            digest=digest,
            delay_ms=policy.delay_ms,
            fields=[*policy.fields, "source", source],
        )
        return Opened(bool(is_new), State(state.decode()), total, cursor.decode())

    @_typed
    def append(
        self, request_id: str, first: int, cursor: str, records: int, entries: Sequence[bytes | int]
    ) -> tuple[int, str, Tokens]:
        """Add parts (payload, about, payload, ...). Returns parts so far, cursor, tokens to push.

        Raises:
            RequestEnded: the request takes no more parts.
            LoadGap: the parts do not follow those that are there.
        """
        total, stands, *tokens = self._run(
            "append",
            self.keys(request_id),
            first=first,
            cursor=cursor,
            records=records,
            entries=entries,
        )
        return total, stands.decode(), _tokens(tokens)

    def appending(self, request_id: str) -> "Appending":
        """For many calls of ``append`` in a row; the caller closes it."""
        return Appending(Ahead(Scripts(self.connection), self.connection), self.keys(request_id))

    @_typed
    def submit(
        self,
        request_id: str,
        policy: Policy,
        content: Callable[[], tuple[str, Sequence[bytes]]],
        *,
        is_soon: bool = False,
    ) -> Tokens:
        """Register a request, create it with all its parts, and wake a worker, at once.

        ``content`` makes the cursor and the entries; with ``is_soon`` that takes no time, and a
        worker is woken before: until it asks for parts they are there. Returns the tokens that
        were pushed.
        """
        tokens = _first_tokens(policy)
        at_first = tokens if is_soon and not self.connection.is_cluster else Tokens()

        keys = self._queue_keys(policy.queue, tokens.to)
        # Who was woken may have gone before there was something: one again, if so.
        again: Call = ("mint", keys, _mint_args(request_id, at_first, "ensure", "no"))

        def calls() -> Iterator[Call]:
            begun = time.monotonic()
            yield "mint", keys, _mint_args(request_id, at_first, "push", "yes")
            yield self._submit_call(request_id, policy, *content())
            if not at_first:
                yield "mint", keys, _mint_args(request_id, tokens, "push", "no")
            elif time.monotonic() - begun > _SOON_S:
                yield again

        _, (_, look_ms), *_ = self._run_all(calls(), otherwise=[again] if at_first else [])
        if look_ms:
            self.push(policy.queue, request_id, Tokens(0, tokens.to, look_ms))
        return tokens

    @_typed
    def submit_all(self, requests: Sequence[tuple[str, Policy, str, Sequence[bytes]]]) -> None:
        """Do what ``submit`` does for many requests: id, policy, cursor and entries of each.

        Where there is one server it takes one round trip. It may be repeated.

        Raises:
            RequestExists: one of the ids is taken by another submission; the others are submitted.
        """

        def calls() -> Iterator[Call]:
            for request_id, policy, cursor, entries in requests:
                tokens = _first_tokens(policy)
                keys = self._queue_keys(policy.queue, tokens.to)
                yield "mint", keys, _mint_args(request_id, Tokens(), "push", "yes")
                yield self._submit_call(request_id, policy, cursor, entries)
                yield "mint", keys, _mint_args(request_id, tokens, "push", "no")

        replies = self._run_all(calls())
        for (request_id, policy, *_), (_, look_ms) in zip(requests, replies[1::3], strict=True):
            if look_ms:
                to = _first_tokens(policy).to
                self.push(policy.queue, request_id, Tokens(0, to, look_ms))

    def _submit_call(
        self, request_id: str, policy: Policy, cursor: str, entries: Sequence[bytes]
    ) -> Call:
        args = {
            "digest": policy.digest,
            "cursor": cursor,
            "delay_ms": policy.delay_ms,
            "total": len(entries) // 2,
            "rest": [*policy.fields, *entries],
        }
        return "submit", self.keys(request_id), args

    @_typed
    def unknown(self, ids: Sequence[str]) -> set[str]:
        """Those of the ids that no request has: in one round trip where there is one server."""
        replies = self._run_apart(("inspect", self.keys(each), {}) for each in ids)
        found = dict(zip(ids, replies, strict=True))
        return {each for each, reply in found.items() if isinstance(reply, RequestUnknown)}

    @_typed
    def seal(self, request_id: str, total: int, cursor: str) -> tuple[State, Tokens]:
        """The load is complete.

        Raises:
            LoadGap: the server has another number of parts.
            RequestExists: the server has other content.
        """
        reply = self._run("seal", self.keys(request_id), total=total, cursor=cursor)
        return _state_and_tokens(reply)

    @_typed
    def set(
        self,
        request_id: str,
        level: int | None = None,
        limit: int | None = None,
        rate_ms: float | None = None,
    ) -> tuple[State, Tokens]:
        """Change level, limit or rate of a request that runs.

        Raises:
            RequestEnded: it does not run any more.
        """
        given = {"level": level, "limit": limit, "rate_ms": rate_ms}
        args = {name: "" if value is None else value for name, value in given.items()}
        return _state_and_tokens(self._run("set", self.keys(request_id), **args))

    @_typed
    def pause(self, request_id: str) -> State:
        """Start no more parts of a request; what runs goes on."""
        return State(self._run("pause", self.keys(request_id)).decode())

    @_typed
    def resume(self, request_id: str) -> tuple[State, Tokens]:
        """Start parts of a request again."""
        return _state_and_tokens(self._run("resume", self.keys(request_id)))

    @_typed
    def cancel(self, request_id: str) -> int:
        """End a request now. Returns how many parts will not be finished."""
        return int(self._run("cancel", self.keys(request_id)))

    @_typed
    def redrive(self, request_id: str, numbers: Iterable[int]) -> tuple[int, State, Tokens]:
        """Run failed parts again. Returns how many, the state, and tokens to push."""
        redriven, *rest = self._run("redrive", self.keys(request_id), numbers=list(numbers))
        return redriven, *_state_and_tokens(rest)

    @_typed
    def collect(
        self,
        request_id: str,
        *,
        next_number: int,
        most: int = 500,
        max_bytes: int = 2**22,
        commit: tuple[str, str] = ("", ""),
        forget: Sequence[str | int] = (),
    ) -> Collected:
        """Results in input order. With ``commit`` (expected, new) earlier ones are forgotten.

        Raises:
            CollectorLost: another collector has committed meanwhile.
        """
        state, next_, left, *flat = self._run(
            "collect",
            self.keys(request_id),
            expected=commit[0],
            committed=commit[1],
            next=next_number,
            most=most,
            max_bytes=max_bytes,
            fields=forget,
        )
        results = [(int(number), result) for number, result in _pairs(flat)]
        return Collected(State(state.decode()), next_, left, results)

    @_typed
    def purge(self, request_id: str, *, force: bool = False) -> int:
        """Forget an ended request. Returns 0, or the moment (ms) from which it may be forgotten.

        Raises:
            RequestOpen: it still runs.
        """
        return int(self._run("purge", self.keys(request_id), force=int(force)))

    @_typed
    def inspect(self, request_id: str) -> Snapshot:
        """Return everything that is known of a request, at one moment."""
        names = ("now_ms", "left", "leases", "alive", "retry", "handed_back", "results")
        reply = self._run("inspect", self.keys(request_id))
        counts = zip(names, map(str, reply[: len(names)]), strict=True)
        found = {field.decode(): value.decode() for field, value in _pairs(reply[len(names) :])}
        return Snapshot(request_id, found | dict(counts))

    @_typed
    def locate(self, request_id: str, numbers: Sequence[int]) -> list[bytes]:
        """Where parts came from, as their entries say; b"" where one has none."""
        return list(self._run("locate", self.keys(request_id), numbers=list(numbers)))

    # Parts

    @_typed
    def claim(
        self,
        request_id: str,
        holder: str,
        terms: Terms,
        handlers: Sequence[str],
        *,
        level: int = -1,
        known: int = 0,
    ) -> Grant:
        """Ask for a lease and parts to run under it.

        It is never sent again: a copy that came late would grant a lease under a name that is
        over. A caller that gets no answer releases the holder and takes another name.
        """
        word, count, to, look, handler, spec, created, waited, troubles, *told = self._run_once(
            "claim",
            self.keys(request_id),
            holder=holder,
            level=level,
            most=terms.most,
            max_bytes=terms.max_bytes,
            lease_ms=terms.lease_ms,
            known=known,
            handlers=handlers,
        )
        return Grant(
            word.decode(),
            Tokens(count, to.decode(), look),
            _parts(told, troubles),
            retried=len(troubles) // 3,
            handler=handler.decode(),
            spec=spec or b"",
            created_ms=created,
            waited_ms=waited,
        )

    @_typed
    def finish(
        self,
        request_id: str,
        holder: str,
        call: int,
        results: Sequence[bytes | int],
        records: int,
        terms: Terms,
        created_ms: int = 0,
    ) -> Grant:
        """Record results (number, result, number, ...) and ask for the next parts.

        With ``terms.most`` 0 the lease ends, and what is still pending under it goes back.
        ``created_ms`` is what ``claim`` told: without it the results count under the lease only.
        """
        given = len(results) // 2
        numbers: Any = results[::2]
        values: Any = results[1::2]
        word, count, to, look, counted, troubles, *told = self._run(
            "finish",
            self.keys(request_id),
            holder=holder,
            call=call,
            most=terms.most,
            max_bytes=terms.max_bytes,
            lease_ms=terms.lease_ms,
            created=created_ms,
            records=records,
            numbers=struct.pack(f"<{given}Q", *numbers),
            sizes=struct.pack(f"<{given}I", *map(len, values)),
            results=b"".join(values),
        )
        return Grant(
            word.decode(),
            Tokens(count, to.decode(), look),
            _parts(told, troubles),
            retried=len(troubles) // 3,
            counted=counted,
        )

    @_typed
    def fail(
        self,
        request_id: str,
        holder: str,
        call: int,
        number: int,
        failures: Sequence[Failure],
        *,
        kind: str = "retry",
        delay_ms: int = 0,
        records: tuple[int, int] = (0, 1),
        result: bytes = b"",
        partial: bytes = b"",
    ) -> Outcome:
        """Put a part off, or give it up. ``records``: of the part, done and failed (-1: all)."""
        reply = self._run(
            "fail",
            self.keys(request_id),
            holder=holder,
            call=call,
            number=number,
            kind=kind,
            delay_ms=delay_ms,
            records_done=records[0],
            records_failed=records[1],
            failure=msgspec.json.encode(failures),
            result=result,
            partial=partial,
        )
        return _outcome(reply)

    @_typed
    def handback(self, request_id: str, holder: str, call: int, numbers: Iterable[int]) -> Outcome:
        """Give back parts that were not started. They were struck before this is called."""
        reply = self._run(
            "handback", self.keys(request_id), holder=holder, call=call, numbers=list(numbers)
        )
        return _outcome(reply)

    @_typed
    def release(
        self, request_id: str, holder: str, call: int, crashed: int | None = None
    ) -> Outcome:
        """End a lease. ``crashed``: the part that was running when its process died."""
        reply = self._run(
            "release",
            self.keys(request_id),
            holder=holder,
            call=call,
            crashed="" if crashed is None else crashed,
            failure=_POISON,
        )
        return _outcome(reply)

    @_typed
    def renew(self, request_id: str, lease_ms: int, running: dict[str, int | None]) -> Renewed:
        """Move the deadlines of leases. Returns the state, paused, and which leases stand."""
        reply = self._run("renew", self.keys(request_id), **_renew_args(lease_ms, running))
        return _renewed(running, reply)

    def renew_all(
        self, lease_ms: int, shares: Sequence[tuple[str, dict[str, int | None]]]
    ) -> list[Renewed | StreamqError]:
        """The same for several requests of one node, in one round trip.

        Returns for each what ``renew`` returns, or the error that it raises.

        Raises:
            ServerUnreachable: the node does not answer.
        """
        replies = self._run_many(
            "renew",
            [(self.keys(each), _renew_args(lease_ms, running)) for each, running in shares],
        )
        answers: list[Renewed | StreamqError] = []
        for (request_id, running), reply in zip(shares, replies, strict=True):
            if isinstance(reply, StreamqError):
                answers.append(reply)
                continue
            try:
                with damaged_if_unreadable(f"what renew was told of {request_id}"):
                    answers.append(_renewed(running, reply))
            except Damaged as error:
                answers.append(error)
        return answers

    # Recovery

    @_typed
    def reap(
        self, request_id: str, limit: int = 100, heard: Mapping[str, int] | None = None
    ) -> Reaped:
        """Take back what holders left who are dead: suspected at every look for a grace.

        ``heard``: of each live pool, how many ms ago it was heard. No part is charged with a crash
        whose pool was heard after the deadline of the lease.
        """
        flat = [value for pair in (heard or {}).items() for value in pair]
        leases, parts, state, *tokens = self._run(
            "reap", self.keys(request_id), limit=limit, failure=_POISON, heard=flat
        )
        return Reaped(leases, parts, State(state.decode()), _tokens(tokens))

    @_typed
    def audit(self, request_id: str, pushed: int = 0) -> Audit:
        """Which tokens should be out, worked out afresh, and which holders seem to be dead.

        ``pushed``: tokens that the caller pushed by belief since the last audit.
        """
        state, queue, want, to, look, *rest = self._run(
            "audit", self.keys(request_id), pushed=pushed
        )
        tokens = Tokens(want, to.decode(), look)
        return Audit(State(state.decode()), queue.decode(), tokens, *rest)

    # Queues

    def mint(
        self,
        queue: str,
        request_id: str,
        tokens: Tokens,
        *,
        mode: str = "push",
        register: str = "no",
    ) -> int:
        """Push tokens of a request and register its next look. Returns how many were pushed."""
        keys = self._queue_keys(queue, tokens.to)
        return int(self._run("mint", keys, **_mint_args(request_id, tokens, mode, register)))

    def ensure(self, request_id: str, audit: Audit) -> int:
        """Push what is missing of the tokens that an audit wants. Returns how many."""
        keys = self._queue_keys(audit.queue, audit.tokens.to)
        args = _mint_args(request_id, audit.tokens, "ensure", "no", audit.believed)
        pushed = int(self._run("mint", keys, **args))
        if pushed:
            # The next look at a long list does not count, and would push as many again.
            self.audit(request_id, pushed)
        return pushed

    def push(self, queue: str, request_id: str, tokens: Tokens) -> None:
        """Do what a script asked its caller to do in the queue, if anything."""
        if tokens:
            self.mint(queue, request_id, tokens)

    @_typed
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
        now, wait_ms, due, *flat = self._run(
            "tick",
            self._queue_keys(queue),
            limit=limit,
            every_ms=every_ms,
            lent=lent,
            looked=looked,
        )
        pairs = [(name, float(score)) for name, score in _pairs(flat)]
        strays = [(name, score) for name, score in pairs if not _names([name])]
        known = [(name.decode(), score) for name, score in pairs[:due] if _names([name])]
        return Tick(now, wait_ms, known, _names([name for name, _ in pairs[due:]]), strays)

    def aside(self, queue: str, name: str, type: str) -> bool:
        """Rename a key of the queue, if it is there and of another type than this."""
        keys = QueueKeys(queue, self._prefix, spoilt=name)
        return bool(self._run("aside", keys, type=type))

    def close(self, queue: str, request_id: str | bytes, score: float, purge_at: int) -> bool:
        """Take an ended request out of the open ones, or a purged one (0) out of all."""
        return bool(
            self._run(
                "close",
                self._queue_keys(queue),
                request_id=request_id,
                score=score,
                purge_at=purge_at,
            )
        )

    def beat(
        self,
        queue: str,
        worker: str,
        ttl_ms: int,
        details: bytes = b"",
        lease_ms: int = 20_000,
        requests: Sequence[str] = (),
    ) -> int:
        """Say that a worker lives and what it holds; with a TTL of 0, that it goes."""
        forgotten = self._run(
            "beat",
            QueueKeys(queue, self._prefix, worker=worker),
            name=worker,
            ttl_ms=ttl_ms,
            details=details,
            lease_ms=lease_ms,
            requests=requests,
        )
        return int(forgotten)

    # What a script cannot do: block, subscribe, and read an index page by page.

    def take(
        self,
        queue: str,
        handlers: tuple[str, ...],
        block_s: float,
        levels: tuple[int, ...] = _EVERY_LEVEL,
    ) -> Token | None:
        """The next token for one of these handlers, best level first; of one level as they come.

        It waits at every list that there may be.
        """
        reply = self._pop(queue, self._token_lists(queue, handlers, levels), block_s)
        return reply and self._token(queue, *reply)

    def take_used(
        self,
        queue: str,
        handlers: tuple[str, ...],
        block_s: float,
        levels: tuple[int, ...],
        used: frozenset[str],
        *,
        news_first: bool,
    ) -> Token | News | None:
        """The same from lists that are in use (``used_lists``), or news of others.

        News come before any token, or only if there is none.
        """
        lists = self._used_lists(queue, handlers, levels, used, news_first)
        reply = self._pop(queue, lists, block_s)
        if reply is None:
            return None
        name, value = reply
        if name.startswith(self._queue_keys(queue).tokens.encode()):
            return self._token(queue, name, value)
        return News(value.decode("utf-8", "replace"))

    def used_lists(self, queue: str, handlers: Iterable[str]) -> frozenset[str]:
        """The lists of these handlers that tokens came into, each as ``list_of`` calls it."""
        key = self._queue_keys(queue).used
        try:
            with translated(self.connection.where):
                found = self.connection.call("ZRANGE", key, 0, -1)
        except Damaged as error:
            raise Damaged(f"{error}; renamed {self.set_aside(queue)}") from None
        named = {b"%s:" % name.encode() for name in handlers}
        ours = (each for each in found if each[:-2] in named and each[-2:].isdigit())
        return frozenset(each.decode() for each in ours)

    def tell_again(self, queue: str, to: str) -> None:
        """Push news of a list once more, if it has tokens, is new, and there are no news."""
        self.mint(queue, "", Tokens(0, to), mode="ensure")

    def forget_lists(self, queue: str, before_ms: int) -> None:
        """Forget lists that came into use before that and are empty; the next token is news."""
        key = self._queue_keys(queue).used
        with translated(self.connection.where):
            old = self.connection.redis.zrange(key, "-inf", before_ms, byscore=True)
        for to in old:
            self.mint(queue, "", Tokens(0, to.decode("utf-8", "replace")), mode="forget")

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
            return Token(units.name(token.decode(), "request id"), handler, int(level))
        except ValueError:
            raise Damaged(f"a token of {queue} is no request id: {token!r:.100}") from None

    def _spell_used_lists(
        self,
        queue: str,
        handlers: tuple[str, ...],
        levels: tuple[int, ...],
        used: frozenset[str],
        news_first: bool,
    ) -> tuple[str, ...]:
        root = self._queue_keys(queue).tokens
        ends = {to[-2:] for to in used}
        some = [level for level in levels if f"{level:02d}" in ends]
        wanted = (list_of(handler, level) for level in some for handler in handlers)
        lists = tuple(root + to for to in wanted if to in used)
        news = tuple(self._queue_keys(queue, list_of(handler, 0)).news for handler in handlers)
        return news + lists if news_first else lists + news

    def _spell_token_lists(
        self, queue: str, handlers: tuple[str, ...], levels: tuple[int, ...]
    ) -> tuple[str, ...]:
        root = self._queue_keys(queue).tokens
        return tuple(root + list_of(handler, level) for level in levels for handler in handlers)

    def drop_former_lists(self, queue: str) -> None:
        """Remove lists of one level for all handlers, which an earlier version pushes to.

        Nobody may be left who takes from them. Should there be, the next audits of that version
        push what is missing.
        """
        root = self._queue_keys(queue).tokens
        with translated(self.connection.where):
            self.connection.redis.unlink(*(f"{root}{level:02d}" for level in _EVERY_LEVEL))

    def set_aside(self, queue: str, lists: tuple[str, ...] = ()) -> list[str]:
        """Rename keys of a queue that are of another type. Returns their names since then."""
        keys = self._queue_keys(queue)
        sets = (keys.due, keys.open, keys.closed, keys.workers, keys.used)
        indexes = dict.fromkeys(sets, "zset")
        wanted = indexes | dict.fromkeys(lists, "list")
        redis = self.connection.redis
        with translated(self.connection.where), redis.pipeline(transaction=False) as pipe:
            for key in wanted:
                pipe.type(key)
            found = dict(zip(wanted, pipe.execute(), strict=True))
        names = {key: key.partition("}:")[2] for key in wanted}
        return [
            QueueKeys(queue, self._prefix, spoilt=names[key]).aside
            for key, type_ in wanted.items()
            if found[key].decode() not in (type_, "none") and self.aside(queue, names[key], type_)
        ]

    def listen(self, request_id: str) -> "Events":
        """Hear of the request's end; the caller closes it."""
        return Events(self.connection, self.keys(request_id).events)

    def ids(self, queue: str, *, closed: bool = False) -> list[str]:
        """Ids of the queue's open requests, or of those that have ended, oldest first."""
        keys = self._queue_keys(queue)
        with translated(self.connection.where):
            found = self.connection.redis.zrange(keys.closed if closed else keys.open, 0, -1)
        return _names(found)

    def registered(self, queue: str, request_id: str) -> float | None:
        """The score of a request among the queue's open ones, for ``close``."""
        with translated(self.connection.where):
            score = self.connection.redis.zscore(self._queue_keys(queue).open, request_id)
        return None if score is None else float(score)

    def replicas(self, queue: str, request_id: str, wanted: int, wait_s: float) -> int:
        """How many replicas have the request, and how it stands in its queue; waits for so many."""
        keys = (self.keys(request_id).sync, self._queue_keys(queue).sync)
        return min(self.connection.replicas(key, wanted, wait_s) for key in keys)

    def newest(self, queue: str, *, closed: bool, page: int) -> Iterator[str]:
        """Ids of open requests, last submitted first; or of ended ones: those that were just
        closed or are about to be purged, then those that are kept longest. Read page by page.
        """
        keys = self._queue_keys(queue)
        # Until the janitor has looked at a closed request once more, its score is that moment.
        soon = round(time.time() * 1e3) + _CLOSED_LATELY_MS
        ended = ((soon, "-inf"), ("+inf", f"({soon}"))
        for most, least in ended if closed else (("+inf", "-inf"),):
            first = 0
            while True:
                with translated(self.connection.where):
                    found = self.connection.redis.zrange(
                        keys.closed if closed else keys.open,
                        most,
                        least,
                        desc=True,
                        byscore=True,
                        offset=first,
                        num=page,
                    )
                if not found:
                    break
                yield from _names(found)
                first += page

    def workers(self, queue: str) -> dict[str, bytes]:
        """What each live worker of the queue says of itself."""
        keys = self._queue_keys(queue)
        alive = {}
        with translated(self.connection.where):
            redis = self.connection.redis
            for name in _names(redis.zrange(keys.workers, 0, -1)):
                key = QueueKeys(queue, self._prefix, worker=name).worker
                details = redis.hget(key, "details")
                if details is not None:
                    alive[name] = details
        return alive

    def beats(self, queue: str) -> dict[str, float]:
        """When each worker of the queue was last heard, by the server's clock (ms)."""
        with translated(self.connection.where):
            found = self.connection.redis.zrange(
                self._queue_keys(queue).workers, 0, -1, withscores=True
            )
        return {name.decode("utf-8", "replace"): score for name, score in found}

    def holders(self, request_id: str) -> list[str]:
        """Who holds a lease of the request."""
        with translated(self.connection.where):
            found = self.connection.redis.zrange(self.keys(request_id).leases, 0, -1)
        return [holder.decode("utf-8", "replace") for holder in found]

    def result_bytes(self, request_id: str) -> int:
        """Memory of the results the server has, about."""
        with translated(self.connection.where):
            used = self.connection.redis.memory_usage(self.keys(request_id).results, samples=20)
        return int(used or 0)

    def failures(self, request_id: str) -> Iterable[tuple[int, bytes]]:
        """Parts that were given up, in no order, and what is kept of each."""
        for number, text in self._scan(self.keys(request_id).failed):
            if _NUMBER.fullmatch(number):
                yield int(number), text

    def leftovers(self, request_id: str, at_once: int = 2**22) -> Iterable[tuple[str, bytes]]:
        """Every result the server has, in no order, by its field; some perhaps twice."""
        for page in self.result_pages(request_id, at_once):
            yield from page.items()

    def result_pages(self, request_id: str, at_once: int = 2**22) -> Iterable[dict[str, bytes]]:
        """Results in no order, by their fields; about so many bytes a call, which gives a page.

        A result that is still there when the next page is asked for may come again.
        """
        for page in self._pages(self.keys(request_id).results, at_once):
            yield {key.decode(): value for key, value in page.items() if _FIELD.fullmatch(key)}

    def results_of(self, request_id: str, fields: Sequence[str]) -> list[tuple[str, bytes]]:
        """The results that have these fields, in that order, as far as the server has them."""
        with translated(self.connection.where):
            found = self.connection.redis.hmget(self.keys(request_id).results, list(fields))
        pairs = zip(fields, found, strict=True)
        return [(field, result) for field, result in pairs if result is not None]

    def _scan(self, key: str, at_once: int = 2**22) -> Iterable[tuple[bytes, bytes]]:
        for page in self._pages(key, at_once):
            yield from page.items()

    def _pages(self, key: str, at_once: int) -> Iterable[dict[bytes, bytes]]:
        cursor, count = 0, 10
        while True:
            with translated(self.connection.where):
                redis = self.connection.redis
                cursor, found = redis.hscan(key, cursor, count=count)
            yield found
            if cursor == 0:
                return
            mean = sum(map(len, found.values())) // max(1, len(found))
            count = max(1, min(500, at_once // max(1, mean)))


class Events:
    """A subscription that can only wake its owner: what happened is read from the request."""

    def __init__(self, connection: Connection, channel: str) -> None:
        self._where = connection.where
        self._pubsub = connection.subscribe(channel)

    def wait(self, timeout_s: float) -> None:
        """Return at the next message, or when the time is over."""
        with translated(self._where):
            self._pubsub.get_sharded_message(ignore_subscribe_messages=True, timeout=timeout_s)

    def close(self) -> None:
        """End the subscription."""
        self._pubsub.close()


class Appending:
    """``append`` again and again: parts are on their way while the server adds those before."""

    def __init__(self, ahead: Ahead, keys: RequestKeys) -> None:
        self._ahead = ahead
        self._keys = keys
        self._answer: Callable[[], Any] | None = None

    def send(self, first: int, cursor: str, records: int, entries: Sequence[bytes | int]) -> Tokens:
        """Send parts. Returns the tokens to push for those sent before, when they are there.

        Raises:
            RequestEnded: the request takes no more parts.
            LoadGap: the parts do not follow those that are there.
        """
        sent = self._ahead.run(
            "append", self._keys, first=first, cursor=cursor, records=records, entries=entries
        )
        tokens = self.wait()
        self._answer = sent
        return tokens

    def wait(self) -> Tokens:
        """Wait until all that was sent is there. Returns the tokens to push for it."""
        answer, self._answer = self._answer, None
        return _tokens(answer()[2:]) if answer else Tokens()

    def close(self) -> None:
        """Let go of the way to the server."""
        self._ahead.close()


def _renew_args(lease_ms: int, running: dict[str, int | None]) -> dict[str, Any]:
    flat = [value for pair in running.items() for value in pair]
    return {"lease_ms": lease_ms, "holders": ["" if value is None else value for value in flat]}


def _renewed(running: dict[str, int | None], reply: Sequence[Any]) -> Renewed:
    state, paused, *stands = reply
    answers = dict(zip(running, map(bool, stands), strict=True))
    return State(state.decode()), bool(paused), answers


def _first_tokens(policy: Policy) -> Tokens:
    """What ``submit.lua`` asks for: it is known, so it need not come back first."""
    return Tokens(0 if policy.delay_ms else 1, list_of(policy.handler, policy.level))


def _mint_args(
    request_id: str, tokens: Tokens, mode: str, register: str, believed: int = 0
) -> dict[str, Any]:
    return {
        "request_id": request_id,
        "count": tokens.count,
        "mode": mode,
        "look_ms": tokens.look_ms,
        "register": register,
        "believed": min(believed, tokens.count),
        "to": tokens.to,
    }


def _names(found: Iterable[bytes]) -> list[str]:
    """Those that can be names; whatever else is in an index is the janitor's to take out."""
    names = []
    for each in found:
        with suppress(ValueError):
            names.append(units.name(each.decode(), "name"))
    return names


def _pairs(flat: Sequence[Any]) -> Iterable[tuple[Any, Any]]:
    return zip(flat[::2], flat[1::2], strict=True)


def _tokens(reply: Sequence[Any]) -> Tokens:
    count, to, look_ms = reply
    return Tokens(count, to.decode(), look_ms)


def _state_and_tokens(reply: Sequence[Any]) -> tuple[State, Tokens]:
    state, *tokens = reply
    return State(state.decode()), _tokens(tokens)


def _outcome(reply: Sequence[Any]) -> Outcome:
    word, *tokens = reply
    return Outcome(word.decode(), _tokens(tokens))


def _parts(told: Sequence[bytes], troubles: Sequence[Any]) -> list[Part]:
    """Parts, from what ``lua/lib/hand.lua`` packed; an id ends in ``-0``."""
    if not told:
        return []
    ids, abouts, sizes, *chunks = told
    if len(sizes) == 4 and len(chunks) == 1 and not troubles:  # one part, as is often so
        return [Part(int(ids[:-2]), chunks[0], abouts)]
    parts = []
    chunks = [chunk for chunk in reversed(chunks) if chunk]
    chunk, at = b"", 0
    sized = struct.unpack(f"<{len(sizes) // 4}I", sizes)
    for id_, about, size in zip(ids.split(), abouts.split(b"\n"), sized, strict=True):
        if size and at == len(chunk):
            chunk, at = chunks.pop(), 0
        parts.append(Part(int(id_[:-2]), chunk[at : at + size], about))
        at += size
    if troubles:
        _add_troubles(parts, troubles)
    return parts


def _add_troubles(parts: Sequence[Part], troubles: Sequence[Any]) -> None:
    by_number = {part.number: part for part in parts}
    for number, tries, partial in zip(*[iter(troubles)] * 3, strict=True):
        part = by_number[int(number)]
        errors, crashes, alone, *_ = map(int, tries.split())
        part.attempt = errors + 1
        part.is_suspect = crashes > 0 or alone > 0
        part.partial = partial
