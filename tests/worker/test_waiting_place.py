"""At which lists a process waits, and how it hears of one that comes into use."""

import re
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from streamq import Client, Connection, Damaged, Janitor, Protocol, ServerBusy
from streamq.model import News
from streamq.protocol.keys import QueueKeys, token_list_of
from streamq.protocol.replies import Token, Tokens
from streamq.queue import waiting_place
from streamq.queue.waiting_place import WaitingPlace
from tests.conftest import FIRST_KIND
from tests.support.by_hand import RequestByHand
from tests.support.simulated import make_due
from tests.support.waiting import allowed_s, wait_until

HANDLERS = ("h", "g")
LEVELS = tuple(range(100))


class Place(WaitingPlace):
    """A place with a connection of its own, that notes at which lists it waits."""

    def __init__(self, url: str, queue: str, levels: tuple[int, ...] = LEVELS) -> None:
        protocol = Protocol(Connection(url))
        super().__init__(protocol, queue, levels)
        self.waits: list[tuple[str, ...]] = []
        self.connection = protocol.connection
        pop = self.connection.pop

        def noted(lists: tuple[str, ...], block_s: float) -> Any:
            self.waits.append(tuple(name.partition("}:")[2] for name in lists))
            return pop(lists, block_s)

        self.connection.pop = noted  # type: ignore[method-assign]
        self._all_at = time.monotonic()


@pytest.fixture
def places(url: str, queue: str) -> Iterator[Callable[..., Place]]:
    made: list[Place] = []

    def make(levels: tuple[int, ...] = LEVELS) -> Place:
        made.append(Place(url, queue, levels))
        return made[-1]

    yield make
    for place in made:
        place.connection.close()


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(16) as threads:
        yield threads


def wait_there(
    place: Place, threads: ThreadPoolExecutor, block_s: float = 5
) -> "Future[Token | None]":
    """Begin a take, and return when the server has it."""
    taken = threads.submit(place.take, HANDLERS, block_s)

    def is_blocked() -> bool:
        for lane, beside in place.connection._blocked():
            if lane.number:
                line = beside.ask(("CLIENT", "LIST", "ID", lane.number), 5)
                return bool(re.search(rb" flags=\w*b", line))
        return False

    wait_until(is_blocked)
    return taken


class TestLists:
    def test_only_those_in_use_are_named(self, places: Any, driver: RequestByHand) -> None:
        for to in ("h:07", "g:50", "other:50"):
            driver.protocol.mint(driver.queue, driver.id, Tokens(1, to))
        place = places()

        taken = [place.take(HANDLERS, 1) for _ in range(2)]

        assert taken == [Token(driver.id, "h", 7), Token(driver.id, "g", 50)]
        assert set(place.waits[0]) == {"news:h", "news:g", "tokens:h:07", "tokens:g:50"}

    def test_best_level_comes_first_and_then_the_first_handler(
        self, places: Any, driver: RequestByHand
    ) -> None:
        for to in ("h:50", "g:50", "h:99", "g:00"):
            driver.protocol.mint(driver.queue, driver.id, Tokens(1, to))
        place = places()

        taken = [place.take(HANDLERS, 1) for _ in range(4)]

        order = [token_list_of(token.handler, token.level) for token in taken if token]
        assert order == ["g:00", "h:50", "g:50", "h:99"]

    def test_a_level_that_is_not_served_is_not_named(
        self, places: Any, driver: RequestByHand
    ) -> None:
        driver.protocol.mint(driver.queue, driver.id, Tokens(1, "h:07"))
        place = places()
        place._levels = (50,)

        assert place.take(("h",), 0.01) is None
        assert "tokens:h:07" not in place.waits[-1]

    def test_garbage_among_them_is_passed_over(
        self, places: Any, driver: RequestByHand, queue_keys: QueueKeys
    ) -> None:
        driver.redis.zadd(queue_keys.used, {b"h:\xff\xfe": 1, b"": 1, b"h:1": 1, b"h:050": 1})
        driver.protocol.mint(driver.queue, driver.id, Tokens(1, "h:07"))
        driver.redis.rpush(QueueKeys(driver.queue, to="h:07").news, b"\xff", b"nonsense")

        assert places().take(HANDLERS, 1) == Token(driver.id, "h", 7)

    def test_one_of_another_type_is_put_aside(
        self, places: Any, driver: RequestByHand, queue_keys: QueueKeys
    ) -> None:
        driver.redis.set(queue_keys.used, "not ours")
        place = places()

        assert driver.protocol.mint(driver.queue, driver.id, Tokens(1, "h:07")) == 1
        with pytest.raises(Exception, match="renamed"):
            place.take(HANDLERS, 0.01)
        driver.protocol.mint(driver.queue, driver.id, Tokens(1, "h:07"))

        assert place.take(HANDLERS, 1) == Token(driver.id, "h", 7)


class TestFirstUse:
    @FIRST_KIND
    def test_every_process_that_waits_is_told_at_once(
        self, places: Any, threads: ThreadPoolExecutor, driver: RequestByHand
    ) -> None:
        driver.protocol.mint(driver.queue, "former", Tokens(1, "h:50"))
        assert places().take(HANDLERS, 1)
        crowd = [places() for _ in range(6)]
        waiting = [wait_there(place, threads) for place in crowd]

        begun = time.monotonic()
        driver.protocol.mint(driver.queue, driver.id, Tokens(1, "h:07"))
        taken = wait_until(lambda: [each.result() for each in waiting if each.done()])

        assert taken == [Token(driver.id, "h", 7)]
        assert time.monotonic() - begun < allowed_s(1), "a tenth of a wait"
        wait_until(lambda: sum("tokens:h:07" in place.waits[-1] for place in crowd) == 6)

    def test_tokens_of_a_list_that_all_know_cost_one_take_each(
        self, places: Any, threads: ThreadPoolExecutor, driver: RequestByHand
    ) -> None:
        """News of each token would make it two, and a reading."""
        place = places()
        driver.protocol.mint(driver.queue, driver.id, Tokens(1, "h:07"))
        assert place.take(HANDLERS, 1)
        waiting = wait_there(place, threads)
        before = len(place.waits)

        for number in range(50):
            driver.protocol.mint(driver.queue, driver.id, Tokens(1, "h:07"))
            assert waiting.result(5) == Token(driver.id, "h", 7)
            if number < 49:
                waiting = wait_there(place, threads)

        took_s = time.monotonic() - place._read_at
        assert len(place.waits) - before <= 49 + took_s + 2, "a piece of news a second"

    def test_pieces_that_are_left_over_are_removed(
        self, places: Any, driver: RequestByHand
    ) -> None:
        driver.protocol.mint(driver.queue, driver.id, Tokens(2, "h:07"))
        place = places()

        assert [place.take(HANDLERS, 1) for _ in range(2)] == [Token(driver.id, "h", 7)] * 2
        assert len(place.waits) == 3, "one of them brought news"
        assert driver.redis.exists(QueueKeys(driver.queue, to="h:07").news) == 0

    def test_who_hears_of_a_known_list_learns_of_all_others(
        self, places: Any, driver: RequestByHand
    ) -> None:
        """While news of one list fill the place, others bring none of their own."""
        protocol, queue = driver.protocol, driver.queue
        protocol.mint(queue, "former", Tokens(1, "h:50"))
        place = places()
        place._used, place._read_at = frozenset({"h:50"}), time.monotonic() + 60
        protocol.mint(queue, driver.id, Tokens(1, "h:07"))
        assert driver.redis.lpos(QueueKeys(queue, to="h:07").news, "h:07") is None

        assert place.take(HANDLERS, 1) == Token(driver.id, "h", 7)

    def test_eight_tokens_wake_eight(
        self, places: Any, threads: ThreadPoolExecutor, driver: RequestByHand
    ) -> None:
        crowd = [wait_there(places(), threads) for _ in range(8)]

        driver.protocol.mint(driver.queue, driver.id, Tokens(8, "h:07"))

        assert [each.result(2) for each in crowd] == [Token(driver.id, "h", 7)] * 8

    def test_who_is_busy_takes_it_before_what_it_knew(
        self, places: Any, driver: RequestByHand
    ) -> None:
        place = places()
        driver.protocol.mint(driver.queue, "former", Tokens(4, "h:50"))
        assert place.take(HANDLERS, 1) == Token("former", "h", 50)
        driver.protocol.mint(driver.queue, driver.id, Tokens(1, "h:07"))

        assert place.take(HANDLERS, 1) == Token(driver.id, "h", 7)

    def test_between_reading_and_waiting_is_not_missed(
        self, places: Any, driver: RequestByHand, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        place = places()
        used_lists = place._protocol.used_lists

        def read(*words: Any) -> Any:
            found = used_lists(*words)
            if not place.waits:
                driver.protocol.mint(driver.queue, driver.id, Tokens(1, "h:07"))
            return found

        monkeypatch.setattr(place._protocol, "used_lists", read)
        begun = time.monotonic()

        assert place.take(HANDLERS, 5) == Token(driver.id, "h", 7)
        assert time.monotonic() - begun < allowed_s(2)

    def test_process_that_learned_of_a_list_tells_the_next_while_there_is_work(
        self, places: Any, threads: ThreadPoolExecutor, driver: RequestByHand
    ) -> None:
        """They were busy when the list came into use, and one removed the news of it."""
        protocol, queue = driver.protocol, driver.queue
        protocol.mint(queue, driver.id, Tokens(4, "h:07"))
        driver.redis.delete(QueueKeys(queue, to="h:07").news)
        crowd = [places() for _ in range(4)]
        for place in crowd:
            place._used, place._read_at = frozenset({"h:50"}), time.monotonic() + 60
        waiting = [wait_there(place, threads) for place in crowd]

        driver.redis.lpush(QueueKeys(queue, to="h:07").news, "h:07")

        assert [each.result(2) for each in waiting] == [Token(driver.id, "h", 7)] * 4
        assert driver.redis.exists(QueueKeys(queue, to="h:07").news) == 0, "and then no more"

    def test_process_that_was_cut_off_reads_before_it_waits_again(
        self, places: Any, driver: RequestByHand, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        place = places()
        assert place.take(HANDLERS, 0.01) is None
        with monkeypatch.context() as patch:

            def fail(*_: Any) -> Any:
                raise ServerBusy("it is not ready")

            patch.setattr(place.connection, "pop", fail)
            place._read_at = time.monotonic() + 60
            with pytest.raises(ServerBusy):
                place.take(HANDLERS, 0.01)
        driver.protocol.mint(driver.queue, driver.id, Tokens(1, "h:07"))
        driver.redis.delete(QueueKeys(driver.queue, to="h:07").news)

        assert place.take(HANDLERS, 1) == Token(driver.id, "h", 7)

    def test_process_that_waited_at_all_lists_reads_before_it_waits_again(
        self, places: Any, driver: RequestByHand
    ) -> None:
        place = places()
        place._all_at -= waiting_place.ALL_EVERY_S
        place._read_at = time.monotonic() + 60
        assert place.take(HANDLERS, 0.01) is None
        driver.protocol.mint(driver.queue, driver.id, Tokens(1, "h:07"))
        driver.redis.delete(QueueKeys(driver.queue, to="h:07").news)

        assert place.take(HANDLERS, 1) == Token(driver.id, "h", 7)

    def test_who_was_told_and_takes_another_token_tells_others(
        self, places: Any, threads: ThreadPoolExecutor, driver: RequestByHand
    ) -> None:
        """Else they would sleep beside a token."""
        protocol, queue = driver.protocol, driver.queue
        protocol.mint(queue, "former", Tokens(1, "h:50"))
        told, other = places(), places()
        told.take(HANDLERS, 1)
        told._read_at = time.monotonic() + 60
        protocol.mint(queue, driver.id, Tokens(1, "h:99"))
        protocol.mint(queue, "former", Tokens(1, "h:50"))
        news = QueueKeys(queue, to="h:50").news
        driver.redis.delete(news)
        driver.redis.lpush(news, "h:99")
        other._used, other._read_at = frozenset({"h:50"}), time.monotonic()

        assert told.take(HANDLERS, 1) == Token("former", "h", 50)

        assert threads.submit(other.take, HANDLERS, 5).result(2) == Token(driver.id, "h", 99)

    def test_news_of_a_token_that_is_gone_end_with_who_took_them(
        self, places: Any, driver: RequestByHand
    ) -> None:
        driver.protocol.mint(driver.queue, driver.id, Tokens(8, "h:07"))
        driver.redis.unlink(QueueKeys(driver.queue, to="h:07").tokens)
        place = places()

        assert place.take(HANDLERS, 0.2) is None
        assert driver.redis.exists(QueueKeys(driver.queue, to="h:07").news) == 0


class TestLost:
    def test_set_is_made_again_by_the_audit(
        self,
        places: Any,
        threads: ThreadPoolExecutor,
        driver: RequestByHand,
        client: Client,
        queue_keys: QueueKeys,
    ) -> None:
        request = client.submit([b"x"], handler="h", queue=driver.queue, level=7)
        news = QueueKeys(driver.queue, to="h:07").news
        driver.redis.unlink(queue_keys.used)
        driver.redis.unlink(news)
        waiting = wait_there(places(), threads)
        make_due(driver.protocol, driver.queue)

        Janitor(driver.protocol, driver.queue).sweep()

        assert waiting.result(2) == Token(request.id, "h", 7)
        assert driver.protocol.used_lists(driver.queue, HANDLERS) == {"h:07"}

    def test_tokens_of_earlier_versions_are_found_by_the_audit(
        self, places: Any, threads: ThreadPoolExecutor, driver: RequestByHand, client: Client
    ) -> None:
        """Their ``mint`` pushes and tells nobody."""
        request = client.submit([b"x"], handler="h", queue=driver.queue, level=7, delay="1h")
        waiting = wait_there(places(), threads)
        driver.redis.hset(driver.protocol.keys(request.id).meta, "due_ms", 0)
        driver.redis.hset(driver.protocol.keys(request.id).meta, "hold_ms", 0)
        driver.redis.lpush(QueueKeys(driver.queue, to="h:07").tokens, request.id)
        make_due(driver.protocol, driver.queue)

        Janitor(driver.protocol, driver.queue).sweep()

        assert waiting.result(2) == Token(request.id, "h", 7)

    def test_and_by_who_waits_at_all_lists_now_and_then(
        self, places: Any, driver: RequestByHand
    ) -> None:
        driver.redis.lpush(QueueKeys(driver.queue, to="h:07").tokens, driver.id)
        place = places()
        assert place.take(HANDLERS, 0.01) is None

        place._all_at -= waiting_place.ALL_EVERY_S
        assert place.take(HANDLERS, 1) == Token(driver.id, "h", 7)
        assert place.take(HANDLERS, 0.01) is None
        assert [len(wait) for wait in place.waits] == [2, 200, 2]

    def test_first_of_all_every_list_is_waited_at(self, url: str, queue: str) -> None:
        place = Place(url, queue)
        place._all_at = WaitingPlace(place._protocol, queue, LEVELS)._all_at

        assert place.take(HANDLERS, 0.01) is None
        assert len(place.waits[0]) == 200
        place.connection.close()

    def test_who_waits_reads_again_when_the_wait_is_over(
        self, places: Any, driver: RequestByHand
    ) -> None:
        place = places()
        assert place.take(HANDLERS, 0.01) is None
        driver.protocol.mint(driver.queue, driver.id, Tokens(1, "h:07"))
        driver.redis.unlink(QueueKeys(driver.queue, to="h:07").news)  # who was told is dead
        place._read_at = time.monotonic() + 60  # so that a slow machine does not read again now
        assert place.take(HANDLERS, 0.01) is None

        place._read_at = time.monotonic() - waiting_place.READ_EVERY_S

        assert place.take(HANDLERS, 1) == Token(driver.id, "h", 7)


def test_stop_ends_a_wait_that_news_began_anew(
    places: Any, threads: ThreadPoolExecutor, driver: RequestByHand
) -> None:
    place = places()
    waiting = wait_there(place, threads, block_s=20)
    driver.redis.lpush(QueueKeys(driver.queue, to="h:07").news, "h:07")
    wait_until(lambda: len(place.waits) == 2)
    ended = threading.Event()

    def wake() -> None:
        while not waiting.done():
            place.connection.wake()
            time.sleep(0.005)
        ended.set()

    threads.submit(wake)

    assert waiting.result(5) is None
    assert ended.wait(5)


def test_news_are_no_token(driver: RequestByHand) -> None:
    protocol, queue = driver.protocol, driver.queue
    protocol.mint(queue, driver.id, Tokens(1, "news:07"))

    found = [
        protocol.take_used(queue, ("news",), 1, LEVELS, frozenset({"news:07"})) for _ in range(2)
    ]
    driver.redis.unlink(QueueKeys(queue, to="news:07").news)
    found.append(protocol.take_used(queue, ("news",), 1, LEVELS, frozenset({"news:07"})))

    assert found == [News("news:07"), News("news:07"), Token(driver.id, "news", 7)]


class TestSomeLevels:
    """A pool with ``--levels`` does not take from every list, and news go to one process."""

    def test_news_are_left_to_those_who_serve_every_level(
        self, places: Any, threads: ThreadPoolExecutor, driver: RequestByHand
    ) -> None:
        urgent = [places(tuple(range(20))) for _ in range(3)]
        waiting = [wait_there(place, threads, block_s=3) for place in urgent]
        rest = wait_there(places(), threads, block_s=8)

        begun = time.monotonic()
        driver.protocol.mint(driver.queue, driver.id, Tokens(1, "h:50"))

        assert rest.result(5) == Token(driver.id, "h", 50)
        assert time.monotonic() - begun < allowed_s(2)
        assert [each.result(5) for each in waiting] == [None] * 3

    def test_their_own_lists_wake_them_whether_in_use_or_not(
        self, places: Any, threads: ThreadPoolExecutor, driver: RequestByHand
    ) -> None:
        place = places((7, 8))
        waiting = wait_there(place, threads)

        driver.protocol.mint(driver.queue, driver.id, Tokens(1, "h:08"))

        assert waiting.result(2) == Token(driver.id, "h", 8)
        assert place.waits == [("tokens:h:07", "tokens:g:07", "tokens:h:08", "tokens:g:08")]


class TestOutage:
    """A call that fails leaves everything as it was: the next take makes up for it."""

    def fail(self, *_: Any) -> Any:
        raise ServerBusy("it is not ready")

    def test_all_lists_are_waited_at_until_that_has_succeeded(
        self, places: Any, driver: RequestByHand, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        driver.redis.lpush(QueueKeys(driver.queue, to="h:07").tokens, driver.id)
        place = places()
        place._all_at = float("-inf")
        with monkeypatch.context() as patch:
            patch.setattr(place.connection, "pop", self.fail)
            for _ in range(2):
                with pytest.raises(ServerBusy):
                    place.take(HANDLERS, 0.01)

        assert place.take(HANDLERS, 0.01) == Token(driver.id, "h", 7)

    def test_lists_in_use_are_read_until_that_has_succeeded(
        self, places: Any, driver: RequestByHand, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        driver.protocol.mint(driver.queue, driver.id, Tokens(1, "h:07"))
        driver.redis.unlink(QueueKeys(driver.queue, to="h:07").news)
        place = places()
        with monkeypatch.context() as patch:
            patch.setattr(place._protocol, "used_lists", self.fail)
            with pytest.raises(ServerBusy):
                place.take(HANDLERS, 0.01)

        assert place.take(HANDLERS, 0.01) == Token(driver.id, "h", 7)

    def test_news_that_were_taken_are_not_forgotten(
        self, places: Any, driver: RequestByHand, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        place = places()
        assert place.take(HANDLERS, 0.01) is None
        driver.protocol.mint(driver.queue, driver.id, Tokens(1, "h:07"))
        with monkeypatch.context() as patch:
            patch.setattr(place._protocol, "used_lists", self.fail)
            with pytest.raises(ServerBusy):
                place.take(HANDLERS, 0.01)

        assert place.take(HANDLERS, 0.01) == Token(driver.id, "h", 7)

    @pytest.mark.parametrize("error", [ServerBusy("it is not ready"), Damaged("no")])
    def test_token_is_worth_more_than_telling_others(
        self, places: Any, driver: RequestByHand, monkeypatch: pytest.MonkeyPatch, error: Exception
    ) -> None:
        protocol, queue = driver.protocol, driver.queue
        protocol.mint(queue, "former", Tokens(2, "h:50"))
        place = places()
        place.take(HANDLERS, 1)
        place._read_at = time.monotonic() + 60
        protocol.mint(queue, driver.id, Tokens(1, "h:99"))
        news = QueueKeys(queue, to="h:99").news
        driver.redis.delete(news)
        driver.redis.lpush(news, "h:99")

        def fail(*_: Any) -> None:
            raise error

        with monkeypatch.context() as patch:
            patch.setattr(place._protocol, "tell_again", fail)
            assert place.take(HANDLERS, 1) == Token("former", "h", 50)

        protocol.mint(queue, "former", Tokens(1, "h:50"))
        driver.redis.delete(news)
        assert place.take(HANDLERS, 1) == Token("former", "h", 50)
        assert driver.redis.lrange(news, 0, -1) == [b"h:99"], "others are told with the next take"
