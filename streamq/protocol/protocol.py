"""The protocol in Python: one method for each script in ``lua/``.

A method makes the call that ``request_calls`` describes. Methods for parts are inherited from
``part_protocol``, those for queues from ``queue_protocol``, and what reads without a script from
``reads``: so one object can do everything. The rules of requests and parts are in the Lua.

A script touches keys of one tag only, so some methods make several calls, and decide their order.
``submit`` and ``submit_all`` register a request before they create it. ``submit`` pushes a second
token if creating the request took more than 1 ms after a worker was woken.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import msgspec
from msgspec.structs import replace

from streamq.driver.connection import Connection
from streamq.errors import (
    ProtocolError,
    RequestUnknown,
    ServerError,
    ServerUnreachable,
    StreamqError,
)
from streamq.flows.shape import Shape
from streamq.model import PREFIX, Failure, FlowPlan, Policy, State
from streamq.protocol import queue_calls, request_calls
from streamq.protocol.call import Call
from streamq.protocol.part_protocol import PartProtocol
from streamq.protocol.pipeline import AppendPipeline
from streamq.protocol.replies import (
    Appended,
    Collected,
    Opened,
    Tokens,
)
from streamq.protocol.snapshot import Snapshot

T = TypeVar("T")

#: The most parts that are found by one key.
_MOST_OF_A_KEY = 100
#: A worker that is woken before its request is there asks again for some milliseconds. If creating
#: the request took longer than this (s), another token is pushed in case that worker gave up.
_SOON_S = 0.001


class Protocol(PartProtocol):
    """Run the scripts of ``lua/``: one method for each transition of a request or a part.

    Example:
        Protocol(Connection("redis://localhost")).inspect("nightly").state
    """

    def __init__(self, connection: Connection, prefix: str = PREFIX) -> None:
        super().__init__(connection, prefix)
        self._do_in_order = self._scripts.do_in_order

    def hasty(self, reply_s: float) -> "Protocol":
        """Return the same over a connection of its own, which waits so long and repeats no call.

        The caller closes that connection.
        """
        hasty = Protocol(self.connection.hasty(reply_s), self._space.prefix)
        hasty._shapes = self._shapes
        return hasty

    def open(self, request_id: str, digest: str, policy: Policy, source: bytes = b"") -> Opened:
        """Create a request, or find the one of the same submission.

        ``source`` says what it is made from. It is kept for a load that goes on later.

        Raises:
            RequestExists: the id is taken by another submission.
        """
        return self._do(request_calls.open(self.keys(request_id), digest, policy, source))

    def lay(self, request_id: str, digest: str, flow: FlowPlan) -> bool:
        """Create the later stages of a flow that was opened. Returns whether they are new.

        Raises:
            RequestExists: the id is taken by another submission.
        """
        self.learn(request_id, Shape.read(flow.shape))
        return self._do(request_calls.lay(self.keys(request_id), digest, flow))

    def index(self, request_id: str, pairs: Sequence[str | int]) -> int:
        """Remember keys of parts (number, key, ...), before or after the parts are added.

        Returns how many of these parts have a key that another part has, too.
        """
        return self._do(request_calls.index(self.keys(request_id), _MOST_OF_A_KEY, pairs))

    def forget_unadded(self, request_id: str) -> None:
        """Forget keys of parts that a load told of and never added."""
        keys, cursor = self.keys(request_id), -1
        while cursor:
            cursor = self._do(request_calls.forget_unadded(keys, max(0, cursor)))

    def append(
        self,
        request_id: str,
        first: int,
        after: str,
        cursor: str,
        records: int,
        entries: Sequence[bytes | int],
    ) -> Appended:
        """Add parts (payload, about, payload, ...). Returns parts so far, cursor, tokens to push.

        ``after`` is the cursor that they were cut at, ``cursor`` the one behind them.

        Raises:
            RequestEnded: the request takes no more parts.
            LoadGap: the parts do not follow those that are there.
        """
        keys = self.keys(request_id)
        return self._do(request_calls.append(keys, first, after, cursor, records, entries))

    def refuse(
        self, request_id: str, number: int, after: str, cursor: str, failures: Sequence[Failure]
    ) -> tuple[bool, Tokens]:
        """Count what cannot be loaded as a failed part. Returns whether it is counted; and tokens.

        If it is not counted, many parts wait before it: the caller calls again.

        Raises:
            RequestEnded: the request takes no more parts.
            LoadGap: the part does not follow those that are there.
        """
        keys, text = self.keys(request_id), msgspec.json.encode(failures)
        return self._do(request_calls.refuse(keys, number, after, cursor, text))

    def appending(self, request_id: str) -> AppendPipeline:
        """Return the way to make many calls of ``append`` in a row; the caller closes it."""
        return AppendPipeline(self.connection, self.keys(request_id))

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
        tokens = request_calls.first_tokens(policy)
        at_first = tokens if is_soon and not self.connection.is_cluster else Tokens()
        keys = self._space.queue(policy.queue, tokens.to)
        again = queue_calls.mint(keys, request_id, at_first, mode="ensure")

        def calls() -> Iterator[Call[int]]:
            begun = time.monotonic()
            yield queue_calls.mint(keys, request_id, at_first, register="yes")
            yield request_calls.submit(self.keys(request_id), policy, *content())
            if not at_first:
                yield queue_calls.mint(keys, request_id, tokens)
            elif time.monotonic() - begun > _SOON_S:
                yield again

        _, look_ms, *_ = self._do_in_order(calls(), otherwise=[again] if at_first else [])
        if look_ms:
            self.push(policy.queue, request_id, Tokens(0, tokens.to, look_ms))
        return tokens

    def submit_all(self, requests: Sequence[tuple[str, Policy, str, Sequence[bytes]]]) -> None:
        """Do what ``submit`` does for many requests: id, policy, cursor and entries of each.

        Where there is one server it takes one round trip. It may be repeated.

        Raises:
            RequestExists: one of the ids is taken by another submission; the others are submitted.
        """

        def calls() -> Iterator[Call[int]]:
            for request_id, policy, cursor, entries in requests:
                tokens = request_calls.first_tokens(policy)
                keys = self._space.queue(policy.queue, tokens.to)
                # "again": a janitor that saw a former request of the id must not close this one.
                yield queue_calls.mint(keys, request_id, Tokens(), register="again")
                yield request_calls.submit(self.keys(request_id), policy, cursor, entries)
                yield queue_calls.mint(keys, request_id, tokens)

        replies = self._do_in_order(calls())
        for (request_id, policy, *_), look_ms in zip(requests, replies[1::3], strict=True):
            if look_ms:
                to = request_calls.first_tokens(policy).to
                self.push(policy.queue, request_id, Tokens(0, to, look_ms))

    def submit_apart(
        self, policy: Policy, requests: Sequence[tuple[str, str, Sequence[bytes]]]
    ) -> list[bool | StreamqError]:
        """Do what ``submit`` does for many requests: id, cursor and entries of each.

        It takes three round trips to each node. Returns for each whether it is new, or the error:
        that of one says nothing about the others.
        """
        first = request_calls.first_tokens(policy)
        queue = self._space.queue(policy.queue, first.to)
        found: dict[str, bool | StreamqError] = {}
        # "again": a janitor that saw a former request of the id must not close this one.
        registered: list[int | StreamqError] = self._each(
            [
                queue_calls.mint(queue, request_id, Tokens(), register="again")
                for request_id, *_ in requests
            ]
        )
        by_node: dict[str, list[tuple[str, Call[tuple[bool, int]]]]] = {}
        for request, reply in zip(requests, registered, strict=True):
            request_id, cursor, entries = request
            if isinstance(reply, StreamqError):
                found[request_id] = reply
                continue
            call = request_calls.submit_new(self.keys(request_id), policy, cursor, entries)
            by_node.setdefault(self.node_of(request_id), []).append((request_id, call))
        pushing = []
        for some in by_node.values():
            made: list[tuple[bool, int] | StreamqError] = self._each([call for _, call in some])
            for (request_id, _), told in zip(some, made, strict=True):
                if isinstance(told, StreamqError):
                    found[request_id] = told
                    continue
                found[request_id], look_ms = told
                # Also of one that was there: perhaps its answer was lost, and its token not pushed.
                tokens = Tokens(first.count, first.to, look_ms)
                pushing.append(queue_calls.mint(queue, request_id, tokens))
        # The next audit pushes what is not pushed now.
        self._each(pushing)
        return [found[request_id] for request_id, *_ in requests]

    def _each(self, calls: Sequence[Call[T]]) -> list[T | StreamqError]:
        """Make calls to one node, in one round trip if it answers. Returns replies or errors."""
        found: list[T | StreamqError] = []
        if not calls:
            return found
        with suppress(ServerError):
            return self._do_apart(calls)
        for call in calls:
            # The first waits for the server as patiently as usual, and the others not again.
            last = found[-1] if found else None
            if isinstance(last, ServerError):
                found.append(last)
                continue
            try:
                found.append(self._do(call))
            except StreamqError as error:
                found.append(error)
        return found

    def register_all(self, places: Iterable[tuple[str, str]]) -> None:
        """Register places, each with its queue: in one round trip where there is one server.

        One that is registered has another score then.
        """
        self._do_in_order(self._registering(places))

    def _registering(self, places: Iterable[tuple[str, str]]) -> Iterator[Call[int]]:
        for place, queue in places:
            keys = self._space.queue(queue, "")
            yield queue_calls.mint(keys, place, Tokens(), register="again")

    def submit_flow(
        self,
        request_id: str,
        policy: Policy,
        places: Iterable[tuple[str, str]],
        cursor: str,
        entries: Sequence[bytes | int],
    ) -> tuple[Tokens, Tokens]:
        """Register a flow's places, each with its queue, and create it with all its parts.

        It takes one round trip where there is one server, and wakes workers in the same. Returns
        the tokens that are still to be pushed.
        """
        flow, digest = policy.flow, policy.digest
        assert flow
        self.learn(request_id, Shape.read(flow.shape))
        keys, parts = self.keys(request_id), len(entries) // 2
        first = request_calls.first_tokens(policy)
        calls: list[Call[Any]] = [
            *self._registering(places),
            request_calls.open(keys, digest, policy),
            request_calls.lay(keys, digest, flow),
            request_calls.append(keys, 1, "", cursor, parts, entries),
            request_calls.seal(keys, parts, cursor),
            queue_calls.mint(self._space.queue(policy.queue, first.to), request_id, first),
        ]
        *_, (_, _, added), (_, sealed), pushed = self._do_in_order(calls)
        return replace(added, count=max(0, added.count - pushed)), sealed

    def unknown(self, ids: Sequence[str]) -> set[str]:
        """Return the ids that no request has: in one round trip where there is one server."""
        if not self.connection.is_cluster and ids:
            calls = [request_calls.inspect(self.keys(each), each) for each in ids]
            # A server that does not answer is asked for each of them, as patiently as usual.
            with suppress(ServerUnreachable):
                replies = self._do_apart(calls)
                found = zip(ids, replies, strict=True)
                return {each for each, reply in found if _is_unknown(reply)}
        return {each for each in ids if not self._is_known(each)}

    def _is_known(self, request_id: str) -> bool:
        try:
            self.inspect(request_id)
        except RequestUnknown:
            return False
        except ProtocolError:  # something is there, though nobody can read it
            return True
        return True

    def seal(self, request_id: str, total: int, cursor: str) -> tuple[State, Tokens]:
        """Say that the load is complete.

        Raises:
            LoadGap: the server has another number of parts.
            RequestExists: the server has other content.
        """
        return self._do(request_calls.seal(self.keys(request_id), total, cursor))

    def set(
        self,
        request_id: str,
        level: int | None = None,
        limit: int | None = None,
        rate_ms: float | None = None,
        weight: int | None = None,
        ceiling: int | None = None,
    ) -> tuple[State, Tokens]:
        """Change level, limit, rate, weight or ceiling (0: none) of a request that runs.

        Raises:
            RequestEnded: it does not run any more.
        """
        keys = self.keys(request_id)
        return self._do(request_calls.set(keys, level, limit, rate_ms, weight, ceiling))

    def pause(self, request_id: str) -> State:
        """Start no more parts of a request; what runs goes on."""
        return self._do(request_calls.pause(self.keys(request_id)))

    def resume(self, request_id: str) -> tuple[State, Tokens]:
        """Start parts of a request again."""
        return self._do(request_calls.resume(self.keys(request_id)))

    def cancel(self, request_id: str) -> int:
        """End a request now. Returns how many parts will not be finished."""
        return self._do(request_calls.cancel(self.keys(request_id)))

    def redrive(self, request_id: str, numbers: Iterable[int]) -> tuple[int, State, Tokens]:
        """Run failed parts again. Returns how many, the state, and tokens to push."""
        return self._do(request_calls.redrive(self.keys(request_id), numbers))

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
        """Return results in input order; forget earlier ones with ``commit`` (expected, new).

        ``within`` is the child of the first part to begin with, in a flow (``Collected.within``).

        Raises:
            CollectorLost: another collector has committed meanwhile.
        """
        call = request_calls.collect(
            self.keys(request_id),
            next_number=next_number,
            most=most,
            max_bytes=max_bytes,
            commit=commit,
            forget=forget,
            within=within,
        )
        return self._do(call)

    def commit(
        self, request_id: str, expected: str, committed: str, forget: Sequence[str | int]
    ) -> None:
        """Say how far results are written, and have the server forget the results ``forget``.

        ``expected`` is what the caller committed last. The script is that of ``collect``.

        Raises:
            CollectorLost: another collector has committed meanwhile.
        """
        self._do(request_calls.commit(self.keys(request_id), expected, committed, forget))

    def purge(self, request_id: str, *, force: bool = False, is_asked: bool = False) -> int:
        """Forget an ended request. Returns 0, or the moment (ms) from which it may be forgotten.

        -1: it is a callback, and its parent must be asked first (``is_asked``: that was done).

        Raises:
            RequestOpen: it still runs, or somebody may still start it or its callbacks.
        """
        keys = self.keys(request_id)
        return self._do(request_calls.purge(keys, force=force, is_asked=is_asked))

    def settle(self, request_id: str, created_ms: int, run: int) -> bool:
        """Note that the callbacks of an end are started. Returns whether they were owed."""
        return self._do(request_calls.settle(self.keys(request_id), created_ms, run))

    def expire(self, request_id: str) -> State:
        """End a request that is past its deadline."""
        return self._do(request_calls.expire(self.keys(request_id)))

    def inspect(self, request_id: str) -> Snapshot:
        """Return everything that is known of a request, at one moment."""
        return self._do(request_calls.inspect(self.keys(request_id), request_id))

    def inspect_all(self, ids: Sequence[str]) -> list[Snapshot | StreamqError]:
        """Return what ``inspect`` returns for each request, or the error that it raises.

        It takes one call for each, and one round trip to each node.

        Raises:
            ServerUnreachable: a node does not answer.
        """
        by_node: dict[str, list[str]] = {}
        for each in ids:
            by_node.setdefault(self.node_of(each), []).append(each)
        found: dict[str, Snapshot | StreamqError] = {}
        for some in by_node.values():
            calls = [request_calls.inspect(self.keys(each), each) for each in some]
            replies = self._do_apart(calls)
            found.update(zip(some, replies, strict=True))
        return [found[each] for each in ids]

    def locate(self, request_id: str, numbers: Sequence[int]) -> list[bytes]:
        """Return where parts came from, as their entries say; b"" where one has none."""
        return self._do(request_calls.locate(self.keys(request_id), numbers))


def _is_unknown(reply: Snapshot | StreamqError) -> bool:
    """Return whether a reply says that there is no such request; raise if it says nothing."""
    if isinstance(reply, ServerError):
        raise reply
    return isinstance(reply, RequestUnknown)
