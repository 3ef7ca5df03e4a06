"""Forgetting a request before its time."""

from typing import Any

import pytest

from streamq import (
    Client,
    Protocol,
    Request,
    RequestOpen,
    RequestUnknown,
    State,
)
from tests.support.by_hand import RequestByHand
from tests.support.simulated import Worker, indexes, make_due, tokens, wait_for_keys_to_go
from tests.support.waiting import wait_until


class TestPurge:
    @pytest.mark.parametrize("is_closed", [False, True])
    def test_leaves_nothing_and_the_id_is_free(
        self,
        client: Client,
        request_: Request,
        protocol: Protocol,
        queue: str,
        worker: Worker,
        is_closed: bool,
    ) -> None:
        request_.cancel()
        if is_closed:
            worker.drain()

        request_.purge()

        wait_for_keys_to_go(protocol, request_.id)
        assert indexes(protocol, queue, request_.id) == set()
        with pytest.raises(RequestUnknown):
            request_.status()
        assert client.list(queue, ended=True) == []
        again = client.submit([b"other"], handler="h2", queue=queue, id=request_.id)
        assert again.status().parts.total == 1

    def test_of_a_live_request_is_refused_and_changes_nothing(
        self, request_: Request, driver: RequestByHand, protocol: Protocol, queue: str
    ) -> None:
        before = driver.snapshot()

        with pytest.raises(RequestOpen, match="is open"):
            request_.purge()

        assert driver.snapshot() == before
        assert indexes(protocol, queue, request_.id) == {"open", "due"}

    def test_one_registered_anew_meanwhile_stays_in_the_index(
        self, url: str, client: Client, request_: Request, protocol: Protocol, queue: str
    ) -> None:
        class Slow(Protocol):
            def close(self, *args: Any) -> bool:
                client.submit([b"new"], handler="h", queue=queue, id=request_.id)
                return super().close(*args)

        request_.cancel()

        Request(Slow(protocol.connection), request_.id).purge()

        assert client.get(request_.id).status().parts.total == 1
        assert indexes(protocol, queue, request_.id) == {"open", "due"}

    @pytest.mark.parametrize("keep", ["1ms", 0, 0.001])
    def test_comes_by_itself_after_the_retention(
        self, client: Client, protocol: Protocol, queue: str, worker: Worker, keep: str | float
    ) -> None:
        request = client.submit([b"a", b"b"], handler="h", queue=queue, keep=keep)
        while worker.step():
            pass
        assert request.wait(timeout=5).state is State.DONE

        def is_swept() -> bool:
            worker.sweep()
            return not indexes(protocol, queue, request.id)

        wait_until(is_swept)

        wait_for_keys_to_go(protocol, request.id)
        assert tokens(protocol, queue) == []
        with pytest.raises(RequestUnknown):
            request.wait(timeout=5)

    def test_does_not_come_before(self, done: Request, protocol: Protocol, queue: str) -> None:
        make_due(protocol, queue)
        Worker(protocol, queue).drain()

        assert done.status().parts.done == 5
        assert indexes(protocol, queue, done.id) == {"closed"}
