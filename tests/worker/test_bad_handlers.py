"""Handlers that crash, fork, hang or end what they run in: the pool survives."""

import secrets
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from streamq import Client
from tests.conftest import ANY_KIND, KINDS
from tests.support.fleet import Fleet
from tests.support.waiting import allowed_s, is_alive, wait_until
from tests.worker.common import values

pytestmark = pytest.mark.commands


@pytest.fixture(scope="module")
def survivor(
    urls: Callable[[str], str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Fleet]:
    """One pool for all the handlers that it has to survive, one after another."""
    queue = f"q{secrets.token_hex(6)}"
    fleet = Fleet(urls(KINDS[-1]), queue, tmp_path_factory.mktemp("survivor"))
    fleet.ready()
    yield fleet
    fleet.end()


class TestBadHandlers:
    @ANY_KIND
    @pytest.mark.parametrize(
        ("what", "error"),
        [
            ("exit", "RuntimeError"),
            ("unencodable", "EncodeError"),
            ("large", "ResultTooLarge"),
            ("die", "Poison"),
            ("killed", "Poison"),
            ("leaves", "Poison"),
            ("half", "EncodeError"),
            ("unspeakable", "Unspeakable"),
            ("garbled", "ValueError"),
            ("cancelled", "RuntimeError"),
        ],
    )
    def test_part_is_accounted_for_and_the_pool_survives(
        self, survivor: Fleet, client: Client, what: str, error: str
    ) -> None:
        request = client.submit([what, "fine"], handler="odd", queue=survivor.queue)

        assert request.wait(20).parts.failed == 1
        assert [failure.error for failure in request.errors()] == [error]
        assert values(request) == ["fine"]
        assert survivor.is_running()

    @ANY_KIND
    @pytest.mark.parametrize("what", ["close_stdin", "print"])
    def test_part_succeeds_all_the_same(self, survivor: Fleet, client: Client, what: str) -> None:
        request = client.submit([what, "fine"], handler="odd", queue=survivor.queue)

        assert request.wait(10).parts.done == 2

    @ANY_KIND
    def test_handler_that_forks_makes_no_second_worker(self, fleet: Fleet, submit: Any) -> None:
        pool = fleet.ready()

        request = submit(["fork", "fine"], "odd")

        assert request.wait(10).parts.done == 2
        assert values(request) == ["parent", "fine"]
        wait_until(lambda: fleet.notes("F"))
        forked = fleet.notes("F")[0].pid
        wait_until(lambda: not is_alive(forked))
        assert len(fleet.children(pool)) == 1

    @ANY_KIND
    def test_coroutine_cannot_end_its_loop(self, fleet: Fleet, submit: Any) -> None:
        pool = fleet.ready("-c", "4")
        before = fleet.children(pool)

        request = submit(["exit", "cancel", "fine"], "odd_async")

        assert request.wait(20).parts.failed == 2
        assert values(request) == ["fine"]
        assert fleet.children(pool) == before

    @ANY_KIND
    def test_process_without_its_loop_is_replaced(self, fleet: Fleet, submit: Any) -> None:
        fleet.ready("-c", "4")

        request = submit(["exit beside", "fine"], "odd_async")

        assert request.wait(20).parts.failed == 1
        assert [failure.error for failure in request.errors()] == ["Poison"]
        assert values(request) == ["fine"]

    @ANY_KIND
    def test_coroutine_that_forks_makes_no_second_worker(self, fleet: Fleet, submit: Any) -> None:
        fleet.ready("-c", "4")

        request = submit(["fork"] * 8 + ["fine"], "odd_async")

        assert request.wait(20).parts.done == 9
        assert values(request) == ["parent"] * 8 + ["fine"]

    @ANY_KIND
    def test_part_is_failed_though_nothing_can_be_logged(self, fleet: Fleet, submit: Any) -> None:
        fleet.ready()

        request = submit(["close_stderr", "exit", "fine"], "odd", limit=1)

        assert request.wait(20).parts.failed == 1
        assert values(request) == ["closed", "fine"]

    @ANY_KIND
    def test_results_that_take_long_to_send_leak_no_lease(self, fleet: Fleet, submit: Any) -> None:
        fleet.ready("--lease", "60s")

        request = submit([3_000_000] * 30, "big", limit=1)

        assert request.wait(40).parts.done == 30

    @ANY_KIND
    def test_programs_of_handlers_can_be_stopped(self, fleet: Fleet, submit: Any) -> None:
        fleet.ready()

        (took,) = values(submit([1], "stops_a_program"))

        assert took < allowed_s(2)

    @ANY_KIND
    def test_id_used_again_for_another_handler_runs_that(
        self, fleet: Fleet, submit: Any, request_id: str
    ) -> None:
        fleet.ready()
        first = submit(["aB"], "shout", id=request_id)
        assert values(first) == ["AB"]
        first.purge()

        again = submit(["aB"], "low", id=request_id)

        assert values(again) == ["ab"]
