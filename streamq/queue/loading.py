"""Putting parts into a request: opened, appended to, sealed, or taken back.

What the parts are made of, and what tells one load from another, is the caller's: payloads
(``submission``) or files (``runs/load``).
"""

from collections.abc import Sequence
from contextlib import suppress

from streamq.errors import (
    LoadGap,
    RequestExists,
    RequestUnknown,
    ServerError,
    ServerFull,
    StreamqError,
)
from streamq.model import Failure, Policy, Status
from streamq.protocol.pipeline import AppendPipeline
from streamq.protocol.protocol import Protocol
from streamq.protocol.replies import Opened, Tokens

#: Payload, about, payload, about, ...
Entries = Sequence[bytes | int]


class Loading:
    """One load into one request. It pushes the tokens that the scripts ask for."""

    def __init__(self, protocol: Protocol, request_id: str, policy: Policy) -> None:
        self._protocol = protocol
        self._id = request_id
        self._policy = policy
        self._pipeline: AppendPipeline | None = None
        #: How many parts are loaded, as far as this load knows; the next one follows them.
        self.parts = 0

    def open(self, identity: str, source: bytes = b"") -> Opened:
        """Register the request, and create it or find the one of the same identity.

        ``source`` is kept with a new request, for a load that goes on later.

        Raises:
            RequestExists: the id has a request of another identity.
        """
        # "again" gives the request a new score among the open ones. A janitor that saw it ended,
        # or registered and not opened, read the old score and can no longer close it.
        places = self._places()
        self._protocol.register_all(places)
        try:
            opened = self._protocol.open(self._id, identity, self._policy, source)
            if self._policy.flow:
                self._protocol.lay(self._id, identity, self._policy.flow)
        except (RequestExists, ServerFull):
            for place, queue in places:
                unregister_request(self._protocol, queue, place)
            raise
        self.parts = opened.total
        return opened

    def load_at_once(self, policy: Policy, cursor: str, entries: Entries) -> None:
        """Register, create and seal a flow with all its parts. Nobody else knows the id.

        Raises:
            RequestExists: the id has another request.
        """
        for tokens in self._protocol.submit_flow(self._id, policy, self._places(), cursor, entries):
            self._push(tokens)

    def _places(self) -> list[tuple[str, str]]:
        """Return the request and the later stages of its flow, each with its queue."""
        later = self._policy.flow.stages[1:] if self._policy.flow else ()
        stages = ((f"{self._id}/{k}", each.policy.queue) for k, each in enumerate(later, 2))
        return [(self._id, self._policy.queue), *stages]

    def append(self, entries: Entries, after: str, cursor: str, records: int) -> tuple[int, str]:
        """Add parts behind those that are loaded. Returns how many the server has, and its cursor.

        ``after`` is the cursor that the parts were cut at. The server has more parts than were
        loaded here, if another process loads the same at the same time.

        Raises:
            RequestEnded: the request takes no more parts.
            LoadGap: the server has other parts than were loaded here: ``pass_over`` says which.
        """
        total, stands, tokens = self._protocol.append(
            self._id, self.parts + 1, after, cursor, records, entries
        )
        self.parts += len(entries) // 2
        self._push(tokens)
        return total, stands

    def append_ahead(self, entries: Entries, after: str, cursor: str, records: int) -> None:
        """Send parts, and wait until those that were sent before them are there.

        The caller calls ``wait`` after the last, and ``close`` in the end.

        Raises:
            RequestEnded: the request takes no more parts.
            LoadGap: the server has other parts than were loaded here.
        """
        self._pipeline = self._pipeline or self._protocol.appending(self._id)
        self._push(self._pipeline.send(self.parts + 1, after, cursor, records, entries))
        self.parts += len(entries) // 2

    def refuse(self, failure: Failure, after: str, cursor: str) -> None:
        """Count what cannot be loaded as a failed part behind those that are loaded.

        Raises:
            RequestEnded, LoadGap: as of ``append_ahead``.
        """
        self.wait()
        is_counted = False
        while not is_counted:
            is_counted, tokens = self._protocol.refuse(
                self._id, self.parts + 1, after, cursor, [failure]
            )
            self._push(tokens)
        self.parts += 1

    def wait(self) -> None:
        """Wait until all parts are there that were sent ahead.

        Raises:
            RequestEnded, LoadGap: as of ``append_ahead``.
        """
        if self._pipeline:
            self._push(self._pipeline.wait())

    def pass_over(self, most: int) -> tuple[int, str | None]:
        """Count parts as loaded that somebody else has appended meanwhile, so many at most.

        Returns how many they are, and the server's cursor if it has no more than them.

        Raises:
            LoadGap: the server has fewer parts than were loaded.
        """
        found = self._protocol.inspect(self._id)
        ahead = found.known_count("total") - self.parts
        if ahead < 0:
            raise LoadGap("the server has lost its last moments, and parts with them")
        passed = min(ahead, most)
        self.parts += passed
        return passed, found.text("cursor") if passed == ahead else None

    def seal(self, cursor: str) -> None:
        """Say that the load is complete.

        Raises:
            LoadGap: the server has another number of parts.
            RequestExists: the server has other parts.
        """
        _, tokens = self._protocol.seal(self._id, self.parts, cursor)
        self._push(tokens)

    def take_back(self) -> None:
        """Leave nothing of a load that went wrong for good."""
        with suppress(StreamqError):
            try:
                self._protocol.cancel(self._id)
                for place, queue in self._places():
                    forget_request(self._protocol, queue, place)
            except RequestUnknown:  # it was registered, and then refused
                for place, queue in self._places():
                    unregister_request(self._protocol, queue, place)

    def close(self) -> None:
        """Let go of the way that parts are sent ahead on."""
        if self._pipeline:
            self._pipeline.close()
            self._pipeline = None

    def _push(self, tokens: Tokens) -> None:
        self._protocol.push(self._policy.queue, self._id, tokens)


def register_request(protocol: Protocol, queue: str, request_id: str) -> None:
    """Register a live request that is not registered, so that janitors look at it.

    A failover may have taken back its registration and left the request, which is in another slot.
    """
    if protocol.registered(queue, request_id) is None:
        protocol.mint(queue, request_id, Tokens(), register="yes")


def keep_registered(protocol: Protocol, status: Status) -> None:
    """Do what ``register`` does, if the request lives and this user of the server may write."""
    if status.state.is_live:
        with suppress(ServerError):
            register_request(protocol, status.queue, status.id)


def unregister_request(protocol: Protocol, queue: str, request_id: str) -> None:
    """Undo a registration, unless the request is there: then another process was quicker."""
    score = protocol.registered(queue, request_id)
    with suppress(RequestUnknown):
        if protocol.inspect(request_id).text("queue") == queue:
            return
    if score is not None:
        protocol.close(queue, request_id, score, 0)


def forget_request(protocol: Protocol, queue: str, request_id: str) -> None:
    """Purge a request that has ended, and take it out of its queue's indexes."""
    score = protocol.registered(queue, request_id)
    protocol.purge(request_id, force=True)
    # If the request was registered anew meanwhile, its score is another one, and it stays.
    protocol.close(queue, request_id, -1 if score is None else score, 0)
