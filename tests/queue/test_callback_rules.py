"""Callbacks with one of the rules K1 to K4 taken out: each is there for a reason.

With the rules, the same stories hold. What else they promise is in ``test_callbacks.py``.
"""

import secrets
from collections.abc import Callable
from contextlib import nullcontext, suppress

import pytest

from streamq import Client, Protocol, Request, RequestOpen, RequestUnknown
from streamq.errors import SubmissionLate
from streamq.model import Callback
from streamq.queue import starting_callbacks
from streamq.queue.starting_callbacks import FENCE_MS
from tests.flows.rules import scripts_without
from tests.support.by_hand import RequestByHand
from tests.support.simulated import Worker

Story = Callable[["Scene"], None]


class Scene:
    """A request that has ended and owes one callback, ``then``."""

    def __init__(self, client: Client, queue: str, request_id: str, worker: Worker) -> None:
        self.worker, self.queue = worker, queue
        self.parent = client.submit([b"x"], handler="h", queue=queue, id=request_id, then="h")
        self.protocol: Protocol = self.parent.protocol
        by_hand = RequestByHand(self.protocol, queue, request_id)
        holder, _ = by_hand.claim(1)
        by_hand.finish(holder, [1])
        self.ran = 0

    def run(self) -> None:
        """Workers and janitors do what there is to do."""
        self.ran += len(self.worker.drain())

    def read(self) -> "Debt":
        """A janitor reads the debt, and goes no further."""
        return Debt(self.protocol, self.parent)

    def purge(self) -> None:
        """Somebody purges the callback, as soon as that is allowed."""
        with suppress(RequestUnknown):
            Request(self.protocol, f"{self.parent.id}.then").purge()


class Debt:
    """A debt as a janitor has read it."""

    def __init__(self, protocol: Protocol, parent: Request) -> None:
        self._protocol = protocol
        self.found = protocol.inspect(parent.id)

    def start(self) -> None:
        starting_callbacks._start_callback(self._protocol, self.found, self.found.calls[0], 0)

    def strike(self) -> None:
        self._protocol.settle(self.found.id, self.found.count("created_ms"), 0)


def two_find_the_debt(scene: Scene) -> None:
    """K1: it has the same id, whoever starts it."""
    debts = scene.read(), scene.read()
    for debt in debts:
        debt.start()
    for debt in debts:
        debt.strike()
    scene.run()
    assert scene.ran == 1


def one_dies(scene: Scene) -> None:
    """K2: it dies in the middle, and the next look finds what it left."""
    steps = starting_callbacks.settle_callbacks
    protocol = Protocol(scene.protocol.connection)

    def die(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    protocol.submit = die  # type: ignore[method-assign, assignment]
    with suppress(KeyboardInterrupt):
        steps(protocol, scene.parent.id)
    scene.run()
    assert scene.ran == 1


def one_sleeps(scene: Scene) -> None:
    """K3: it sleeps after reading; meanwhile the callback is started, runs and is forgotten."""
    debt = scene.read()
    scene.run()
    scene.protocol.connection.redis.unlink(
        *scene.protocol.keys(f"{scene.parent.id}.then").all().values()
    )
    debt.found.fields["now_ms"] = str(debt.found.count("now_ms") - FENCE_MS - 1_000)
    with suppress(SubmissionLate):
        debt.start()
    scene.run()
    assert scene.ran == 1


def one_is_second(scene: Scene) -> None:
    """K4: it comes between the callback's end and the striking of the debt."""
    first, second = scene.read(), scene.read()
    first.start()
    scene.run()
    with suppress(RequestOpen):
        scene.purge()
    second.start()
    scene.run()
    assert scene.ran == 1


def struck_first(protocol: Protocol, request_id: str) -> None:
    """What ``settle`` does, but it strikes the debt before the callback is there."""
    found = protocol.inspect(request_id)
    if found.is_owed:
        protocol.settle(request_id, found.count("created_ms"), 0)
        starting_callbacks._start_callback(protocol, found, found.calls[0], 0)


STORIES: dict[str, Story] = {
    "K1 derived": two_find_the_debt,
    "K2 paid last": one_dies,
    "K3 fence": one_sleeps,
    "K4 outlive": one_is_second,
}


@pytest.fixture
def scene(client: Client, queue: str, request_id: str, worker: Worker) -> Scene:
    return Scene(client, queue, request_id, worker)


@pytest.mark.parametrize("rule", STORIES)
def test_with_the_rule_it_runs_once(rule: str, scene: Scene) -> None:
    STORIES[rule](scene)


@pytest.mark.parametrize("rule", STORIES)
def test_without_the_rule_it_does_not(
    rule: str, scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    if rule == "K1 derived":
        monkeypatch.setattr(
            Callback, "id_of", lambda _, parent, __: f"{parent}.{secrets.token_hex(4)}"
        )
    elif rule == "K2 paid last":
        monkeypatch.setattr(starting_callbacks, "settle_callbacks", struck_first)
    is_cut = rule[:2] in ("K3", "K4")
    with scripts_without(rule) if is_cut else nullcontext(), pytest.raises(AssertionError):
        STORIES[rule](scene)
