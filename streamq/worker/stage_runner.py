"""Running parts of a stage of a flow: what the handler returns is handed over to the next stage."""

from collections.abc import Callable, Iterable
from typing import Any, cast

import msgspec

from streamq.app import Abandon
from streamq.errors import EncodeError, InvalidValue, ResultTooLarge
from streamq.flows.flow import MOST_CHILDREN
from streamq.flows.shape import Shape
from streamq.flows.values import Spread
from streamq.model import Failure, Part
from streamq.protocol.replies import PassedPart
from streamq.queue.outcomes import FORGET, PartDone, PartNotDone
from streamq.records import about
from streamq.records import encoding as codec
from streamq.records.encoding import Item
from streamq.worker import yielding
from streamq.worker.kept_outcomes import Outcomes
from streamq.worker.line_blocks import LineBlocks
from streamq.worker.runner import Runner

#: All children of one part may have this many times the bytes of the largest result.
_MOST_SIZE = 4


class TooManyChildren(Abandon):
    """A part of a spread has more children than one part may have."""


class StageRunner(Runner):
    """Runs parts of a map that is a stage of a flow."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        shape = Shape.read(self._spec.shape)
        self._feeds = shape.feeds(self._spec.stage)
        self._is_joined = shape.closing_join(self._spec.stage) > 0
        self._check()

    def _check(self) -> None:
        """Raise InvalidValue if the handler cannot be called by a stage of this kind."""
        if self.handler.takes_two:
            raise InvalidValue(
                f"handler {self.handler.name} takes two values, so only a join can call it"
            )

    def endings(self, given: list[bytes]) -> bytes:
        """Return how the lines of a part's records end: only the last stage tells it."""
        return super().endings(given) if self._feeds == "end" else b""

    def done(
        self,
        part: Part,
        items: list[Item],
        fresh: int,
        endings: bytes,
        outcomes: Outcomes | None = None,
    ) -> PartDone | PartNotDone:
        """Return what the part hands over: what its records returned, unless that is nothing."""
        kept: list[Item] = items
        if self._feeds != "end":
            kept = [item for item in items if item is not None]
        found = super().done(part, kept, fresh, endings if self._feeds == "end" else b"")
        if isinstance(found, PartDone):
            found.passed = self._passed(part, [found.result] if kept else [], len(kept))
        return found

    def done_in_blocks(self, part: Part, found: LineBlocks) -> PartDone | PartNotDone:
        """Return what a part hands over that was run block by block: items, as of any other."""
        items = found.items()
        return self.done(part, items, len(items), b"")

    def give_up(
        self, part: Part, failures: list[Failure], outcomes: Outcomes, endings: bytes
    ) -> PartNotDone:
        """Return what becomes of a part some of whose records have failed for good."""
        found = super().give_up(part, failures, outcomes, endings)
        if found.result and self._feeds != "end":
            items = [item for item in codec.decode_result(found.result)[0] if item is not None]
            found.result = codec.encode_result(items) if items else b""
        return found

    def _cut(
        self, part: Part, failures: list[Failure], outcomes: Outcomes, endings: bytes
    ) -> PartNotDone:
        """Give up all of the part: what it hands over is one value, and none is left out of it."""
        failure = Failure(
            error="ResultTooLarge",
            message=f"the part's results have more than the {self._max_result} bytes allowed: "
            "make parts smaller (--lines, --bytes)",
            part=part.number,
            attempts=part.attempt,
        )
        return PartNotDone("abandon", 0, [failure], (0, -1), partial=FORGET)

    def _passed(self, part: Part, payloads: list[bytes], records: int) -> PassedPart:
        origin = about.item_of_about(part)
        label = about.about_of_child(part, records, origin) if self._feeds == "parts" else origin
        return PassedPart(part.number, origin, [label] * len(payloads), payloads, records)


class _Children(msgspec.Struct):
    """What one call of a spread's handler came to."""

    payloads: list[bytes]
    keep: bytes


class SpreadRunner(StageRunner):
    """Runs parts of a spread: each yields many."""

    def _callable(self) -> Callable[..., Any]:
        return yielding.plain_yields(self.handler, MOST_CHILDREN + 1)

    def encode(self, returned: Any) -> Item:
        """Return the children that the handler returned, each as it is kept."""
        keep: Any = None
        if isinstance(returned, Spread):
            returned, keep = returned.children, returned.keep
        if returned is None:
            returned = ()
        if isinstance(returned, str | bytes | dict) or not isinstance(returned, Iterable):
            kind = type(returned).__name__
            raise EncodeError(f"a spread returns a list or a Spread, not a {kind}")
        payloads: list[bytes] = []
        for child in returned:
            if len(payloads) == MOST_CHILDREN:
                raise TooManyChildren(
                    f"a part has more than the {MOST_CHILDREN:,} children allowed: "
                    "spread twice, or let one child hold several values"
                )
            payloads.append(codec.encode_result([super().encode(child)]))
        if sum(map(len, payloads)) > _MOST_SIZE * self._max_result:
            raise ResultTooLarge(
                f"the children have more than the {_MOST_SIZE * self._max_result} bytes allowed"
            )
        kept = b"" if keep is None else codec.encode_result([super().encode(keep)])
        return cast(Item, _Children(payloads, kept))

    def done(
        self,
        part: Part,
        items: list[Item],
        fresh: int,
        endings: bytes,
        outcomes: Outcomes | None = None,
    ) -> PartDone | PartNotDone:
        """Return what the part hands over: all children of all its records."""
        found = [cast(_Children, item) for item in items]
        payloads = [payload for each in found for payload in each.payloads]
        if len(payloads) > MOST_CHILDREN:
            error = TooManyChildren(
                f"the {len(items)} records of a part have {len(payloads):,} children, more than "
                f"the {MOST_CHILDREN:,} allowed: load with fewer records in a part (--lines)"
            )
            failure = self.describe(error, part, 0)
            return PartNotDone("abandon", 0, [failure], (0, -1), partial=FORGET)
        origin = about.item_of_about(part)
        if self._feeds == "parts":
            labels = [
                about.about_of_child(part, 1, f"{origin}/{n}") for n in range(1, len(payloads) + 1)
            ]
        else:
            labels = [f"{origin}/{n}" for n in range(1, len(payloads) + 1)]
        if self._is_joined:
            labels.insert(0, f"{origin}/0")
            payloads.insert(0, next((each.keep for each in found if each.keep), b""))
        size = sum(map(len, payloads))
        passed = PassedPart(part.number, origin, labels, payloads, len(labels))
        return PartDone(b"", self._count(part, fresh), passed, size)

    def give_up(
        self, part: Part, failures: list[Failure], outcomes: Outcomes, endings: bytes
    ) -> PartNotDone:
        """Return what becomes of a part of which a record failed: none of it is handed over."""
        return PartNotDone("abandon", 0, failures, (0, -1), partial=FORGET)

    def _kept(self, outcomes: Outcomes | None) -> bytes:
        return b""

    def _so_far(self, outcomes: Outcomes) -> bytes:
        # Nothing: all children of a part are handed over at once, so all its records run again.
        return b""
