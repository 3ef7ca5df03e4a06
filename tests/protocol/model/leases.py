"""The token and lease protocol as a model: one request, its workers, janitors and loader.

A worker has one slot with a local queue, and a heartbeat that hands back what the slot has
not started. A call is sent, then executed and answered in one step; other actors step in
between, so calls of the slot and of the heartbeat overtake each other. The queue's slot is
the number of tokens in the list; pushing is a step of its own after the script that asked
for it, and popping one before the claim.

Faults, each with a budget. *Late*: a call is left in the network and sent again. Executed at
once it is a lost reply, executed later it is a late call. *Crash*: a worker loses all it had,
tokens to push included; its calls never arrive, or are left in the network. A janitor or the
loader loses its push. *Stall*: a lease passes its deadline, and the grace after it, though its
holder lives. *Doze*: a lease passes its deadline, and its holder renews it within the grace.
*Outage*: the server is away for longer than leases and the grace; then holders renew. A token is
*lost* or *doubled*. *Rollback*: the request's slot goes back to a state it had before. (A
rollback of the queue's slot is tokens lost or doubled.) A handler that *fails*, a polite *stop*,
a *redrive*, and a *reuse* (the request is cancelled, purged, and submitted anew under its id) are
no faults, but have budgets too.

A crashed process is started again at once. A lease nobody beats for may be found expired at
any moment. The loader reads its cursor from the request, so a second one would be the same.
The grace is a step of its own where holders may doze or the server be away; elsewhere it is over
at once. Not modelled: levels, ``set``, ``pause``, the indexes ``open`` and ``due`` (a retry that
falls due is audited at once), a chunk appended twice, ``cancel`` and ``purge`` but for a reuse.
"""

from collections.abc import Iterator
from itertools import count

from tests.protocol.model import keyspace
from tests.protocol.model.explore import Kind, Step
from tests.protocol.model.keyspace import (
    Call,
    Lease,
    Place,
    Request,
    Rule,
    Script,
    Slot,
    Standing,
    State,
    Suspicion,
)
from tests.protocol.model.world import (
    NO_CALL,
    OWN,
    Config,
    Janitor,
    Worker,
    World,
    canonical,
    left_behind,
    names_in,
    pushed_to,
    put,
    renamed,
    send,
    spend,
    sweep,
    with_lease,
)

RUN_TWICE = "a part runs at two holders, and neither has stalled"
OVERRUN = "more parts run than the limit allows, not counting stalled holders"
STARVED = "room and work, no fault, and no token anywhere"
ALIVE = "a holder was reaped that lives, and did not stall"

Steps = Iterator[tuple[Step, World]]


class Protocol:
    """The model itself: what may happen in a world, and what must hold in it."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.terms = config.terms
        self.has_grace = bool(config.budget.outages or config.budget.dozes)

    def has(self, rule: Rule) -> bool:
        """Whether a rule is kept."""
        return rule not in self.terms.without

    def initial(self) -> World:
        """Nobody has begun; the request is loaded, or empty."""
        config = self.config
        slot = self._submitted()
        tokens = 0 if config.chunk else slot.out
        return World(
            slot.saved(),
            tokens,
            (Worker(),) * config.workers,
            (Janitor(),) * config.janitors,
            config.budget,
        )

    def _submitted(self, made: int = 0) -> Slot:
        """The request as somebody submits it, for the first time or under an id used before."""
        parts = self.config.parts
        slot = Slot(self.terms, Request((Place.NEW,) * parts, made=made))
        if not self.config.chunk:
            slot.append(tuple(range(parts)))
            slot.seal()
        return slot

    # What must hold.

    def broken(self, world: World) -> str | None:
        """The invariant this world breaks."""
        return (
            keyspace.broken(self.terms, world.request)
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
        return STARVED if keyspace.want(self.terms, world.request) > 0 else None

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
            yield Step("client pushes"), pushed_to(world, world.pushing)._replace(pushing=0)
            return
        if world.request.state is State.LOADING:
            yield self._loads(world)
        if world.budget.redrives and Place.FAILED in world.request.places:
            slot = Slot(self.terms, world.request)
            push = slot.redrive(slot.places.index(Place.FAILED))
            spent = spend(world, "redrives")
            yield Step("redrive", Kind.FAULT), spent._replace(request=slot.saved(), pushing=push)

        if world.budget.reuses:
            slot = self._submitted(world.request.made + 1)
            push = 0 if self.config.chunk else slot.out
            workers = tuple(worker._replace(forgotten=worker.held) for worker in world.workers)
            spent = spend(world, "reuses")._replace(
                request=slot.saved(), pushing=push, workers=workers
            )
            yield Step("the id is used again", Kind.FAULT), spent

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
            pushed = pushed_to(world, worker.pushing)
            yield Step(f"worker {name} pushes"), put(pushed, name, worker._replace(pushing=0))
        elif worker.call.script:
            return
        elif worker.held:
            for what, after in self._slot_decides(worker):
                yield Step(f"worker {name} {what}"), put(world, name, after)
        elif world.tokens:
            call = Call(Script.CLAIM, OWN, 1)
            popped = world._replace(tokens=world.tokens - 1)
            after = worker._replace(held=True, number=1, call=call)
            yield Step(f"worker {name} pops"), put(popped, name, after)

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
            yield "sends finish and more", send(worker, Script.FINISH, worker.finished, True)
        if worker.finished or not worker.queue:
            yield "sends finish", send(worker, Script.FINISH, worker.finished)

    def _answered(self, world: World, name: int, worker: Worker) -> tuple[Step, World]:
        """The server executes the slot's call, and the slot hears the answer."""
        call = worker.call
        request, answer = keyspace.execute(self.terms, world.request, call._replace(holder=name))
        world = world._replace(request=request)
        step = Step(f"worker {name} executes {call.script.name} {call.number}")
        worker = worker._replace(call=NO_CALL, pushing=worker.pushing + answer.push)
        if not answer.goes_on:
            return step, self._retire(world, name, worker)
        if call.script not in (Script.FAIL, Script.GIVE_UP):
            worker = worker._replace(
                queue=answer.parts, finished=(), stalled=False, forgotten=False, made=request.made
            )
        return step, put(world, name, worker)

    def _retire(self, world: World, name: int, worker: Worker) -> World:
        """The slot is done with a lease. What still bears its name is nobody's from now on."""
        idle = Worker(beat=worker.beat, pushing=worker.pushing)
        if not self.has(Rule.FRESH_NAMES):
            return put(world, name, idle)
        used = names_in(world)
        gone = next(n for n in count(len(world.workers)) if n not in used)
        if idle.beat.holder == OWN and idle.beat.script:
            idle = idle._replace(beat=idle.beat._replace(holder=gone))
        if name in used:
            world = renamed(world, {name: gone})
        return put(world, name, idle)

    # The heartbeat.

    def _heartbeat(self, world: World, name: int, worker: Worker) -> Steps:
        """Hand back while a part runs, and renew. Before one runs there is no hand-back:
        a slot that was robbed of all its parts would only fetch them again.
        """
        if worker.beat.script:
            yield self._beat_answered(world, name, worker)
        elif worker.running >= 0 and worker.queue:
            after = self._hands_back(worker)
            yield Step(f"worker {name} beat sends hand-back"), put(world, name, after)
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
        request, answer = keyspace.execute(self.terms, world.request, call._replace(holder=holder))
        queue = tuple(part for part in worker.queue if part not in call.parts)
        worker = worker._replace(
            beat=NO_CALL,
            pushing=worker.pushing + answer.push,
            queue=worker.queue if self.has(Rule.ONE_LOCK) else queue,
        )
        step = Step(f"worker {name} beat executes {call.script.name} {call.number}")
        return step, put(world._replace(request=request), name, worker)

    def _renews(self, world: World, name: int, worker: Worker) -> Steps:
        """Only where it matters: the lease is expired, or gone."""
        lease = next((le for le in world.request.leases if le.holder == name), None)
        if lease is not None and lease.standing is Standing.LIVE:
            return
        if lease is not None or not self.has(Rule.RENEW_ONLY_MOVES):
            number = worker.number if lease is None else lease.number
            renewed = with_lease(world, Lease(name, number))
            after = put(renewed, name, worker._replace(stalled=False))
            yield Step(f"worker {name} renews"), after
        elif not worker.call.script:
            yield Step(f"worker {name} learns it lost"), self._retire(world, name, worker)

    # The janitor.

    def _janitor(self, world: World, name: int, janitor: Janitor) -> Steps:
        if janitor.pushing or janitor.mint:
            pushing = janitor.pushing + max(0, janitor.mint - world.tokens)
            after = sweep(pushed_to(world, pushing), name, Janitor())
            yield Step(f"janitor {name} pushes"), after
        elif janitor.seen >= 0:
            yield self._reaps(sweep(world, name, Janitor()), name, janitor.seen)
        else:
            if self.has_grace:
                yield from self._suspects(world, name)
            yield from self._looks(world, name)
            yield from self._audits(world, name)

    def _suspects(self, world: World, name: int) -> Steps:
        """Note that leases are past their deadline, or that none is any more; let time pass."""
        request = world.request
        overdue = [lease for lease in request.leases if self._is_expired(world, lease)]
        seen = request._replace(suspicion=Suspicion.BEGUN if overdue else Suspicion.NONE)
        if bool(overdue) != bool(request.suspicion):
            step = Step(f"janitor {name} suspects {len(overdue)}", Kind.REPAIR)
            yield step, world._replace(request=seen)
        if not overdue or any(self._is_awake(world, lease.holder) for lease in overdue):
            return
        if request.suspicion:
            old = [lease._replace(standing=Standing.OLD) for lease in overdue]
            others = [lease for lease in request.leases if lease not in overdue]
            ripe = request._replace(suspicion=Suspicion.RIPE, leases=tuple(sorted([*old, *others])))
            yield Step("the grace passes", Kind.REPAIR), world._replace(request=ripe)

    def _is_awake(self, world: World, holder: int) -> bool:
        """Whether the holder lives and is able to renew its lease."""
        if holder >= len(world.workers):
            return False
        worker = world.workers[holder]
        return worker.held and not worker.stalled and not worker.forgotten

    def _may_reap(self, world: World, lease: Lease) -> bool:
        if not self._is_expired(world, lease):
            return False
        if not self.has_grace:
            return True
        if self.has(Rule.GRACE) and world.request.suspicion is not Suspicion.RIPE:
            return False
        return lease.standing is Standing.OLD or not self.has(Rule.OWN_GRACE)

    def _looks(self, world: World, name: int) -> Steps:
        """Find an expired lease, and reap it in the same script, or without rule 7 later."""
        for lease in world.request.leases:
            if self._may_reap(world, lease):
                if self.has(Rule.REAP_CHECKS):
                    yield self._reaps(world, name, lease.holder)
                else:
                    after = sweep(world, name, Janitor(seen=lease.holder))
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
        if self.has_grace and self._is_awake(world, holder):
            slot.broken = ALIVE
        return step, sweep(world._replace(request=slot.saved()), name, janitor)

    def _audits(self, world: World, name: int) -> Steps:
        """Audit where it changes anything; a retry that falls due is audited at once."""
        want = keyspace.want(self.terms, world.request)
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
        return sweep(world._replace(request=slot.saved()), name, janitor)

    # Faults.

    def _worker_faults(self, world: World, name: int, worker: Worker) -> Steps:
        budget = world.budget
        if budget.crashes and worker != Worker():
            yield from self._crashes(spend(world, "crashes"), name, worker)
        if budget.late and (worker.call.script or worker.beat.script):
            yield from self._late_calls(spend(world, "late"), name, worker)
        if budget.stalls and worker.held:
            yield from self._stalls(world, name, worker)
        if budget.dozes and worker.held:
            yield from self._dozes(world, name)
        if budget.fails and worker.running >= 0 and not worker.pushing:
            yield from self._fails(spend(world, "fails"), name, worker)
        if budget.stops and worker.held and not worker.pushing:
            yield from self._stops(spend(world, "stops"), name, worker)

    def _crashes(self, world: World, name: int, worker: Worker) -> Steps:
        dead = worker._replace(beat=NO_CALL, pushing=0)
        yield Step(f"worker {name} crashes", Kind.FAULT), self._retire(world, name, dead)
        if worker.call.script or worker.beat.script:
            sent = left_behind(left_behind(world, name, worker.call), name, worker.beat)
            step = Step(f"worker {name} crashes with calls under way", Kind.FAULT)
            yield step, self._retire(sent, name, dead)

    def _late_calls(self, world: World, name: int, worker: Worker) -> Steps:
        for call in (worker.call, worker.beat):
            if call.script:
                after = worker
                if call.script is Script.CLAIM and self.has(Rule.CLAIM_ONCE):
                    after = send(worker, Script.RELEASE)
                step = Step(f"worker {name} hears nothing of {call.script.name}", Kind.FAULT)
                yield step, put(left_behind(world, name, call), name, after)

    def _stalls(self, world: World, name: int, worker: Worker) -> Steps:
        for lease in world.request.leases:
            if lease.holder == name and lease.standing is Standing.LIVE:
                expired = with_lease(world, lease._replace(standing=Standing.EXPIRED))
                stalled = put(spend(expired, "stalls"), name, worker._replace(stalled=True))
                yield Step(f"worker {name} stalls", Kind.FAULT), stalled

    def _dozes(self, world: World, name: int) -> Steps:
        for lease in world.request.leases:
            if lease.holder == name and lease.standing is Standing.LIVE:
                expired = with_lease(world, lease._replace(standing=Standing.EXPIRED))
                yield Step(f"worker {name} dozes", Kind.FAULT), spend(expired, "dozes")

    def _fails(self, world: World, name: int, worker: Worker) -> Steps:
        number = worker.number + 1
        for script in (Script.FAIL, Script.GIVE_UP):
            call = Call(script, OWN, number, (worker.running,), made=worker.made)
            after = worker._replace(running=-1, number=number, call=call)
            yield Step(f"worker {name} sends {script.name}", Kind.FAULT), put(world, name, after)

    def _stops(self, world: World, name: int, worker: Worker) -> Steps:
        """A polite stop, or a child that died: the parent gives everything back."""
        running = (worker.running,) if worker.running >= 0 else ()
        in_hand = (*running, *worker.queue, *worker.finished)
        after = send(worker._replace(running=-1, queue=in_hand, finished=()), Script.RELEASE)
        if not worker.call.script:
            yield Step(f"worker {name} stops", Kind.FAULT), put(world, name, after)
        elif world.budget.late:
            late = left_behind(spend(world, "late"), name, worker.call)
            yield Step(f"worker {name} dies in a call", Kind.FAULT), put(late, name, after)

    def _faults(self, world: World) -> Steps:
        """Late calls that arrive, and what happens to tokens, pushes and the whole slot."""
        for place, call in enumerate(world.late):
            request, _ = keyspace.execute(self.terms, world.request, call)
            late = world.late[:place] + world.late[place + 1 :]
            step = Step(f"late {call.script.name} {call.number} of {call.holder}", Kind.FAULT)
            yield step, world._replace(request=request, late=late)
        if world.budget.lost and world.tokens:
            lost = spend(world, "lost")._replace(tokens=world.tokens - 1)
            yield Step("a token is lost", Kind.FAULT), lost
        if world.budget.doubled and world.tokens:
            doubled = spend(world, "doubled")._replace(tokens=world.tokens + 1)
            yield Step("a token is doubled", Kind.FAULT), doubled
        if world.budget.crashes:
            yield from self._lost_pushes(world)
        if world.budget.rollbacks:
            yield from self._rollback(world)
        if world.budget.outages:
            yield self._outage(spend(world, "outages"))

    def _lost_pushes(self, world: World) -> Steps:
        if world.pushing:
            after = spend(world, "crashes")._replace(pushing=0)
            yield Step("client crashes", Kind.FAULT), after
        for name, janitor in enumerate(world.janitors):
            if janitor != Janitor():
                after = sweep(spend(world, "crashes"), name, Janitor())
                yield Step(f"janitor {name} crashes", Kind.FAULT), after

    def _outage(self, world: World) -> tuple[Step, World]:
        """Nobody reaches the server for a long time; by its clock everything is long ago."""
        request = world.request
        leases = tuple(lease._replace(standing=Standing.OLD) for lease in request.leases)
        suspicion = Suspicion.NONE
        if request.suspicion and not self.has(Rule.GAP):
            suspicion = Suspicion.RIPE
        after = request._replace(leases=leases, suspicion=suspicion)
        return Step("outage", Kind.FAULT), world._replace(request=after)

    def _rollback(self, world: World) -> Steps:
        """A replica stops hearing of the request's slot, and later takes its place."""
        if world.memory is None:
            yield Step("replica cut off", Kind.FAULT), world._replace(memory=world.request)
            return
        workers = tuple(worker._replace(forgotten=worker.held) for worker in world.workers)
        after = spend(world, "rollbacks")._replace(
            request=world.memory, memory=None, workers=workers
        )
        yield Step("rollback", Kind.FAULT), after

    def canonical(self, world: World) -> World:
        """The same world with workers and janitors in order."""
        return canonical(world)
