"""Collecting results: each is written once, in input order or as they come, even across crashes.

A commit stores in the request how many bytes are written and which result comes next; the same
script call deletes the results from the server. When a collector is started again, it cuts the file
to the committed length.
"""

import logging
import secrets
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import msgspec

from streamq.errors import StreamqError, damaged_if_unreadable
from streamq.model import Failure, Spec
from streamq.protocol.protocol import Protocol
from streamq.queue.request import Request
from streamq.queue.results import BATCH, BATCH_BYTES, ResultReader
from streamq.records import outputs
from streamq.records.outputs import (
    Output,
    OutputError,
    OutputExists,
    Stopped,
    check_errors,
    digest_of,
    error_lines,
    errors_digest,
    refuse_inputs,
)
from streamq.records.writer import Writer

log = logging.getLogger(__name__)

_LOOK_S = 0.05
#: After a batch of results the next look comes soon, since more results are likely.
_SOON_S = 0.003


class Committed(msgspec.Struct, frozen=True):
    """How far a file has been written."""

    offset: int = 0
    next: int = 1
    #: Column names of a CSV.
    header: list[str] = []
    #: The file, and the form of its lines.
    file: str = ""
    form: str = ""
    #: The last line has no newline, as in the input: what follows has to begin with one.
    is_open: bool = False
    #: Counts the commits, so that no two commits of a collector are equal.
    times: int = 0
    #: The file of failures beside the output belongs to this request and may be replaced.
    owns_errors: bool = False
    #: A random name of this run of the collector, so that no two collectors commit the same text.
    collector: str = ""
    #: Digests of what the file of failures may hold: its old content, and the new one.
    errors: list[str] = []


def file_of(protocol: Protocol, request_id: str) -> str:
    """Return the file to which results were moved from the server; "" if none were."""
    told = protocol.inspect(request_id).optional_text("committed")
    with damaged_if_unreadable("how far results are written"):
        done = msgspec.json.decode(told, type=Committed) if told else Committed()
    return done.file if done.offset else ""


def show(protocol: Protocol, request_id: str, form: str, *, follow: bool) -> Iterator[bytes]:
    """Yield results in input order for somebody who only looks: the server keeps them."""
    writer = Writer(form, [], preamble=protocol.inspect(request_id).spec.header.encode())
    reader = ResultReader(protocol, request_id, is_patient=follow)
    while True:
        batch = reader.read()
        if batch is not None:
            yield b"".join(writer.lines(result) for _, result in batch)
        elif reader.is_over or not follow:
            break
        else:
            time.sleep(_LOOK_S)
    yield writer.preamble()
    writer.warn()


def write_errors(failures: Iterable[Failure], output: Path) -> Path:
    """Write failures beside the output, one a line as JSON. Return the path of that file.

    Raises:
        OutputError: the file cannot be written.
    """
    return outputs.write_errors(output, outputs.error_lines(failures))


def _batches(results: dict[str, bytes]) -> Iterator[dict[str, bytes]]:
    """Yield the same results in batches of the size that is written at once."""
    batch: dict[str, bytes] = {}
    size = 0
    for field, result in results.items():
        batch[field] = result
        size += len(result)
        if len(batch) >= BATCH or size >= BATCH_BYTES:
            yield batch
            batch, size = {}, 0
    if batch:
        yield batch


class Collector:
    """Writes one request's results to one output."""

    def __init__(
        self,
        protocol: Protocol,
        request_id: str,
        output: Output,
        form: str,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> None:
        self._should_stop = should_stop
        self._protocol = protocol
        self._id = request_id
        self._output = output
        self._form = form
        self._writer = Writer(form, [])
        self._name = secrets.token_hex(8)
        #: Whether the output that was begun is lost, and how many parts the server has no more.
        self._is_anew = False
        self._gone = 0
        #: The request's failures, once all results are written; the caller writes them to a file.
        self.failures: list[Failure] = []

    def run(
        self, *, is_ordered: bool, follow: bool, force: bool, renew: bool | None = None
    ) -> bool:
        """Write the results there are; with ``follow``, go on until the request has ended.

        ``renew``: begin a lost output anew, without the results that the server no longer has; by
        default as ``force``. Return whether the request has ended and all of its results are
        written.

        Raises:
            OutputExists: the file exists and is not this request's.
            OutputError: the output cannot be written.
            CollectorLost: another collector writes the results of this request.
        """
        self._may_renew = force if renew is None else renew
        self._look(force)
        self._output.open(self._done.offset, has_begun=bool(self._token), force=force)
        try:
            # Before we had the lock, another collector may have written and committed more.
            spec = self._look(force)
            if self._is_anew:
                self._tell_lost()
            self._output.cut(self._done.offset)
            self._begin(spec)
            if not self._collect(is_ordered, follow):
                return False
            self._complete(force)
        except Stopped:
            return False
        finally:
            self._output.close()
            self._writer.warn()
        return True

    def _look(self, force: bool) -> Spec:
        """Read how far results are written, and refuse an output that they do not belong to."""
        found = self._protocol.inspect(self._id)
        text = self._token = found.optional_text("committed")
        with damaged_if_unreadable("how far results are written"):
            self._done = msgspec.json.decode(text, type=Committed) if text else Committed()
        spec = found.spec
        self._refuse_other(force, spec.files)
        # Decided anew at each look: since the last one another collector may have begun the file,
        # or somebody may have put it back. What counts is what the locked file has.
        self._is_anew = self._may_renew and self._output.lacks(self._done.offset)
        self._gone = found.count("done") - found.known_count("results") if self._is_anew else 0
        if self._is_anew:
            self._done = msgspec.structs.replace(self._done, offset=0, header=[], is_open=False)
        return spec

    def _tell_lost(self) -> None:
        """Log which results were lost with the output that is begun anew."""
        before = self._done.next - 1
        some = f"{self._gone} parts" if self._gone > 0 else ""
        if which := f"parts 1 to {before}" if before else some:
            log.warning(
                "the results of %s are gone: they were in the file that is missing, and the "
                "server has them no more. Only later ones are written",
                which,
            )

    def _begin(self, spec: Spec) -> None:
        """Get ready to write where the committed results end."""
        # Raw output of a CSV begins with the header that its input had.
        preamble = b"" if self._done.offset else spec.header.encode()
        self._writer = Writer(
            self._form, self._done.header, is_open=self._done.is_open, preamble=preamble
        )
        self._reader = ResultReader(
            self._protocol, self._id, first=self._done.next, is_forgetting=True
        )
        if not self._token or self._is_anew:
            # Committed before the first result is written: from now on the file is this request's.
            self._commit(b"", self._done.next, [])

    def _complete(self, force: bool) -> None:
        """Write a header even without results, and commit that the failures' file is ours."""
        name, errors = self._output.name, self._done.errors
        self.failures = Request(self._protocol, self._id).errors()
        if name:
            if not force:
                self._check_errors(OutputError)
            # Both contents count as ours, since we may be killed before the old one is replaced.
            lines = error_lines(self.failures)
            errors = sorted({errors_digest(Path(name)), digest_of(lines)})
        if (preamble := self._writer.preamble()) or errors != self._done.errors:
            self._commit(preamble, self._done.next, [], errors=errors)

    def _check_errors(self, error: type[StreamqError]) -> None:
        """Raise the error if writing the failures would replace a file that is not ours."""
        # An earlier version committed only that the file is ours, without a digest of its content.
        if not self._done.owns_errors or self._done.errors:
            check_errors(Path(self._output.name), error, self._done.errors)

    def _refuse_other(self, force: bool, inputs: Iterable[str]) -> None:
        """Raise an error if the output is an input, or another file or form than was begun."""
        done, name = self._done, self._output.name
        if name:
            refuse_inputs(Path(name), inputs)
            if not force:
                self._check_errors(OutputExists)
        if done.form and done.form != self._form:
            raise OutputExists(
                f"results of request {self._id} are written to {done.file} as {done.form}, "
                f"not as {self._form}"
            )
        if done.file and name and done.file != name and not force:
            raise OutputExists(
                f"results of request {self._id} are written to {done.file}: "
                f"say --force if that is {name} now"
            )

    def _collect(self, is_ordered: bool, follow: bool) -> bool:
        pause_s = _SOON_S
        self._reader.is_following = follow
        while True:
            if self._ordered() if is_ordered else self._unordered():
                pause_s = _SOON_S
                continue
            if self._reader.is_over:
                return True
            if not follow or self._should_stop():
                return False
            self._output.look()
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LOOK_S)

    def _ordered(self) -> bool:
        """Write the next results. Return whether there may be more now."""
        found = self._reader.read()
        if found is not None and (found or self._reader.next != self._done.next):
            self._write(dict(found))
        return found is not None

    def _unordered(self) -> bool:
        """Write the results that are there, in any order. Return whether there may be more now."""
        found = self._protocol.inspect(self._id)
        has_some = False
        for page in self._protocol.result_pages(self._id, BATCH_BYTES):
            # A page is deleted from the server before the next one is asked for, so nothing comes
            # twice.
            for results in _batches(page):
                self._write(results)
                has_some = True
        # ``found`` was read before the results. If it was settled then, there are no further
        # results.
        self._reader.is_over = not found.state.is_live and self._reader.is_settled(found)
        return has_some and not self._reader.is_over

    def _write(self, results: dict[str, bytes]) -> None:
        data = b"".join(map(self._writer.lines, results.values()))
        self._commit(data, self._reader.next, list(results))

    def _commit(
        self, data: bytes, next_number: int, forget: list[str], *, errors: list[str] | None = None
    ) -> None:
        """Write the bytes first, then commit that they are written."""
        self._output.write(data)
        errors = self._done.errors if errors is None else errors
        done = Committed(
            self._done.offset + len(data),
            next_number,
            self._writer.header,
            self._output.name,
            self._form,
            self._writer.is_open,
            self._done.times + 1,
            bool(errors) or self._done.owns_errors,
            self._name,
            errors,
        )
        token = msgspec.json.encode(done).decode()
        self._protocol.commit(self._id, self._token, token, forget=forget)
        self._done, self._token = done, token
