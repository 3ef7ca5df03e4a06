# ruff: noqa: C901, PLR0911, PLR0912, B905, B007, C416, SIM102
"""Flows: stages of one request in one slot, explored exhaustively (breadth first).

What the model of the plain protocol (``leases.py``) proves of leases, call numbers and names is
taken as given: here a lease carries batches and closing calls. What is modelled is what is new: the
hand-over to the next stage, one counter for all stages, groups that join, the reduce, windows
between stages, failures inside a group, redrive of a middle stage, tokens for each stage. Every
rule is a switch in ``Terms.without``.
"""

from collections import Counter
from typing import Any, NamedTuple

from tests.protocol.model.explore import Kind, Step

WAITING, RETRY, DONE, FAILED = -2, -3, -4, -5
PASS, GIVEUP, HAND = "PASS", "GIVEUP", "HAND"

LOST = "an item is nowhere: the hand-over lost it"
DOUBLED = "an item is in two places: the hand-over doubled it"
MISCOUNT = "left is not the number of unfinished parts"
WRONG_END = "ended with parts left, or none left and not ended"
GROUP = "a group's counter is not the number of its unfinished children"
BLIND = "a join or reduce runs without the results of children that succeeded"
TWO_JOINS = "a group has two join parts"
OVER_LIMIT = "more leases than the stage's limit"
OVER_WINDOW = "more parts behind a window than it allows"
STARVED = "room and work, no fault, and no token"
LEFTOVER = "everything was redriven and done, and yet a failure is still recorded"
HALF = "the flow ended, and a stage does not know it"
WRONG_ITEM = "a result is recorded for another item than it was made from"


class Budget(NamedTuple):
    crashes: int = 0
    late: int = 0
    stalls: int = 0
    lost: int = 0
    rolls: int = 0
    fails: int = 0
    poison: int = 0
    redrives: int = 0
    drops: int = 0

    def faults(self) -> Any:
        return self[:5]


class Terms(NamedTuple):
    """kinds: of each stage; 'map', 'spread', 'join' or 'reduce'."""

    kinds: tuple[Any, ...] = ("map", "map")
    inputs: int = 2
    children: int = 2
    workers: int = 2
    limit: int = 1
    batch: int = 1
    cap: int = 2
    window: int = 0  # 0: none
    policy: str = "fail"  # what a join does with failed children: fail or run
    seal: bool = False  # the load is sealed by a step of its own
    more: bool = False  # a lease may go on with another batch
    budget: Budget = Budget()
    without: frozenset[str] = frozenset()

    def no(self, *rules: str) -> Any:
        return self._replace(without=frozenset(rules))


class Stage(NamedTuple):
    parts: tuple[Any, ...] = ()  # (origin, place)
    leases: tuple[Any, ...] = ()  # (holder, (expired, number of its last call))
    out: int = 0
    live: bool = True


class Slot(NamedTuple):
    stages: tuple[Any, ...]
    left: int
    sealed: bool = True
    groups: tuple[Any, ...] = ()  # (origin, left, failed, number of the join part or -1)
    got: tuple[Any, ...] = ()  # (stage, origin): the inbox of a join or a reduce
    results: tuple[Any, ...] = ()
    ended: bool = False
    reduced: int = -1  # number of the reduce part
    broken: str = ""


class Call(NamedTuple):
    kind: str
    stage: int
    holder: int
    parts: tuple[Any, ...]
    origins: tuple[Any, ...] = ()  # of these parts, as the worker was told
    number: int = 1
    more: bool = False  # hand out the next batch under the same lease
    drop: bool = False


class Worker(NamedTuple):
    stage: int = -1
    holder: int = -1
    parts: tuple[Any, ...] = ()
    origins: tuple[Any, ...] = ()
    number: int = 0
    call: Call | None = None
    stalled: bool = False
    forgotten: bool = False


IDLE = Worker()


class World(NamedTuple):
    slot: Slot
    tokens: tuple[Any, ...]
    workers: tuple[Any, ...]
    budget: Budget
    late: tuple[Any, ...] = ()
    memory: Slot | None = None


# ------------------------------------------------------------------------------------- the scripts


class Work:
    """A working copy of the slot, for one script."""

    def __init__(self, terms: Terms, slot: Slot, tokens: Any) -> None:
        self.t = terms
        self.parts = [list(s.parts) for s in slot.stages]
        self.leases = [dict(s.leases) for s in slot.stages]
        self.out = [s.out for s in slot.stages]
        self.live = [s.live for s in slot.stages]
        self.left, self.sealed, self.ended = slot.left, slot.sealed, slot.ended
        self.groups = {g[0]: list(g[1:]) for g in slot.groups}
        self.got = list(slot.got)
        self.results = list(slot.results)
        self.reduced = slot.reduced
        self.broken = slot.broken
        self.tokens = list(tokens)

    def has(self, rule: str) -> Any:
        return rule not in self.t.without

    def saved(self) -> Any:
        stages = tuple(
            Stage(tuple(p), tuple(sorted(le.items())), o, li)
            for p, le, o, li in zip(self.parts, self.leases, self.out, self.live)
        )
        groups = tuple(sorted((k, *v) for k, v in self.groups.items()))
        slot = Slot(
            stages,
            self.left,
            self.sealed,
            groups,
            tuple(sorted(self.got)),
            tuple(sorted(self.results)),
            self.ended,
            self.reduced,
            self.broken,
        )
        return slot, tuple(self.tokens)

    # tokens

    def unfinished(self, k: int) -> Any:
        return sum(p >= 0 or p in (WAITING, RETRY) for _, p in self.parts[k])

    def in_hand(self, k: int) -> Any:
        return sum(p >= 0 for _, p in self.parts[k])

    def room(self, k: int) -> Any:
        """How many more parts of stage k may start, for the window of the next one."""
        if not self.t.window or k + 1 >= len(self.parts):
            return 99
        kind = self.t.kinds[k + 1]
        if kind in ("join", "reduce"):
            if self.has("inbox-free"):
                return 99  # what waits for its siblings does not count: it cannot drain by itself
            waiting = sum(s == k + 1 for s, _ in self.got)
            return self.t.window - waiting - self.in_hand(k)
        used = self.in_hand(k) if self.has("reserve") else 0
        if self.t.kinds[k] == "spread":
            return (self.t.window - self.unfinished(k + 1)) // self.t.children - used
        return self.t.window - self.unfinished(k + 1) - used

    def want(self, k: int) -> Any:
        if not self.live[k] or self.ended:
            return 0
        ready = sum(p in (WAITING, RETRY) for _, p in self.parts[k])
        return max(0, min(self.t.limit - len(self.leases[k]), ready, self.t.cap, self.room(k)))

    def mint(self, k: int) -> Any:
        if k < 0 or k >= len(self.parts):
            return
        more = max(0, self.want(k) - self.out[k])
        self.out[k] += more
        self.tokens[k] += more

    # parts

    def add(self, k: int, origin: Any) -> Any:
        self.parts[k].append((origin, WAITING))
        self.left += 1

    def place(self, k: int, i: int, where: int) -> Any:
        self.parts[k][i] = (self.parts[k][i][0], where)

    def group_of(self, k: int, origin: Any) -> Any:
        """The group that a part of stage k counts for: that of the spread before it."""
        if len(origin) < 2 or "join" not in self.t.kinds[k + 1 :]:
            return None
        return origin[:1]

    def count_group(self, origin: Any, failed: int) -> Any:
        g = self.groups[origin]
        g[0] -= 1
        g[1] += failed
        if g[0] == 0:
            self.complete(origin)

    def complete(self, origin: Any) -> Any:
        """All children of a group are finished: one join part, the same if there was one before."""
        k = self.t.kinds.index("join")
        g = self.groups[origin]
        if g[2] >= 0 and self.has("one-join"):
            if self.parts[k][g[2]][1] == FAILED:
                self.place(k, g[2], RETRY)
                self.left += 1
                self.results = [x for x in self.results if x != ("blocked", origin)]
        else:
            g[2] = len(self.parts[k])
            self.add(k, origin)
        self.mint(k)

    def deliver(self, k: int, i: int, drop: bool) -> Any:
        """What a finished part leaves to the next stage. Counted in the same script."""
        origin = self.parts[k][i][0]
        kinds = self.t.kinds
        if drop:
            g = self.group_of(k, origin)
            if g and self.has("drop-counts"):
                self.count_group(g, 0)
            self.results.append(("none", origin))
        elif kinds[k] == "spread":
            if "join" in kinds:
                self.groups[origin] = [self.t.children, 0, -1]
            for j in range(self.t.children):
                self.add(k + 1, (*origin, j))
            self.mint(k + 1)
        elif k + 1 == len(kinds):
            self.results.append(("done", origin))
            if kinds[k] == "join":
                self.got = [x for x in self.got if x[0] != k or x[1][:1] != origin]
            if kinds[k] == "reduce":
                self.got = [x for x in self.got if x[0] != k]
        elif kinds[k + 1] == "join":
            self.got.append((k + 1, origin))
            self.count_group(origin[:1], 0)
        elif kinds[k + 1] == "reduce":
            self.got.append((k + 1, origin))
        else:
            self.add(k + 1, origin)
            if self.has("mint-next"):
                self.mint(k + 1)
        if kinds[k] == "join" and k + 1 < len(kinds):
            self.got = [x for x in self.got if x[0] != k or x[1][:1] != origin]

    def end_check(self) -> Any:
        if self.left > 0 or self.ended:
            return
        if "reduce" in self.t.kinds:
            k = self.t.kinds.index("reduce")
            if self.reduced < 0:
                self.reduced = len(self.parts[k])
                self.add(k, ("all",))
                self.mint(k)
                return
            if self.parts[k][self.reduced][1] == FAILED and not self.failed_before(k):
                # Its inputs are all there now: redriven by the end of the stages before it.
                if self.stale_failure(k):
                    self.place(k, self.reduced, RETRY)
                    self.left += 1
                    self.results.remove(("blocked", ("all",)))
                    self.mint(k)
                    return
        self.ended = True
        for k in range(len(self.parts)):
            self.live[k] = False
            self.leases[k].clear()

    def failed_before(self, k: int) -> Any:
        return any(p == FAILED for s in self.parts[:k] for _, p in s)

    def stale_failure(self, k: int) -> Any:
        """The reduce failed for want of inputs, and not by itself (told by what is recorded)."""
        return ("blocked", ("all",)) in self.results

    def finished(self, k: int, prev: bool = True) -> Any:
        """After a part of stage k was finished or given up: tokens for k and for the one before."""
        self.mint(k)
        if prev and self.has("mint-prev"):
            self.mint(k - 1)

    # called by workers

    def claim(self, k: int, holder: int) -> Any:
        self.out[k] = max(0, self.out[k] - 1)
        got = []
        if self.live[k] and len(self.leases[k]) < self.t.limit:
            got = self.hand_out(k, holder)
            if got:
                self.leases[k][holder] = (0, 0)
        self.mint(k)
        return tuple(got)

    def hand_out(self, k: int, holder: int) -> Any:
        most = min(self.t.batch, self.room(k))
        order = [i for i, (_, p) in enumerate(self.parts[k]) if p == RETRY]
        order += [i for i, (_, p) in enumerate(self.parts[k]) if p == WAITING]
        got = order[: max(0, most)]
        for i in got:
            self.place(k, i, holder)
        if self.t.kinds[k] in ("join", "reduce"):
            for i in got:
                self.look_into(k, i)
        return got

    def look_into(self, k: int, i: int) -> Any:
        """What a join that starts finds in its inbox."""
        origin = self.parts[k][i][0]
        if self.t.kinds[k] == "join":
            there = sum(s == k and o[:1] == origin for s, o in self.got)
            wanted = self.t.children - self.groups[origin][1] - self.dropped(origin)
            if not self.has("keep-inbox"):
                self.got = [x for x in self.got if x[0] != k or x[1][:1] != origin]
        else:
            there = sum(s == k for s, _ in self.got)
            done = sum(1 for kind, o in self.results if kind == "none")
            gone = sum(p == FAILED for s in self.parts[:k] for _, p in s)
            wanted = self.t.inputs - gone - done
            if not self.has("keep-inbox"):
                self.got = [x for x in self.got if x[0] != k]
        if there != wanted:
            self.broken = self.broken or BLIND

    def dropped(self, origin: Any) -> Any:
        return sum(kind == "none" and o[:1] == origin and len(o) > 1 for kind, o in self.results)

    def pass_on(self, call: Call) -> Any:
        """Record a batch, hand it over, count once; then the next batch, or the end of the lease.

        Returns the parts that the holder has from now on.
        """
        k = call.stage
        lease = self.leases[k].get(call.holder)
        stored = lease[1] if lease else -1
        # A call that follows the last one knows its parts as the server does. Any other may come
        # from before a rollback, after which numbers of a later stage stand for other items.
        in_step = lease is not None and (call.number == stored + 1 or not self.has("gap-check"))
        acked = []
        for i, origin in zip(call.parts, call.origins):
            if i >= len(self.parts[k]):
                continue
            own, where = self.parts[k][i]
            pending = where >= 0 or where == RETRY if lease else where == RETRY  # else the mercy
            if not pending:
                continue
            if own != origin:
                if not in_step and self.has("origin-check"):
                    continue
                self.broken = self.broken or WRONG_ITEM
            acked.append(i)
        for i in acked:
            self.place(k, i, DONE)
            if self.has("one-script") or "hand-first" in self.t.without:
                self.left -= 1
            if not self.has("count-last"):
                self.end_check()
        if self.has("one-script"):
            given = acked if self.has("ack-gate") else [i for i in call.parts]
            for i in given:
                if lease or i not in acked or self.has("mercy-passes"):
                    self.deliver(k, i, call.drop)
        self.end_check()
        got: Any = ()
        if lease and not self.ended:
            if call.number <= stored:  # a repeat
                self.leases[k][call.holder] = (0, stored)
                got = tuple(i for i, (_, p) in enumerate(self.parts[k]) if p == call.holder)
            else:
                got = self.go_on(k, call)
        self.finished(k)
        return got

    def go_on(self, k: int, call: Call) -> Any:
        for i, (_, p) in enumerate(self.parts[k]):
            if p == call.holder:
                self.place(k, i, RETRY)
        got: Any = ()
        if call.more and len(self.leases[k]) <= self.t.limit:
            got = tuple(self.hand_out(k, call.holder))
        if got:
            self.leases[k][call.holder] = (0, call.number)
        else:
            del self.leases[k][call.holder]
        return got

    def give_up(self, k: int, i: int, how: str) -> Any:
        """XACK without XDEL, the failure kept, the group counted down."""
        origin = self.parts[k][i][0]
        self.place(k, i, FAILED)
        self.left -= 1
        kind = self.t.kinds[k]
        if kind in ("join", "reduce") and self.is_blocked(k, origin):
            self.results = [x for x in self.results if x != ("blocked", origin)]
            self.results.append(("blocked", origin))
        g = self.group_of(k, origin)
        rule = "reap-counts" if how == "reap" else "fail-counts"
        if g and self.has(rule):
            self.count_group(g, 1)
        self.end_check()
        self.finished(k, self.has("mint-prev-fail"))

    def is_blocked(self, k: int, origin: Any) -> Any:
        if self.t.policy != "fail":
            return False
        if self.t.kinds[k] == "join":
            return self.groups[origin][1] > 0
        return self.failed_before(k)

    def is_waiting_for(self, k: int, origin: Any) -> Any:
        """Whether a join or reduce part that failed has children that run or failed again."""
        if self.t.kinds[k] == "join":
            left, failed, _ = self.groups[origin]
            return left > 0 or (failed > 0 and self.t.policy == "fail")
        if self.t.kinds[k] == "reduce":
            return any(self.unfinished(j) for j in range(k)) or self.is_blocked(k, origin)
        return False

    def fail(self, call: Call) -> Any:
        k, (i,) = call.stage, call.parts
        lease = self.leases[k].get(call.holder)
        if lease is None or call.number <= lease[1]:
            return
        if i >= len(self.parts[k]) or self.parts[k][i][1] != call.holder:
            return
        # One part was in hand, so its lease ends with it.
        for j, (_, p) in enumerate(self.parts[k]):
            if p == call.holder and j != i:
                self.place(k, j, RETRY)
        del self.leases[k][call.holder]
        self.give_up(k, i, "fail")

    def reap(self, k: int, holder: int, poison: bool) -> Any:
        pending = [i for i, (_, p) in enumerate(self.parts[k]) if p == holder]
        for i in pending:
            self.place(k, i, RETRY)
        del self.leases[k][holder]
        if poison and pending:
            self.give_up(k, pending[0], "reap")
        self.mint(k)

    def redrive(self, k: int, i: int) -> Any:
        """A failed part runs again, unless what comes after it has already done without it."""
        origin = self.parts[k][i][0]
        g = self.group_of(k, origin)
        kinds = self.t.kinds
        if self.has("not-after-join"):
            if g:
                left, _, number = self.groups[g]
                joined = kinds.index("join")
                if left == 0 and self.parts[joined][number][1] != FAILED:
                    return False
            if "reduce" in kinds[k + 1 :] and self.reduced >= 0:
                r = kinds.index("reduce")
                if self.parts[r][self.reduced][1] != FAILED:
                    return False
        if self.has("join-last") and self.is_waiting_for(k, origin):
            return False  # its children first: with them it comes back by itself
        self.place(k, i, RETRY)
        self.left += 1
        if g:
            self.groups[g][0] += 1
            self.groups[g][1] -= 1
        if self.ended:
            self.ended = False
            for s in range(len(self.parts)):
                if s == k or self.has("open-all"):
                    self.live[s] = True
                if s == k or self.has("forget-all-tokens"):
                    self.out[s] = 0
        self.mint(k)
        return True

    def seal(self) -> Any:
        self.sealed = True
        self.left -= 1
        self.end_check()

    def audit(self, k: int) -> Any:
        want = self.want(k)
        self.out[k] = min(self.out[k], want)
        self.tokens[k] = max(self.tokens[k], want)


# ---------------------------------------------------------------------------------------- the model


class Flow:
    def __init__(self, terms: Terms) -> None:
        self.t = terms

    def has(self, rule: str) -> Any:
        return rule not in self.t.without

    def initial(self) -> Any:
        n = len(self.t.kinds)
        empty = Slot((Stage(),) * n, 1, False)
        w = Work(self.t, empty, (0,) * n)
        for i in range(self.t.inputs):
            w.add(0, (i,))
        if not self.t.seal:
            w.seal()
        w.mint(0)
        slot, tokens = w.saved()
        return World(slot, tokens, (IDLE,) * self.t.workers, self.t.budget)

    # what must hold

    def broken(self, world: Any) -> Any:
        s = world.slot
        if s.broken:
            return s.broken
        unfinished = sum(
            p >= 0 or p in (WAITING, RETRY) for st in s.stages for _, p in st.parts
        ) + (not s.sealed)
        if not self.has("one-script"):
            unfinished += sum(
                len(w.call.parts)
                for w in world.workers
                if w.call and w.call.kind == HAND and "hand-first" not in self.t.without
            )
        if s.left != unfinished:
            return MISCOUNT
        if (s.left == 0) != s.ended:
            return WRONG_END
        for st in s.stages:
            if len(st.leases) > self.t.limit:
                return OVER_LIMIT
            if st.live == s.ended:
                return HALF
        return (
            self._items(s, self._between(world))
            or self._groups(s)
            or self._window(world)
            or self._tokens(world)
        )

    def _between(self, world: Any) -> Any:
        """Without the one script: items that a living worker is about to hand over, or just did."""
        place: Counter[Any] = Counter()
        if self.has("one-script"):
            return place
        first = "hand-first" in self.t.without
        for w in world.workers:
            if w.call and w.call.kind == (PASS if first else HAND):
                for origin in w.origins:
                    place[origin] += -1 if first else 1
        return place

    def _items(self, s: Slot, place: Any) -> Any:
        """Every input, and every child of an open group, is in exactly one place."""
        kinds = self.t.kinds
        for k, st in enumerate(s.stages):
            for origin, p in st.parts:
                if p != DONE:
                    place[origin] += 1
        for kind, origin in s.results:
            if kind != "blocked":
                place[origin] += 1
        joins = {g[0]: g for g in s.groups}
        if "reduce" in kinds:
            k = kinds.index("reduce")
            all_in = s.reduced >= 0 and s.stages[k].parts[s.reduced][1] == DONE
            for x in s.got:
                place[x[1]] += 1
            for i in range(self.t.inputs):
                n = place[(i,)]
                if all_in:
                    n += n == 0
                if n != 1:
                    return LOST if n == 0 else DOUBLED
            return None
        for i in range(self.t.inputs):
            g = joins.get((i,))
            n = place[(i,)]
            if g is None:
                if "spread" in kinds and "join" not in kinds:
                    kids = [place[(i, j)] for j in range(self.t.children)]
                    if any(kids):
                        if n or any(m != 1 for m in kids):
                            return DOUBLED if n or max(kids) > 1 else LOST
                        continue
                if n != 1:
                    return LOST if n == 0 else DOUBLED
                continue
            join = s.stages[kinds.index("join")]
            parts = [p for o, p in join.parts if o == (i,)]
            if len(parts) > 1:
                return TWO_JOINS
            if g[3] >= 0 and n != 1:
                return LOST if n == 0 else DOUBLED
            inbox = {x[1] for x in s.got}
            if len(inbox) != len(s.got):
                return DOUBLED
            if not parts:
                for j in range(self.t.children):
                    c = (i, j)
                    m = place[c] + (c in inbox)
                    if m != 1:
                        return LOST if m == 0 else DOUBLED
        return None

    def _groups(self, s: Slot) -> Any:
        for origin, left, failed, number in s.groups:
            n = f = 0
            for k, st in enumerate(s.stages):
                for o, p in st.parts:
                    if len(o) > 1 and o[:1] == origin:
                        n += p >= 0 or p in (WAITING, RETRY)
                        f += p == FAILED
            if left != n or failed != f:
                return GROUP
            if left == 0 and failed == 0 and number >= 0 and ("blocked", origin) in s.results:
                k = self.t.kinds.index("join")
                if s.stages[k].parts[number][1] == FAILED:
                    return LEFTOVER
        return None

    def _window(self, world: Any) -> Any:
        """Only while no fault was spent: a result by mercy comes on top."""
        if not self.t.window or not self.is_clean(world):
            return None
        for k in range(1, len(self.t.kinds)):
            if self.t.kinds[k] in ("join", "reduce"):
                continue
            parts = world.slot.stages[k].parts
            if sum(p >= 0 or p in (WAITING, RETRY) for _, p in parts) > self.t.window:
                return OVER_WINDOW
        return None

    def _tokens(self, world: Any) -> Any:
        if not self.is_clean(world) or any(w.call for w in world.workers):
            return None
        w = Work(self.t, world.slot, world.tokens)
        for k in range(len(self.t.kinds)):
            if w.want(k) > 0 and world.tokens[k] == 0:
                return STARVED
        return None

    def is_done(self, world: Any) -> Any:
        return world.slot.ended

    def is_clean(self, world: Any) -> Any:
        return world.budget.faults() == self.t.budget.faults()

    # what may happen

    def steps(self, world: Any) -> Any:
        slot, tokens = world.slot, world.tokens
        if not slot.sealed:
            w = Work(self.t, slot, tokens)
            w.seal()
            yield Step("loader seals"), self._with(world, w)
        for n, worker in enumerate(world.workers):
            yield from self._worker(world, n, worker)
        yield from self._janitor(world)
        yield from self._faults(world)

    def _with(self, world: Any, work: Work, **more: Any) -> Any:
        slot, tokens = work.saved()
        return world._replace(slot=slot, tokens=tokens, **more)

    def _fresh(self, world: Any) -> Any:
        used = {w.holder for w in world.workers} | {c.holder for c in world.late}
        for s in (world.slot, world.memory):
            if s is not None:
                for st in s.stages:
                    used |= {h for h, _ in st.leases} | {p for _, p in st.parts}
        return next(h for h in range(99) if h not in used)

    def _worker(self, world: Any, n: int, worker: Any) -> Any:
        if worker.call:
            yield self._execute(world, n, worker)
            if world.budget.late:
                late = tuple(sorted((*world.late, worker.call)))
                spent = self._spend(world, "late")
                yield (
                    Step(f"w{n} hears nothing of {worker.call.kind}", Kind.FAULT),
                    spent._replace(late=late),
                )
        elif worker.stage >= 0:
            yield from self._closes(world, n, worker)
        else:
            for k, count in enumerate(world.tokens):
                if count:
                    yield self._claims(world, n, k)
        if worker.stage >= 0 and world.budget.crashes:
            gone = self._put(self._spend(world, "crashes"), n, IDLE)
            yield Step(f"w{n} crashes", Kind.FAULT), gone
            if worker.call:
                late = tuple(sorted((*world.late, worker.call)))
                yield (
                    Step(f"w{n} crashes, its {worker.call.kind} under way", Kind.FAULT),
                    gone._replace(late=late),
                )
        if worker.stage >= 0 and world.budget.stalls and not worker.stalled:
            st = world.slot.stages[worker.stage]
            found = dict(st.leases).get(worker.holder)
            if found and not found[0]:
                leases = tuple((h, (1, e[1]) if h == worker.holder else e) for h, e in st.leases)
                stages = list(world.slot.stages)
                stages[worker.stage] = st._replace(leases=leases)
                after = self._spend(world, "stalls")._replace(
                    slot=world.slot._replace(stages=tuple(stages))
                )
                yield (
                    Step(f"w{n} stalls", Kind.FAULT),
                    self._put(after, n, worker._replace(stalled=True)),
                )

    def _claims(self, world: Any, n: int, k: int) -> Any:
        tokens = tuple(c - (i == k) for i, c in enumerate(world.tokens))
        if world.slot.ended:  # left over: whoever saw the end drops it without a claim
            return Step(f"w{n} drops a token of stage {k}"), world._replace(tokens=tokens)
        w = Work(self.t, world.slot, tokens)
        holder = self._fresh(world)
        got = w.claim(k, holder)
        after = self._with(world, w)
        if got:
            origins = tuple(w.parts[k][i][0] for i in got)
            after = self._put(after, n, Worker(k, holder, got, origins))
        return Step(f"w{n} claims stage {k}: {list(got)}"), after

    def _closes(self, world: Any, n: int, worker: Any) -> Any:
        k = worker.stage
        w = Work(self.t, world.slot, world.tokens)
        call = Call(PASS, k, worker.holder, worker.parts, worker.origins, worker.number + 1)

        def sent(call: Call, base: Any = world) -> Any:
            return self._put(base, n, worker._replace(call=call, number=call.number))

        if self.t.kinds[k] in ("join", "reduce"):
            origin = worker.origins[0]
            known = self.t.kinds[k] == "reduce" or origin in w.groups
            if known and w.is_blocked(k, origin):
                blocked = call._replace(kind=GIVEUP, parts=worker.parts[:1])
                yield Step(f"w{n} sends GIVEUP (a child failed)"), sent(blocked)
                return
        if "hand-first" in self.t.without:
            yield Step(f"w{n} sends HAND of stage {k}"), sent(call._replace(kind=HAND))
        else:
            yield Step(f"w{n} sends PASS of stage {k}"), sent(call)
            if self.t.more:
                yield (
                    Step(f"w{n} sends PASS of stage {k} and asks for more"),
                    sent(call._replace(more=True)),
                )
        if world.budget.drops and k + 1 < len(self.t.kinds) and self.t.kinds[k] == "map":
            yield (
                Step(f"w{n} sends PASS of nothing", Kind.FAULT),
                sent(call._replace(drop=True), self._spend(world, "drops")),
            )
        if world.budget.fails and len(worker.parts) == 1:
            yield (
                Step(f"w{n} sends GIVEUP of stage {k}", Kind.FAULT),
                sent(call._replace(kind=GIVEUP), self._spend(world, "fails")),
            )

    def _run(self, world: Any, call: Call) -> Any:
        """The server executes a call. Returns the world, and what the holder has after it."""
        w = Work(self.t, world.slot, world.tokens)
        got: Any = ()
        if w.ended:
            return world, got
        if call.kind == PASS:
            got = w.pass_on(call)
        elif call.kind == HAND:
            for i in call.parts:
                w.deliver(call.stage, i, call.drop)
                if "hand-first" not in self.t.without:
                    w.left -= 1
            w.end_check()
        else:
            w.fail(call)
        origins = tuple(w.parts[call.stage][i][0] for i in got)
        return self._with(world, w), (got, origins) if got else ()

    def _execute(self, world: Any, n: int, worker: Any) -> Any:
        call = worker.call
        got: Any
        after, got = self._run(world, call)
        step = Step(
            f"server executes {call.kind} {call.number} of w{n}, stage {call.stage} "
            f"{list(call.parts)}"
        )
        if not self.has("one-script") and call.kind in (PASS, HAND):
            # Two calls instead of one: which comes first is a matter of taste, both are wrong.
            first = HAND if "hand-first" in self.t.without else PASS
            if call.kind == first:
                second = call._replace(kind=PASS if first == HAND else HAND)
                return step, self._put(after, n, worker._replace(call=second))
        if got:
            return step, self._put(
                after,
                n,
                worker._replace(
                    parts=got[0], origins=got[1], call=None, stalled=False, forgotten=False
                ),
            )
        return step, self._put(after, n, IDLE)

    def _janitor(self, world: Any) -> Any:
        alive = {(w.stage, w.holder) for w in world.workers if w.stage >= 0}
        for k, st in enumerate(world.slot.stages):
            for holder, (expired, _) in st.leases:
                if expired or (k, holder) not in alive:
                    for poison in (False, True) if world.budget.poison else (False,):
                        w = Work(self.t, world.slot, world.tokens)
                        w.reap(k, holder, poison)
                        base = self._spend(world, "poison") if poison else world
                        kind = Kind.FAULT if poison else Kind.REPAIR
                        yield (
                            Step(f"reap of {holder} in stage {k}{' poison' * poison}", kind),
                            self._with(base, w),
                        )
            w = Work(self.t, world.slot, world.tokens)
            want = w.want(k)
            if want > world.tokens[k] or want < st.out:
                w.audit(k)
                yield Step(f"audit of stage {k}", Kind.REPAIR), self._with(world, w)

    def _faults(self, world: Any) -> Any:
        for i, call in enumerate(world.late):
            after, _ = self._run(world._replace(late=world.late[:i] + world.late[i + 1 :]), call)
            yield Step(f"late {call.kind} {call.number} of {call.holder}", Kind.FAULT), after
        if world.budget.lost:
            for k, count in enumerate(world.tokens):
                if count:
                    tokens = tuple(c - (i == k) for i, c in enumerate(world.tokens))
                    yield (
                        Step("a token is lost", Kind.FAULT),
                        self._spend(world, "lost")._replace(tokens=tokens),
                    )
        if world.budget.redrives:
            for k, st in enumerate(world.slot.stages):
                for i, (_, p) in enumerate(st.parts):
                    if p == FAILED:
                        w = Work(self.t, world.slot, world.tokens)
                        if w.redrive(k, i):
                            yield (
                                Step(f"redrive of part {i} of stage {k}", Kind.FAULT),
                                self._with(self._spend(world, "redrives"), w),
                            )
        if world.budget.rolls:
            if world.memory is None:
                yield Step("replica cut off", Kind.FAULT), world._replace(memory=world.slot)
            else:
                workers = tuple(w._replace(forgotten=w.stage >= 0) for w in world.workers)
                yield (
                    Step("rollback", Kind.FAULT),
                    self._spend(world, "rolls")._replace(
                        slot=world.memory, memory=None, workers=workers
                    ),
                )

    def _spend(self, world: Any, what: str) -> Any:
        b = world.budget
        return world._replace(budget=b._replace(**{what: getattr(b, what) - 1}))

    def _put(self, world: Any, n: int, worker: Any) -> Any:
        ws = world.workers
        return world._replace(workers=(*ws[:n], worker, *ws[n + 1 :]))

    # names

    def canonical(self, world: Any) -> Any:
        """Workers in order; holders named by where they first appear."""

        def key(w: Any) -> Any:
            return (
                w.stage,
                w.parts,
                repr(w.call._replace(holder=0)) if w.call else "",
                w.stalled,
                w.forgotten,
                w.holder,
            )

        workers = tuple(sorted(world.workers, key=key))
        names: dict[int, int] = {}

        def name(h: int) -> Any:
            if h < 0:
                return h
            return names.setdefault(h, len(names))

        new = []
        for w in workers:
            h = name(w.holder)
            call = w.call._replace(holder=name(w.call.holder)) if w.call else None
            new.append(w._replace(holder=h, call=call))
        slot = self._renamed(world.slot, name)
        memory = None if world.memory is None else self._renamed(world.memory, name)
        late = tuple(sorted(c._replace(holder=name(c.holder)) for c in world.late))
        return world._replace(workers=tuple(new), slot=slot, memory=memory, late=late)

    def _renamed(self, slot: Slot, name: Any) -> Any:
        stages = []
        for st in slot.stages:
            if not st.leases and all(p < 0 for _, p in st.parts):
                stages.append(st)
                continue
            parts = tuple([(o, name(p)) for o, p in st.parts])
            leases = tuple(sorted([(name(h), e) for h, e in st.leases]))
            stages.append(Stage(parts, leases, st.out, st.live))
        return slot._replace(stages=tuple(stages))
