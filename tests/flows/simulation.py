"""Flows of random shape, moved at random on a real server, and looked at after each step.

Slots claim, hand over, fail, hand back and die; replies are lost and calls arrive late; leases run
out though their holders live; parts are redriven; the slot forgets its last moments, as in a
failover. A handler returns the origin of its item, so a result under a wrong origin shows.
"""

import random
import re
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from streamq import Protocol
from streamq.errors import ProtocolError
from streamq.model import Part
from streamq.protocol.replies import PassedPart, Terms
from streamq.records import about
from streamq.records.encoding import FAILED, NOTHING
from tests.support.flow_by_hand import FlowByHand, StageByHand

FAILED_CHILD = b"\xc1"
SHAPES = (
    "map,map",
    "map,map,map",
    "map,map,map,map,map",
    "spread,map",
    "spread,spread,map",
    "spread,map,join",
    "spread,join",
    "spread,map,map,join,map",
    "map,spread,join,spread,map,join",
    "map,reduce",
    "map,tree",
    "spread,map,reduce",
    "spread,map,tree,map",
    "spread,map,join,reduce,map",
)
CAN_RUN = ("parts h",)


def item_of(origin: str) -> str:
    """The item without the numbers of redrives: `17/3` for `17.1/3.2`."""
    return re.sub(r"\.\d+", "", origin)


@dataclass
class Holding:
    """A lease as a slot knows it."""

    stage: StageByHand
    holder: str
    created_ms: int
    parts: list[Part]
    call: int = 0
    #: What each part of a join or reduce found when it was begun.
    inputs: dict[int, list[str]] = field(default_factory=dict)


@dataclass
class StageSeen:
    """What the server has of a stage."""

    kind: str
    is_grouped: bool
    counts: dict[str, int]
    state: str
    failed: set[int]
    leases: int
    #: Number and origin of each entry that is there.
    entries: list[tuple[int, str]]
    inbox: dict[str, bytes]


@dataclass
class Seen:
    """What the server has of a flow, read in one round trip."""

    left: int
    stages: list[StageSeen]
    groups: dict[str, int]
    results: dict[str, bytes]
    kids: dict[str, int]


COUNTS = ("total", "done", "failed", "limit")


def look(redis: Any, flow: FlowByHand) -> Seen:
    """Read everything of a flow."""
    keys = flow[1].keys
    with redis.pipeline(transaction=False) as pipe:
        for stage in flow.stages:
            own = stage.keys
            pipe.hmget(own.meta, *COUNTS, "state")
            pipe.hkeys(own.failed)
            pipe.zcard(own.leases)
            pipe.xrange(own.parts)
            pipe.hgetall(own.got)
        pipe.get(keys.left)
        for name in ("groups", "results", "kids"):
            pipe.hgetall(getattr(keys, name))
        found = iter(pipe.execute())
    stages = [_stage_of(stage, *(next(found) for _ in range(5))) for stage in flow.stages]
    left = int(next(found) or 0)
    groups, results, kids = ({k.decode(): v for k, v in next(found).items()} for _ in range(3))
    return Seen(
        left,
        stages,
        {name: int(count) for name, count in groups.items()},
        results,
        {name: int(count) for name, count in kids.items()},
    )


def _stage_of(
    stage: StageByHand, meta: Any, failed: Any, leases: int, parts: Any, got: Any
) -> StageSeen:
    *counts, state = meta
    facts = stage.facts.split()
    return StageSeen(
        facts[0],
        facts[4] == "1",
        {name: int(value or 0) for name, value in zip(COUNTS, counts, strict=True)},
        state.decode(),
        {int(number) for number in failed},
        leases,
        [
            (
                int(id_.partition(b"-")[0]),
                about.item_of_about(Part(int(id_[:-2]), b"", next(iter(of)))),
            )
            for id_, of in parts
        ],
        {name.decode(): value for name, value in got.items()},
    )


class Simulation:
    """One flow, some slots, and chance."""

    shapes: tuple[str, ...] = SHAPES
    #: How many inputs there may be.
    counts: tuple[int, ...] = (0, 2, 4, 6)
    #: How many parts a slot asks for with those that it hands over.
    mosts: tuple[int, ...] = (0, 1, 2)

    def __init__(
        self, protocol: Protocol, queue: str, request_id: str, seed: int, tally: Counter[str]
    ) -> None:
        self.random = random.Random(seed)
        self.protocol = protocol
        self.tally = tally
        self.log: list[str] = []
        chance = self.random
        kinds = chance.choice(self.shapes)
        self.fails = chance.choice((0.0, 0.15, 0.3))
        self.drops = chance.choice((0.0, 0.0, 0.2))
        stages: dict[int, dict[str, Any]] = {}
        for number, kind in enumerate(kinds.split(","), 1):
            own: dict[str, Any] = {"limit": chance.randint(1, 3)}
            if kind in ("join", "reduce", "tree"):
                own["on_failure"] = chance.choice(("fail", "run"))
            if kind == "tree":
                own["width"] = chance.randint(2, 3)
            if kind in ("map", "spread") and number > 1 and chance.random() < 0.4:
                own["window"] = f"{chance.randint(1, 3)} parts"
            stages[number] = own
        self.is_tree = "tree" in kinds
        self.flow = FlowByHand(
            protocol, queue, request_id, kinds.replace("tree", "reduce"), stages, retries=1
        )
        self.kinds = kinds.replace("tree", "reduce").split(",")
        self.on_failure = [stages[number].get("on_failure", "") for number in stages]
        self.inputs = chance.choice(self.counts)
        self.log.append(f"{kinds} {stages} inputs {self.inputs}")
        self.flow.open()
        if self.inputs:
            self.flow[1].append(self.inputs)
        self.is_sealed = False
        self.slots: list[Holding | None] = [None] * 3
        self.late: list[Callable[[], object]] = []
        self.memory: dict[bytes, bytes] | None = None
        self.is_rolled = False
        self.redis: Any = protocol.connection.redis
        #: Items that were dropped or failed, so that they need not be anywhere.
        self.may_be_gone = self.drops > 0

    # What may happen

    def run(self, steps: int) -> None:
        """Go so many steps, then mend everything and go to the end."""
        for _ in range(steps):
            self.step()
            self.check()
        self.finish()

    def step(self) -> None:
        """Let something happen."""
        chance = self.random
        roll = chance.random()
        if roll < 0.02 and not self.is_sealed:
            self.say("seal")
            self.seal()
        elif roll < 0.07 and self.late:
            self.say("a late call arrives")
            self.tally["late calls"] += 1
            with suppress(ProtocolError):
                self.late.pop(chance.randrange(len(self.late)))()
        elif roll < 0.12:
            self.expire(chance.choice(self.flow.stages))
        elif roll < 0.17:
            self.redrive(chance.choice(self.flow.stages))
        elif roll < 0.19:
            self.remember_or_forget()
        else:
            self.act(chance.randrange(len(self.slots)))

    def act(self, slot: int) -> None:
        holding, chance = self.slots[slot], self.random
        if holding is None:
            self.claim(slot)
            return
        roll = chance.random()
        if roll < 0.04:
            self.say(f"slot {slot} dies")
            self.tally["deaths"] += 1
            self.slots[slot] = None
        elif roll < 0.08:
            self.hand_back(slot, holding)
        elif roll < 0.08 + self.fails or self.lacks(holding):
            self.fail(slot, holding)
        else:
            self.pass_on(slot, holding)

    def seal(self) -> None:
        if not self.is_sealed:
            self.protocol.seal(self.flow.id, self.inputs, f"c{self.inputs}" if self.inputs else "")
            self.is_sealed = True

    def claim(self, slot: int) -> None:
        terms = Terms(self.random.randint(1, 3), lease_ms=600_000)
        for stage in self.random.sample(self.flow.stages, len(self.flow.stages)):
            holder = f"s{slot}.{self.random.getrandbits(48):x}"
            grant = self.protocol.claim(stage.id, holder, terms, CAN_RUN)
            if grant.parts:
                break
        else:
            return
        self.say(f"slot {slot} claims {self.named(stage, grant.parts)} as {holder}")
        holding = Holding(stage, holder, grant.created_ms, grant.parts)
        self.slots[slot] = holding
        self.read(holding)

    def read(self, holding: Holding) -> None:
        """Read the inputs of joins and reduces, as their workers do when they begin."""
        stage = holding.stage
        kind = self.kinds[stage.number - 1]
        for part in holding.parts:
            origin = about.item_of_about(part)
            if kind == "join":
                found = self.protocol.inbox_of_group(stage.id, origin)
                fields = [each for each in found[1:] if each is not None]
                holding.inputs[part.number] = [
                    "!" if each.startswith(FAILED_CHILD) else each.decode() for each in fields
                ]
            elif kind == "reduce":
                inbox = stage.inbox()
                names = [str(n) for n in self.arrivals(stage, origin)] if self.is_tree else inbox
                values = [inbox.get(name, b"lost").decode() for name in names]
                holding.inputs[part.number] = [one for each in values for one in each.split("+")]

    def arrivals(self, stage: StageByHand, origin: str) -> range:
        first, is_run, last = origin.partition("-")
        if is_run:
            return range(int(first), int(last) + 1)
        return range(int(stage.meta("assigned") or 0) + 1, int(stage.meta("arrived") or 0) + 1)

    def lacks(self, holding: Holding) -> bool:
        """Whether a part in hand is a join or reduce that fails for want of its inputs."""
        stage = holding.stage
        kind = self.kinds[stage.number - 1]
        if self.on_failure[stage.number - 1] != "fail":
            return False
        first = holding.parts[0]
        if kind == "join":
            return "!" in holding.inputs[first.number]
        return (
            kind == "reduce" and "-" not in about.item_of_about(first) and self.failures(stage) > 0
        )

    def failures(self, stage: StageByHand) -> int:
        shape = self.flow.policy.flow
        assert shape
        before = [each for each in self.flow.stages if each.number < stage.number]
        counted = [each for each in before if each.facts.split()[4] == "0"]
        own = [stage] if self.is_tree else []
        return sum(int(each.meta("failed") or 0) for each in counted + own)

    def passed(self, holding: Holding, part: Part) -> PassedPart:
        stage = holding.stage
        kind, feeds, _, join, *_ = stage.facts.split()
        origin = about.item_of_about(part)
        own = item_of(origin)
        if part.payload and stage.number > 1:
            said = part.payload.decode()
            assert kind in ("join", "reduce") or said in (own, "all") or "+" in said, (
                f"part {part.number} of stage {stage.number} is {own}, its payload is of {said}"
            )
        value = own if kind in ("map", "spread", "join") else ""
        if kind == "reduce":
            value = "+".join(each for each in sorted(holding.inputs[part.number]) if each)
        elif part.payload and stage.number > 1 and self.kinds[stage.number - 2] == "reduce":
            value = part.payload.decode()
        is_dropped = kind in ("map", "join") and self.random.random() < self.drops
        if kind == "spread":
            count = self.random.randint(0, 3)
            origins = [f"{origin}/{n}" for n in range(1, count + 1)]
            labels = [
                about.about_of_child(part, 1, each) if feeds == "parts" else each
                for each in origins
            ]
            payloads = [item_of(each).encode() for each in origins]
            if join != "0":
                labels, payloads = [f"{origin}/0", *labels], [b"kept", *payloads]
            return PassedPart(part.number, origin, labels, payloads, len(payloads))
        label = about.about_of_child(part, 1, origin) if feeds == "parts" else origin
        payloads = [] if is_dropped else [value.encode()]
        return PassedPart(part.number, origin, [label] * len(payloads), payloads, len(payloads))

    def pass_on(self, slot: int, holding: Holding) -> None:
        chance, stage = self.random, holding.stage
        holding.call += 1_000
        passed = [self.passed(holding, part) for part in holding.parts]
        terms = Terms(chance.choice(self.mosts), lease_ms=600_000)
        call, holder = holding.call, holding.holder

        def send() -> Any:
            return self.protocol.pass_on(
                stage.id, holder, call, passed, len(passed), terms, holding.created_ms, stage.facts
            )

        fares = chance.random()
        self.say(f"slot {slot} passes {self.named(stage, holding.parts)}, call {call} of {holder}")
        if fares < 0.12:
            self.say("  it is under way, and its sender dies")
            self.late.append(send)
            self.slots[slot] = None
            return
        if fares < 0.3:
            self.say("  it is sent twice")
            self.tally["repeats"] += 1
            with suppress(ProtocolError):
                send()
            if chance.random() < 0.3:
                self.late.append(send)
        try:
            grant = send()
        except ProtocolError:
            self.slots[slot] = None
            return
        if grant.parts:
            holding.parts = grant.parts
            holding.inputs = {}
            self.read(holding)
            self.say(f"  and is handed {self.named(stage, grant.parts)}")
        else:
            if grant.word == "lost" and grant.counted:
                self.tally["mercy"] += 1
            self.slots[slot] = None

    def fail(self, slot: int, holding: Holding) -> None:
        part, stage = holding.parts.pop(0), holding.stage
        holding.call += 1_000
        is_for_good = self.lacks_part(holding, part) or self.random.random() < 0.6
        kind = "abandon" if is_for_good else "retry"
        self.say(f"slot {slot} fails {self.named(stage, [part])}: {kind}")
        with suppress(ProtocolError):
            stage.fail(holding.holder, part.number, call=holding.call, kind=kind)
            self.tally[f"fail {kind}"] += 1
        if not holding.parts:
            with suppress(ProtocolError):
                stage.release(holding.holder, call=holding.call + 1_000)
            self.slots[slot] = None

    def lacks_part(self, holding: Holding, part: Part) -> bool:
        return "!" in holding.inputs.get(part.number, ())

    def hand_back(self, slot: int, holding: Holding) -> None:
        number = holding.parts[-1].number
        if len(holding.parts) > 1:
            holding.parts.pop()
            self.say(f"slot {slot} hands part {number} back")
            with suppress(ProtocolError):
                call = holding.call + 1
                self.protocol.handback(holding.stage.id, holding.holder, call, [number])

    def expire(self, stage: StageByHand) -> None:
        leases = stage.leases()
        if leases:
            holder = self.random.choice(sorted(leases))
            self.say(f"the lease of {holder} runs out")
            stage.expire(holder)
            stage.reap()
            self.tally["stalls"] += any(each and each.holder == holder for each in self.slots)

    def redrive(self, stage: StageByHand) -> None:
        failed = sorted(stage.failed())
        if failed:
            numbers = self.random.sample(failed, self.random.randint(1, len(failed)))
            redriven, state, tokens = stage.redrive(*numbers)
            self.say(f"redrive of {numbers} of stage {stage.number}: {redriven}, {state}")
            self.tally["redriven"] += redriven
            self.tally["refused"] += tokens.refused

    # A failover

    def remember_or_forget(self) -> None:
        """Cut a replica off; or go on with what it has."""
        if self.memory is None:
            self.say("the replica is cut off")
            self.memory = {key: self.redis.dump(key) for key in self.own_keys()}
            self.was_sealed = self.is_sealed
            return
        self.say("failover")
        self.tally["failovers"] += 1
        self.redis.unlink(*self.own_keys())
        for key, value in self.memory.items():
            if value is not None:
                self.redis.restore(key, 0, value)
        self.memory, self.is_sealed, self.is_rolled = None, self.was_sealed, True

    def own_keys(self) -> list[bytes]:
        pattern = f"sq:{{r:{self.flow.id}}}:*"
        return sorted(self.redis.scan_iter(match=pattern, count=1_000))

    # What must hold

    def check(self) -> None:
        """Compare what the server has with the invariants."""
        seen = look(self.redis, self.flow)
        unfinished = 0
        for number, stage in enumerate(seen.stages, 1):
            counts = stage.counts
            unfinished += counts["total"] - counts["done"] - counts["failed"]
            assert len(stage.failed) == counts["failed"], self.why(f"failures of stage {number}")
            assert stage.leases <= counts["limit"], self.why("more leases than the limit")
        assert seen.left == unfinished + (not self.is_sealed), self.why(
            f"left is {seen.left}, and {unfinished} parts are unfinished"
        )
        states = {stage.state.replace("loading", "open") for stage in seen.stages}
        assert len(states) == 1, self.why(f"states differ: {states}")
        if states == {"done"}:
            assert seen.left == 0, self.why("done, and something is left")
        self.check_groups(seen)
        self.check_places(seen)
        self.tally["steps"] += 1

    def check_groups(self, seen: Seen) -> None:
        running, failed, joins = Counter[str](), Counter[str](), Counter[str]()
        for stage in seen.stages:
            for number, origin in stage.entries:
                group = origin.rpartition("/")[0]
                if stage.is_grouped:
                    (failed if number in stage.failed else running)[group] += 1
                elif stage.kind == "join":
                    joins[origin] += 1
        for name, count in seen.groups.items():
            if name[-1:] in "!#@":
                continue
            assert count == running[name], self.why(f"group {name} says {count} run")
            assert seen.groups.get(f"{name}!", 0) == failed[name], self.why(f"failures of {name}")
            assert f"{name}@" in seen.groups or count > 0, self.why(f"group {name} has no join")
            assert joins[name] <= 1, self.why(f"group {name} has {joins[name]} joins")

    def check_places(self, seen: Seen) -> None:
        """Every item is in one place; what is in a place is of that item."""
        places = Counter[str]()
        # From a reduce on there is one item, and it is not the first input, though it is called so.
        before = self.kinds.index("reduce") if "reduce" in self.kinds else len(self.kinds)
        for stage in seen.stages[:before]:
            places.update(item_of(origin) for _, origin in stage.entries)
        if before == len(self.kinds):
            self.check_results(seen, places)
        for stage in seen.stages:
            if stage.kind == "join" or (stage.kind == "reduce" and not self.is_tree):
                self.check_inbox(stage, places)
        twice = {name: count for name, count in places.items() if count > 1}
        assert not twice, self.why(f"in several places: {twice}")
        if not {"join", "reduce"} & set(self.kinds) and seen.stages[0].counts["total"]:
            self.check_lost(seen, places)

    def check_results(self, seen: Seen, places: Counter[str]) -> None:
        for name, value in seen.results.items():
            places[item_of(name)] += value != FAILED
            if value not in (FAILED, NOTHING):
                assert value.decode() == item_of(name), self.why(f"result {name} is of {value!r}")

    def check_inbox(self, stage: StageSeen, places: Counter[str]) -> None:
        for name, value in stage.inbox.items():
            if name.endswith("/0") or value.startswith(FAILED_CHILD):
                continue
            places[item_of(name)] += stage.kind == "reduce"
            said = value.decode()
            assert said == item_of(name), self.why(f"input {name} is of {said}")

    def check_lost(self, seen: Seen, places: Counter[str]) -> None:
        """Without a join or a reduce each item is somewhere: it, or its children."""
        kids = {item_of(name): count for name, count in seen.kids.items()}
        wanted = [str(number) for number in range(1, self.inputs + 1)]
        wanted += [f"{name}/{n}" for name, count in kids.items() for n in range(1, count + 1)]
        for item in wanted:
            assert places[item] or item in kids, self.why(f"item {item} is nowhere")

    # The end

    def finish(self) -> None:
        """Let everything late arrive, end all leases, and run what is left."""
        self.say("the end: everything arrives, and the rest runs without faults")
        for send in self.late:
            with suppress(ProtocolError):
                send()
            self.check()
        self.late, self.fails, self.drops = [], 0.0, 0.0
        self.seal()
        for stage in self.flow.stages:
            for holder in stage.leases():
                stage.expire(holder)
            stage.reap()
        self.slots = [None]
        for _ in range(400):
            if "open" not in self.flow.states():
                break
            for stage in self.flow.stages:
                self.drain(stage)
        assert self.flow.states()[0] in ("done", "failed"), self.why(
            f"it does not end: {self.flow.states()}, left {self.flow.left}"
        )
        self.check()
        self.check_end()
        for stage in self.flow.stages:
            stage.set_meta(finished_ms=1)
        self.protocol.purge(self.flow.id, force=True)
        assert self.own_keys() == [], self.why("keys remain")
        self.tally["ends"] += 1

    def drain(self, stage: StageByHand) -> None:
        holder = f"e{self.random.getrandbits(48):x}"
        grant = self.protocol.claim(stage.id, holder, Terms(2, lease_ms=600_000), CAN_RUN)
        if not grant.parts:
            return
        holding = Holding(stage, holder, grant.created_ms, grant.parts)
        self.read(holding)
        self.slots[0] = holding
        while self.slots[0]:
            if self.lacks(holding):
                self.fail(0, holding)
            else:
                holding.call += 1_000
                passed = [self.passed(holding, part) for part in holding.parts]
                self.protocol.pass_on(
                    stage.id, holder, holding.call, passed, len(passed), Terms(0),
                    holding.created_ms, stage.facts,
                )  # fmt: skip
                self.slots[0] = None
        self.check()

    def check_end(self) -> None:
        """What came to the end: each leaf once, or its failure."""
        seen = look(self.redis, self.flow)
        assert seen.left == 0, self.why(f"left is {seen.left}")
        if "reduce" in self.kinds:
            whole = [each for each in seen.results.values() if each not in (FAILED, NOTHING)]
            for text in whole:
                items = Counter(each for each in text.decode().split("+") if each)
                twice = {each for each, count in items.items() if count > 1}
                assert not twice, self.why(f"the reduce has twice: {twice}")
                assert "lost" not in items, self.why("the reduce found an input missing")
        elif "join" not in self.kinds:
            for number in range(1, self.inputs + 1):
                self.check_leaf(str(number), seen)

    def check_leaf(self, item: str, seen: Seen) -> None:
        kids = {item_of(name): count for name, count in seen.kids.items()}
        if item in {item_of(name) for name in seen.results} or kids.get(item) == 0:
            return
        assert item in kids, self.why(f"item {item} has no end")
        for child in range(1, kids[item] + 1):
            self.check_leaf(f"{item}/{child}", seen)

    def named(self, stage: StageByHand, parts: list[Part]) -> str:
        told = ", ".join(f"{part.number}={about.item_of_about(part)}" for part in parts)
        return f"stage {stage.number} [{told}]"

    def say(self, what: str) -> None:
        self.log.append(what)

    def why(self, what: str) -> str:
        return what + "\n  " + "\n  ".join(self.log)


class Forgetful(Simulation):
    """Two maps whose slot forgets its last moments again and again, while workers have parts.

    Then numbers of the second stage come to be other items, which their holders do not know.
    """

    shapes = ("map,map",)
    counts = (40,)
    mosts = (1, 2)

    def __init__(
        self, protocol: Protocol, queue: str, request_id: str, seed: int, tally: Counter[str]
    ) -> None:
        super().__init__(protocol, queue, request_id, seed, tally)
        self.fails = self.drops = 0.0
        self.slots = [None] * 8
        for stage in self.flow.stages:
            stage.set_meta(limit=8, window=0)

    def run(self, steps: int) -> None:
        """Go so many steps. Only the end is looked at: that takes longer than the steps."""
        for _ in range(steps):
            self.step()
        self.finish()

    def step(self) -> None:
        """Work; let the slot forget what was done last; and work while some do not hear of it."""
        chance = self.random
        for _ in range(chance.randint(0, 4)):
            self.act(chance.randrange(len(self.slots)))
        self.remember_or_forget()
        for _ in range(chance.randint(3, 9)):
            self.act(chance.randrange(len(self.slots)))
        self.remember_or_forget()
        asleep = [
            number
            for number, held in enumerate(self.slots)
            if held and chance.random() < (0.9 if held.stage.number > 1 else 0.3)
        ]
        awake = [n for n in range(len(self.slots)) if n not in asleep]
        for _ in range(chance.randint(3, 12) if awake else 0):
            self.act(chance.choice(awake))
        for _ in range(chance.choice((0, len(self.slots)))):
            self.expire(self.flow[2])
        # What they have may be other items by now, which others hold or which lie in `retry`.
        for slot in asleep:
            self.act(slot)
        if self.late:
            with suppress(ProtocolError):
                self.late.pop(chance.randrange(len(self.late)))()
