"""submit.lua: (absent) -> open, with all its parts."""

from typing import Any

import pytest

from streamq.errors import RequestExists, ServerFull
from streamq.protocol.keys import QueueKeys, token_list_of
from streamq.protocol.replies import Tokens
from tests.support.by_hand import RequestByHand, policy

ENTRIES = [b"1", b"1", b"2", b"1", b"3", b"1"]
#: What depends on the moment, on who asks for tokens, and what only a load has.
DIFFERS = {"created_ms", "now_ms", "out", "digest", "source"}


def submit(driver: RequestByHand, cursor: str = "c3", **changes: Any) -> Tokens:
    options = policy(driver.queue, **changes)
    return driver.protocol.submit(driver.id, options, lambda: (cursor, ENTRIES), is_soon=True)


def tokens(driver: RequestByHand, level: int = 50) -> list[bytes]:
    found: list[bytes] = driver.redis.lrange(
        QueueKeys(driver.queue, to=token_list_of("h", level)).tokens, 0, -1
    )
    return found


def test_makes_what_open_append_and_seal_make(driver: RequestByHand) -> None:
    other = RequestByHand(driver.protocol, driver.queue, driver.id + "o")
    submit(driver, level=7, limit=3, max_failures=2)
    other.load(3, level=7, limit=3, max_failures=2)

    mine, others = (
        {
            name: text
            for name, text in each.protocol.inspect(each.id).fields.items()
            if name not in DIFFERS
        }
        for each in (driver, other)
    )
    assert mine == others
    assert driver.existing_keys() == other.existing_keys()
    _, grant = driver.claim(most=5)
    _, wanted = other.claim(most=5)
    assert grant.parts == wanted.parts


def test_one_token_is_pushed_and_its_claim_asks_for_more(driver: RequestByHand) -> None:
    # The first one may find that the server does not have the script, and push again.
    submit(RequestByHand(driver.protocol, driver.queue, driver.id + "o"), level=8)

    pushed = submit(driver, level=7, limit=2)

    assert pushed == Tokens(1, "h:07")
    assert tokens(driver, 7) == [driver.id.encode()]
    _, grant = driver.claim(level=7)
    assert grant.tokens.count == 1


def test_twice_changes_nothing(driver: RequestByHand) -> None:
    submit(driver)
    before = driver.snapshot()

    submit(driver)

    assert driver.snapshot() == before


@pytest.mark.parametrize("changes", [{"limit": 3}, {"cursor": "other"}])
def test_another_submission_is_refused_and_changes_nothing(
    driver: RequestByHand, changes: dict[str, Any]
) -> None:
    submit(driver)
    before = driver.snapshot()

    with pytest.raises(RequestExists, match="taken by another submission"):
        submit(driver, **changes)

    assert driver.snapshot() == before


def test_with_a_delay_it_is_looked_at_when_that_is_over(driver: RequestByHand) -> None:
    pushed = submit(driver, delay_ms=60_000)

    hold_ms = int(driver.meta("hold_ms"))
    assert 0 < hold_ms - driver.now_ms() <= 60_000
    assert (pushed.count, tokens(driver)) == (0, [])
    assert driver.claim()[1].word == "held"
    # The registration is due at once; the look after that one is at the end of the delay.
    assert driver.protocol.audit(driver.id).tokens.look_ms == hold_ms


def test_full_server_refuses_and_nothing_is_there(driver: RequestByHand) -> None:
    with driver.full_server(), pytest.raises(ServerFull):
        submit(driver)

    assert driver.existing_keys() == set()


def test_any_number_of_parts(driver: RequestByHand) -> None:
    entries = [value for number in range(10_000) for value in (b"%d" % number, b"1")]

    driver.protocol.submit(driver.id, policy(driver.queue), lambda: ("c", entries))

    assert driver.meta("total") == "10000"
    _, grant = driver.claim(most=2)
    assert [part.payload for part in grant.parts] == [b"0", b"1"]
