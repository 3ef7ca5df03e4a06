"""The folder of a run, with its plan and its lock, and the embedded server that it starts.

The server starts in the background. Both are needed before redis-py is imported.
"""

import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, Literal

import msgspec

from streamq.errors import InvalidValue, ServerError
from streamq.model import Failure, State, Status
from streamq.queue.options import Named
from streamq.records import errors_file, outputs
from streamq.records.manifest import check_manifest, write_manifest
from streamq.records.output import OutputError, OutputExists
from streamq.records.output_note import OutputNote
from streamq.records.partitions import check_partitions, folder_of_partitions, write_partitions
from streamq.runs import finding, plan_differences, stored_runs
from streamq.runs.finished import Finished, FinishedNote, FinishedSeal, check_retry
from streamq.runs.plan import STANDARD, Plan
from streamq.runs.stored_runs import HOME
from streamq.runs.upload import check_upload, upload_output, upload_partitions
from streamq.servers.local import FOR_ONE_RUN, LocalServer

#: How a run begins. resumed: it goes on. found: it goes on if the same command was stopped, else it
#: is new. fresh: it is new, whatever was stopped. retried: its failed records run again.
Beginning = Literal["resumed", "found", "fresh", "retried"]


def beginning_of_run(*, resume: str, retry: str, is_fresh: bool) -> Beginning:
    """Return how a run begins, by the options that say so.

    Raises:
        InvalidValue: they contradict each other.
    """
    if sum(map(bool, (resume, retry, is_fresh))) > 1:
        raise InvalidValue(
            "resume continues a run, retry-failed runs what failed, and fresh "
            "starts over: give one of them"
        )
    if retry:
        return "retried"
    return "resumed" if resume else "fresh" if is_fresh else "found"


class RunFolder:
    """Where a plan is carried out: its folder, which is kept for ``--resume``, and its server."""

    def __init__(
        self,
        plan: Plan,
        beginning: Beginning = "resumed",
        *,
        named: Named = str,
    ) -> None:
        """``named`` returns what an option is called in messages."""
        #: The plan that is carried out: once the folder is held, perhaps that of a stopped run.
        self.plan = plan
        self._beginning = beginning
        self._named = named
        #: Whether the run was begun before.
        self.is_resumed = beginning in ("resumed", "retried")
        #: Whether what failed is run again.
        self.is_retry = beginning == "retried"
        #: Finished runs whose output this one replaces.
        self._outdated: list[str] = []
        #: The file of failures, once the run is done; and the error if it cannot be written.
        self.errors_file: Path | None = None
        self.errors_problem: OutputError | None = None
        #: Whether the run is done, and is kept so that its failures can be retried.
        self.can_retry = False
        #: Whether it was found as the one that the same command began.
        self.is_found = False
        #: What the request is to be set to, because the command says so now: level, limit, rate.
        self.steered: dict[str, Any] = {}
        #: Whether the folder stays after the run.
        self.is_kept = plan.can_go_on

    @property
    def note(self) -> OutputNote | None:
        """Where the run notes which file its output is; None where it has no folder."""
        return _note_of_output(self.plan.id) if self.plan.can_go_on else None

    @property
    def finished(self) -> FinishedNote:
        """Where it is noted how the run ended."""
        return FinishedNote(HOME / self.plan.id)

    @property
    def gaps(self) -> Path | None:
        """Where the run notes what is missing in its output; None where it has no folder."""
        return HOME / self.plan.id / "gaps" if self.plan.can_go_on else None

    @property
    def spool(self) -> Path | None:
        """Where processes spool results; None where they do not."""
        return (HOME / self.plan.id / "spool").absolute() if self.plan.spools else None

    @contextmanager
    def held(self) -> Generator[None]:
        """Make the folder, write the plan into it and lock it; in the end remove it or keep it.

        Raises:
            InvalidValue: another process runs this plan, a run that was stopped writes the same
                output, the output may not be written, or another user may write to the folder.
        """
        if not self.plan.can_go_on:
            if self._beginning != "resumed":
                _check_output(self.plan, force=self.plan.force)
            yield
            return
        with stored_runs.home_locked():
            stored_runs.remove_expired(but=self.plan.id if self.is_retry else "")
            if not self.is_resumed:
                self._choose(stored_runs.read_stored_runs())
            lock = self._take()
        with lock:
            if self.is_retry:
                check_retry(self.plan, self.finished)
            try:
                yield
            finally:
                if not self.is_kept:
                    with stored_runs.home_locked():
                        stored_runs.remove_run_folder(self.plan.id)

    def _choose(self, runs: list[stored_runs.StoredRun]) -> None:
        """Go on with a run that the same command began, or make sure that a new one may begin."""
        alike = [run for run in runs if plan_differences.has_same_output(run.plan, self.plan)]
        for run in alike:
            if run.is_live:
                raise InvalidValue(
                    f"run {run.id} ({run.process}) writes {self.plan.output} now: wait for its end"
                )
        done = [run for run in alike if run.finished]
        self._outdated = [run.id for run in done]
        alike = [run for run in alike if not run.finished]
        if self._beginning == "fresh":
            notes = [_note_of_output(run.id) for run in alike]
            is_theirs = any(note.fits(Path(self.plan.output)) for note in notes)
            _check_output(self.plan, force=self.plan.force or is_theirs)
            self.plan = msgspec.structs.replace(self.plan, replaces=tuple(run.id for run in alike))
        elif alike:
            self._go_on_with(alike[0].plan)
        else:
            self._check_new(done)

    def _check_new(self, done: list[stored_runs.StoredRun]) -> None:
        """Check that a new run may write its output, which perhaps a finished run has written."""
        try:
            _check_output(self.plan, force=self.plan.force)
        except OutputExists as error:
            if not done:
                raise
            raise OutputExists(
                f"{error}. Run {done[0].id} wrote it, and {done[0].finished_words}: "
                f"{stored_runs.retry_command(done[0].id)} runs what failed again"
            ) from None

    def _go_on_with(self, then: Plan) -> None:
        now = self.plan
        if reasons := plan_differences.differences_of_plans(then, now, self._named):
            resume, fresh = self._named("resume"), self._named("fresh")
            raise InvalidValue(
                f"run {then.id} writes {then.output} and was stopped. This command cannot go on "
                f"with it: {'; '.join(reasons)}. {resume} {then.id} goes on as it began, "
                f"{fresh} starts over"
            )
        self.steered = plan_differences.fields_to_steer(then, now)
        self.plan = msgspec.structs.replace(
            then,
            processes=now.processes,
            slots=now.slots,
            window_bytes=now.window_bytes,
            has_manifest=now.has_manifest,
        )
        self.is_resumed = self.is_found = True

    def _take(self) -> BinaryIO:
        stored_runs.make_own_folder(HOME / self.plan.id)
        lock = stored_runs.lock_run_folder(self.plan.id)
        if lock is None:
            pid = stored_runs.process_that_holds_run(self.plan.id)
            who = f", process {pid}" if pid > 0 else ""
            raise InvalidValue(f"run {self.plan.id} goes on in another process{who}")
        stored_runs.store_plan(self.plan)
        return lock

    def conclude(self, failures: list[Failure], status: Status) -> None:
        """End a run that is done: write its failures, and keep it if they can be retried."""
        self._end_replaced()
        if self.plan.is_piped:
            return
        output, lines = Path(self.plan.output), errors_file.error_lines(failures)
        try:
            self.errors_file = errors_file.write_errors(output, lines)
        except OutputError as error:
            self.errors_problem = error
        if self.plan.has_manifest and not self.errors_problem:
            self._write_manifest(output, status)
        # A file that could not be read is not read again by a retry.
        can_retry = any(each.error != "BadInput" or each.traceback for each in failures)
        if can_retry and self.plan.keep_ms and status.state is not State.CANCELLED:
            self._keep(status)
        if self.plan.upload or self.plan.partition_by:
            self._bring_away()

    def _bring_away(self) -> None:
        """Make folders of the output and upload it. If that fails, the run goes on with it."""
        is_kept, self.is_kept = self.is_kept, True
        plan, output, url = self.plan, Path(self.plan.output), self.plan.upload
        if plan.partition_by:
            write_partitions(output, plan.partition_by, plan.id)
            if url:
                upload_partitions(output, url)
            if not is_kept:
                output.unlink()
        else:
            upload_output(output, url, is_kept=is_kept, is_again=self.is_retry)
        self.is_kept = is_kept

    def _write_manifest(self, output: Path, status: Status) -> None:
        plan = self.plan
        try:
            write_manifest(output, status, plan.policy.spec.files, plan.form)
        except OutputError as error:
            self.errors_problem = error

    def _keep(self, status: Status) -> None:
        """Keep the run for retries of its failed records. A disk that refuses that is no error."""
        seal = FinishedSeal.of(Path(self.plan.output))
        if seal is None or not self.plan.can_go_on:
            return
        until_s = time.time() + self.plan.keep_ms / 1e3
        failed = status.records.failed
        with suppress(OSError):
            self.finished.write(Finished(failed=failed, until_s=until_s, seal=seal))
            self.is_kept = self.can_retry = True

    def _end_replaced(self) -> None:
        """Remove the runs that this one, which is done, has replaced."""
        if not (self.plan.replaces or self._outdated):
            return
        with stored_runs.home_locked():
            for each in (*self.plan.replaces, *self._outdated):
                if (HOME / each).is_dir() and (lock := stored_runs.lock_run_folder(each)):
                    with lock:
                        stored_runs.remove_run_folder(each)

    @contextmanager
    def server(self, url: str, prefix: str) -> Generator[Callable[[], str]]:
        """Give a function that waits for the server and returns its URL. No URL: start a server.

        The address of a server that is started is noted in the folder, so that commands find it.
        """
        if url:
            yield lambda: url
            return
        place = HOME / self.plan.id / "server" if self.plan.can_go_on else None

        def address() -> str:
            found = starting.server().url
            if place:
                finding.note_server_address(self.plan.id, found, prefix)
            return found

        if place:
            finding.forget_server_address(self.plan.id)
        starting = _StartingServer(place)
        try:
            yield address
            if not self.is_kept:
                # A finished run needs no data, so the server is killed before it writes them. If
                # that fails, ``stop`` ends the server a moment later.
                with suppress(ServerError):
                    starting.server().kill()
        finally:
            starting.stop()


def _note_of_output(run_id: str) -> OutputNote:
    return OutputNote(HOME / run_id / "output.json")


def _check_output(plan: Plan, *, force: bool) -> None:
    """Check that a new run may write its output.

    Raises:
        InvalidValue: it may not.
    """
    if plan.output != STANDARD:
        outputs.check_new_output(Path(plan.output), force=force)
    if plan.partition_by:
        check_partitions(folder_of_partitions(Path(plan.output)), force=force)
    if plan.upload:
        check_upload(plan.upload, force=force, is_folder=bool(plan.partition_by))
    if plan.has_manifest:
        check_manifest(Path(plan.output), force=force)


class _StartingServer(threading.Thread):
    """Starts a server in the background."""

    def __init__(self, directory: Path | None) -> None:
        super().__init__(daemon=True)
        self._directory = directory
        self._server: LocalServer | None = None
        self._error: BaseException | None = None
        self.start()

    def run(self) -> None:
        """Start the server."""
        is_kept = self._directory is not None
        try:
            self._server = LocalServer.start(self._directory, persist=is_kept, options=FOR_ONE_RUN)
        except BaseException as error:  # noqa: BLE001  ``server`` raises it
            self._error = error

    def server(self) -> LocalServer:
        """Wait until the server answers, and return it.

        Raises:
            ServerError: the server does not start.
        """
        self.join()
        if self._error:
            raise self._error
        assert self._server is not None
        return self._server

    def stop(self) -> None:
        """End the server."""
        self.join()
        if self._server:
            self._server.stop()
