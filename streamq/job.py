"""The whole job at once: load, work, collect, each going on while the others do.

What is needed to go on after a stop or a crash is kept in a folder of the job's own: the
embedded server's data and how the job was started.
"""

import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgspec

from streamq.client import Request
from streamq.collector import Collector
from streamq.connection import Connection
from streamq.control import Config
from streamq.errors import RequestUnknown, ServerError
from streamq.keeper import Keeper
from streamq.loader import Load
from streamq.model import Failure, Policy, Status
from streamq.pool import Pool, PoolOptions
from streamq.protocol import Protocol
from streamq.runner import MAX_RESULT
from streamq.source import Size

_LEASE_MS = 8_000
_BEAT_MS = 2_000
_AUDIT_MS = 2_000


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that makes a job what it is."""

    id: str
    target: str
    output: str
    form: str
    policy: Policy
    size: Size
    processes: int
    slots: int
    window_bytes: int
    is_ordered: bool = True


class Job:
    """One run of a plan on one server."""

    def __init__(self, plan: Plan, url: str, prefix: str, *, log_level: str) -> None:
        self._plan = plan
        self._url = url
        self._prefix = prefix
        self._log_level = log_level
        self._is_stopping = threading.Event()
        self._error: BaseException | None = None
        self._is_collected = threading.Event()
        self.failures: list[Failure] = []
        self._pool: Pool | None = None

    def run(self, watch: Callable[[Status], None], *, force: bool) -> Status:
        """Run to the end, or until told to stop. Returns the last status.

        Raises:
            StreamqError: what went wrong with the input, the output, the function or the server.
        """
        # The loader, the collector, the pool's keeper and whoever watches: a connection each.
        connections = [Connection(self._url) for _ in range(4)]
        protocols = [Protocol(connection, self._prefix) for connection in connections]
        opened = threading.Event()
        threads = [
            self._thread(lambda: self._load(protocols[0], opened)),
            self._thread(lambda: self._collect(protocols[1], opened, force=force)),
            self._thread(lambda: self._watch(protocols[2], opened, watch)),
        ]
        self._pool = self._make_pool(protocols[3])
        try:
            self._pool.run()
        finally:
            self._is_stopping.set()
            for thread in threads:
                thread.join()
        if self._error:
            raise self._error
        request = Request(protocols[2], self._plan.id)
        status, self.failures = request.status(), request.errors()
        for connection in connections:
            connection.close()
        return status

    def processes(self) -> list[int]:
        """Ids of the processes that run the function."""
        return self._pool.processes() if self._pool else []

    @property
    def is_complete(self) -> bool:
        """Whether every result is in the output."""
        return self._is_collected.is_set()

    def _thread(self, work: Callable[[], None]) -> threading.Thread:
        def run() -> None:
            try:
                work()
            except BaseException as error:  # noqa: BLE001  it is raised where the job is run
                self._error = self._error or error
                self._is_stopping.set()

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        return thread

    def _load(self, protocol: Protocol, opened: threading.Event) -> None:
        plan = self._plan
        Load(
            protocol,
            plan.id,
            plan.policy,
            plan.size,
            window_bytes=plan.window_bytes,
            should_stop=self._is_stopping.is_set,
        ).run(opened.set)

    def _collect(self, protocol: Protocol, opened: threading.Event, *, force: bool) -> None:
        plan = self._plan
        if not _await(opened, self._is_stopping):
            return
        collector = Collector(
            protocol, plan.id, Path(plan.output), plan.form, self._is_stopping.is_set
        )
        state = collector.run(is_ordered=plan.is_ordered, follow=True, force=force)
        if not state.is_live:
            self._is_collected.set()

    def _watch(
        self, protocol: Protocol, opened: threading.Event, watch: Callable[[Status], None]
    ) -> None:
        if not _await(opened, self._is_stopping):
            return
        request = Request(protocol, self._plan.id)
        while not self._is_stopping.wait(0.5):
            with suppress(ServerError, RequestUnknown):
                watch(request.status())

    def _make_pool(self, protocol: Protocol) -> Pool:
        plan = self._plan
        config = Config(
            url=self._url,
            prefix=self._prefix,
            queue=plan.policy.queue,
            target=plan.target,
            is_map=True,
            slots=plan.slots,
            levels=tuple(range(100)),
            quantum_ms=50,
            lease_ms=_LEASE_MS,
            max_result=MAX_RESULT,
            log_level=self._log_level,
            log_format="text",
        )
        keeper = Keeper(
            protocol,
            plan.policy.queue,
            lease_ms=_LEASE_MS,
            beat_ms=_BEAT_MS,
            audit_ms=_AUDIT_MS,
        )
        keeper.slots = plan.processes * plan.slots
        options = PoolOptions(processes=plan.processes)
        return Pool(config, options, keeper, self._is_finished)

    def _is_finished(self) -> bool:
        return self._is_collected.is_set() or self._error is not None


def _await(opened: threading.Event, stopping: threading.Event) -> bool:
    while not opened.wait(0.05):
        if stopping.is_set():
            return False
    return True


def remaining(status: Status) -> str:
    """How far a request is, in a line."""
    parts, records = status.parts, status.records
    total = f"{parts.total}" if status.state != "loading" else f"{parts.total}+"
    eta = "" if status.eta_s is None else f" · {status.eta_s:.0f} s left"
    return (
        f"{parts.done + parts.failed}/{total} parts · {records.done:,} records · "
        f"{status.rate:,.0f}/s{eta} · {parts.running} running · {parts.retry} to retry · "
        f"{records.failed} failed"
    )
