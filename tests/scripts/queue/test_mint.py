"""mint.lua: tokens in the queue's lists, and requests in its indexes."""

import pytest

from streamq.errors import Damaged
from streamq.model import State
from streamq.protocol.keys import QueueKeys, token_list_of
from streamq.protocol.replies import Audit, MintMode, Register, Token, Tokens
from streamq.queue.taker import LEFT_OVER_S
from tests.conftest import FIRST_KIND
from tests.support.by_hand import RequestByHand


class TestTokens:
    def test_so_many_more_are_pushed(self, driver: RequestByHand) -> None:
        pushed = [
            driver.protocol.mint(driver.queue, driver.id, Tokens(2, "h:07")) for _ in range(2)
        ]

        assert pushed == [2, 2]
        assert driver.tokens(7) == [driver.id] * 4

    def test_requests_of_one_level_take_turns(self, driver: RequestByHand) -> None:
        for request_id in ("a", "b", "a"):
            driver.protocol.mint(driver.queue, request_id, Tokens(1, "h:07"))

        taken = [driver.protocol.take(driver.queue, ("h",), 1) for _ in range(3)]

        assert taken == [Token(name, "h", 7) for name in ("a", "b", "a")]

    def test_only_a_worker_with_the_handler_is_given_one(self, driver: RequestByHand) -> None:
        driver.protocol.mint(driver.queue, driver.id, Tokens(1, "h:07"))

        assert driver.protocol.take(driver.queue, ("g", "h0"), 0.01) is None
        assert driver.protocol.take(driver.queue, ("g", "h"), 1) == Token(driver.id, "h", 7)

    def test_best_level_is_taken_first(self, driver: RequestByHand) -> None:
        for level in (50, 99, 0):
            driver.protocol.mint(driver.queue, f"r{level}", Tokens(1, token_list_of("h", level)))

        taken = [driver.protocol.take(driver.queue, ("h",), 1) for _ in range(3)]

        assert taken == [Token(f"r{level}", "h", level) for level in (0, 50, 99)]

    def test_ensured_twice_are_pushed_once(self, driver: RequestByHand) -> None:
        pushed = [
            driver.protocol.mint(driver.queue, driver.id, Tokens(3, "h:07"), mode="ensure")
            for _ in range(2)
        ]

        assert pushed == [3, 0]
        assert driver.tokens(7) == [driver.id] * 3

    def test_ensured_are_those_missing_among_others(self, driver: RequestByHand) -> None:
        for request_id in ("other", driver.id, "other"):
            driver.protocol.mint(driver.queue, request_id, Tokens(2, "h:07"))

        pushed = driver.protocol.mint(driver.queue, driver.id, Tokens(5, "h:07"), mode="ensure")

        assert pushed == 3
        assert driver.tokens(7).count(driver.id) == 5

    @FIRST_KIND
    def test_long_list_is_read_through_now_and_then(
        self, driver: RequestByHand, queue_keys: QueueKeys
    ) -> None:
        driver.redis.lpush(queue_keys.tokens, *["other"] * 40_000)
        driver.load(3)
        audit = Audit(State.OPEN, driver.queue, Tokens(3), 0, 0, believed=3)

        times = 0
        for _ in range(300):
            times += driver.protocol.ensure(driver.id, audit) == 3
            driver.redis.lrem(queue_keys.tokens, 3, driver.id)

        assert 0 < times < 150

    def test_more_than_ensured_are_left(self, driver: RequestByHand) -> None:
        driver.protocol.mint(driver.queue, driver.id, Tokens(4, "h:07"))

        assert driver.protocol.mint(driver.queue, driver.id, Tokens(2, "h:07"), mode="ensure") == 0
        assert len(driver.tokens(7)) == 4

    @pytest.mark.parametrize(("weight", "left"), [(0, 8), (6, 6), (20, 12)])
    def test_a_look_drops_those_beyond_the_weight(
        self, driver: RequestByHand, weight: int, left: int
    ) -> None:
        driver.load(1)
        driver.protocol.mint(driver.queue, driver.id, Tokens(12, "h:50"))
        audit = Audit(State.OPEN, driver.queue, Tokens(1, "h:50"), 0, 0, weight=weight)

        driver.protocol.ensure(driver.id, audit)

        assert len(driver.tokens()) == left

    @pytest.mark.parametrize("mode", ["push", "ensure"])
    def test_none_are_none(self, driver: RequestByHand, mode: MintMode) -> None:
        assert driver.protocol.mint(driver.queue, driver.id, Tokens(0, "h:07"), mode=mode) == 0

        assert driver.tokens(7) == []

    def test_nothing_else_is_registered_with_them(
        self, driver: RequestByHand, queue_keys: QueueKeys
    ) -> None:
        driver.protocol.mint(driver.queue, driver.id, Tokens(1))

        assert driver.redis.exists(queue_keys.open) == 0
        assert driver.redis.exists(queue_keys.due) == 0


class TestLook:
    def test_moment_is_registered(self, driver: RequestByHand, queue_keys: QueueKeys) -> None:
        driver.protocol.push(driver.queue, driver.id, Tokens(look_ms=5_000))

        assert driver.redis.zscore(queue_keys.due, driver.id) == 5_000

    @pytest.mark.parametrize(("look_ms", "due"), [(4_000, 4_000), (6_000, 5_000)])
    def test_sooner_moment_counts(
        self, driver: RequestByHand, queue_keys: QueueKeys, look_ms: int, due: int
    ) -> None:
        driver.protocol.push(driver.queue, driver.id, Tokens(look_ms=5_000))

        driver.protocol.push(driver.queue, driver.id, Tokens(look_ms=look_ms))

        assert driver.redis.zscore(queue_keys.due, driver.id) == due


class TestRegister:
    @pytest.mark.parametrize("register", ["yes", "again"])
    def test_request_is_open_and_due_at_once(
        self, driver: RequestByHand, queue_keys: QueueKeys, register: Register
    ) -> None:
        driver.protocol.mint(driver.queue, driver.id, Tokens(), register=register)

        score = driver.redis.zscore(queue_keys.open, driver.id)
        assert score == driver.redis.zscore(queue_keys.due, driver.id)
        assert driver.protocol.tick(driver.queue).due == [(driver.id, score)]

    def test_score_is_the_first_submission(
        self, driver: RequestByHand, queue_keys: QueueKeys
    ) -> None:
        driver.redis.zadd(queue_keys.open, {driver.id: 17})
        driver.redis.zadd(queue_keys.due, {driver.id: 18})

        driver.protocol.mint(driver.queue, driver.id, Tokens(), register="yes")

        assert driver.redis.zscore(queue_keys.open, driver.id) == 17
        assert driver.redis.zscore(queue_keys.due, driver.id) == 18

    def test_redriven_request_gets_another_score(
        self, driver: RequestByHand, queue_keys: QueueKeys
    ) -> None:
        future = 10**14
        driver.redis.zadd(queue_keys.open, {driver.id: future})

        driver.protocol.mint(driver.queue, driver.id, Tokens(), register="again")

        assert driver.redis.zscore(queue_keys.open, driver.id) == future + 1

    def test_redriven_request_gets_the_time_as_its_score(
        self, driver: RequestByHand, queue_keys: QueueKeys
    ) -> None:
        driver.redis.zadd(queue_keys.open, {driver.id: 17})

        driver.protocol.mint(driver.queue, driver.id, Tokens(), register="again")

        assert driver.redis.zscore(queue_keys.open, driver.id) > 10**12

    def test_redriven_request_is_looked_at_when_its_tokens_are_dropped_no_more(
        self, driver: RequestByHand, queue_keys: QueueKeys
    ) -> None:
        driver.redis.zadd(queue_keys.due, {driver.id: 10**14})

        driver.protocol.mint(driver.queue, driver.id, Tokens(), register="again")

        due = driver.redis.zscore(queue_keys.due, driver.id)
        assert LEFT_OVER_S * 1e3 < due - driver.redis.zscore(queue_keys.open, driver.id) < 1_000

    @pytest.mark.parametrize("register", ["yes", "again"])
    def test_request_is_closed_no_more(
        self, driver: RequestByHand, queue_keys: QueueKeys, register: Register
    ) -> None:
        driver.redis.zadd(queue_keys.closed, {driver.id: 17})

        driver.protocol.mint(driver.queue, driver.id, Tokens(), register=register)

        assert driver.redis.zscore(queue_keys.closed, driver.id) is None


class TestDropped:
    def drop(self, driver: RequestByHand) -> int:
        return driver.protocol.mint(driver.queue, driver.id, Tokens(0, "h:07"), mode="drop")

    def push(self, driver: RequestByHand, queue: str, *ids: str) -> None:
        """Push tokens, the first to be taken first."""
        driver.redis.lpush(QueueKeys(queue, to="h:07").tokens, *ids)

    def test_are_those_of_all_requests_that_are_open_no_more(
        self, driver: RequestByHand, queue: str, queue_keys: QueueKeys
    ) -> None:
        driver.redis.zadd(queue_keys.open, {"a": 1, "b": 2})
        self.push(driver, queue, "gone", "a", driver.id, "b", "a", "gone", "b", driver.id)

        assert self.drop(driver) == 4

        assert driver.tokens(7) == ["b", "a", "b", "a"], "the order stays"
        assert self.drop(driver) == 0
        assert driver.tokens(7) == ["b", "a", "b", "a"]

    def test_request_that_no_index_knows_is_to_be_looked_at(
        self, driver: RequestByHand, queue: str, queue_keys: QueueKeys
    ) -> None:
        """It may live: a failover forgets that it was registered."""
        driver.load(1)
        driver.redis.zadd(queue_keys.open, {"a": 1})
        driver.redis.zadd(queue_keys.closed, {"ended": 1})
        driver.redis.zadd(queue_keys.due, {"known": 7})
        self.push(driver, queue, "a", "ended", "known", driver.id, driver.id)
        before = driver.now_ms()

        assert self.drop(driver) == 4

        due = dict(driver.redis.zrange(queue_keys.due, 0, -1, withscores=True))
        assert set(due) == {b"known", driver.id.encode()}
        assert due[b"known"] == 7
        assert before <= due[driver.id.encode()] <= driver.now_ms()

    def test_are_all_of_a_short_list(self, driver: RequestByHand, queue: str) -> None:
        self.push(driver, queue, *[driver.id] * 4_096)

        assert self.drop(driver) == 4_096

        assert driver.tokens(7) == []

    def test_of_a_long_list_are_those_that_are_taken_next(
        self, driver: RequestByHand, queue: str, queue_keys: QueueKeys
    ) -> None:
        driver.redis.zadd(queue_keys.open, {"a": 1})
        self.push(driver, queue, *[driver.id, "a"] * 5_000)

        taken = [self.drop(driver) for _ in range(3)]

        # The first 4,096 have as many of both. Then half of what is read was read before.
        assert taken == [2_048, 1_024, 512]
        left = driver.tokens(7)
        assert (left.count("a"), left.count(driver.id)) == (5_000, 5_000 - sum(taken))
        assert left[-3_584:] == ["a"] * 3_584

    def test_none_are_dropped_where_the_index_is_spoilt(
        self, driver: RequestByHand, queue: str, queue_keys: QueueKeys
    ) -> None:
        driver.redis.set(queue_keys.open, "no index")
        self.push(driver, queue, "a")

        with pytest.raises(Damaged):
            self.drop(driver)

        assert driver.tokens(7) == ["a"]


def test_to_ensure_takes_away_what_is_more_than_eight(driver: RequestByHand) -> None:
    for _ in range(2):
        driver.protocol.mint(driver.queue, driver.id, Tokens(6, "h:50"))

    driver.protocol.mint(driver.queue, driver.id, Tokens(3, "h:50"), mode="ensure")

    assert driver.tokens() == [driver.id] * 8


def test_count_that_was_spoilt_pushes_no_more_than_eight(driver: RequestByHand) -> None:
    driver.load(9, limit=9)
    driver.set_meta(out=-(10**6))

    audit = driver.protocol.resume(driver.id)[1]

    assert driver.protocol.mint(driver.queue, driver.id, audit) == 8
    assert driver.tokens() == [driver.id] * 8


def test_full_server_still_takes_it(driver: RequestByHand) -> None:
    with driver.full_server():
        assert driver.protocol.mint(driver.queue, driver.id, Tokens(2), register="again") == 2


class TestUse:
    def news(self, driver: RequestByHand, handler: str = "h") -> list[bytes]:
        found: list[bytes] = driver.redis.lrange(
            QueueKeys(driver.queue, to=f"{handler}:00").news, 0, -1
        )
        return found

    def age(self, driver: RequestByHand, queue_keys: QueueKeys, to: str, ms: int) -> None:
        """Let the list be in use for so long, and nobody be told any more."""
        driver.redis.zincrby(queue_keys.used, -ms, to)
        driver.redis.unlink(QueueKeys(driver.queue, to=to).news)

    def test_first_tokens_are_news_of_their_handler_for_every_process_that_may_wait(
        self, driver: RequestByHand, queue_keys: QueueKeys
    ) -> None:
        driver.protocol.mint(driver.queue, driver.id, Tokens(3, "h:07"))

        assert driver.redis.zrange(queue_keys.used, 0, -1) == [b"h:07"]
        assert self.news(driver) == [b"h:07"] * 1000
        assert self.news(driver, "g") == []
        assert 0 < driver.redis.pttl(QueueKeys(driver.queue, to="h:07").news) <= 30_000

    @pytest.mark.parametrize(("ms", "told"), [(25_000, 1), (31_000, 0)])
    def test_later_ones_bring_one_piece_until_every_process_knows(
        self, driver: RequestByHand, queue_keys: QueueKeys, ms: int, told: int
    ) -> None:
        driver.protocol.mint(driver.queue, driver.id, Tokens(1, "h:07"))
        self.age(driver, queue_keys, "h:07", ms)

        driver.protocol.mint(driver.queue, driver.id, Tokens(2, "h:07"))

        assert len(self.news(driver)) == told

    def test_tokens_that_come_fast_bring_no_piece_each(
        self, driver: RequestByHand, queue_keys: QueueKeys
    ) -> None:
        news = QueueKeys(driver.queue, to="h:07").news
        driver.protocol.mint(driver.queue, driver.id, Tokens(1, "h:07"))
        driver.redis.unlink(news)

        told = []
        for ago_ms in (0, 0, 300, 1_100, -100_000):
            driver.redis.zadd(queue_keys.used, {"h:told": -ago_ms}, incr=True, xx=True)
            driver.protocol.mint(driver.queue, driver.id, Tokens(1, "h:07"))
            told.append(driver.redis.llen(news))
            driver.redis.unlink(news)

        assert told == [1, 0, 0, 1, 1], "also when the clock went back"

    def test_looks_that_come_fast_bring_no_piece_each(
        self, driver: RequestByHand, queue_keys: QueueKeys
    ) -> None:
        news = QueueKeys(driver.queue, to="h:07").news
        driver.protocol.mint(driver.queue, driver.id, Tokens(1, "h:07"))

        told = []
        for _ in range(2):
            driver.redis.unlink(news)
            driver.protocol.mint(driver.queue, driver.id, Tokens(1, "h:07"), mode="ensure")
            told.append(driver.redis.llen(news))

        assert told == [1, 0]

    def test_moment_of_first_use_that_is_still_to_come_is_mended(
        self, driver: RequestByHand, queue_keys: QueueKeys
    ) -> None:
        """A clock went back. Else each token would bring news until that moment."""
        driver.protocol.mint(driver.queue, driver.id, Tokens(1, "h:07"))
        began = driver.redis.zscore(queue_keys.used, "h:07")
        driver.redis.zincrby(queue_keys.used, 10_000_000, "h:07")

        driver.protocol.mint(driver.queue, driver.id, Tokens(1, "h:07"))

        assert driver.redis.zscore(queue_keys.used, "h:07") < began + 60_000

    def test_list_of_another_type_keeps_no_other_from_being_forgotten(
        self, driver: RequestByHand, queue_keys: QueueKeys
    ) -> None:
        for to in ("h:07", "h:08"):
            driver.protocol.mint(driver.queue, driver.id, Tokens(1, to))
            driver.redis.unlink(QueueKeys(driver.queue, to=to).tokens)
        driver.redis.set(QueueKeys(driver.queue, to="h:07").tokens, "not ours")

        driver.protocol.forget_lists(driver.queue, 2**53)

        assert driver.redis.zscore(queue_keys.used, "h:08") is None

    def test_list_that_comes_into_use_is_told_of_whatever_was_told_before(
        self, driver: RequestByHand
    ) -> None:
        for to in ("h:07", "h:07", "h:08"):
            driver.redis.unlink(QueueKeys(driver.queue, to=to).news)
            driver.protocol.mint(driver.queue, driver.id, Tokens(1, to))

        assert set(self.news(driver)) == {b"h:08"}

    def test_news_that_no_process_takes_are_few(self, driver: RequestByHand) -> None:
        for number in range(20):
            driver.protocol.mint(driver.queue, f"r{number}", Tokens(8, f"h:{number:02d}"))

        assert len(self.news(driver)) == 1000

    def test_news_of_one_list_are_removed_when_they_were_heard(self, driver: RequestByHand) -> None:
        driver.protocol.mint(driver.queue, driver.id, Tokens(3, "h:07"))
        driver.redis.lpush(QueueKeys(driver.queue, to="h:07").news, "h:50")

        driver.protocol.heard(driver.queue, "h:07")

        assert self.news(driver) == [b"h:50"]
        assert driver.tokens(7) == [driver.id] * 3

    @pytest.mark.parametrize("count", [0, 2])
    def test_to_ensure_tells_again_of_what_is_there(
        self, driver: RequestByHand, queue_keys: QueueKeys, count: int
    ) -> None:
        driver.protocol.mint(driver.queue, driver.id, Tokens(2, "h:07"))
        driver.redis.unlink(queue_keys.used)
        driver.redis.unlink(QueueKeys(driver.queue, to="h:07").news)

        for _ in range(3):
            driver.protocol.mint(driver.queue, driver.id, Tokens(count, "h:07"), mode="ensure")

        assert b"h:07" in driver.redis.zrange(queue_keys.used, 0, -1)
        assert set(self.news(driver)) == {b"h:07"}

    def test_to_ensure_tells_again_whenever_it_is_asked(self, driver: RequestByHand) -> None:
        driver.protocol.mint(driver.queue, driver.id, Tokens(2, "h:07"))
        for _ in range(3):
            driver.redis.unlink(QueueKeys(driver.queue, to="h:07").news)
            driver.protocol.tell_again(driver.queue, "h:07")

            assert self.news(driver) == [b"h:07"]

    @pytest.mark.parametrize("mode", ["push", "ensure", "drop"])
    def test_no_token_is_no_news(
        self, driver: RequestByHand, queue_keys: QueueKeys, mode: MintMode
    ) -> None:
        driver.protocol.mint(driver.queue, driver.id, Tokens(0, "h:07"), mode=mode)

        assert driver.redis.exists(queue_keys.used) == 0
        assert self.news(driver) == []

    def test_old_and_empty_is_forgotten_and_news_when_it_comes_again(
        self, driver: RequestByHand, queue_keys: QueueKeys
    ) -> None:
        for to in ("h:07", "h:50", "g:50"):
            driver.protocol.mint(driver.queue, driver.id, Tokens(1, to))
        for to in ("h:07", "h:50"):
            self.age(driver, queue_keys, to, 60_000)
        driver.protocol.take(driver.queue, ("h",), 1, (7,))

        lately = driver.redis.zscore(queue_keys.used, "g:50")
        driver.protocol.forget_lists(driver.queue, int(lately) - 30_000)

        assert set(driver.redis.zrange(queue_keys.used, 0, -1)) == {b"h:50", b"g:50"}
        driver.protocol.mint(driver.queue, driver.id, Tokens(1, "h:07"))
        assert b"h:07" in self.news(driver)

    def test_word_of_when_was_told_is_forgotten_like_a_list(
        self, driver: RequestByHand, queue_keys: QueueKeys
    ) -> None:
        for _ in range(2):
            driver.protocol.mint(driver.queue, driver.id, Tokens(1, "h:07"))
            driver.redis.unlink(QueueKeys(driver.queue, to="h:07").news)
        assert driver.redis.zscore(queue_keys.used, "h:told")

        driver.protocol.forget_lists(driver.queue, 2**53)

        assert driver.redis.zrange(queue_keys.used, 0, -1) == [b"h:07"]

    @pytest.mark.parametrize("name", ["used", "news"])
    def test_key_of_another_type_keeps_no_token_back(
        self, driver: RequestByHand, name: str
    ) -> None:
        driver.redis.set(getattr(QueueKeys(driver.queue, to="h:07"), name), "not ours")

        assert driver.protocol.mint(driver.queue, driver.id, Tokens(2, "h:07")) == 2
        assert driver.tokens(7) == [driver.id] * 2
