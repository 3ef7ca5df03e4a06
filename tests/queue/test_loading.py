"""Parts go into a request behind those that are there, and the tokens for them into its queue."""

from contextlib import closing

import pytest

from streamq import Protocol
from streamq.errors import LoadGap, RequestExists, RequestUnknown
from streamq.queue.loading import Loading
from tests.support.by_hand import RequestByHand, policy

#: Two parts of one record each.
TWO = [b"a", b"1", b"b", b"1"]


@pytest.fixture
def loading(protocol: Protocol, driver: RequestByHand) -> Loading:
    return Loading(protocol, driver.id, policy(driver.queue))


def is_registered(driver: RequestByHand) -> bool:
    return driver.protocol.registered(driver.queue, driver.id) is not None


class TestOpen:
    def test_registers_the_request(self, loading: Loading, driver: RequestByHand) -> None:
        assert loading.open("d").is_new
        assert is_registered(driver)

    def test_goes_on_behind_the_parts_that_are_there(
        self, protocol: Protocol, loading: Loading, driver: RequestByHand
    ) -> None:
        loading.open("d")
        loading.append(TWO, "", "c2", 2)
        again = Loading(protocol, driver.id, policy(driver.queue))

        opened = again.open("d")

        assert (opened.is_new, opened.cursor, again.parts) == (False, "c2", 2)
        assert again.append(TWO, "c2", "c4", 2) == (4, "c4")

    def test_one_refused_leaves_no_trace_in_its_own_queue(
        self, protocol: Protocol, loading: Loading, driver: RequestByHand
    ) -> None:
        loading.open("d")
        other = Loading(protocol, driver.id, policy(f"{driver.queue}-other"))

        with pytest.raises(RequestExists):
            other.open("another")

        assert protocol.registered(f"{driver.queue}-other", driver.id) is None
        assert is_registered(driver)


class TestAppend:
    def test_pushes_the_tokens(self, loading: Loading, driver: RequestByHand) -> None:
        loading.open("d")
        assert driver.tokens() == []

        loading.append(TWO, "", "c2", 2)

        assert driver.tokens() != []

    def test_ahead_pushes_the_tokens_when_the_parts_are_there(
        self, loading: Loading, driver: RequestByHand
    ) -> None:
        loading.open("d")
        with closing(loading):
            loading.append_ahead(TWO, "", "c2", 2)
            loading.append_ahead(TWO, "c2", "c4", 2)
            loading.wait()

        assert driver.tokens() != []
        assert driver.protocol.inspect(driver.id).count("total") == loading.parts == 4

    def test_parts_of_another_process_are_passed_over(
        self, protocol: Protocol, loading: Loading, driver: RequestByHand
    ) -> None:
        loading.open("d")
        rival = Loading(protocol, driver.id, policy(driver.queue))
        rival.open("d")
        rival.append(TWO + TWO + TWO, "", "c6", 6)

        assert loading.pass_over(4) == (4, None)
        assert loading.pass_over(4) == (2, "c6")
        assert loading.pass_over(4) == (0, "c6")

    def test_parts_that_the_server_lost_are_a_gap(self, loading: Loading) -> None:
        loading.open("d")
        loading.parts = 2

        with pytest.raises(LoadGap):
            loading.append(TWO, "c2", "c4", 2)
        assert loading.parts == 2
        with pytest.raises(LoadGap, match="lost its last moments"):
            loading.pass_over(4)


def test_seal_pushes_the_tokens(loading: Loading, driver: RequestByHand) -> None:
    loading.open("d")
    loading.append(TWO, "", "c2", 2)

    loading.seal("c2")

    assert driver.protocol.inspect(driver.id).is_sealed
    assert driver.tokens() != []


class TestTakeBack:
    def test_leaves_nothing(self, loading: Loading, driver: RequestByHand) -> None:
        loading.open("d")
        loading.append(TWO, "", "c2", 2)

        loading.take_back()

        assert not is_registered(driver)
        with pytest.raises(RequestUnknown):
            driver.protocol.inspect(driver.id)

    def test_leaves_no_registration_of_one_that_was_not_opened(
        self, protocol: Protocol, loading: Loading, driver: RequestByHand
    ) -> None:
        loading.open("d")
        protocol.cancel(driver.id)
        protocol.purge(driver.id, force=True)

        loading.take_back()

        assert not is_registered(driver)
