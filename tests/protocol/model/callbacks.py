"""A callback in another slot, started once when its parent has ended; explored exhaustively.

The parent's slot holds the debt. The callback's slot holds nothing, the callback, or nothing again
after it was purged. Each of two janitors reads the debt, submits the callback and strikes the debt:
three calls. It may die between any two of them, or sleep for longer than an attempt may take.

The rules are K1 to K4 of ``lua/README.md``.
"""

from collections.abc import Iterator
from enum import StrEnum
from typing import Any, NamedTuple

from tests.protocol.model.explore import Kind, Step

TWICE = "the callback was started twice"
NEVER = "the debt is struck, and the callback was never started"


class Rule(StrEnum):
    """What can be left out."""

    DERIVED = "K1: the callback's id is made from the parent's"
    PAID_LAST = "K2: the debt is struck after the callback is there"
    FENCE = "K3: a submission that is too old is refused"
    OUTLIVE = "K4: the callback stays for longer than an attempt may take, and while it is owed"


class Janitor(NamedTuple):
    """What it does next ("": it reads the debt), and whether it has slept for long since."""

    next: str = ""
    is_old: bool = False


class World(NamedTuple):
    """Both slots, the janitors, and how many faults may still come."""

    is_owed: bool = True
    is_there: bool = False
    starts: int = 0
    janitors: tuple[Janitor, ...] = (Janitor(), Janitor())
    crashes: int = 1
    sleeps: int = 1


class Callbacks:
    """The protocol, with all rules or without some."""

    def __init__(self, *without: Rule) -> None:
        self._rules = set(Rule) - set(without)

    def initial(self) -> World:
        return World()

    def canonical(self, w: World) -> World:
        return w._replace(janitors=tuple(sorted(w.janitors)))

    def broken(self, w: World) -> str | None:
        if w.starts > 1:
            return TWICE
        is_coming = any(each.next == "submit" for each in w.janitors)
        return NEVER if not w.is_owed and not w.starts and not is_coming else None

    def is_done(self, w: World) -> bool:
        return not w.is_owed and w.starts == 1

    def is_clean(self, w: World) -> bool:
        return w.crashes == w.sleeps == 1

    def steps(self, w: World) -> Iterator[tuple[Step, World]]:
        for n, janitor in enumerate(w.janitors):
            for step, after, changes in self._steps_of(w, n, janitor):
                others = (*w.janitors[:n], after, *w.janitors[n + 1 :])
                yield step, w._replace(janitors=others, **changes)
        if w.is_there and self._may_be_purged(w):
            yield Step("the callback ends and is purged"), w._replace(is_there=False)

    def _may_be_purged(self, w: World) -> bool:
        if Rule.OUTLIVE not in self._rules:
            return True
        return not w.is_owed and not any(
            each.next == "submit" and not each.is_old for each in w.janitors
        )

    def _steps_of(
        self, w: World, n: int, janitor: Janitor
    ) -> Iterator[tuple[Step, Janitor, dict[str, Any]]]:
        order = ["submit", "strike"] if Rule.PAID_LAST in self._rules else ["strike", "submit"]
        following = dict(zip(order, [*order[1:], ""], strict=True))
        after = Janitor(
            following.get(janitor.next, ""), janitor.is_old and janitor.next != order[1]
        )
        if not janitor.next:
            if w.is_owed:
                yield Step(f"{n} reads the debt"), Janitor(order[0]), {}
            return
        if janitor.next == "strike":
            yield Step(f"{n} strikes the debt"), after, {"is_owed": False}
        elif janitor.is_old and Rule.FENCE in self._rules:
            yield Step(f"{n} is refused: too old"), Janitor(), {}
        elif w.is_there and Rule.DERIVED in self._rules:
            yield Step(f"{n} finds the callback"), after, {}
        else:
            made: dict[str, Any] = {"is_there": True, "starts": w.starts + 1}
            yield Step(f"{n} submits the callback"), after, made
        if w.crashes:
            yield Step(f"{n} dies", Kind.FAULT), Janitor(), {"crashes": w.crashes - 1}
        if w.sleeps and not janitor.is_old:
            asleep = janitor._replace(is_old=True)
            yield Step(f"{n} sleeps for long", Kind.FAULT), asleep, {"sleeps": w.sleeps - 1}
