"""The token and lease protocol as a model: one request, its workers, janitors and loader.

A worker has one slot with a local queue, and a heartbeat that hands back what the slot has
not started. A call is sent, then executed and answered in one step; other actors step in
between, so calls of the slot and of the heartbeat overtake each other. The queue's slot is
the number of tokens in the list; pushing is a step of its own after the script that asked
for it, and popping one before the claim.

Faults, each with a budget. *Late*: a call is left in the network and sent again. Executed at
once it is a lost reply, executed later it is a late call. *Crash*: a worker loses all it had,
tokens to push included; its calls never arrive, or are left in the network. A janitor or the
loader loses its push. *Stall*: a lease passes its deadline though its holder lives. A token is
*lost* or *doubled*. *Rollback*: the request's slot goes back to a state it had before. (A
rollback of the queue's slot is tokens lost or doubled.) A handler that *fails*, a polite *stop*
and a *redrive* are no faults, but have budgets too.

A crashed process is started again at once. A lease nobody beats for may be found expired at
any moment. The loader reads its cursor from the request, so a second one would be the same.
Not modelled: levels, ``set``, ``pause``, ``cancel``, the indexes ``open`` and ``due`` (a retry
that falls due is audited at once), a chunk appended twice, purge.

Holders are numbered: below the number of workers, a number is the name that worker goes by
now; above, it is a name whose worker has gone. A fresh name is one nothing refers to.
"""

from collections.abc import Iterator, Sequence
from itertools import count, pairwise, permutations
from typing import Any, NamedTuple

from tests.model import scripts
from tests.model.explore import Kind, Step
from tests.model.scripts import (
    Call,
    Lease,
    Parts,
    Place,
    Request,
    Rule,
    Script,
    Slot,
    Standing,
    State,
    Terms,
)

RUN_TWICE = "a part runs at two holders, and neither has stalled"
OVERRUN = "more parts run than the limit allows, not counting stalled holders"
STARVED = "room and work, no fault, and no token anywhere"

OWN = -1
NO_CALL = Call()


class Budget(NamedTuple):
    """How often each thing may still happen."""

    crashes: int = 0
    late: int = 0
    stalls: int = 0
    lost: int = 0
    doubled: int = 0
    rollbacks: int = 0
    fails: int = 0
    stops: int = 0
    redrives: int = 0

    def faults(self) -> tuple[int, ...]:
        """What counts as a fault, not as a user's doing."""
        return self[:6]


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

    held: bool = False
    number: int = 0
    running: int = -1
    queue: Parts = ()
    finished: Parts = ()
    call: Call = NO_CALL
    beat: Call = NO_CALL
    pushing: int = 0
    stalled: bool = False
    forgotten: bool = False


class Janitor(NamedTuple):
    """What a janitor is about to do: make tokens out of an audit, push, or reap."""

    mint: int = 0
    pushing: int = 0
    seen: int = -1


class World(NamedTuple):
    """One state of everything."""

    request: Request
    tokens: int
    workers: tuple[Worker, ...]
    janitors: tuple[Janitor, ...]
    budget: Budget
    pushing: int = 0
    late: tuple[Call, ...] = ()
    memory: Request | None = None


Steps = Iterator[tuple[Step, World]]


class Protocol:
    """The model itself: what may happen in a world, and what must hold in it."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.terms = config.terms

    def has(self, rule: Rule) -> bool:
        """Whether a rule is kept."""
        return rule not in self.terms.without

    def initial(self) -> World:
        """Nobody has begun; the request is loaded, or empty."""
        config = self.config
        slot = Slot(self.terms, Request((Place.NEW,) * config.parts))
        tokens = 0
        if not config.chunk:
            slot.append(tuple(range(config.parts)))
            slot.seal()
            tokens = slot.out
        return World(
            slot.saved(),
            tokens,
            (Worker(),) * config.workers,
            (Janitor(),) * config.janitors,
            config.budget,
        )

    # What must hold.

    def broken(self, world: World) -> str | None:
        """The invariant this world breaks."""
        return (
            scripts.broken(self.terms, world.request)
            or self._broken_running(world)
            or self._broken_tokens(world)
        )

    def _broken_running(self, world: World) -> str | None:
        running = [
            worker.running
            for worker in world.workers
            if worker.running >= 0 and not worker.stalled and not worker.forgotten
        ]
        if len(running) > self.terms.limit:
            return OVERRUN
        return RUN_TWICE if len(set(running)) < len(running) else None

    def _broken_tokens(self, world: World) -> str | None:
        if world.tokens or world.pushing or not self.is_clean(world):
            return None
        if any(worker.pushing or worker.call.script is Script.CLAIM for worker in world.workers):
            return None
        if any(janitor != Janitor() for janitor in world.janitors):
            return None
        return STARVED if scripts.want(self.terms, world.request) > 0 else None

    def is_done(self, world: World) -> bool:
        """The request has ended."""
        return world.request.state is State.ENDED

    def is_clean(self, world: World) -> bool:
        """No fault was spent."""
        return world.budget.faults() == self.config.budget.faults()

    # What may happen.

    def steps(self, world: World) -> Steps:
        """Every step of everybody, and every fault."""
        yield from self._client(world)
        for name, worker in enumerate(world.workers):
            yield from self._slot(world, name, worker)
            yield from self._heartbeat(world, name, worker)
            yield from self._worker_faults(world, name, worker)
        for name, janitor in enumerate(world.janitors):
            yield from self._janitor(world, name, janitor)
        yield from self._faults(world)

    def _client(self, world: World) -> Steps:
        """The loader, and the user who redrives."""
        if world.pushing:
            yield Step("client pushes"), _pushed(world, world.pushing)._replace(pushing=0)
            return
        if world.request.state is State.LOADING:
            yield self._loads(world)
        if world.budget.redrives and Place.FAILED in world.request.places:
            slot = Slot(self.terms, world.request)
            push = slot.redrive(slot.places.index(Place.FAILED))
            spent = _spend(world, "redrives")
            yield Step("redrive", Kind.FAULT), spent._replace(request=slot.saved(), pushing=push)

    def _loads(self, world: World) -> tuple[Step, World]:
        slot = Slot(self.terms, world.request)
        new = [part for part, place in enumerate(slot.places) if place == Place.NEW]
        push = slot.append(tuple(new[: self.config.chunk])) if new else slot.seal()
        step = Step("loader appends" if new else "loader seals")
        return step, world._replace(request=slot.saved(), pushing=push)

    # The slot.

    def _slot(self, world: World, name: int, worker: Worker) -> Steps:
        """Push first, then go on; a call under way is executed whatever the worker does."""
        if worker.call.script:
            yield self._answered(world, name, worker)
        if worker.pushing:
            pushed = _pushed(world, worker.pushing)
            yield Step(f"worker {name} pushes"), _put(pushed, name, worker._replace(pushing=0))
        elif worker.call.script:
            return
        elif worker.held:
            for what, after in self._slot_decides(worker):
                yield Step(f"worker {name} {what}"), _put(world, name, after)
        elif world.tokens:
            call = Call(Script.CLAIM, OWN, 1)
            popped = world._replace(tokens=world.tokens - 1)
            after = worker._replace(held=True, number=1, call=call)
            yield Step(f"worker {name} pops"), _put(popped, name, after)

    def _slot_decides(self, worker: Worker) -> Iterator[tuple[str, Worker]]:
        """What a slot with a lease and no call under way may do next."""
        if worker.running >= 0:
            finished = tuple(sorted((*worker.finished, worker.running)))
            yield "completes", worker._replace(running=-1, finished=finished)
            return
        if worker.queue:
            first, *rest = worker.queue
            yield f"starts {first}", worker._replace(running=first, queue=tuple(rest))
        else:
            yield "sends finish and more", _send(worker, Script.FINISH, worker.finished, True)
        if worker.finished or not worker.queue:
            yield "sends finish", _send(worker, Script.FINISH, worker.finished)

    def _answered(self, world: World, name: int, worker: Worker) -> tuple[Step, World]:
        """The server executes the slot's call, and the slot hears the answer."""
        call = worker.call
        request, answer = scripts.execute(self.terms, world.request, call._replace(holder=name))
        world = world._replace(request=request)
        step = Step(f"worker {name} executes {call.script.name} {call.number}")
        worker = worker._replace(call=NO_CALL, pushing=worker.pushing + answer.push)
        if not answer.goes_on:
            return step, self._retire(world, name, worker)
        if call.script not in (Script.FAIL, Script.GIVE_UP):
            worker = worker._replace(
                queue=answer.parts, finished=(), stalled=False, forgotten=False
            )
        return step, _put(world, name, worker)

    def _retire(self, world: World, name: int, worker: Worker) -> World:
        """The slot is done with a lease. What still bears its name is nobody's from now on."""
        idle = Worker(beat=worker.beat, pushing=worker.pushing)
        if not self.has(Rule.FRESH_NAMES):
            return _put(world, name, idle)
        used = _names(world)
        gone = next(n for n in count(len(world.workers)) if n not in used)
        if idle.beat.holder == OWN and idle.beat.script:
            idle = idle._replace(beat=idle.beat._replace(holder=gone))
        if name in used:
            world = _renamed(world, {name: gone})
        return _put(world, name, idle)

    # The heartbeat.

    def _heartbeat(self, world: World, name: int, worker: Worker) -> Steps:
        if worker.beat.script:
            yield self._beat_answered(world, name, worker)
        elif worker.running >= 0 and worker.queue:
            after = self._hands_back(worker)
            yield Step(f"worker {name} beat sends hand-back"), _put(world, name, after)
        if worker.held and worker.call.script is not Script.CLAIM:
            yield from self._renews(world, name, worker)

    def _hands_back(self, worker: Worker) -> Worker:
        number = worker.number + 1
        beat = Call(Script.HANDBACK, OWN, number, worker.queue)
        queue = () if self.has(Rule.ONE_LOCK) else worker.queue
        return worker._replace(number=number, beat=beat, queue=queue)

    def _beat_answered(self, world: World, name: int, worker: Worker) -> tuple[Step, World]:
        call = worker.beat
        holder = name if call.holder == OWN else call.holder
        request, answer = scripts.execute(self.terms, world.request, call._replace(holder=holder))
        queue = tuple(part for part in worker.queue if part not in call.parts)
        worker = worker._replace(
            beat=NO_CALL,
            pushing=worker.pushing + answer.push,
            queue=worker.queue if self.has(Rule.ONE_LOCK) else queue,
        )
        step = Step(f"worker {name} beat executes {call.script.name} {call.number}")
        return step, _put(world._replace(request=request), name, worker)

    def _renews(self, world: World, name: int, worker: Worker) -> Steps:
        """Only where it matters: the lease is expired, or gone."""
        lease = next((le for le in world.request.leases if le.holder == name), None)
        if lease is not None and lease.standing is Standing.LIVE:
            return
        if lease is not None or not self.has(Rule.RENEW_ONLY_MOVES):
            number = worker.number if lease is None else lease.number
            renewed = _with_lease(world, Lease(name, number))
            after = _put(renewed, name, worker._replace(stalled=False))
            yield Step(f"worker {name} renews"), after
        elif not worker.call.script:
            yield Step(f"worker {name} learns it lost"), self._retire(world, name, worker)

    # The janitor.

    def _janitor(self, world: World, name: int, janitor: Janitor) -> Steps:
        if janitor.pushing or janitor.mint:
            pushing = janitor.pushing + max(0, janitor.mint - world.tokens)
            after = _sweep(_pushed(world, pushing), name, Janitor())
            yield Step(f"janitor {name} pushes"), after
        elif janitor.seen >= 0:
            yield self._reaps(_sweep(world, name, Janitor()), name, janitor.seen)
        else:
            yield from self._looks(world, name)
            yield from self._audits(world, name)

    def _looks(self, world: World, name: int) -> Steps:
        """Find an expired lease, and reap it in the same script, or without rule 7 later."""
        for lease in world.request.leases:
            if self._is_expired(world, lease):
                if self.has(Rule.REAP_CHECKS):
                    yield self._reaps(world, name, lease.holder)
                else:
                    after = _sweep(world, name, Janitor(seen=lease.holder))
                    yield Step(f"janitor {name} sees lease of {lease.holder}", Kind.REPAIR), after

    def _is_expired(self, world: World, lease: Lease) -> bool:
        if lease.standing is not Standing.LIVE or lease.holder >= len(world.workers):
            return True
        return not world.workers[lease.holder].held

    def _reaps(self, world: World, name: int, holder: int) -> tuple[Step, World]:
        step = Step(f"janitor {name} reaps {holder}", Kind.REPAIR)
        if all(lease.holder != holder for lease in world.request.leases):
            return step, world
        slot = Slot(self.terms, world.request)
        janitor = Janitor(pushing=slot.reap(holder))
        return step, _sweep(world._replace(request=slot.saved()), name, janitor)

    def _audits(self, world: World, name: int) -> Steps:
        """Audit where it changes anything; a retry that falls due is audited at once."""
        want = scripts.want(self.terms, world.request)
        if want > world.tokens or want < world.request.out:
            step = Step(f"janitor {name} audits", Kind.REPAIR)
            yield step, self._audited(world, name, Slot(self.terms, world.request))
        for part in world.request.later:
            slot = Slot(self.terms, world.request)
            slot.later.remove(part)
            step = Step(f"part {part} is due, janitor {name} audits")
            yield step, self._audited(world, name, slot)

    def _audited(self, world: World, name: int, slot: Slot) -> World:
        janitor = Janitor(mint=slot.audit())
        return _sweep(world._replace(request=slot.saved()), name, janitor)

    # Faults.

    def _worker_faults(self, world: World, name: int, worker: Worker) -> Steps:
        budget = world.budget
        if budget.crashes and worker != Worker():
            yield from self._crashes(_spend(world, "crashes"), name, worker)
        if budget.late and (worker.call.script or worker.beat.script):
            yield from self._late_calls(_spend(world, "late"), name, worker)
        if budget.stalls and worker.held:
            yield from self._stalls(world, name, worker)
        if budget.fails and worker.running >= 0 and not worker.pushing:
            yield from self._fails(_spend(world, "fails"), name, worker)
        if budget.stops and worker.held and not worker.pushing:
            yield from self._stops(_spend(world, "stops"), name, worker)

    def _crashes(self, world: World, name: int, worker: Worker) -> Steps:
        dead = worker._replace(beat=NO_CALL, pushing=0)
        yield Step(f"worker {name} crashes", Kind.FAULT), self._retire(world, name, dead)
        if worker.call.script or worker.beat.script:
            sent = _left(_left(world, name, worker.call), name, worker.beat)
            step = Step(f"worker {name} crashes with calls under way", Kind.FAULT)
            yield step, self._retire(sent, name, dead)

    def _late_calls(self, world: World, name: int, worker: Worker) -> Steps:
        for call in (worker.call, worker.beat):
            if call.script:
                after = worker
                if call.script is Script.CLAIM and self.has(Rule.CLAIM_ONCE):
                    after = _send(worker, Script.RELEASE)
                step = Step(f"worker {name} hears nothing of {call.script.name}", Kind.FAULT)
                yield step, _put(_left(world, name, call), name, after)

    def _stalls(self, world: World, name: int, worker: Worker) -> Steps:
        for lease in world.request.leases:
            if lease.holder == name and lease.standing is Standing.LIVE:
                expired = _with_lease(world, lease._replace(standing=Standing.EXPIRED))
                stalled = _put(_spend(expired, "stalls"), name, worker._replace(stalled=True))
                yield Step(f"worker {name} stalls", Kind.FAULT), stalled

    def _fails(self, world: World, name: int, worker: Worker) -> Steps:
        number = worker.number + 1
        for script in (Script.FAIL, Script.GIVE_UP):
            call = Call(script, OWN, number, (worker.running,))
            after = worker._replace(running=-1, number=number, call=call)
            yield Step(f"worker {name} sends {script.name}", Kind.FAULT), _put(world, name, after)

    def _stops(self, world: World, name: int, worker: Worker) -> Steps:
        """A polite stop, or a child that died: the parent gives everything back."""
        running = (worker.running,) if worker.running >= 0 else ()
        in_hand = (*running, *worker.queue, *worker.finished)
        after = _send(worker._replace(running=-1, queue=in_hand, finished=()), Script.RELEASE)
        if not worker.call.script:
            yield Step(f"worker {name} stops", Kind.FAULT), _put(world, name, after)
        elif world.budget.late:
            late = _left(_spend(world, "late"), name, worker.call)
            yield Step(f"worker {name} dies in a call", Kind.FAULT), _put(late, name, after)

    def _faults(self, world: World) -> Steps:
        """Late calls that arrive, and what happens to tokens, pushes and the whole slot."""
        for place, call in enumerate(world.late):
            request, _ = scripts.execute(self.terms, world.request, call)
            late = world.late[:place] + world.late[place + 1 :]
            step = Step(f"late {call.script.name} {call.number} of {call.holder}", Kind.FAULT)
            yield step, world._replace(request=request, late=late)
        if world.budget.lost and world.tokens:
            lost = _spend(world, "lost")._replace(tokens=world.tokens - 1)
            yield Step("a token is lost", Kind.FAULT), lost
        if world.budget.doubled and world.tokens:
            doubled = _spend(world, "doubled")._replace(tokens=world.tokens + 1)
            yield Step("a token is doubled", Kind.FAULT), doubled
        if world.budget.crashes:
            yield from self._lost_pushes(world)
        if world.budget.rollbacks:
            yield from self._rollback(world)

    def _lost_pushes(self, world: World) -> Steps:
        if world.pushing:
            after = _spend(world, "crashes")._replace(pushing=0)
            yield Step("client crashes", Kind.FAULT), after
        for name, janitor in enumerate(world.janitors):
            if janitor != Janitor():
                after = _sweep(_spend(world, "crashes"), name, Janitor())
                yield Step(f"janitor {name} crashes", Kind.FAULT), after

    def _rollback(self, world: World) -> Steps:
        """A replica stops hearing of the request's slot, and later takes its place."""
        if world.memory is None:
            yield Step("replica cut off", Kind.FAULT), world._replace(memory=world.request)
            return
        workers = tuple(worker._replace(forgotten=worker.held) for worker in world.workers)
        after = _spend(world, "rollbacks")._replace(
            request=world.memory, memory=None, workers=workers
        )
        yield Step("rollback", Kind.FAULT), after

    # Names.

    def canonical(self, world: World) -> World:
        """The same world with workers and janitors in order."""
        if len(world.janitors) > 1:
            world = world._replace(janitors=tuple(sorted(world.janitors)))
        workers = world.workers
        if all(a < b for a, b in pairwise(workers)):
            return world
        order = sorted(range(len(workers)), key=workers.__getitem__)
        if all(workers[a] != workers[b] for a, b in pairwise(order)):
            return _reordered(world, order)
        if not _names(world) & set(order):
            return world._replace(workers=tuple([workers[name] for name in order]))
        ordered = [workers[name] for name in order]
        return min(
            _reordered(world, names)
            for names in permutations(order)
            if [workers[name] for name in names] == ordered
        )


# Small changes of a world.


def _put(world: World, name: int, worker: Worker) -> World:
    workers = world.workers
    return world._replace(workers=(*workers[:name], worker, *workers[name + 1 :]))


def _sweep(world: World, name: int, janitor: Janitor) -> World:
    janitors = world.janitors
    return world._replace(janitors=(*janitors[:name], janitor, *janitors[name + 1 :]))


def _pushed(world: World, tokens: int) -> World:
    return world._replace(tokens=world.tokens + tokens)


def _spend(world: World, what: str) -> World:
    less: Any = {what: getattr(world.budget, what) - 1}
    return world._replace(budget=world.budget._replace(**less))


def _send(worker: Worker, script: Script, parts: Parts = (), more: bool = False) -> Worker:
    """Number a call and send it; what the slot has not started is struck with it."""
    number = worker.number + 1
    call = Call(script, OWN, number, parts, more, worker.queue)
    return worker._replace(call=call, number=number, queue=())


def _left(world: World, name: int, call: Call) -> World:
    """Leave a call in the network."""
    if not call.script:
        return world
    holder = name if call.holder == OWN else call.holder
    return world._replace(late=tuple(sorted((*world.late, call._replace(holder=holder)))))


def _with_lease(world: World, lease: Lease) -> World:
    leases = [other for other in world.request.leases if other.holder != lease.holder]
    return world._replace(request=world.request._replace(leases=tuple(sorted((*leases, lease)))))


def _names(world: World) -> set[int]:
    """Every name something refers to, and some numbers below 0 that are none."""
    names = {*world.request.places, *(lease.holder for lease in world.request.leases)}
    names.update([call.holder for call in world.late])
    names.update([worker.beat.holder for worker in world.workers])
    names.update([janitor.seen for janitor in world.janitors])
    if world.memory is not None:
        names.update(world.memory.places, [lease.holder for lease in world.memory.leases])
    return names


def _reordered(world: World, order: Sequence[int]) -> World:
    """The workers in another order, each with the name of its new place."""
    world = _renamed(world, {old: new for new, old in enumerate(order)})
    return world._replace(workers=tuple([world.workers[name] for name in order]))


def _renamed(world: World, names: dict[int, int]) -> World:
    memory = world.memory
    return world._replace(
        request=_renamed_in(world.request, names),
        memory=memory if memory is None else _renamed_in(memory, names),
        late=tuple(sorted(c._replace(holder=names.get(c.holder, c.holder)) for c in world.late)),
        janitors=tuple(j._replace(seen=names.get(j.seen, j.seen)) for j in world.janitors),
    )


def _renamed_in(request: Request, names: dict[int, int]) -> Request:
    leases = [le._replace(holder=names.get(le.holder, le.holder)) for le in request.leases]
    places = [names.get(place, place) for place in request.places]
    return request._replace(places=tuple(places), leases=tuple(sorted(leases)))
