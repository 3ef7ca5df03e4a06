"""Exhaustive exploration of a small model.

Breadth first from the initial state over every step, so that the trace to a broken
invariant is a shortest one. When no state is broken, the graph of all states is asked two
more questions. Can the end be reached from everywhere, without another fault (``EF done``)?
Is there a circle of steps without a fault, that is, work that makes no progress?

A model says what its states are and which steps lead out of them; this module knows nothing
of requests and tokens.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from enum import Enum, IntEnum
from typing import Generic, NamedTuple, Protocol, TypeVar

STUCK = "stuck: the end cannot be reached without another fault"
STUCK_CLEAN = "stuck: no fault happened, and yet only a repair leads to the end"
SPIN = "spin: a circle of steps without a fault"

S = TypeVar("S")


class Kind(IntEnum):
    """What a step is to the search for the end."""

    WORK = 0
    REPAIR = 1  # not needed while no fault has happened
    FAULT = 2  # never needed


class Step(NamedTuple):
    """A step's name, as a trace shows it, and its kind."""

    name: str
    kind: Kind = Kind.WORK


class Model(Protocol[S]):
    """What can be explored. States are hashable and steps a pure function of them."""

    def initial(self) -> S:
        """The state everything starts in."""

    def steps(self, state: S) -> Iterable[tuple[Step, S]]:
        """All steps out of a state, with where they lead."""

    def canonical(self, state: S) -> S:
        """The state that stands for all that differ from this one by names only."""

    def broken(self, state: S) -> str | None:
        """The invariant this state breaks."""

    def is_done(self, state: S) -> bool:
        """Whether this is the end that every state must be able to reach."""

    def is_clean(self, state: S) -> bool:
        """Whether no fault has happened on any way to this state."""


class Violation(NamedTuple, Generic[S]):
    """What was broken, and the steps that lead there."""

    kind: str
    trace: list[tuple[str, S]]

    def __str__(self) -> str:
        """The trace, each step with the state after it."""
        lines = [f"  {name}\n      {brief(state)}" for name, state in self.trace]
        return "\n".join([self.kind, *lines])


class Exploration(NamedTuple, Generic[S]):
    """How many states there are, and what is wrong with them."""

    states: int
    violation: Violation[S] | None


def explore(model: Model[S]) -> Exploration[S]:
    """The first violation among all reachable states, if there is one."""
    return _Graph(model).exploration()


def brief(value: object) -> str:
    """A state without the fields that are as they begin."""
    if isinstance(value, Enum):
        return value.name
    if not isinstance(value, tuple):
        return str(value)
    if not hasattr(value, "_asdict"):
        return f"({', '.join(map(brief, value))})"
    begins = getattr(value, "_field_defaults", {})
    fields = {field: item for field, item in value._asdict().items() if item != begins.get(field)}
    return f"{type(value).__name__}({', '.join(f'{k}={brief(v)}' for k, v in fields.items())})"


class _Graph(Generic[S]):
    """The states found so far, numbered, with the edges between them."""

    def __init__(self, model: Model[S]) -> None:
        first = model.canonical(model.initial())
        self.model = model
        self.numbers: dict[S, int] = {first: 0}
        self.states: list[S] = [first]
        self.parents: list[int] = [0]
        self.edges: list[list[tuple[int, Kind]]] = []

    def exploration(self) -> Exploration[S]:
        violation = self._search() or self._stuck() or self._stuck_clean() or self._spin()
        return Exploration(len(self.states), violation)

    def _search(self) -> Violation[S] | None:
        for number, state in enumerate(self.states):  # grows while it is walked
            kind = self.model.broken(state)
            if kind is not None:
                return self._violation(kind, self._path(number))
            self.edges.append(list(self._out(number, state)))
        return None

    def _out(self, number: int, state: S) -> Iterator[tuple[int, Kind]]:
        numbers, states, canonical = self.numbers, self.states, self.model.canonical
        for step, after in self.model.steps(state):
            target = canonical(after)
            found = numbers.setdefault(target, len(states))
            if found == len(states):
                states.append(target)
                self.parents.append(number)
            if found != number:
                yield found, step.kind

    def _stuck(self) -> Violation[S] | None:
        reaching = self._reaching(Kind.REPAIR)
        number = reaching.find(0)
        return None if number < 0 else self._violation(STUCK, self._path(number))

    def _stuck_clean(self) -> Violation[S] | None:
        reaching = self._reaching(Kind.WORK)
        for number, state in enumerate(self.states):
            if not reaching[number] and self.model.is_clean(state):
                return self._violation(STUCK_CLEAN, self._path(number))
        return None

    def _reaching(self, worst: Kind) -> bytearray:
        """Which states reach the end over edges of at most this kind."""
        before = self._before(worst)
        reaching = bytearray(len(self.states))
        todo = deque(n for n, state in enumerate(self.states) if self.model.is_done(state))
        while todo:
            number = todo.popleft()
            if not reaching[number]:
                reaching[number] = 1
                todo.extend(before[number])
        return reaching

    def _before(self, worst: Kind) -> list[list[int]]:
        before: list[list[int]] = [[] for _ in self.states]
        for number, out in enumerate(self.edges):
            for target, kind in out:
                if kind <= worst:
                    before[target].append(number)
        return before

    def _spin(self) -> Violation[S] | None:
        """Peel off states that nothing leads to, again and again: circles stay."""
        before = self._before(Kind.REPAIR)
        missing = [len(sources) for sources in before]
        todo = [number for number, count in enumerate(missing) if not count]
        while todo:
            for target, kind in self.edges[todo.pop()]:
                if kind <= Kind.REPAIR:
                    missing[target] -= 1
                    if not missing[target]:
                        todo.append(target)
        rest = next((number for number, count in enumerate(missing) if count), None)
        if rest is None:
            return None
        return self._violation(SPIN, self._circle(rest, before, missing))

    def _circle(self, number: int, before: list[list[int]], missing: list[int]) -> list[int]:
        """The way to a circle and once around it, found by walking back."""
        walk: list[int] = []
        while number not in walk:
            walk.append(number)
            number = next(source for source in before[number] if missing[source])
        around = [*walk[walk.index(number) :], number]
        around.reverse()
        return [*self._path(number), *around[1:]]

    def _path(self, number: int) -> list[int]:
        path = [number]
        while number:
            number = self.parents[number]
            path.append(number)
        path.reverse()
        return path

    def _violation(self, kind: str, path: list[int]) -> Violation[S]:
        """Walk the path again with the names left as they are, so that it can be read."""
        state = self.model.initial()
        trace = [("start", state)]
        for number in path[1:]:
            wanted = self.states[number]
            step, state = next(
                (step, after)
                for step, after in self.model.steps(state)
                if self.model.canonical(after) == wanted
            )
            trace.append((step.name, state))
        return Violation(kind, trace)
