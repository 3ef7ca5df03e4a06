"""One run: the loader, the pool and the collector work at the same time.

A folder of the run (``runs/folder.py``) keeps what is needed to resume it after a stop or a crash:
the plan, and the data of the embedded server.
"""

import logging
import os
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

from streamq.driver.connection import Connection
from streamq.errors import (
    AppLoadError,
    InvalidValue,
    ProtocolError,
    RequestEnded,
    RequestUnknown,
    ServerError,
    StreamqError,
)
from streamq.model import LAST_LEVEL, MAX_RESULT, Failure, Status
from streamq.protocol.protocol import Protocol
from streamq.queue.flow_status import status_of_request_or_flow
from streamq.queue.lease_keeper import LeaseKeeper
from streamq.queue.request import Request
from streamq.records.arrow_tables import TABLE_FORMATS
from streamq.records.output import Output
from streamq.records.output_note import OutputNote
from streamq.records.outputs import FileOutput
from streamq.records.sizes import GrowingSize, most_size_by_rate
from streamq.records.splitting import blank_lines_before_cursor
from streamq.records.stream_output import StreamOutput
from streamq.runs.collect import Collector
from streamq.runs.folder import RunFolder
from streamq.runs.load import Load
from streamq.runs.plan import STANDARD, Plan
from streamq.runs.progress import Progress, ProgressMeter
from streamq.runs.spooled_results import SpooledResults
from streamq.worker.channel import PoolOptions, ProcessConfig
from streamq.worker.pool import LAST_CALL, Pool
from streamq.worker.spawning import Spawner

log = logging.getLogger(__name__)

_LEASE_MS = 8_000
_BEAT_MS = 2_000
_AUDIT_MS = 2_000
_CANCEL_GRACE_S = 3.0
_WATCH_S = 0.25
#: Largest result of a part of a table, which goes into a spool.
_MOST_SPOOLED = 2**28


class Run:
    """One run of a plan on one server."""

    def __init__(  # noqa: PLR0913  places in a folder, and what a caller wants to hear
        self,
        plan: Plan,
        url: str,
        prefix: str,
        *,
        log_level: str,
        is_alone: bool = False,
        spawner: Spawner | None = None,
        note: OutputNote | None = None,
        gaps: Path | None = None,
        spool: Path | None = None,
        steered: Mapping[str, Mapping[str, Any]] | None = None,
        on_begun: Callable[[], object] = lambda: None,
    ) -> None:
        """Prepare a run.

        ``is_alone``: no other program uses the server. ``note``: where it notes which file its
        output is. ``gaps``: where it notes what is missing there. ``spool``: the folder in which
        its processes keep results. ``steered``: what a resumed request is set to, by
        its places. ``on_begun`` is called once, when the function is loaded and the run can be
        resumed.
        """
        self._spawner = spawner
        self._note = note
        self._gaps = gaps
        self._spool = spool
        self._waiting: SpooledResults | None = None
        self._steered = dict(steered or {})
        self._on_begun = on_begun
        self._plan = plan
        self._url = url
        self._prefix = prefix
        self._log_level = log_level
        self._is_alone = is_alone
        self._is_stopping = threading.Event()
        self._error: BaseException | None = None
        self._is_collected = threading.Event()
        self.failures: list[Failure] = []
        #: How many lines of the input were blank, and no records.
        self.blank_lines = 0
        self._pool: Pool | None = None
        self._file: FileOutput | None = None

    def run(self, watch: Callable[[Progress], object], *, force: bool) -> Status:
        """Run to the end, or until told to stop. Return the last status.

        ``force``: replace files that exist, and begin an output that was lost anew.

        Raises:
            StreamqError: something went wrong with input, output, function or server.
            BrokenPipeError: the reader of the output is gone.
        """
        if self._spool:
            # If the spool cannot be made, processes send their results to the server.
            with suppress(OSError):
                self._spool.mkdir(mode=0o700, exist_ok=True)
        # One connection each for the loader, the collector, the watcher and the pool's keeper.
        connections = [Connection(self._url) for _ in range(4)]
        protocols = [Protocol(connection, self._prefix) for connection in connections]
        if self._is_alone:
            self._take_over(protocols[0])
        opened = threading.Event()
        pool = self._pool = self._make_pool(protocols[3])
        if self._spool:
            # Before the processes begin: the spools that are there now are those of an earlier
            # attempt.
            self._waiting = SpooledResults(
                protocols[1],
                self._plan.id,
                self._plan.policy,
                self._spool,
                self._is_stopping.is_set,
                pool.processes,
            )
        threads = [
            self._thread(lambda: self._load(protocols[0], opened)),
            self._thread(lambda: self._collect(protocols[1], opened, force=force)),
            self._thread(lambda: self._watch(protocols[2], opened, pool, watch)),
        ]
        try:
            self._pool.run()
        finally:
            self._is_stopping.set()
            for thread in threads:
                thread.join()
        if self._error:
            raise self._error
        request = Request(protocols[2], self._plan.id)
        found = protocols[2].inspect(self._plan.id)
        status = status_of_request_or_flow(protocols[2], found)
        self.blank_lines = blank_lines_before_cursor(found.optional_text("cursor"))
        if not self.is_complete:
            self.failures = request.errors()
        for connection in connections:
            connection.close()
        return status

    def forget(self) -> None:
        """Delete the request from the server, and the output file if this run has opened it.

        The output of a run that this one was to replace is put back.
        """
        if self._file:
            self._file.remove()
        if self._plan.replaces:
            with suppress(FileNotFoundError):
                self._replaced.rename(self._plan.output)
        self._purge([self._plan.id])

    def end_replaced(self) -> None:
        """Delete what is left of the runs that this one, which is done, has replaced."""
        if self._plan.replaces:
            self._replaced.unlink(missing_ok=True)
            self._purge(self._plan.replaces)

    @property
    def _replaced(self) -> Path:
        """Where the output of a run that is replaced is kept until this one is done."""
        output = Path(self._plan.output)
        return output.with_name(f"{output.name}.before-{self._plan.id}")

    def _purge(self, ids: Iterable[str]) -> None:
        with closing(Connection(self._url)) as connection:
            protocol = Protocol(connection, self._prefix)
            for each in ids:
                with suppress(StreamqError):
                    request = Request(protocol, each)
                    with suppress(RequestEnded):
                        request.cancel()
                    request.purge()

    @property
    def stopped_by(self) -> int:
        """The number of the signal that stopped the run; 0 if none did."""
        return self._pool.stopped_by if self._pool else 0

    def processes(self) -> list[int]:
        """Return the ids of the processes that run the function."""
        return self._pool.processes() if self._pool else []

    @property
    def is_complete(self) -> bool:
        """Whether every result is in the output."""
        return self._is_collected.is_set()

    def _thread(self, work: Callable[[], None]) -> threading.Thread:
        def run() -> None:
            try:
                work()
            except BaseException as error:  # noqa: BLE001  ``run`` raises it
                # When a load fails it purges the request, and then the others fail with
                # RequestUnknown. Keep the loader's error, not theirs.
                if self._error is None or isinstance(self._error, RequestUnknown):
                    self._error = error
                self._end()

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        return thread

    def _end(self) -> None:
        self._is_stopping.set()
        assert self._pool is not None
        self._pool.end()

    def _take_over(self, protocol: Protocol) -> None:
        """Hand back at once the parts that processes of an earlier run held.

        Those processes are dead, and their parts are not charged with a crash.
        """
        plan = self._plan
        for place in plan.places:
            with suppress(RequestUnknown):
                for holder in protocol.holders(place):
                    protocol.release(place, holder, LAST_CALL)
                audit = protocol.audit(place)
                protocol.ensure(place, audit)

    def _load(self, protocol: Protocol, opened: threading.Event) -> None:
        plan = self._plan
        load = Load(
            protocol,
            plan.id,
            plan.policy,
            plan.size,
            sizing=self._sizing(),
            window_bytes=plan.window_bytes,
            counts_results=True,
            checks_complete=False,
            spooled=self._spooled_size if self._spool else None,
            should_stop=self._is_stopping.is_set,
        )
        # Too many failures end the request before all is loaded. The collector notices that.
        with suppress(RequestEnded):
            load.run(lambda: self._open(protocol, opened))
            for words in load.keys.words():
                log.warning("%s", words)

    def _open(self, protocol: Protocol, opened: threading.Event) -> None:
        """Set level, limit, rate and weight as the command says now, and let the others begin."""
        for place, steered in self._steered.items():
            with suppress(RequestEnded):
                _, tokens = protocol.set(
                    place,
                    steered.get("level"),
                    steered.get("limit"),
                    steered.get("rate_ms"),
                    steered.get("weight"),
                )
                protocol.push(self._plan.policy.queue, place, tokens)
        opened.set()

    def _sizing(self) -> GrowingSize:
        """Return what sizes parts by what the pool of this run measures."""
        plan, policy = self._plan, self._plan.policy
        assert self._pool is not None
        pool = self._pool
        return GrowingSize(
            lambda: pool.measured().get(policy.handler),
            plan.slots,
            min(policy.limit, plan.processes * plan.slots),
            most_size_by_rate(policy.rate_ms),
        )

    def _collect(self, protocol: Protocol, opened: threading.Event, *, force: bool) -> None:
        plan = self._plan
        if not _await_opened_load_of_run(opened, self._is_stopping):
            return
        should_stop = self._is_stopping.is_set
        gaps = None if plan.is_piped else self._gaps
        collector = Collector(
            protocol,
            plan.id,
            self._output(),
            plan.form,
            should_stop,
            gaps=gaps,
            moved_from=plan.moved_from,
            spools=self._waiting,
        )
        if collector.run(
            is_ordered=plan.is_ordered, follow=True, force=force or plan.force, renew=force
        ):
            self.failures = collector.failures
            self._is_collected.set()
            self._end()

    def _spooled_size(self) -> int:
        """Return how many bytes of results wait in spools."""
        return self._waiting.size() if self._waiting else 0

    @property
    def _spools(self) -> bool:
        """Whether processes keep results in spools from now on."""
        return self._spool is not None

    def _output(self) -> Output:
        plan = self._plan
        should_stop = self._is_stopping.is_set
        if plan.output == STANDARD:
            return StreamOutput(1, "standard output", should_stop)
        if plan.is_piped:
            return StreamOutput(os.open(plan.output, os.O_WRONLY), plan.output, should_stop)
        if plan.replaces and self._note and not self._note.is_written:
            with suppress(FileNotFoundError):
                Path(plan.output).rename(self._replaced)
        self._file = FileOutput(Path(plan.output), plan.id, self._note)
        return self._file

    def _watch(
        self,
        protocol: Protocol,
        opened: threading.Event,
        pool: Pool,
        watch: Callable[[Progress], object],
    ) -> None:
        if not _await_opened_load_of_run(opened, self._is_stopping):
            return
        meter = ProgressMeter(protocol, self._plan, pool)
        has_told = False
        while not self._is_stopping.wait(_WATCH_S):
            if not has_told and not pool.unready():
                self._on_begun()
                has_told = True
            with suppress(ServerError, ProtocolError):
                watch(meter.read())

    def _make_pool(self, protocol: Protocol) -> Pool:
        plan = self._plan
        is_table = plan.policy.spec.format in TABLE_FORMATS
        config = ProcessConfig(
            url=self._url,
            prefix=self._prefix,
            queue=plan.policy.queue,
            target=plan.target,
            handler=plan.policy.handler,
            serves=plan.serves,
            argv=plan.argv,
            keeps_stdout=not plan.is_piped,
            allow_read=tuple(plan.policy.spec.files) if plan.policy.spec.by_reference else (),
            base=str(Path.cwd()) if self._spool else "",
            spool=str(self._spool) if self._spool and self._spools else "",
            form=plan.form,
            slots=plan.slots,
            levels=tuple(range(LAST_LEVEL + 1)),
            quantum_ms=50,
            lease_ms=_LEASE_MS,
            max_result=_MOST_SPOOLED if self._spools and is_table else MAX_RESULT,
            log_level=self._log_level,
            log_format="text",
        )
        keeper = LeaseKeeper(
            protocol,
            config.queue,
            config.pool,
            slots=plan.processes * config.slots,
            lease_ms=config.lease_ms,
            beat_ms=_BEAT_MS,
            audit_ms=_AUDIT_MS,
            levels=config.levels,
        )
        options = PoolOptions(
            processes=plan.processes, cancel_grace_s=_CANCEL_GRACE_S, stops_on_hup=True
        )
        return Pool(config, options, keeper, spawner=self._spawner)


def carry_out_run(
    run: Run,
    folder: RunFolder,
    watch: Callable[[Progress], object],
    *,
    force: bool,
) -> Status:
    """Carry the run out, and decide whether its folder stays; if not, delete everything of the run.

    The folder stays while the run can be resumed. A new run that fails because of its options or
    its function leaves nothing. Of a resumed run nothing is deleted.

    Raises:
        StreamqError: as ``Run.run``.
        BrokenPipeError: as ``Run.run``.
    """
    plan = folder.plan
    try:
        # A lost output is begun anew only where the run was named: a command that is just given
        # again is to write everything.
        status = run.run(watch, force=force and not folder.is_found)
    except StreamqError as error:
        is_lasting = not isinstance(error, (InvalidValue, AppLoadError))
        folder.is_kept = plan.can_go_on and (is_lasting or folder.is_resumed)
        if not folder.is_kept:
            run.forget()
        raise
    except BrokenPipeError:
        run.forget()
        raise
    folder.is_kept = plan.can_go_on and not run.is_complete
    if run.is_complete:
        if plan.replaces:
            run.end_replaced()
        folder.conclude(run.failures, status)
    return status


def _await_opened_load_of_run(opened: threading.Event, stopping: threading.Event) -> bool:
    while not opened.wait(0.05):
        if stopping.is_set():
            return False
    return True
