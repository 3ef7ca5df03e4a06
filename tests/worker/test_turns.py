"""Which handler's list a process takes from: requests of one level take turns."""

from collections import Counter, deque

import pytest

from streamq.queue.turns import Turns

Lists = dict[str, deque[str]]


def lists(**requests: int) -> Lists:
    """A list of tokens for each handler, of so many requests; one token of each."""
    return {name: deque(f"{name}{n}" for n in range(count)) for name, count in requests.items()}


def take(turns: Turns, tokens: Lists, times: int) -> list[str]:
    """Take as a process does, and give each token back as a request with more to do does."""
    taken = []
    for _ in range(times):
        handler = next((name for name in turns.order() if tokens[name]), None)
        if handler is None:
            turns.took_nothing()
            continue
        request_id = tokens[handler].popleft()
        tokens[handler].append(request_id)
        turns.took(handler, request_id)
        taken.append(request_id)
    return taken


def test_one_handler_is_always_the_order() -> None:
    turns = Turns(("a",))

    assert take(turns, lists(a=2), 4) == ["a0", "a1", "a0", "a1"]
    assert turns.order() == ("a",)


@pytest.mark.parametrize(
    "requests",
    [
        {"a": 1, "b": 1, "c": 0},
        {"a": 3, "b": 1, "c": 0},
        {"a": 1, "b": 3, "c": 20},
        {"a": 40, "b": 1, "c": 0, "d": 0, "e": 0, "f": 2, "g": 0},
    ],
)
def test_requests_take_turns_whatever_their_handlers(requests: dict[str, int]) -> None:
    turns, tokens = Turns(tuple(requests)), lists(**requests)
    total = sum(requests.values())
    take(turns, tokens, 20 * total)

    seen = Counter(take(turns, tokens, 100 * total))

    assert len(seen) == total
    assert max(seen.values()) <= 1.1 * min(seen.values()), seen


def test_many_requests_do_not_starve_a_handler_that_has_one() -> None:
    turns, tokens = Turns(("a", "b")), lists(a=10_000, b=0)
    take(turns, tokens, 1_000)

    tokens["b"].append("b0")

    assert "b0" in take(turns, tokens, 1)
    assert "b0" in take(turns, tokens, 100)


def test_handlers_with_very_many_requests_share_evenly() -> None:
    turns, tokens = Turns(("a", "b")), lists(a=10_000, b=10_000)

    seen = Counter(request_id[0] for request_id in take(turns, tokens, 4_000))

    assert abs(seen["a"] - seen["b"]) < 200, seen


def test_what_has_ended_is_forgotten() -> None:
    turns, tokens = Turns(("a", "b")), lists(a=60, b=1)
    take(turns, tokens, 200)
    while len(tokens["a"]) > 1:
        tokens["a"].pop()
    take(turns, tokens, 130)

    seen = Counter(take(turns, tokens, 100))

    assert max(seen.values()) <= 60, seen


def test_a_handler_without_a_token_costs_the_others_no_turn() -> None:
    turns, tokens = Turns(("a", "b", "c")), lists(a=1, b=1, c=1)
    take(turns, tokens, 30)
    tokens["b"].clear()
    take(turns, tokens, 2)

    assert Counter(take(turns, tokens, 10)) == {"a0": 5, "c0": 5}


def test_after_nothing_came_all_begin_anew() -> None:
    turns, tokens = Turns(("a", "b")), lists(a=1, b=1)
    take(turns, tokens, 5)

    turns.took_nothing()

    assert turns.order() == ("a", "b")
