"""What runs of a request that is cancelled is stopped."""

from typing import Any

import pytest

from tests.conftest import ANY_KIND
from tests.support.fleet import Fleet
from tests.support.waiting import is_alive, wait_until

pytestmark = pytest.mark.commands


class TestCancel:
    def test_coroutine_is_cancelled(self, fleet: Fleet, submit: Any) -> None:
        fleet.ready("-c", "2")
        request = submit([60.0] * 4, "nap_async")
        wait_until(lambda: len(fleet.notes("S")) == 2)

        request.cancel()

        wait_until(lambda: len(fleet.notes("C")) == 2)
        assert len(fleet.notes("S")) == 2

    @ANY_KIND
    def test_function_sees_should_stop(self, fleet: Fleet, submit: Any) -> None:
        fleet.ready()
        request = submit([1], "until_told")
        wait_until(lambda: fleet.notes("S"))

        request.cancel()

        wait_until(lambda: fleet.notes("C"))

    @ANY_KIND
    def test_function_that_does_not_listen_is_stopped(self, fleet: Fleet, submit: Any) -> None:
        fleet.ready("--cancel-grace", "300ms")
        request = submit([60.0], "deaf")
        (note,) = wait_until(lambda: fleet.notes("S"))

        request.cancel()

        wait_until(lambda: not is_alive(note.pid))
        assert submit([0.0], "nap").wait(10).parts.done == 1
