"""Finding one item of a request: where it is, and what it came to in each stage.

Everything is read, and nothing is written. An item moves on while it is looked at, so what is told
of two stages may be of two moments.
"""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import msgspec

from streamq.errors import InvalidValue, StreamqError, damaged_if_unreadable
from streamq.flows.flow import MOST_CHILDREN
from streamq.flows.shape import Shape
from streamq.model import Failure
from streamq.protocol import lookups
from streamq.protocol.protocol import Protocol
from streamq.protocol.snapshot import Snapshot
from streamq.queue.failures import read_failures
from streamq.queue.flow_status import name_of_flow_stage, places_of_flow_stages
from streamq.records import encoding as codec
from streamq.records.keys import MADE, WHOLE, stored_key

#: Where an item is in a stage: it has not come; the stage waits for its children; and so on.
Where = Literal["", "waits", "waiting", "running", "retry", "done", "failed", "dropped", "unknown"]
#: Unfinished, in the order in which they are told.
_UNFINISHED: tuple[Where, ...] = ("retry", "running", "waiting")
#: Most children of one part.
_CHILDREN = MOST_CHILDREN
#: Items are looked for under the names of this many redrives at most.
_MOST_RUNS = 50
_PARKED = "-"
#: Stands for the result of an item that dropped out, or failed; as in ``lua/lib/handover.lua``.
_NOTHING, _FAILED = b"\xdc\x00\x00", b"\xdd\x00\x00\x00\x00"
_ITEM = re.compile(r"[0-9]{1,15}(/[0-9]{1,6}){0,15}")


class ItemPart(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Show one part that an item, or a child of it, is in a stage.

    Example:
        for part in item.stages[0].parts:
            print(part.item, part.where, part.error)
    """

    #: The input's number, or that of a child of it, such as ``17/3``.
    item: str
    where: Where
    #: The part's number in its stage; 0 where it is none yet.
    part: int = 0
    #: Which attempt comes or goes on now, and when it may begin (ms since 1970).
    attempt: int = 1
    due_ms: int | None = None
    #: Why it was given up.
    error: str = ""
    message: str = ""
    #: What the handler returned, where the server has it: with ``trace``, or a result that nobody
    #: has collected yet.
    result: Any = msgspec.UNSET


class ItemStage(msgspec.Struct, frozen=True, kw_only=True):
    """Show an item in one stage. ``Item.stages`` has these.

    Example:
        for stage in item.stages:
            print(stage.name, stage.counts)
    """

    number: int
    name: str
    kind: str
    #: The item itself here, or its children behind a spread.
    parts: list[ItemPart]
    #: How many children a spread made, or a join is for; and how many the join waits for.
    children: int = 0
    waits_for: int = 0

    @property
    def counts(self) -> dict[str, int]:
        """How many parts are in which state.

        Example:
            item.stages[2].counts == {"done": 8, "retry": 1}
        """
        return dict(Counter(part.where for part in self.parts))


class Item(msgspec.Struct, frozen=True, kw_only=True):
    """Show where one input of a request is. ``Request.find`` returns one.

    Example:
        item = request.find("B-62")
        if item:
            print(item.stage, [stage.counts for stage in item.stages])
    """

    request: str
    #: The input's number, or the item that was asked for.
    item: str
    key: str = ""
    value: str = ""
    #: The stage that it, or the last of its children, has come to; and how it is there.
    stage: str
    where: Where
    stages: list[ItemStage]
    #: Other inputs with the same key.
    again: list[str] = []


def find_item(protocol: Protocol, request_id: str, value: Any, item: str = "") -> Item | None:
    """Return the input that has the key, or the item of that number; None if there is none.

    Raises:
        InvalidValue: the request keeps no keys, or that is no item's number.
    """
    found = protocol.inspect(request_id)
    if item:
        return _item_in_its_stages(protocol, found, _checked_item(item))
    key, name = stored_key(value), found.optional_text("key")
    if not name:
        raise InvalidValue(
            f"request {request_id} was submitted without a key: an item is found by its number only"
        )
    if key is None:
        raise InvalidValue(f"{value!r} is no key: a text or a number is one")
    (numbers,) = lookups.look_up_parts_of_key(protocol, [request_id], key)
    # A load that stopped may have told of parts that it never added.
    numbers = [number for number in numbers if number <= found.known_count("total")]
    if not numbers:
        return None
    first = _item_in_its_stages(protocol, found, str(numbers[0]))
    assert first
    return msgspec.structs.replace(
        first,
        key=name,
        value=str(value),
        again=[str(number) for number in numbers[1:]],
    )


def _item_in_its_stages(protocol: Protocol, found: Snapshot, origin: str) -> Item | None:
    with damaged_if_unreadable(f"where item {origin} of {found.id} is"):
        return ItemFinder(protocol, found).item(origin)


def requests_with_item(
    protocol: Protocol, ids: Sequence[str], key: str, value: str, flow: str = ""
) -> list[str]:
    """Return those of the requests that have the key, the newest first."""
    told = protocol.fields_of(list(ids), ("key", "flow", "created_ms"))
    kept = [
        (int(values[2] or 0), each)
        for each, values in zip(ids, told, strict=True)
        if values and values[0] in (key, MADE, WHOLE) and (not flow or values[1] == flow)
    ]
    newest = [each for _, each in sorted(kept, reverse=True)]
    found = lookups.look_up_parts_of_key(protocol, newest, stored_key(value) or "")
    return [each for each, numbers in zip(newest, found, strict=True) if numbers]


class ItemFinder:
    """Follows one item through the stages of its request."""

    def __init__(self, protocol: Protocol, found: Snapshot) -> None:
        self._protocol = protocol
        self._id = found.id
        spec = found.spec
        #: A plain request is a flow of one stage whose parts keep their numbers.
        self._shape = Shape.read(spec.shape) if spec.stage else Shape(("map",))
        self._is_flow = bool(spec.stage)
        self._stages = [
            found,
            *(protocol.inspect(place) for place in places_of_flow_stages(found)[1:]),
        ]
        runs = found.fields.get("runs", "") if self._is_flow else str(found.count("redrives"))
        #: What a redrive adds to the name of an item.
        self._runs = range(1, min(_MOST_RUNS, int(runs or 0)) + 1)

    def item(self, origin: str) -> Item | None:
        """Return where the item is; None if there is none of that number."""
        number, *below = origin.split("/")
        if not 0 < int(number) <= self._stages[0].known_count("total"):
            return None
        stages = list(self._walk([number], below))
        stage, where = _stage_of_item(stages)
        return Item(request=self._id, item=origin, stage=stage, where=where, stages=stages)

    def _walk(self, names: list[str], below: list[str]) -> Iterator[ItemStage]:
        """Yield the stages. ``names``: what the item, or its children, are called in the next.

        ``below``: of the children of each spread only this one is followed.
        """
        parents: list[ItemPart] = []
        for number, kind in enumerate(self._shape.kinds, 1):
            if kind == "join":
                stage = self._join(number, parents)
                names = [part.item for part in parents]
            elif kind == "reduce":
                stage, names = self._reduce(number), ["1"]
            else:
                stage, names = self._parts(number, names)
            if kind == "spread":
                parents = [
                    msgspec.structs.replace(part, item=name)
                    for part, name in zip(stage.parts, names, strict=True)
                ]
                found = [(part, self._children(number, part)) for part in parents]
                parents = [
                    msgspec.structs.replace(part, item=own[0].rpartition("/")[0]) if own else part
                    for part, own in found
                ]
                names = [name for _, own in found for name in own]
                stage = msgspec.structs.replace(stage, children=len(names))
                if below:
                    own, *below = below
                    names = [name for name in names if name.rpartition("/")[2] == own]
            yield self._valued(stage, names)

    def _stage(self, number: int, parts: list[ItemPart], **more: int) -> ItemStage:
        own = self._stages[number - 1]
        kind = self._shape.kinds[number - 1] if self._is_flow else ""
        return ItemStage(
            number=number, name=name_of_flow_stage(own), kind=kind, parts=parts, **more
        )

    def _parts(self, number: int, names: list[str]) -> tuple[ItemStage, list[str]]:
        """Return a map or a spread, and what its items are called from then on."""
        if not self._shape.follow:
            return self._stage(number, self._untracked(number, names)), names
        parts = self._come(number, names)
        places = self._places(names)
        if self._shape.kinds[number - 1] == "map" and self._shape.feeds(number) == "parts":
            # The places were read after the parts: what is done and has not gone on dropped out.
            parts = [
                msgspec.structs.replace(part, where="dropped")
                if part.where == "done" and places.get(part.item, ("", 0, 0))[1] <= number
                else part
                for part in parts
            ]
        return self._stage(number, parts), [places.get(name, (name,))[0] for name in names]

    def _untracked(self, number: int, names: list[str]) -> list[ItemPart]:
        """Return what is known where nobody notes which part of a stage an item is."""
        if number > 1:
            return [ItemPart(item=name, where="unknown") for name in names]
        found = self._found(1, [int(name) for name in names])
        return [
            msgspec.structs.replace(each, item=name)
            for each, name in zip(found, names, strict=True)
        ]

    def _come(self, number: int, names: list[str]) -> list[ItemPart]:
        """Return where items are in this stage: they have passed it, they are there, or neither."""
        places = self._places(names)
        at = {name: places.get(name, (name, 0, 0))[1:] for name in names}
        if number == 1:
            at = {name: (1, int(name)) for name in names}
        here = [name for name in names if at[name][0] == number]
        found = dict(zip(here, self._found(number, [at[name][1] for name in here]), strict=True))
        return [
            msgspec.structs.replace(found[name], item=name)
            if name in found
            else ItemPart(item=name, where="done" if at[name][0] > number else "")
            for name in names
        ]

    def _places(self, names: list[str]) -> dict[str, tuple[str, int, int]]:
        """Return for each item what it is called by now, and the stage and the part that it is."""
        asked = {name: self._called(name) for name in names}
        flat = [each for called in asked.values() for each in called]
        told = dict(zip(flat, self._asked("items", flat), strict=True))
        found: dict[str, tuple[str, int, int]] = {}
        for name, called in asked.items():
            for each in called:
                stage, _, part = (told[each] or b"0:0").partition(b":")
                if int(stage) > found.get(name, ("", 0, 0))[1]:
                    found[name] = (each, int(stage), int(part))
        return found

    def _called(self, name: str) -> list[str]:
        """Return what an item may be called, as redrives add to its name."""
        base = name.rpartition(".")[0] if "." in name.rpartition("/")[2] else name
        return list(dict.fromkeys([name, *(f"{base}.{run}" for run in self._runs)]))

    def _found(self, number: int, parts: list[int]) -> list[ItemPart]:
        """Return where parts of a stage are."""
        own = self._stages[number - 1]
        delivered = own.count("delivered")
        return [
            _item_part(each, delivered)
            for each in lookups.look_up_parts(self._protocol, own.id, parts)
        ]

    def _join(self, number: int, parents: list[ItemPart]) -> ItemStage:
        asked = [f"{part.item}{mark}" for part in parents for mark in ("", "#", "@")]
        told = [None if each is None else int(each) for each in self._asked("groups", asked)]
        groups = list(zip(told[::3], told[1::3], told[2::3], strict=True))
        numbers = [part for _, _, part in groups if part is not None]
        found = iter(self._found(number, numbers))
        parts, waits, children = [], 0, 0
        for parent, (left, count, part) in zip(parents, groups, strict=True):
            children += count or 0
            if part is not None:
                parts.append(msgspec.structs.replace(next(found), item=parent.item))
            elif left is not None:
                waits += left
                parts.append(ItemPart(item=parent.item, where="waits"))
            else:
                # The server forgets a group when its join is done.
                where: Where = "done" if parent.where == "done" else ""
                parts.append(ItemPart(item=parent.item, where=where))
        return self._stage(number, parts, waits_for=waits, children=children)

    def _reduce(self, number: int) -> ItemStage:
        final = self._final(number)
        if not final:
            return self._stage(number, [ItemPart(item="1", where="waits")])
        (found,) = self._found(number, [final])
        return self._stage(number, [msgspec.structs.replace(found, item="1")])

    def _final(self, number: int) -> int:
        """Return the part of a reduce that yields the result; 0 where it is not made yet."""
        fields = self._stages[number - 1].fields
        if int(fields.get("width") or 0):
            return int(fields.get("final") or 0)
        return min(1, self._stages[number - 1].count("total"))

    def _children(self, number: int, parent: ItemPart) -> list[str]:
        """Return what the children of a part of a spread are called."""
        if parent.where != "done" or not self._shape.follow:
            return []
        is_joined = self._shape.closing_join(number) > 0
        name, mark = ("groups", "#") if is_joined else ("kids", "")
        called = self._called(parent.item)
        counts = self._asked(name, [f"{each}{mark}" for each in called])
        known = [(each, int(count)) for each, count in zip(called, counts, strict=True) if count]
        own, most = known[-1] if known else (parent.item, _CHILDREN)
        names = [f"{own}/{child}" for child in range(1, most + 1)]
        if not known:
            # Its join is done: those are its children that came to the next stage.
            places = self._places(names)
            names = [each for each in names if each in places]
        return names

    def _valued(self, stage: ItemStage, names: list[str]) -> ItemStage:
        """Return the stage with what its handler returned, as far as the server has it."""
        is_last = stage.number == len(self._shape)
        if not (self._shape.follow == "trace" or is_last):
            return stage
        if stage.kind == "spread":
            return self._valued_spread(stage, names)
        suffix = f":{stage.number}" if self._shape.follow == "trace" else ""
        kept = "trace" if suffix else "results"
        asked = [self._called(part.item) for part in stage.parts]
        flat = [f"{each}{suffix}" for called in asked for each in called]
        told = dict(zip(flat, self._asked(kept, flat), strict=True))
        parts = []
        for part, called in zip(stage.parts, asked, strict=True):
            values = [value for each in called if (value := told[f"{each}{suffix}"])]
            is_over = part.where == "done" and values and values[-1] != _FAILED
            parts.append(_stage_with_result(part, values[-1]) if is_over else part)
        return msgspec.structs.replace(stage, parts=parts)

    def _valued_spread(self, stage: ItemStage, names: list[str]) -> ItemStage:
        """Return a spread with what it made its children of."""
        if self._shape.follow != "trace" or len(stage.parts) != 1 or not names:
            return stage
        told = self._asked("trace", [f"{name}:{stage.number}" for name in names])
        values = [_handler_value(each) for each in told if each]
        return msgspec.structs.replace(
            stage, parts=[msgspec.structs.replace(stage.parts[0], result=values)]
        )

    def _asked(self, name: str, asked: list[str]) -> list[bytes | None]:
        return lookups.look_up_fields(self._protocol, self._id, name, asked)


def _checked_item(item: str) -> str:
    if not _ITEM.fullmatch(item):
        raise InvalidValue(f"{item!r} is no item: write the number of an input, or 17/3 of a child")
    return item


def _item_part(found: lookups.PartLookup, delivered: int) -> ItemPart:
    failure = read_failures(found.failed)[0] if found.failed else Failure(error="")
    where: Where = "done"
    if found.failed is not None:
        where = "failed"
    elif found.holder:
        where = "retry" if found.holder == _PARKED else "running"
    elif found.number > delivered:
        where = "waiting"
    return ItemPart(
        item="",
        where=where,
        part=found.number,
        attempt=failure.attempts or found.errors + 1,
        due_ms=found.due_ms if where == "retry" else None,
        error=failure.error,
        message=failure.message,
    )


def _stage_with_result(part: ItemPart, value: bytes) -> ItemPart:
    if value == _NOTHING:
        return msgspec.structs.replace(part, where="dropped")
    return msgspec.structs.replace(part, result=_handler_value(value))


def _handler_value(result: bytes) -> Any:
    """Return what a handler returned; of several records, a list."""
    try:
        values = [codec.decode_item(item) for item in codec.decode_result(result)[0]]
    except StreamqError as error:
        return f"(cannot be read: {error})"
    return values[0] if len(values) == 1 else values


def _stage_of_item(stages: list[ItemStage]) -> tuple[str, Where]:
    """Return the first stage in which something is unfinished, or else the last one it came to."""
    for stage in stages:
        for where in _UNFINISHED:
            if where in stage.counts:
                return stage.name, where
    come = [stage for stage in stages if any(part.where for part in stage.parts)]
    last = come[-1] if come else stages[0]
    return last.name, next(iter(Counter(p.where for p in last.parts if p.where)), "")
