"""The results of a run that are in spools: where they are, and what to do if they are lost."""

import logging
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import msgspec

from streamq.errors import InvalidValue
from streamq.model import Policy, State
from streamq.protocol.protocol import Protocol
from streamq.queue.loading import Loading, forget_request
from streamq.records import encoding as codec
from streamq.records.output import OutputError
from streamq.records.ranges import Range
from streamq.records.references import ReferenceReader
from streamq.records.spool import Spooled, SpoolReader, is_spool_name, spooled_of
from streamq.records.stream_output import Stopped

log = logging.getLogger(__name__)

#: What is written to an output: bytes, or a range of a spool.
Piece = bytes | Range


class SpooledLines(NamedTuple):
    """Where the lines of a part are, and whether they begin with a value."""

    place: Range
    is_value: bool


_LOOK_S = 0.02


def size_of_spooled(piece: Piece) -> int:
    """Return how many bytes a piece has."""
    return piece.length if isinstance(piece, Range) else len(piece)


class SpooledResults:
    """Finds the lines of one run's results in its spools, and removes spools that are copied."""

    def __init__(
        self,
        protocol: Protocol,
        request_id: str,
        policy: Policy,
        folder: Path,
        should_stop: Callable[[], bool] = lambda: False,
        live: Callable[[], Iterable[int]] = tuple,
        *,
        is_shared: bool = False,
    ) -> None:
        """``live`` returns the ids of the processes that write to spools now.

        ``is_shared``: those of other machines write there, too.
        """
        self._protocol = protocol
        self._id = request_id
        self._policy = policy
        self._folder = folder
        self._should_stop = should_stop
        self._reader = SpoolReader(folder, live, is_shared=is_shared)
        #: Reads the records that failed.
        self.inputs = ReferenceReader(policy.spec.files)
        #: What was found since the last commit.
        self._found: list[Spooled] = []

    def size(self) -> int:
        """Return about how many bytes wait in the spools; from any thread."""
        return self._reader.size()

    def find(self, result: bytes) -> bytes | SpooledLines:
        """Return where the lines of a result are; the result itself, if they are in no spool.

        A part whose lines are not there any more, as they were, is run again.

        Raises:
            OutputError: it cannot be run again, or fails.
            Stopped: the run was told to stop meanwhile.
        """
        while (spooled := spooled_of(result)) is not None:
            found = self._reader.find(spooled)
            if found:
                self._found.append(spooled)
                return SpooledLines(found, spooled.is_value)
            result = self._run_again(spooled)
        return result

    def inline(self, result: bytes) -> bytes:
        """Return a result that has its lines itself."""
        found = self.find(result)
        if isinstance(found, bytes):
            return found
        return codec.encode_result([codec.encode_item(codec.Verbatim(found.place.read()))])

    def committed(self) -> None:
        """Remove the spools of which all is in the output now."""
        found, self._found = self._found, []
        if found:
            self._reader.copied(found)

    def remove(self) -> None:
        """Delete all spools: every result is in the output. Other files stay where they are."""
        self._reader.close()
        with suppress(OSError):
            for path in self._folder.iterdir():
                if is_spool_name(path.name):
                    path.unlink()
            self._folder.rmdir()

    def _run_again(self, lost: Spooled) -> bytes:
        """Have a part run again, as a request of its own, and return its result."""
        log.warning(
            "a part of %s runs again: its result was lost with the last moments before a crash",
            self._id,
        )
        again = f"{self._id}-{lost.spool.replace('.', '-')}-{lost.offset}"
        unset = msgspec.UNSET
        policy = msgspec.structs.replace(
            self._policy, max_failures=-1, max_percent=-1.0, canary=unset, delay_ms=0
        )
        loading = Loading(self._protocol, again, policy)
        # After a crash the request of this second run may be there already, perhaps done.
        if loading.open(again).state is State.LOADING:
            if not loading.parts:
                loading.append([lost.payload, lost.about], "", "1", 1)
            loading.seal("1")
        while self._protocol.inspect(again).state.is_live:
            if self._should_stop():
                raise Stopped
            time.sleep(_LOOK_S)
        found = dict(self._protocol.results_of(again, ["1"]))
        # A part some of whose records failed has a result, too: that of the others.
        has_failed = any(True for _ in self._protocol.failures(again))
        forget_request(self._protocol, self._policy.queue, again)
        if has_failed or "1" not in found:
            raise OutputError(
                f"a result of {self._id} was lost in a crash, and its part failed when it ran "
                "again. It is run once more when the run goes on"
            )
        return found["1"]


def spools_of_fleet(
    protocol: Protocol, request_id: str, form: str, allowed: str, *, has_keys: bool = False
) -> SpooledResults | None:
    """Return the spools in which workers keep the results of a request; None if they do not.

    ``allowed``: the folder in which they may be. Whoever loads a request can name any.

    Raises:
        InvalidValue: they are elsewhere, or the output is to have another form than their lines.
        OutputError: the folder of the spools is not there.
    """
    found = protocol.inspect(request_id)
    spec = found.spec
    if not spec.spool:
        return None
    if form != spec.spool_form or has_keys:
        raise InvalidValue(
            f"results of {request_id} are kept in {spec.spool} as {spec.spool_form} without keys: "
            "name the output so, or give the format"
        )
    folder = Path(spec.spool)
    if not allowed or not folder.resolve().is_relative_to(Path(allowed).resolve()):
        raise InvalidValue(
            f"results of {request_id} are kept in {folder}: say --spool {folder.parent} if you "
            "trust who loaded it"
        )
    if not folder.parent.is_dir():
        raise OutputError(f"results of {request_id} are in {folder}, and there is no such folder")
    again = msgspec.structs.replace(spec, spool="", spool_form="")
    policy = Policy(
        handler=found.text("handler"),
        queue=found.text("queue"),
        level=found.count("level"),
        spec=again,
    )
    return SpooledResults(protocol, request_id, policy, folder, is_shared=True)
