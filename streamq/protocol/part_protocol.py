"""The life of parts: one method for each script that hands parts out or takes them back.

A method makes the call that ``part_calls`` describes. ``ensure`` makes two: it tells the next audit
how many tokens it has pushed.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence

from streamq.errors import ServerError, ServerUnreachable, StreamqError
from streamq.flows.shape import Shape
from streamq.model import Failure
from streamq.protocol import part_calls, queue_calls
from streamq.protocol.queue_protocol import QueueProtocol
from streamq.protocol.replies import (
    Audit,
    FailKind,
    Grant,
    Outcome,
    PassedPart,
    Reaped,
    Renewed,
    Terms,
)


class PartProtocol(QueueProtocol):
    """Claim, finish, fail, renew and take back parts."""

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
        """Ask for a lease and parts to run under it.

        ``guess``: the flow that the request may be of, if it was not told. A wrong one does no
        harm; a right one saves a round trip.

        It is never sent again: a copy that came late would grant a lease under a name that is
        over. A caller that gets no answer releases the holder and takes another name.
        """
        keys = self.keys(request_id, guess)
        return self._do(part_calls.claim(keys, holder, terms, handlers, level, known))

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
        keys = self.keys(request_id)
        return self._do(part_calls.finish(keys, holder, call, results, records, terms, created_ms))

    def pass_on(
        self,
        request_id: str,
        holder: str,
        call: int,
        passed: Sequence[PassedPart],
        records: int,
        terms: Terms,
        created_ms: int = 0,
        facts: str = "",
    ) -> Grant:
        """Hand finished parts of a stage over to the next, and ask for the next parts.

        ``facts`` is what the stage's spec says of it. It does for a stage what ``finish`` does for
        a plain request.
        """
        keys = self.keys(request_id)
        return self._do(
            part_calls.pass_on(keys, holder, call, passed, records, terms, created_ms, facts)
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
        """Put a part off, or give it up. ``records``: of the part, done and failed (-1: all)."""
        failing = part_calls.fail(
            self.keys(request_id),
            holder,
            call,
            number,
            failures,
            kind=kind,
            delay_ms=delay_ms,
            records=records,
            result=result,
            partial=partial,
        )
        return self._do(failing)

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
        """Keep what the records of a running part came to. ``mark``: which of them run next.

        Without its lease the holder's outcomes count if nobody has taken the part since.
        """
        keys = self.keys(request_id)
        return self._do(part_calls.keep(keys, holder, call, number, partial, mark, created_ms))

    def handback(self, request_id: str, holder: str, call: int, numbers: Iterable[int]) -> Outcome:
        """Give back parts that were not started. They were struck before this is called."""
        return self._do(part_calls.handback(self.keys(request_id), holder, call, numbers))

    def release(
        self, request_id: str, holder: str, call: int, crashed: int | None = None
    ) -> Outcome:
        """End a lease. ``crashed``: the part that was running when its process died."""
        return self._do(part_calls.release(self.keys(request_id), holder, call, crashed))

    def renew(self, request_id: str, lease_ms: int, running: dict[str, int | None]) -> Renewed:
        """Move the deadlines of leases. Returns the state, paused, and which leases stand."""
        return self._do(part_calls.renew(self.keys(request_id), lease_ms, running))

    def renew_all(
        self, lease_ms: int, shares: Sequence[tuple[str, dict[str, int | None]]]
    ) -> list[Renewed | StreamqError]:
        """Renew leases of several requests of one node, in one round trip.

        Returns for each request what ``renew`` returns, or the error that it raises.

        Raises:
            ServerUnreachable: the node does not answer.
        """
        calls = [part_calls.renew(self.keys(each), lease_ms, running) for each, running in shares]
        return self._do_apart(calls)

    # Recovery

    def reap(
        self, request_id: str, limit: int = 100, heard: Mapping[str, int] | None = None
    ) -> Reaped:
        """Take back what holders left who are dead: suspected at every look for a grace.

        ``heard``: of each live pool, how many ms ago it was heard. No part is charged with a crash
        whose pool was heard after the deadline of the lease.
        """
        return self._do(part_calls.reap(self.keys(request_id), limit, heard))

    def audit(self, request_id: str, pushed: int = 0) -> Audit:
        """Work out afresh which tokens should be out, and which holders seem to be dead.

        ``pushed``: tokens that the caller pushed by belief since the last audit.
        """
        return self._do(part_calls.audit(self.keys(request_id), pushed))

    def audit_all(
        self, ids: Sequence[str], is_away: Callable[[str], object] = lambda _: None
    ) -> dict[str, Audit]:
        """Audit requests, in one round trip to each node.

        Those that are refused, or whose node does not answer, are left out. ``is_away`` is told of
        a node that does not answer.
        """
        by_node: dict[str, list[str]] = {}
        for each in ids:
            by_node.setdefault(self.node_of(each), []).append(each)
        found: dict[str, Audit] = {}
        for node, some in by_node.items():
            try:
                replies = self._do_apart([part_calls.audit(self.keys(each)) for each in some])
            except ServerUnreachable:
                is_away(node)
                continue
            except ServerError:
                continue
            told = zip(some, replies, strict=True)
            found |= {each: it for each, it in told if not isinstance(it, StreamqError)}
        return found

    def close_all(self, queue: str, closing: Sequence[tuple[str, float, int]]) -> list[str]:
        """Do what ``close`` does for many requests: id, score, and when it may be purged.

        It takes one round trip. Returns the ids of those that it took out of the open ones. Of the
        others nothing is known.

        Raises:
            ServerError: the node does not answer.
        """
        keys = self._space.queue(queue)
        replies = self._do_apart([queue_calls.close(keys, *each) for each in closing])
        return [each[0] for each, reply in zip(closing, replies, strict=True) if reply is True]

    def ensure(self, request_id: str, audit: Audit) -> int:
        """Push what is missing of the tokens that an audit wants. Returns how many."""
        keys = self._space.queue(audit.queue, audit.tokens.to)
        call = queue_calls.mint(
            keys,
            request_id,
            audit.tokens,
            mode="ensure",
            believed=audit.believed,
            weight=audit.weight,
        )
        pushed = self._do(call)
        if pushed:
            # The next look at a long list does not count, and would push as many again.
            self.audit(request_id, pushed)
        return pushed
