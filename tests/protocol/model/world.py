"""One state of the model: what every actor has in hand, and small changes of it.

Holders are numbered: below the number of workers, a number is the name that worker goes by
now; above, it is a name whose worker has gone. A fresh name is one nothing refers to.
"""

from collections.abc import Sequence
from itertools import pairwise, permutations
from typing import Any, NamedTuple

from tests.protocol.model.keyspace import Call, Lease, Parts, Request, Rule, Script, Terms

OWN = -1  # in a worker's own calls: the name it goes by now
NO_CALL = Call()


class Budget(NamedTuple):
    """How often each thing may still happen."""

    crashes: int = 0
    late: int = 0
    stalls: int = 0
    lost: int = 0
    doubled: int = 0
    rollbacks: int = 0
    outages: int = 0
    dozes: int = 0
    fails: int = 0
    stops: int = 0
    redrives: int = 0
    reuses: int = 0

    def faults(self) -> tuple[int, ...]:
        """What counts as a fault, not as a user's doing."""
        return self[:8]


class Config(NamedTuple):
    """The size of a model. With ``chunk`` 0 all parts are there from the start."""

    parts: int = 2
    workers: int = 2
    janitors: int = 1
    chunk: int = 0
    terms: Terms = Terms()
    budget: Budget = Budget()

    def without(self, *rules: Rule) -> "Config":
        """The same size with rules left out."""
        return self._replace(terms=self.terms._replace(without=frozenset(rules)))


class Worker(NamedTuple):
    """One slot and its heartbeat; their calls are numbered together."""

    held: bool = False  # it has chosen a name, and a lease or a claim under way
    number: int = 0  # of the last call sent
    running: int = -1
    queue: Parts = ()  # handed out, not started
    finished: Parts = ()  # not reported yet
    call: Call = NO_CALL  # the slot's, under way
    beat: Call = NO_CALL  # the heartbeat's, under way
    pushing: int = 0  # tokens to push before anything else
    stalled: bool = False  # past its lease, until it is told to go on
    forgotten: bool = False  # a rollback took back what it had been told
    made: int = 0  # which of the requests of this id its parts are of


class Janitor(NamedTuple):
    """What a janitor is about to do: make tokens out of an audit, push, or reap."""

    mint: int = 0  # tokens that should be in the list
    pushing: int = 0
    seen: int = -1  # the holder whose lease looked expired; only without rule 7


class World(NamedTuple):
    """One state of everything."""

    request: Request
    tokens: int
    workers: tuple[Worker, ...]
    janitors: tuple[Janitor, ...]
    budget: Budget
    pushing: int = 0  # the loader's, or the user's who redrives
    late: tuple[Call, ...] = ()  # calls in the network that nobody waits for
    memory: Request | None = None  # what a replica knows that was cut off


def canonical(world: World) -> World:
    """The same world with workers and janitors in order, and no name that cannot come again."""
    if world.request.gone or (world.memory and world.memory.gone):
        world = _without_gone(world)
    if len(world.janitors) > 1:
        world = world._replace(janitors=tuple(sorted(world.janitors)))
    workers = world.workers
    if all(a < b for a, b in pairwise(workers)):
        return world
    order = sorted(range(len(workers)), key=workers.__getitem__)
    if all(workers[a] != workers[b] for a, b in pairwise(order)):
        return _reordered(world, order)
    if not names_in(world) & set(order):
        return world._replace(workers=tuple([workers[name] for name in order]))
    ordered = [workers[name] for name in order]
    return min(
        _reordered(world, names)
        for names in permutations(order)
        if [workers[name] for name in names] == ordered
    )


def _without_gone(world: World) -> World:
    """Who was released, and has no claim in the network, is of no interest."""
    claiming = {call.holder for call in world.late if call.script is Script.CLAIM}

    def kept(request: Request) -> Request:
        return request._replace(gone=tuple(name for name in request.gone if name in claiming))

    memory = world.memory and kept(world.memory)
    return world._replace(request=kept(world.request), memory=memory)


def put(world: World, name: int, worker: Worker) -> World:
    """The world with this worker in the place of that name."""
    workers = world.workers
    return world._replace(workers=(*workers[:name], worker, *workers[name + 1 :]))


def sweep(world: World, name: int, janitor: Janitor) -> World:
    """The world with this janitor in the place of that name."""
    janitors = world.janitors
    return world._replace(janitors=(*janitors[:name], janitor, *janitors[name + 1 :]))


def pushed_to(world: World, tokens: int) -> World:
    """The world with so many tokens more in the list."""
    return world._replace(tokens=world.tokens + tokens)


def spend(world: World, what: str) -> World:
    """The world in which this may happen once less."""
    less: Any = {what: getattr(world.budget, what) - 1}
    return world._replace(budget=world.budget._replace(**less))


def send(worker: Worker, script: Script, parts: Parts = (), more: bool = False) -> Worker:
    """Number a call and send it; what the slot has not started is struck with it."""
    number = worker.number + 1
    call = Call(script, OWN, number, parts, more, worker.queue, worker.made)
    return worker._replace(call=call, number=number, queue=())


def left_behind(world: World, name: int, call: Call) -> World:
    """Leave a call in the network."""
    if not call.script:
        return world
    holder = name if call.holder == OWN else call.holder
    return world._replace(late=tuple(sorted((*world.late, call._replace(holder=holder)))))


def with_lease(world: World, lease: Lease) -> World:
    """The world in which the holder has this lease, whatever it had."""
    leases = [other for other in world.request.leases if other.holder != lease.holder]
    return world._replace(request=world.request._replace(leases=tuple(sorted((*leases, lease)))))


def names_in(world: World) -> set[int]:
    """Every name something refers to, and some numbers below 0 that are none."""
    names = {*world.request.places, *(lease.holder for lease in world.request.leases)}
    names.update(world.request.gone)
    names.update([call.holder for call in world.late])
    names.update([worker.beat.holder for worker in world.workers])
    names.update([janitor.seen for janitor in world.janitors])
    if world.memory is not None:
        names.update(world.memory.places, [lease.holder for lease in world.memory.leases])
        names.update(world.memory.gone)
    return names


def _reordered(world: World, order: Sequence[int]) -> World:
    """The workers in another order, each with the name of its new place."""
    world = renamed(world, {old: new for new, old in enumerate(order)})
    return world._replace(workers=tuple([world.workers[name] for name in order]))


def renamed(world: World, names: dict[int, int]) -> World:
    """Other names wherever one is referred to; the workers stay where they are."""
    memory = world.memory
    return world._replace(
        request=_renamed_request(world.request, names),
        memory=memory if memory is None else _renamed_request(memory, names),
        late=tuple(sorted(c._replace(holder=names.get(c.holder, c.holder)) for c in world.late)),
        janitors=tuple(j._replace(seen=names.get(j.seen, j.seen)) for j in world.janitors),
    )


def _renamed_request(request: Request, names: dict[int, int]) -> Request:
    leases = [le._replace(holder=names.get(le.holder, le.holder)) for le in request.leases]
    places = [names.get(place, place) for place in request.places]
    gone = tuple(sorted(names.get(name, name) for name in request.gone))
    return request._replace(places=tuple(places), leases=tuple(sorted(leases)), gone=gone)
