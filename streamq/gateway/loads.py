"""Serves loaders that load parts call by call, and commit the results they have written."""

import hashlib
from collections.abc import Sequence

from streamq import units
from streamq.errors import CollectorLost, InvalidValue, LoadGap
from streamq.gateway import payloads
from streamq.gateway.desk import Desk
from streamq.gateway.messages import Commit, Committed, Loaded, MoreParts, NewRequest, Seal
from streamq.gateway.problems import Problem
from streamq.gateway.requests import policy_of_new_request
from streamq.gateway.roles import Caller
from streamq.model import MAX_PART, Policy, Status
from streamq.protocol.protocol import Protocol
from streamq.protocol.snapshot import Snapshot
from streamq.queue.loading import Loading
from streamq.queue.request import Request
from streamq.queue.submission import Submission

#: The first characters of a gateway's commit. They tell it from the commit of another collector.
_MARK = "gateway:"
#: How many results one call of a commit has the server forget.
_FORGOTTEN = 1_000


class Loads:
    """Serves loaders that load call by call. Calls of the server run in the desk's threads."""

    def __init__(self, protocol: Protocol, desk: Desk, team: str = "") -> None:
        self._protocol = protocol
        self._desk = desk
        self._team = team

    async def open(self, caller: Caller, new: NewRequest) -> tuple[Status, bool]:
        """Make a request that takes parts, or find it. Tells whether it is new."""
        self._desk.check_queue(caller, new.queue)
        if new.parts:
            raise InvalidValue("a request that is loading gets its parts with POST .../parts")
        if new.id is None:
            raise InvalidValue("a request that is loading needs an id")
        name, meant = units.request_id(new.id, self._team), policy_of_new_request(new)

        def open_() -> tuple[Status, bool]:
            opened = Loading(self._protocol, name, meant).open(meant.digest)
            return Request(self._protocol, name).status(), opened.is_new

        return await self._desk.in_thread(open_)

    async def append(self, caller: Caller, request_id: str, more: MoreParts) -> Loaded:
        """Add parts behind those that are there. The same call again adds nothing."""
        name = units.name(request_id, "request id")
        parts = [
            payloads.submitted_payload(each, number) for number, each in enumerate(more.parts, 1)
        ]
        if not parts:
            raise InvalidValue("which parts? Give at least one")

        def append() -> Loaded:
            found = self._found(caller, name)
            meant = Policy(handler=found.text("handler"), queue=found.text("queue"))
            _, entries = Submission(self._protocol, name, meant, MAX_PART).content(parts)
            last = more.first + len(parts) - 1
            cursor = f"{last}:{_digest_of_loaded_entries(entries)}"
            try:
                total, _, tokens = self._protocol.append(
                    name, more.first, found.optional_text("cursor"), cursor, len(parts), entries
                )
            except LoadGap as gap:
                raise self._short(name, gap) from None
            self._protocol.push(found.text("queue"), name, tokens)
            return Loaded(total)

        return await self._desk.in_thread(append)

    async def seal(self, caller: Caller, request_id: str, seal: Seal) -> Status:
        """Say that the load is complete. Parts run before that, too."""
        name = units.name(request_id, "request id")

        def seal_() -> Status:
            found = self._found(caller, name)
            try:
                _, tokens = self._protocol.seal(name, seal.total, found.optional_text("cursor"))
            except LoadGap as gap:
                raise self._short(name, gap) from None
            self._protocol.push(found.text("queue"), name, tokens)
            return Request(self._protocol, name).status()

        return await self._desk.in_thread(seal_)

    async def commit(self, caller: Caller, request_id: str, commit: Commit) -> Committed:
        """Have the server forget results that are safely written, up to a part."""
        name = units.name(request_id, "request id")

        def commit_() -> Committed:
            found = self._found(caller, name)
            stands = _part_committed_by_load(found.optional_text("committed"))
            if commit.through > found.known_count("total"):
                raise InvalidValue(f"there is no part {commit.through}")
            # When the call is repeated, all of it or some of it may be done already.
            if not commit.after <= stands <= commit.through:
                raise CollectorLost(f"results are committed up to part {stands}")
            while stands < commit.through:
                end = min(commit.through, stands + _FORGOTTEN)
                fields: list[str | int] = [*range(stands + 1, end + 1)]
                self._protocol.commit(
                    name, _commit_mark_of_load(stands), _commit_mark_of_load(end), fields
                )
                stands = end
            return Committed(stands)

        return await self._desk.in_thread(commit_)

    def _found(self, caller: Caller, name: str) -> Snapshot:
        found = self._protocol.inspect(name)
        caller.check_queue(found.text("queue"))
        return found

    def _short(self, name: str, gap: LoadGap) -> Problem:
        following = self._protocol.inspect(name).known_count("total") + 1
        title = "the load left parts out"
        return Problem(409, "SHORT", title, str(gap), more={"next": following})


def _part_committed_by_load(committed: str) -> int:
    if not committed:
        return 0
    if not committed.startswith(_MARK):
        raise CollectorLost("streamq results or streamq run collects this request")
    return int(committed.removeprefix(_MARK))


def _commit_mark_of_load(number: int) -> str:
    return f"{_MARK}{number}" if number else ""


def _digest_of_loaded_entries(entries: Sequence[bytes]) -> str:
    made = hashlib.blake2b(digest_size=12)
    for each in entries:
        made.update(len(each).to_bytes(8, "big") + each)
    return made.hexdigest()
