"""The kinds of a flow's stages, and what follows from them: which stage hands over to which.

A stage is a ``map`` (a part yields one part or none), a ``spread`` (one part yields many), a
``join`` (all children of one part of a spread yield one) or a ``reduce`` (all results yield one).
Stages are numbered from 1.
"""

from functools import cached_property
from typing import Literal

import msgspec

from streamq.errors import InvalidValue, damaged_if_unreadable
from streamq.units import MOST_STAGES

Kind = Literal["map", "spread", "join", "reduce"]
#: Where results of a stage go: parts of the next stage, the inbox of a join or of a reduce, or the
#: results of the flow.
Feeds = Literal["parts", "join", "reduce", "end"]
#: What the server keeps of each item: nothing; its stage and part, so that ``find`` finds it
#: (track); or also its result in each stage (trace).
Follow = Literal["", "track", "trace"]

KINDS: tuple[Kind, ...] = ("map", "spread", "join", "reduce")


class Shape(msgspec.Struct, frozen=True, dict=True):
    """The kinds of all stages of a flow, checked."""

    kinds: tuple[Kind, ...]
    follow: Follow = ""

    @classmethod
    def read(cls, text: str) -> "Shape":
        """Return the shape that ``text`` wrote.

        Raises:
            Damaged: it is no shape of a flow.
        """
        kinds, _, follow = text.partition("+")
        with damaged_if_unreadable("the shape of a flow"):
            return msgspec.convert({"kinds": kinds.split(","), "follow": follow}, cls)

    @cached_property
    def text(self) -> str:
        """The shape as one word, such as ``map,spread,map,join`` or ``map,map+track``."""
        return ",".join(self.kinds) + (f"+{self.follow}" if self.follow else "")

    def __len__(self) -> int:
        return len(self.kinds)

    def check(self) -> None:
        """Raise InvalidValue if there can be no such flow."""
        if not self.kinds:
            raise InvalidValue("a flow needs a stage: add one with .map(...)")
        if len(self) > MOST_STAGES:
            raise InvalidValue(
                f"a flow has {len(self)} stages, more than the {MOST_STAGES} allowed"
            )
        if self.kinds[0] in ("join", "reduce"):
            raise InvalidValue(f"a flow cannot begin with a {self.kinds[0]}: nothing is before it")
        if self.kinds.count("reduce") > 1:
            raise InvalidValue("a flow has at most one reduce")
        self._check_joins()

    def _check_joins(self) -> None:
        is_open, has_joined_inside = False, False
        for number, kind in enumerate(self.kinds, 1):
            if kind == "spread":
                # A join closes the nearest spread before it.
                has_joined_inside = False
                is_open = True
            elif kind == "join" and not is_open:
                why = "closed already: joins do not nest" if has_joined_inside else "missing"
                raise InvalidValue(f"stage {number} is a join, and its spread is {why}")
            elif kind == "join":
                is_open, has_joined_inside = False, True
            elif kind == "reduce" and self._join_after(number):
                raise InvalidValue(f"stage {number} is a reduce between a spread and its join")

    def _join_after(self, number: int) -> bool:
        later = self.kinds[number:]
        return "join" in later and "spread" not in later[: later.index("join")]

    # Of one stage

    def feeds(self, stage: int) -> Feeds:
        """Return where results of the stage go."""
        if stage == len(self):
            return "end"
        kind = self.kinds[stage]
        if kind == "join":
            return "join"
        return "reduce" if kind == "reduce" else "parts"

    def join(self, stage: int) -> int:
        """Return the join of the spread that the stage is, or stands behind; 0 for none."""
        after = stage + 1 if self.kinds[stage - 1] == "join" else stage
        for number in range(after, len(self) + 1):
            kind = self.kinds[number - 1]
            if kind == "join":
                return number
            if kind == "reduce" or (kind == "spread" and number != stage):
                return 0
        return 0

    def is_grouped(self, stage: int) -> bool:
        """Return whether parts of the stage are children that a join waits for."""
        return (
            self.join(stage) > 0 and "spread" in self.kinds[: stage - 1] and self._in_group(stage)
        )

    def _in_group(self, stage: int) -> bool:
        if self.kinds[stage - 1] == "spread":
            return False
        for kind in reversed(self.kinds[: stage - 1]):
            if kind in ("spread", "join", "reduce"):
                return kind == "spread"
        return False

    def barrier(self, stage: int) -> int:
        """Return the reduce that comes after the stage; 0 for none."""
        later = self.kinds[stage:]
        return stage + 1 + later.index("reduce") if "reduce" in later else 0

    def closing_join(self, stage: int) -> int:
        """Return the join that handing over a part of the stage may complete; 0 for none."""
        if self.kinds[stage - 1] == "spread" or self.is_grouped(stage):
            return self.join(stage)
        return 0

    def facts(self, stage: int) -> str:
        """Return what the scripts need to know of the stage; ``lua/lib/flow.lua`` reads it."""
        grouped = int(self.is_grouped(stage))
        numbers = (stage, self.closing_join(stage), grouped, self.barrier(stage), len(self))
        return f"{self.kinds[stage - 1]} {self.feeds(stage)} {' '.join(map(str, numbers))}"
