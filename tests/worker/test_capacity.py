"""How much a pool runs at once, and when it ends by itself."""

from typing import Any

import pytest

from streamq import Client
from streamq.model import State
from tests.conftest import ANY_KIND, ONE_KIND
from tests.support.fleet import Fleet, most_at_once
from tests.support.waiting import wait_until
from tests.worker.common import TWO_KINDS

pytestmark = pytest.mark.commands


class TestCapacity:
    @ANY_KIND
    def test_levels_keep_capacity_for_the_better_ones(self, fleet: Fleet, submit: Any) -> None:
        fleet.ready("--levels", "0-19")

        low = submit([0.0], "nap", level=50)
        high = submit([0.0], "nap", level=10)

        assert high.wait(10).parts.done == 1
        assert low.status().parts.done == 0

    def test_burst_ends_when_nothing_is_left(self, fleet: Fleet, submit: Any) -> None:
        request = submit([0.01] * 20, "nap")

        pool = fleet.start("--burst", "-c", "4")

        assert pool.wait(20) == 0
        assert request.status().state is State.DONE

    @ANY_KIND
    def test_max_idle_ends_the_pool(self, fleet: Fleet) -> None:
        pool = fleet.ready("--max-idle", "1s")

        assert pool.wait(10) == 0

    @ANY_KIND
    def test_max_parts_replaces_the_process(self, fleet: Fleet, submit: Any) -> None:
        fleet.ready("--max-parts", "5")

        request = submit([0.05] * 60, "nap")

        assert request.wait(30).parts.done == 60
        assert len({note.pid for note in fleet.notes("S")}) > 1

    @ONE_KIND
    def test_a_thousand_coroutines_run_at_once_on_few_connections(
        self, fleet: Fleet, submit: Any, client: Client
    ) -> None:
        fleet.ready("-c", "1000")

        request = submit([6.0] * 1000, "nap_async", limit=1000)

        wait_until(lambda: request.status().parts.running == 1000, 20)
        connections = client._protocol.connection.redis.info("clients")["connected_clients"]
        assert request.wait(30).parts.done == 1000
        assert most_at_once(fleet.notes()) == 1000
        assert connections < 60

    @TWO_KINDS
    def test_limit_holds_over_processes_and_is_reached(self, fleet: Fleet, submit: Any) -> None:
        fleet.ready("-p", "3", "-c", "8")
        fleet.ready("-p", "1", "-c", "8")

        sizes = {1: 10, 3: 30, 17: 170}
        requests = {
            limit: submit([0.1] * size, "nap", limit=limit) for limit, size in sizes.items()
        }

        for limit, request in requests.items():
            request.wait(60)
            assert most_at_once(fleet.notes(request=request.id)) == limit
