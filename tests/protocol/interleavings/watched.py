"""The protocol, watched: every call is told to the request's book, and the server compared with it.

Whoever uses it, a simulated worker or the real janitor and client, can be held up before each
of its calls, so that others act in between, or be killed there.
"""

from collections import Counter
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

from streamq import Connection, Protocol
from streamq.errors import ProtocolError, StreamqError
from streamq.flows.shape import Shape
from streamq.model import Failure, Policy, State
from streamq.protocol.replies import (
    Audit,
    Collected,
    FailKind,
    Grant,
    MintMode,
    Opened,
    Outcome,
    Reaped,
    Register,
    Terms,
    Tick,
    Tokens,
)
from tests.protocol.interleavings.book import Book
from tests.protocol.interleavings.seen import Eye, Seen
from tests.support.by_hand import HANDLER

R = TypeVar("R")


class Crash(Exception):
    """Kills who is held up before a call."""


class Watched(Protocol):
    """A protocol that checks itself."""

    def __init__(self, connection: Connection, eye: Eye, tally: Counter[str]) -> None:
        super().__init__(connection)
        self.eye = eye
        self.tally = tally
        self.books: dict[str, Book] = {}
        #: Called with the name of every call before it is made, unless it is being called.
        self.between: Callable[[str], None] | None = None
        #: Requests that were audited since this was last emptied.
        self.looked_at: set[str] = set()
        #: Tokens that reaps asked for.
        self.asked_by_reap: Counter[str] = Counter()

    @contextmanager
    def held_up(self, between: Callable[[str], None]) -> Generator[None]:
        """Have others act before each call that is made in the block."""
        self.between = between
        try:
            yield
        finally:
            self.between = None

    def _hold_up(self, name: str) -> None:
        self.tally["calls"] += 1
        between, self.between = self.between, None
        if between:
            try:
                between(name)
            finally:
                self.between = between

    def _watch(
        self,
        name: str,
        request_id: str,
        call: Callable[[], R],
        account: Callable[[Book, Any, Seen], None],
    ) -> R:
        """Make a call, then have its answer and the server checked."""
        self._hold_up(name)
        book = self.books[request_id]
        reply: R | ProtocolError
        try:
            reply = call()
        except ProtocolError as refused:
            reply = refused
        after = self.eye.request(book.keys)
        if not book.forgotten(reply):
            account(book, reply, after)
        book.compare(after)
        if isinstance(reply, ProtocolError):
            raise reply
        return reply

    # Requests

    def open(self, request_id: str, digest: str, policy: Policy, source: bytes = b"") -> Opened:
        return self._watch(
            "open",
            request_id,
            lambda: super(Watched, self).open(request_id, digest, policy, source),
            lambda book, reply, _: book.opened(reply),
        )

    def append(
        self,
        request_id: str,
        first: int,
        after: str,
        cursor: str,
        records: int,
        entries: Sequence[bytes | int],
    ) -> tuple[int, str, Tokens]:
        return self._watch(
            "append",
            request_id,
            lambda: super(Watched, self).append(request_id, first, after, cursor, records, entries),
            lambda book, reply, _: book.appended(reply, first, len(entries) // 2),
        )

    def seal(self, request_id: str, total: int, cursor: str) -> tuple[State, Tokens]:
        return self._watch(
            "seal",
            request_id,
            lambda: super(Watched, self).seal(request_id, total, cursor),
            lambda book, reply, _: book.was_sealed(reply, total),
        )

    def set(
        self,
        request_id: str,
        level: int | None = None,
        limit: int | None = None,
        rate_ms: float | None = None,
        weight: int | None = None,
        ceiling: int | None = None,
    ) -> tuple[State, Tokens]:
        return self._watch(
            "set",
            request_id,
            lambda: super(Watched, self).set(request_id, level, limit, rate_ms, weight, ceiling),
            lambda book, reply, _: book.was_set(reply, level, limit, rate_ms),
        )

    def pause(self, request_id: str) -> State:
        return self._watch(
            "pause",
            request_id,
            lambda: super(Watched, self).pause(request_id),
            lambda book, reply, _: book.was_paused(reply),
        )

    def resume(self, request_id: str) -> tuple[State, Tokens]:
        return self._watch(
            "resume",
            request_id,
            lambda: super(Watched, self).resume(request_id),
            lambda book, reply, _: book.resumed(reply),
        )

    def cancel(self, request_id: str) -> int:
        return self._watch(
            "cancel",
            request_id,
            lambda: super(Watched, self).cancel(request_id),
            lambda book, reply, _: book.cancelled(reply),
        )

    def redrive(self, request_id: str, numbers: Iterable[int]) -> tuple[int, State, Tokens]:
        given = list(numbers)
        return self._watch(
            "redrive",
            request_id,
            lambda: super(Watched, self).redrive(request_id, given),
            lambda book, reply, _: book.redriven(reply, given),
        )

    def collect(
        self,
        request_id: str,
        *,
        next_number: int,
        most: int = 500,
        max_bytes: int = 2**22,
        commit: tuple[str, str] = ("", ""),
        forget: Sequence[str | int] = (),
        within: str = "",
    ) -> Collected:
        def account(book: Book, reply: Any, _: Seen) -> None:
            if commit[0] != commit[1] and not isinstance(reply, ProtocolError):
                for name in forget:
                    book.results.pop(str(name), None)
            book.collected(reply, next_number, commit)

        return self._watch(
            "collect",
            request_id,
            lambda: super(Watched, self).collect(
                request_id,
                next_number=next_number,
                most=most,
                max_bytes=max_bytes,
                commit=commit,
                forget=forget,
                within=within,
            ),
            account,
        )

    def purge(self, request_id: str, *, force: bool = False, is_asked: bool = False) -> int:
        return self._watch(
            "purge",
            request_id,
            lambda: super(Watched, self).purge(request_id, force=force, is_asked=is_asked),
            lambda book, reply, after: book.purged(reply, after, force=force),
        )

    # Parts

    def claim(
        self,
        request_id: str,
        holder: str,
        terms: Terms,
        handlers: Sequence[str],
        *,
        level: int = -1,
        known: int = 0,
        guess: Shape | None = None,
    ) -> Grant:
        units = [unit for unit, name in map(str.split, handlers) if name == HANDLER]
        unit = units[0] if units else None
        return self._watch(
            "claim",
            request_id,
            lambda: super(Watched, self).claim(
                request_id, holder, terms, handlers, level=level, known=known, guess=guess
            ),
            lambda book, reply, after: book.claimed(reply, after, holder, level, terms.most, unit),
        )

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
        flat = iter(results)
        by_number = {int(n): bytes(result) for n, result in zip(flat, flat, strict=True)}
        return self._watch(
            "finish",
            request_id,
            lambda: super(Watched, self).finish(
                request_id, holder, call, results, records, terms, created_ms
            ),
            lambda book, reply, after: book.finished(
                reply, after, holder, call, by_number, terms.most, created_ms
            ),
        )

    def fail(
        self,
        request_id: str,
        holder: str,
        call: int,
        number: int,
        failures: Sequence[Failure],
        *,
        kind: FailKind = "retry",
        delay_ms: int = 0,
        records: tuple[int, int] = (0, 1),
        result: bytes = b"",
        partial: bytes = b"",
    ) -> Outcome:
        return self._watch(
            "fail",
            request_id,
            lambda: super(Watched, self).fail(
                request_id,
                holder,
                call,
                number,
                failures,
                kind=kind,
                delay_ms=delay_ms,
                records=records,
                result=result,
                partial=partial,
            ),
            lambda book, reply, _: book.put_off_or_given_up(
                reply, holder, call, number, kind, delay_ms, records, result, partial
            ),
        )

    def keep(
        self,
        request_id: str,
        holder: str,
        call: int,
        number: int,
        partial: bytes,
        mark: bytes = b"",
        created_ms: int = 0,
    ) -> str:
        return self._watch(
            "keep",
            request_id,
            lambda: super(Watched, self).keep(
                request_id, holder, call, number, partial, mark, created_ms
            ),
            lambda book, reply, _: book.kept(reply, holder, call, number, partial, created_ms),
        )

    def handback(self, request_id: str, holder: str, call: int, numbers: Iterable[int]) -> Outcome:
        given = list(numbers)
        return self._watch(
            "handback",
            request_id,
            lambda: super(Watched, self).handback(request_id, holder, call, given),
            lambda book, reply, _: book.handed_back(reply, holder, call, given),
        )

    def release(
        self, request_id: str, holder: str, call: int, crashed: int | None = None
    ) -> Outcome:
        return self._watch(
            "release",
            request_id,
            lambda: super(Watched, self).release(request_id, holder, call, crashed),
            lambda book, reply, _: book.released(reply, holder, call, crashed),
        )

    def renew(
        self, request_id: str, lease_ms: int, running: dict[str, int | None]
    ) -> tuple[State, bool, dict[str, bool]]:
        return self._watch(
            "renew",
            request_id,
            lambda: super(Watched, self).renew(request_id, lease_ms, running),
            lambda book, reply, _: book.renewed(reply, running),
        )

    # Recovery

    def reap(
        self, request_id: str, limit: int = 100, heard: Mapping[str, int] | None = None
    ) -> Reaped:
        reaped = self._watch(
            "reap",
            request_id,
            lambda: super(Watched, self).reap(request_id, limit, heard),
            lambda book, reply, after: book.reaped(reply, after),
        )
        self.asked_by_reap[request_id] += reaped.tokens.count
        return reaped

    def audit(self, request_id: str, pushed: int = 0) -> Audit:
        self.looked_at.add(request_id)
        return self._watch(
            "audit",
            request_id,
            lambda: super(Watched, self).audit(request_id, pushed),
            lambda book, reply, after: book.audited(reply, after),
        )

    def audit_all(
        self, ids: Sequence[str], is_away: Callable[[str], object] = lambda _: None
    ) -> dict[str, Audit]:
        """Audit one after the other: each audit is checked, and others act in between."""
        found = {}
        for request_id in ids:
            with suppress(StreamqError):
                found[request_id] = self.audit(request_id)
        return found

    # Queues

    def mint(
        self,
        queue: str,
        request_id: str,
        tokens: Tokens,
        *,
        mode: MintMode = "push",
        register: Register = "no",
    ) -> int:
        self._hold_up("mint")
        return super().mint(queue, request_id, tokens, mode=mode, register=register)

    def ensure(self, request_id: str, audit: Audit) -> int:
        self._hold_up("mint")
        return super().ensure(request_id, audit)

    def tick(
        self,
        queue: str,
        limit: int = 100,
        every_ms: int = 5_000,
        looked: Sequence[str] = (),
        lent: int = 0,
    ) -> Tick:
        self._hold_up("tick")
        return super().tick(queue, limit, every_ms, looked, lent)

    def close(self, queue: str, request_id: str | bytes, score: float, purge_at: int) -> bool:
        self._hold_up("close")
        return super().close(queue, request_id, score, purge_at)

    def close_all(self, queue: str, closing: Sequence[tuple[str, float, int]]) -> list[str]:
        """Close one after the other, so that others act in between."""
        return [each[0] for each in closing if self.close(queue, *each)]
