"""The seed's protocol as a model, with the three things that make it naive.

Tokens *are* the limit: as many are pushed as parts may run, a worker pops one, reads one part,
runs it, and pushes its token back. The counter goes down on every finish, whether XACK found
the part or not. A worker that finds nothing to read pushes its token back too.

The last two can be mended by a switch; the first is the design. A worker that finds nothing
new takes over a part whose worker died or stalled, as the seed proposes.
"""

from collections.abc import Iterator
from typing import NamedTuple

from tests.protocol.model.explore import Kind, Step
from tests.protocol.model.keyspace import MISCOUNT, WRONG_END, Parts, Place
from tests.protocol.model.leases import OVERRUN, RUN_TWICE

NOBODY = 99  # the consumer name of a worker that died


class Seed(NamedTuple):
    """The size of a model, what is mended in it, and how often each fault may happen."""

    parts: int = 2
    limit: int = 2
    workers: int = 2
    guards_counter: bool = True
    drops_on_empty: bool = True
    crashes: int = 0
    stalls: int = 0
    doubled: int = 0


class Worker(NamedTuple):
    """A worker with or without a token, and the part it runs."""

    has_token: bool = False
    running: int = -1
    stalled: bool = False
    pushing: bool = False


class World(NamedTuple):
    """One state of everything."""

    places: Parts
    tokens: int
    counter: int
    workers: tuple[Worker, ...]
    crashes: int
    stalls: int
    doubled: int
    ended: bool = False


Steps = Iterator[tuple[Step, World]]


class Naive:
    """The model itself: what may happen in a world, and what must hold in it."""

    def __init__(self, seed: Seed) -> None:
        self.seed = seed

    def initial(self) -> World:
        """All parts are inserted, and as many tokens as the limit."""
        seed = self.seed
        return World(
            (Place.WAITING,) * seed.parts,
            seed.limit,
            seed.parts,
            (Worker(),) * seed.workers,
            seed.crashes,
            seed.stalls,
            seed.doubled,
        )

    def canonical(self, world: World) -> World:
        """Names are kept: these models are small."""
        return world

    def broken(self, world: World) -> str | None:
        """The invariant this world breaks."""
        running = [w.running for w in world.workers if w.running >= 0 and not w.stalled]
        if len(running) > self.seed.limit:
            return OVERRUN
        if len(set(running)) < len(running):
            return RUN_TWICE
        unfinished = sum(place != Place.DONE for place in world.places)
        if world.ended and unfinished:
            return WRONG_END
        return MISCOUNT if world.counter != unfinished else None

    def is_done(self, world: World) -> bool:
        """The request was reported complete."""
        return world.ended

    def is_clean(self, world: World) -> bool:
        """No fault was spent."""
        seed = self.seed
        return world[4:7] == (seed.crashes, seed.stalls, seed.doubled)

    def steps(self, world: World) -> Steps:
        """Every step of every worker, and every fault."""
        for name, worker in enumerate(world.workers):
            yield from self._works(world, name, worker)
            yield from self._faults(world, name, worker)

    def _works(self, world: World, name: int, worker: Worker) -> Steps:
        if worker.pushing:
            pushed = world._replace(tokens=world.tokens + 1)
            yield Step(f"worker {name} pushes"), _put(pushed, name, Worker())
        elif worker.running >= 0:
            finished = self._finished(world, worker.running)
            after = Worker(has_token=True, pushing=True)
            yield Step(f"worker {name} finishes {worker.running}"), _put(finished, name, after)
        elif worker.has_token:
            yield self._reads(world, name)
        elif world.tokens:
            popped = world._replace(tokens=world.tokens - 1)
            yield Step(f"worker {name} pops"), _put(popped, name, Worker(has_token=True))

    def _reads(self, world: World, name: int) -> tuple[Step, World]:
        """Read a new part, or take one over, or find nothing."""
        part = self._next_part(world)
        if part >= 0:
            places = (*world.places[:part], name, *world.places[part + 1 :])
            after = _put(world._replace(places=places), name, Worker(True, part))
            return Step(f"worker {name} reads {part}"), after
        keeps = not (self.seed.drops_on_empty or world.ended)
        idle = Worker(has_token=True, pushing=True) if keeps else Worker()
        return Step(f"worker {name} finds nothing"), _put(world, name, idle)

    def _next_part(self, world: World) -> int:
        if world.ended:
            return -1
        if Place.WAITING in world.places:
            return world.places.index(Place.WAITING)
        idle = [NOBODY, *(name for name, worker in enumerate(world.workers) if worker.stalled)]
        return next((part for part, place in enumerate(world.places) if place in idle), -1)

    def _finished(self, world: World, part: int) -> World:
        if world.ended:
            return world
        acked = world.places[part] != Place.DONE
        counter = world.counter - 1 if acked or not self.seed.guards_counter else world.counter
        places = (*world.places[:part], Place.DONE, *world.places[part + 1 :])
        return world._replace(places=places, counter=counter, ended=counter == 0)

    def _faults(self, world: World, name: int, worker: Worker) -> Steps:
        if world.crashes and worker != Worker():
            places = tuple(NOBODY if place == name else place for place in world.places)
            crashed = world._replace(places=places, crashes=world.crashes - 1)
            yield Step(f"worker {name} crashes", Kind.FAULT), _put(crashed, name, Worker())
        if world.stalls and worker.running >= 0 and not worker.stalled:
            stalled = world._replace(stalls=world.stalls - 1)
            after = worker._replace(stalled=True)
            yield Step(f"worker {name} stalls", Kind.FAULT), _put(stalled, name, after)
        if world.doubled and worker.pushing:
            doubled = world._replace(tokens=world.tokens + 2, doubled=world.doubled - 1)
            yield Step(f"worker {name} pushes twice", Kind.FAULT), _put(doubled, name, Worker())


def _put(world: World, name: int, worker: Worker) -> World:
    workers = world.workers
    return world._replace(workers=(*workers[:name], worker, *workers[name + 1 :]))
