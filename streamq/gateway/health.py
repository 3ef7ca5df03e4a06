"""Health and metrics of a gateway, at a port of their own: they need no key, and tell no ids."""

from collections.abc import Callable, Collection, Generator
from contextlib import contextmanager

from streamq.gateway.route import Gateway
from streamq.model import LAST_LEVEL
from streamq.protocol.protocol import Protocol
from streamq.queue.backlog import BacklogCache
from streamq.queue.janitor import janitor_samples
from streamq.queue.lease_keeper import LeaseKeeper
from streamq.telemetry.health import HealthServer, HealthSource
from streamq.telemetry.metrics import Samples, build_info_samples


@contextmanager
def serve_gateway_health(
    address: str,
    gateway: Gateway,
    protocol: Protocol,
    keepers: dict[str, LeaseKeeper],
    queues: Collection[str],
    ticked_at: Callable[[], float],
) -> Generator[None]:
    """Serve health and metrics at the address, if there is one."""
    if not address:
        yield
        return
    lookout = BacklogCache(protocol, list(queues))
    server = HealthServer(
        address,
        HealthSource(
            ticked_at=ticked_at,
            unready=gateway.unready,
            samples=lambda: (
                gateway_health_samples(gateway)
                | _health_samples_of_server(keepers.values())
                | lookout.samples()
                | build_info_samples()
            ),
            wanted=lambda: sum(
                backlog.wanted(None, range(LAST_LEVEL + 1)) for backlog in lookout.backlogs()
            ),
        ),
    )
    try:
        yield
    finally:
        server.close()
        lookout.close()


def gateway_health_samples(gateway: Gateway) -> Samples:
    """Return what a gateway has counted, and what it does now."""
    return {
        **gateway.tallies.samples(),
        "streamq_gateway_parts_total": [
            ({"state": state}, number)
            for state, number in sorted(gateway.desk.parts.copy().items())
        ],
        "streamq_gateway_calls_waiting": [({}, gateway.desk.waiting)],
        "streamq_gateway_streams": [({}, len(gateway.sessions))],
        "streamq_gateway_uploads": [({}, gateway.uploads.open)],
        "streamq_gateway_watchers": [({}, gateway.board.feed.watchers if gateway.board else 0)],
    }


def _health_samples_of_server(keepers: Collection[LeaseKeeper]) -> Samples:
    if not keepers:
        return {}
    return {
        "streamq_server_up": [({}, int(all(each.is_server_up for each in keepers)))],
        **janitor_samples([each.janitor for each in keepers]),
    }
