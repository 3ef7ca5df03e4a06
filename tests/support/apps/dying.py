"""A flow with a join whose worker kills itself at chosen points of the join, so often at each.

``STREAMQ_TEST_KILLS`` is how often, ``STREAMQ_TEST_STAGES`` at which stages, and
``STREAMQ_TEST_POINTS`` a folder for what was done. ``STREAMQ_TEST_WHOLE`` has the parent of the
pool die, too.
"""

import os
import random
import signal
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

from streamq import App, Protocol, Spread
from streamq.protocol.part_protocol import PartProtocol
from streamq.protocol.queue_protocol import QueueProtocol

app = App()
KILLS = int(os.environ["STREAMQ_TEST_KILLS"])
STAGES = os.environ["STREAMQ_TEST_STAGES"].split(",")
FOLDER = Path(os.environ["STREAMQ_TEST_POINTS"])
IS_WHOLE = bool(os.environ.get("STREAMQ_TEST_WHOLE"))


def die_at(point: str) -> None:
    """Kill this process, unless so many were killed here already.

    If there are to be many, only now and then: a pool pauses after processes that did nothing.
    """
    if KILLS > 9 and random.random() > 0.3:
        return
    for number in range(KILLS if point.rpartition(" ")[2] in STAGES else 0):
        try:
            os.close(os.open(FOLDER / f"{point}.{number}", os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            continue
        if IS_WHOLE:
            os.kill(os.getppid(), signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)


def stage_of(place: str) -> str:
    """`join` for the place of the third stage."""
    return {"": "spread", "2": "map", "3": "join"}[place.partition("/")[2]]


def deadly(kind: type, name: str, is_at_the_join_only: bool = False) -> None:
    """Have a method kill before and after it talks to the server, by the stage it is called for."""
    method: Callable[..., Any] = getattr(kind, name)

    @wraps(method)
    def dying(self: Any, *words: Any, **others: Any) -> Any:
        stage = stage_of(words[1] if name == "push" else words[0])
        if is_at_the_join_only and stage != "join":
            return method(self, *words, **others)
        die_at(f"before {name} of a {stage}")
        found = method(self, *words, **others)
        die_at(f"after {name} of a {stage}")
        return found

    setattr(kind, name, dying)


deadly(PartProtocol, "claim")
deadly(PartProtocol, "pass_on")
deadly(Protocol, "inbox_of_group", is_at_the_join_only=True)
deadly(QueueProtocol, "push")


@app.map
def split(given: list[int]) -> Spread:
    """Make so many children as the second number says."""
    number, children = given
    die_at("in the handler of a spread")
    return Spread([[number, child] for child in range(children)], keep=number)


@app.map
def work(given: list[int]) -> int:
    """Return a number that tells which child of which input it was."""
    die_at("in the handler of a map")
    return given[0] * 1_000 + given[1]


@app.handler
def merge(kept: int, children: list[int]) -> list[int]:
    """Return the input, and its children as they came."""
    die_at("in the handler of a join")
    return [kept, *children]
