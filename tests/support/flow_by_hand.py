"""Moving a flow through the protocol by hand, stage by stage."""

from collections.abc import Mapping, Sequence
from typing import Any

from streamq import Protocol
from streamq.flows.flow import Flow, Stage
from streamq.model import Part, Policy
from streamq.protocol.replies import Grant, PassedPart, Terms
from streamq.queue.flow_policy import flow_policy
from streamq.records import about
from tests.support.by_hand import HANDLER, RequestByHand

#: What the children of a part are, by its number: their payloads.
Children = Mapping[int, Sequence[bytes]]


def plan(queue: str, kinds: str, stages: Mapping[int, Mapping[str, Any]], **common: Any) -> Policy:
    """The policy of a flow of these kinds (``map,map``), each with the handler ``h``."""
    made = [
        Stage(kind=kind, handler=HANDLER, **stages.get(number, {}))  # type: ignore[arg-type]
        for number, kind in enumerate(kinds.split(","), 1)
    ]
    follow = common.pop("follow", "")
    return flow_policy(Flow("f", made), {"queue": queue, "retries": 3, **common}, follow=follow)


class StageByHand(RequestByHand):
    """One stage of a flow: a request, but its results are handed over."""

    def __init__(self, flow: "FlowByHand", number: int) -> None:
        place = flow.id if number == 1 else f"{flow.id}/{number}"
        super().__init__(flow.protocol, flow.queue, place)
        self.keys = flow.protocol.keys(place)
        self.number = number
        self.flow = flow
        assert flow.policy.flow
        self.facts = flow.policy.flow.stages[number - 1].policy.spec.facts

    def call(self, holder: str) -> int:
        """The next call number of a holder: by the thousand, as a worker counts."""
        return super().call(holder) * 1_000

    def pass_on(
        self,
        holder: str,
        parts: Sequence[Part],
        most: int = 0,
        *,
        children: Children | None = None,
        call: int | None = None,
        created_ms: int | None = None,
    ) -> Grant:
        """Hand parts over. A part that ``children`` does not name has one child: its payload."""
        passed = [self._passed(part, (children or {}).get(part.number)) for part in parts]
        number = self.call(holder) if call is None else call
        made = int(self.meta("created_ms") or 0) if created_ms is None else created_ms
        return self.protocol.pass_on(
            self.id, holder, number, passed, len(parts), Terms(most), made, self.facts
        )

    def _passed(self, part: Part, payloads: Sequence[bytes] | None) -> PassedPart:
        kind, feeds, *_ = self.facts.split()
        origin = about.item_of_about(part)
        payloads = [part.payload or b"j" + origin.encode()] if payloads is None else payloads
        if kind != "spread":
            label = about.about_of_child(part, 1, origin) if feeds == "parts" else origin
            count = len(payloads)
            return PassedPart(part.number, origin, [label] * count, list(payloads), count)
        named = [f"{origin}/{n}" for n in range(1, len(payloads) + 1)]
        labels = [
            about.about_of_child(part, 1, each) if feeds == "parts" else each for each in named
        ]
        if self.facts.split()[3] != "0":  # it is joined, and keeps the parent's origin
            labels, payloads = [f"{origin}/0", *labels], [b"k" + origin.encode(), *payloads]
        return PassedPart(part.number, origin, labels, list(payloads), len(labels))

    def run(self, most: int = 1, *, children: Children | None = None) -> list[Part]:
        """Claim parts, hand them over, and end the lease."""
        holder, grant = self.claim(most)
        if grant.parts:
            self.pass_on(holder, grant.parts, children=children)
        return grant.parts

    def waiting(self) -> list[str]:
        """What each entry of the stage says of itself."""
        return [next(iter(entry)).decode() for _, entry in self.redis.xrange(self.keys.parts)]

    def inbox(self) -> dict[str, bytes]:
        found = self.redis.hgetall(self.keys.got)
        return {origin.decode(): value for origin, value in found.items()}


class FlowByHand:
    """One flow, which is loaded by hand."""

    def __init__(
        self,
        protocol: Protocol,
        queue: str,
        request_id: str,
        kinds: str = "map,map",
        stages: Mapping[int, Mapping[str, Any]] | None = None,
        **common: Any,
    ) -> None:
        self.protocol = protocol
        self.queue = queue
        self.id = request_id
        self.kinds = kinds
        self.policy = plan(queue, kinds, stages or {}, **common)
        assert self.policy.flow
        self.stages = [StageByHand(self, n) for n in range(1, len(self.policy.flow.stages) + 1)]

    def __getitem__(self, number: int) -> StageByHand:
        return self.stages[number - 1]

    def open(self) -> None:
        assert self.policy.flow
        self.protocol.open(self.id, "d", self.policy)
        self.protocol.lay(self.id, "d", self.policy.flow)
        self.stages = [StageByHand(self, each.number) for each in self.stages]

    def load(self, count: int) -> "FlowByHand":
        """Load and seal so many parts."""
        self.open()
        if count:
            self[1].append(count)
        self.protocol.seal(self.id, count, f"c{count}" if count else "")
        return self

    @property
    def left(self) -> int:
        return self[1].left()

    def states(self) -> list[str]:
        return [stage.meta("state") for stage in self.stages]

    def results(self) -> dict[str, bytes]:
        return self[1].results()

    def groups(self) -> dict[str, int]:
        found = self[1].redis.hgetall(self[1].keys.groups)
        return {name.decode(): int(value) for name, value in found.items()}

    def run_all(self) -> None:
        """Run everything that can be run, stage after stage, until nothing is left."""
        ran = True
        while ran:
            ran = sum(len(stage.run(8)) for stage in self.stages) > 0
