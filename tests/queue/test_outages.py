"""Waiting for a server: said once, asked again more and more seldom."""

from streamq.errors import ServerBusy, ServerUnreachable
from streamq.queue.outages import Outage


def test_its_beginning_and_its_end_are_said_once_each() -> None:
    said: list[str] = []
    outage = Outage(lambda error: said.append(str(error)), lambda: said.append("over"))
    outage.over()
    assert said == []

    for _ in range(2):
        outage.failed(ServerUnreachable("away"))
        outage.failed(ServerBusy("loads"))
        outage.over()
        outage.over()

    assert said == ["away", "over", "away", "over"]


def test_rests_grow_to_the_longest_and_begin_anew() -> None:
    outage = Outage(rest_ms=100, longest_ms=2_000)
    error = ServerUnreachable("away")

    for full in (0.1, 0.2, 0.4, 0.8, 1.6, 2.0, 2.0):
        assert full / 2 <= outage.failed(error) <= full
    assert outage.tries == 7
    outage.over()
    assert outage.tries == 0

    assert outage.failed(error) <= 0.1
