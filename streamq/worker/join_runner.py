"""Running parts of a join or a reduce: their inputs wait in the server, in the stage's inbox.

The inputs stay there until the part is finished, so a worker that dies leaves them to the next.
"""

import typing
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

import msgspec

from streamq.app import Context, Handler
from streamq.errors import UNREADABLE, Damaged, DecodeError, RecordError, damaged_if_unreadable
from streamq.flows.shape import Shape
from streamq.flows.values import Failed
from streamq.model import Failure, Part, Spec
from streamq.protocol.protocol import Protocol
from streamq.queue.held_lease import insist_for_lease
from streamq.records import about
from streamq.records.decoding import item_decoder, items_of_part
from streamq.records.references import ReferenceReader
from streamq.worker.stage_runner import SpreadRunner, StageRunner

T = TypeVar("T")

#: Begins the field of a failed child; as in ``lua/lib/handover.lua``.
_FAILED_CHILD = b"\xc1"
#: Inputs that are read in one call.
_PAGE = 500

#: Of an item, what redrives of it are called, in their order: ``17.1`` and ``17.2`` of ``17``.
Reruns = dict[str, list[str]]


class ChildFailed(RecordError):
    """Inputs of a join or a reduce have failed, and it is not to run without them."""


class InputDamaged(RecordError):
    """What the server has for a join or a reduce cannot be read."""


class JoinRunner(StageRunner):
    """Runs parts of a join: what its spread kept, and what the children returned."""

    #: Set by the process that made it.
    protocol: Protocol

    def _check(self) -> None:
        self._is_whole = False
        annotation = self.handler.second if self.handler.takes_two else self.handler.annotation
        self._decode_kept = item_decoder(self.handler.annotation)
        self._decode_child = item_decoder(_element_of_children(annotation))

    def _given(self, part: Part) -> list[bytes]:
        return [about.item_of_about(part).encode()]

    def decode_record(self, record: bytes, is_json: bool) -> Any:
        """Return what the handler is called with: what was kept, and the children."""
        origin, place = record.decode(), self._request_id
        fields = _ask_until_answered(lambda: self.protocol.inbox_of_group(place, origin))
        if self._spec.on_failure == "fail":
            failed = [each for each in fields[1:] if each and each.startswith(_FAILED_CHILD)]
            if failed:
                first = _failure_of_child(failed[0])
                raise ChildFailed(
                    f"{len(failed)} of {len(fields) - 1} children failed, the first with "
                    f"{first.error}: {first.message}"
                )
        kept = self._values(fields[0], self._decode_kept, "what the spread kept")
        children = [
            value
            for number, each in enumerate(fields[1:], 1)
            for value in self._values(each, self._decode_child, f"what {origin}/{number} returned")
        ]
        return (kept[0] if kept else None), children

    def _values(self, field: bytes | None, decode: Callable[[Any], Any], what: str) -> list[Any]:
        """Return the values of a field of the inbox: none if the child returned nothing.

        Raises:
            InputDamaged: it is no result.
            DecodeError: it is not what the handler asks for.
        """
        if field is None:
            return []
        if field.startswith(_FAILED_CHILD):
            failure = _failure_of_child(field)
            return [Failed(failure.error, failure.message)]
        try:
            return [decode(item) for item in items_of_part(field)]
        except Damaged as error:
            raise InputDamaged(f"{what}: {error}") from None
        except UNREADABLE as error:
            raise DecodeError(f"{what} does not decode: {error}") from None

    def _bind(self, context: Context | None) -> Callable[[Any], Any]:
        call = super()._bind(None)
        name = self.handler.context_name
        told = {name: context} if name else {}
        if self.handler.takes_two:
            return lambda value: self._function(*value, **told)
        return lambda value: call(value[1]) if not told else self._function(value[1], **told)


class ReduceRunner(JoinRunner):
    """Runs the part of a reduce: an iterator over everything before it, in input order."""

    def _check(self) -> None:
        super()._check()
        #: How many parts before the reduce failed; or why that is not known.
        self._failed: int | InputDamaged = 0

    def decode_record(self, record: bytes, is_json: bool) -> Any:
        """Return what the handler is called with: an iterator, which reads page by page."""
        first, is_run, last = record.decode().partition("-")
        if is_run:
            return None, self._arrivals(int(first), int(last))
        if isinstance(self._failed, InputDamaged):
            raise self._failed
        if self._failed and self._spec.on_failure == "fail":
            what = "1 part" if self._failed == 1 else f"{self._failed:,} parts"
            raise ChildFailed(f"{what} before it failed")
        return None, self._last_arrivals() if self._spec.width else self._inputs()

    def _bind(self, context: Context | None) -> Callable[[Any], Any]:
        try:
            self._failed = _ask_until_answered(self._count_failures)
        except InputDamaged as error:
            self._failed = error
        if context is not None and isinstance(self._failed, int):
            context.failed = self._failed
        return super()._bind(context)

    def _count_failures(self) -> int:
        """Return how many parts failed whose results the reduce would have had."""
        shape, request_id = Shape.read(self._spec.shape), self._request_id.partition("/")[0]
        before = [n for n in range(1, self._spec.stage) if not shape.is_grouped(n)]
        if self._spec.width:
            before.append(self._spec.stage)
        places = [request_id if n == 1 else f"{request_id}/{n}" for n in before]
        found = self.protocol.fields_of(places, ("failed",))
        return sum(int(values[0] or 0) for values in found if values)

    def _last_arrivals(self) -> Iterator[Any]:
        """Yield what the final part of a tree has: what no other part of it was made of."""
        fields = ("assigned", "arrived")
        assigned, arrived = _ask_until_answered(lambda: self._counts(self._request_id, fields))
        yield from self._arrivals(assigned + 1, arrived)

    def _arrivals(self, first: int, last: int) -> Iterator[Any]:
        for start in range(first, last + 1, _PAGE):
            numbers = [str(number) for number in range(start, min(last + 1, start + _PAGE))]
            ask = partial(self.protocol.inbox, self._request_id, numbers)
            results, _ = _ask_until_answered(ask)
            for number, result in zip(numbers, results, strict=True):
                yield from self._values(result, self._decode_child, f"arrival {number}")

    def _inputs(self) -> Iterator[Any]:
        request_id = self._request_id.partition("/")[0]
        total, runs = _ask_until_answered(lambda: self._counts(request_id, ("total", "runs")))
        reruns: Reruns = {}
        if runs:
            reruns = _reruns_by_origin(
                _ask_until_answered(lambda: self.protocol.rerun_inputs(self._request_id))
            )
        for first in range(1, total + 1, _PAGE):
            numbers = range(first, min(total + 1, first + _PAGE))
            yield from self._page([str(number) for number in numbers], reruns)

    def _counts(self, place: str, fields: tuple[str, ...]) -> list[int]:
        (found,) = self.protocol.fields_of([place], fields)
        return [int(value or 0) for value in found or ["0"] * len(fields)]

    def _page(self, origins: list[str], reruns: Reruns) -> Iterator[Any]:
        results, kids = _ask_until_answered(partial(self.protocol.inbox, self._request_id, origins))
        for origin, result, count in zip(origins, results, kids, strict=True):
            if result is not None:
                yield from self._values(result, self._decode_child, f"what {origin} came to")
            for first in range(1, count + 1, _PAGE):
                below = range(first, min(count + 1, first + _PAGE))
                yield from self._page([f"{origin}/{child}" for child in below], reruns)
            if origin in reruns:
                yield from self._page(reruns[origin], reruns)


def _reruns_by_origin(origins: list[str]) -> Reruns:
    """Return which redrives there are of each item, by the origins that they led to.

    ``17.1/3.2`` tells of two: ``17.1`` of ``17``, and ``17.1/3.2`` of ``17.1/3``.
    """
    found: dict[str, set[int]] = {}
    for origin in origins:
        path = origin.split("/")
        for depth, step in enumerate(path, 1):
            number, _, run = step.partition(".")
            if run:
                item = "/".join([*path[: depth - 1], number])
                found.setdefault(item, set()).add(int(run))
    return {item: [f"{item}.{run}" for run in sorted(runs)] for item, runs in found.items()}


def _element_of_children(annotation: Any) -> Any:
    """Return the type of the children that ``list[Page | Failed]`` or an iterator is of."""
    args = typing.get_args(annotation)
    if not args:
        return Any
    parts = [each for each in typing.get_args(args[0]) if each is not Failed]
    if typing.get_origin(args[0]) is not None and Failed in typing.get_args(args[0]):
        return typing.Union[tuple(parts)]  # noqa: UP007  the number of types is not known
    return args[0]


def _failure_of_child(field: bytes) -> Failure:
    with suppress(*UNREADABLE):
        return msgspec.json.decode(field.removeprefix(_FAILED_CHILD), type=list[Failure])[0]
    return Failure(error="Unknown", message="why it failed cannot be read")


def _ask_until_answered(ask: Callable[[], T]) -> T:
    """Ask the server until it answers: an outage is no failure of the part.

    Raises:
        InputDamaged: the answer cannot be read.
    """

    def asked() -> T:
        try:
            with damaged_if_unreadable("what the server has for the part"):
                return ask()
        except Damaged as error:
            raise InputDamaged(str(error)) from None

    return insist_for_lease(asked)


_RUNNERS: dict[str, type[StageRunner]] = {
    "map": StageRunner,
    "spread": SpreadRunner,
    "join": JoinRunner,
    "reduce": ReduceRunner,
}


def make_runner(
    protocol: Protocol, handler: Handler, spec: Spec, max_result: int, reader: ReferenceReader
) -> StageRunner:
    """Return what runs parts of the stage of a flow that the spec describes."""
    kind = Shape.read(spec.shape).kinds[spec.stage - 1]
    runner = _RUNNERS[kind](handler, spec, max_result, "", reader)
    if isinstance(runner, JoinRunner):
        runner.protocol = protocol
    return runner
