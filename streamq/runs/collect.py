"""Writes results to an output: each once, in input order or as they come, even across crashes.

A commit stores in the request how many bytes are written and which result comes next; the same
script call deletes the results from the server. When a collector is started again, it cuts the file
to the committed length.
"""

import logging
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import msgspec

from streamq.errors import StreamqError, damaged_if_unreadable
from streamq.model import Failure, Spec
from streamq.protocol.protocol import Protocol
from streamq.protocol.replies import part_of_field
from streamq.queue.failed_inputs import failures_with_inputs
from streamq.queue.request import Request
from streamq.queue.results import BATCH, BATCH_BYTES, ResultReader
from streamq.records import errors_file, parquet
from streamq.records.errors_file import (
    check_errors_file,
    digest_of_errors_file,
    digest_of_failures,
    error_lines,
)
from streamq.records.gaps import Gap, GapFile
from streamq.records.output import Output, OutputError, OutputExists
from streamq.records.outputs import FileOutput, refuse_inputs_as_output
from streamq.records.stream_output import Stopped
from streamq.records.writer import Writer
from streamq.runs.committed import Committed
from streamq.runs.in_place import InPlace
from streamq.runs.spooled_results import Piece, SpooledLines, SpooledResults, size_of_spooled

log = logging.getLogger(__name__)

_LOOK_S = 0.05
#: After a batch of results the next look comes soon, since more results are likely.
_SOON_S = 0.003
#: Results for gaps are gathered up to this size: to fill gaps, the whole output is copied.
_MOST_LATE = 2**26


def show_results(
    protocol: Protocol, request_id: str, form: str, *, follow: bool, has_keys: bool = False
) -> Iterator[bytes]:
    """Yield results in input order, for printing: the server keeps them."""
    spec = protocol.inspect(request_id).spec
    # Results of a flow are no rows of its input, so they get no header.
    preamble = b"" if spec.stage else spec.header.encode()
    writer = Writer(form, [], preamble=preamble, has_keys=has_keys)
    reader = ResultReader(protocol, request_id, is_patient=follow)
    while True:
        batch = reader.read()
        if batch is not None:
            yield b"".join(writer.lines(result, part_of_field(field)) for field, result in batch)
        elif reader.is_over or not follow:
            break
        else:
            time.sleep(_LOOK_S)
    yield writer.preamble()
    writer.warn()


def write_collected_errors(failures: Iterable[Failure], output: Path) -> Path:
    """Write failures beside the output, one a line as JSON. Return the path of that file.

    Raises:
        OutputError: the file cannot be written.
    """
    return errors_file.write_errors(output, errors_file.error_lines(failures))


def _batches_to_collect(results: dict[str, bytes]) -> Iterator[dict[str, bytes]]:
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


def _fields_collector_passes_over(fields: set[str]) -> set[str]:
    """Return the fields of parts that were passed over before they had run."""
    return {field for field in fields if field.isdigit()}


class Collector:
    """Writes one request's results to one output."""

    def __init__(
        self,
        protocol: Protocol,
        request_id: str,
        output: Output,
        form: str,
        should_stop: Callable[[], bool] = lambda: False,
        *,
        gaps: Path | None = None,
        has_keys: bool = False,
        moved_from: Sequence[str] = (),
        spools: SpooledResults | None = None,
    ) -> None:
        """Get ready to write.

        ``gaps``: where to note what is missing in the file, so that results of retried parts can
        be put there later. Without it they come last. ``has_keys``: each line has the numbers of
        its part and its record. ``spools``: where results are that a run's processes have written.
        ``moved_from``: names that the output had before.
        """
        self._moved_from = moved_from
        self._spools = spools
        self._should_stop = should_stop
        self._gap_file = GapFile(gaps) if gaps else None
        self._in_place: InPlace | None = None
        #: Results for gaps, by their fields, and about how many bytes they have.
        self._late: dict[str, bytes] = {}
        self._late_size = 0
        self._has_keys = has_keys
        self._protocol = protocol
        self._id = request_id
        self._output = output
        self._form = form
        self._writer = Writer(form, [])
        self._name = secrets.token_hex(8)
        #: Whether the output that was begun is lost, and how many parts the server no longer has.
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
            # Another collector may have written and committed more before this one got the lock.
            spec = self._look(force)
            if self._is_anew:
                self._tell_lost()
            has_begun = bool(self._token) and not self._is_anew
            self._output.cut(self._done.written, has_begun=has_begun)
            self._begin(spec, is_ordered)
            if not self._collect(is_ordered, follow):
                return False
            self._complete(force)
            self._output.settle()
            self._seal(spec)
            if self._spools:
                self._spools.remove()
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
        self._output.recover(self._done.written)
        if self._done.offset:
            self._output.packing = self._done.packing
        # Decided anew at each look: since the last one another collector may have begun the file,
        # or somebody may have put it back. Only the content of the locked file counts.
        self._is_anew = self._may_renew and self._output.lacks(self._done.written)
        self._gone = found.count("done") - found.known_count("results") if self._is_anew else 0
        if self._is_anew:
            self._done = self._done.anew
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

    def _begin(self, spec: Spec, is_ordered: bool) -> None:
        """Get ready to write where the committed results end."""
        # Raw output of a CSV begins with the header that its input had.
        preamble = b"" if self._done.offset or spec.stage else spec.header.encode()
        self._writer = Writer(
            self._form,
            self._done.header,
            is_open=self._done.is_open,
            preamble=preamble,
            has_keys=self._has_keys,
        )
        self._writer.head = self._done.head
        if (
            self._gap_file
            and self._form != "parquet"
            and is_ordered
            and not spec.stage
            and (self._done.gaps or self._done.next == 1)
        ):
            self._in_place = InPlace(self._protocol, self._id, self._gap_file)
            self._in_place.begin(self._done.gaps, self._done.next)
        self._reader = ResultReader(
            self._protocol,
            self._id,
            first=self._done.next,
            within=self._done.within,
            is_forgetting=True,
        )
        if not self._token or self._is_anew:
            # Committed before the first result is written: from now on the file is this request's.
            self._commit([], self._done.next, [])

    def _complete(self, force: bool) -> None:
        """Write a header even without results, and commit that the failures' file is ours."""
        name, errors = self._output.name, self._done.errors
        failures = Request(self._protocol, self._id).errors()
        reader = self._spools.inputs if self._spools else None
        self.failures = list(failures_with_inputs(self._protocol, self._id, failures, reader))
        if name:
            if not force:
                self._check_errors(OutputError)
            # Both the old and the new content count as ours: the process may be killed before the
            # old one is replaced.
            lines = error_lines(self.failures)
            errors = sorted({digest_of_errors_file(Path(name)), digest_of_failures(lines)})
        preamble = self._writer.preamble()
        is_empty = not self._done.offset and not preamble
        self._writer.head = self._writer.head or len(preamble)
        if preamble or errors != self._done.errors or (is_empty and self._output.packing):
            self._commit([preamble], self._done.next, [], errors=errors, is_last=is_empty)
        if self._in_place:
            self._in_place.end(is_complete=not self.failures)

    def _seal(self, spec: Spec) -> None:
        """Turn the frames that were written into Parquet, unless that is done already."""
        done = self._done
        if self._form != "parquet" or (done.sealed and done.sealed == done.offset):
            return
        assert isinstance(self._output, FileOutput)
        types = parquet.column_types_of_input(spec)
        written = self._output.draft(
            lambda file: parquet.convert_to_parquet(file, done.sealed, done.offset, types)
        )
        following = self._next(written.offset, written.offset, done.next, done.errors)
        self._store(
            msgspec.structs.replace(
                following, tail=written.tail, inode=written.inode, sealed=written.offset
            ),
            [],
        )
        self._output.replace()

    def _check_errors(self, error: type[StreamqError]) -> None:
        """Raise the error if writing the failures would replace a file that is not ours."""
        # An earlier version committed only that the file is ours, without a digest of its content.
        if not self._done.owns_errors or self._done.errors:
            check_errors_file(Path(self._output.name), error, self._done.errors)

    def _refuse_other(self, force: bool, inputs: Iterable[str]) -> None:
        """Raise an error if the output is an input, or another file or form than was begun."""
        done, name = self._done, self._output.name
        if name:
            refuse_inputs_as_output(Path(name), inputs)
            if not force:
                self._check_errors(OutputExists)
        if done.form and done.form != self._told_form:
            raise OutputExists(
                f"results of request {self._id} are written to {done.file} as {done.form}, "
                f"not as {self._told_form}"
            )
        if done.file and name and done.file not in (name, *self._moved_from) and not force:
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
        results = dict(found or ())
        if self._in_place and self._in_place.generation:
            late = {field for field in results if self._has_place(field)}
            self._late |= {field: self._inline(results.pop(field)) for field in late}
            self._late_size += sum(len(self._late[field]) for field in late)
            if (
                self._reader.is_over
                or self._late_size > _MOST_LATE
                or late & _fields_collector_passes_over(late)
            ):
                self._fill()
        read = self._reader.next, self._reader.within
        if found is not None and (results or read != (self._done.next, self._done.within)):
            self._write(results)
        return found is not None

    def _has_place(self, field: str) -> bool:
        """Return whether a result belongs before what is written."""
        part = part_of_field(field)
        return part < self._done.next and self._in_place is not None and self._in_place.has(part)

    def _fill(self) -> None:
        """Put the late results in their places: in a copy of the output, which then replaces it."""
        late, self._late, self._late_size = self._late, {}, 0
        if not late:
            return
        assert self._in_place
        assert isinstance(self._output, FileOutput)
        done = self._done
        filled = self._in_place.fill(
            late, self._lone_writer, self._output.packing, done.length, done.head
        )
        written = self._output.draft(filled.copy)
        if filled.header:
            self._writer.header, self._writer.head = filled.header, filled.head
        if done.length != filled.size and self._form == "raw":
            self._writer.is_open = filled.last not in (b"", b"\n") and self._writer.is_open
        self._store(
            msgspec.structs.replace(
                self._next(written.offset, filled.size, done.next, done.errors),
                tail=written.tail,
                inode=written.inode,
                gaps=self._in_place.prepare(filled),
            ),
            list(late),
        )
        self._output.replace()
        self._in_place.filled(filled)

    def _lone_writer(self) -> Writer:
        """Return a writer for lines that are put between others."""
        return Writer(self._form, self._writer.header, has_keys=self._has_keys)

    def _unordered(self) -> bool:
        """Write the results that are there, in any order. Return whether there may be more now."""
        found = self._protocol.inspect(self._id)
        has_some = False
        for page in self._protocol.result_pages(self._id, BATCH_BYTES):
            # A page is deleted from the server before the next one is asked for, so nothing comes
            # twice.
            for results in _batches_to_collect(page):
                self._write(results)
                has_some = True
        # ``found`` was read before the results. If it was settled then, there are no further
        # results.
        self._reader.is_over = not found.state.is_live and self._reader.is_settled(found)
        return has_some and not self._reader.is_over

    def _write(self, results: dict[str, bytes]) -> None:
        if self._in_place and self._in_place.generation:
            pieces = self._write_in_order(self._in_place, results)
        else:
            pieces = []
            for field, result in results.items():
                pieces += self._pieces(self._find(result), part_of_field(field))
        self._commit(pieces, self._reader.next, list(results))

    def _find(self, result: bytes) -> bytes | SpooledLines:
        """Return a result as it is; or where in a spool the lines of the part are."""
        return self._spools.find(result) if self._spools else result

    def _pieces(self, found: bytes | SpooledLines, part: int) -> list[Piece]:
        """Return what is written of a result that was found."""
        if isinstance(found, bytes):
            return [self._writer.lines(found, part)]
        return [self._writer.before(is_value=found.is_value), found.place]

    def _inline(self, result: bytes) -> bytes:
        """Return a result with its lines, even if they are in a spool."""
        return self._spools.inline(result) if self._spools else result

    def _write_in_order(self, in_place: InPlace, results: dict[str, bytes]) -> list[Piece]:
        """Return the lines of the parts that come next, and note the gaps between them."""
        written: list[Piece] = []
        gaps, offset = [], self._done.length
        passed = range(self._done.next, self._reader.next)
        for number in passed:
            result = results.get(f"{number}")
            if result is None:
                gaps.append(Gap(number, 0, offset))
                continue
            self._writer.has_skipped = False
            found = self._find(result)
            pieces = self._pieces(found, number)
            size = sum(map(size_of_spooled, pieces))
            # The lines in a spool are those of a part without failures, so without gaps.
            if self._writer.has_skipped and isinstance(found, bytes):
                begin = offset + size - len(self._lone_writer().lines(found, number))
                gaps += in_place.gaps_of(number, found, self._lone_writer, begin)
            written += pieces
            offset += size
        for field in results:
            if not field.isdigit() or int(field) not in passed:
                written += self._pieces(self._find(results[field]), part_of_field(field))
        in_place.note(gaps)
        return written

    def _commit(
        self,
        pieces: list[Piece],
        next_number: int,
        forget: list[str],
        *,
        errors: list[str] | None = None,
        is_last: bool = False,
    ) -> None:
        """Write the bytes first, then commit that they are written."""
        errors = self._done.errors if errors is None else errors
        if all(isinstance(each, bytes) for each in pieces):
            grown = self._output.write(b"".join(pieces), is_last=is_last)  # type: ignore[arg-type]
        else:
            assert isinstance(self._output, FileOutput)
            grown = self._output.add(pieces)
        length = self._done.length + sum(map(size_of_spooled, pieces))
        self._store(self._next(self._done.offset + grown, length, next_number, errors), forget)
        if self._spools:
            self._spools.committed()

    def _next(self, offset: int, length: int, next_number: int, errors: list[str]) -> Committed:
        """Return what is committed next."""
        packing = self._output.packing
        return Committed(
            offset,
            next_number,
            self._writer.header,
            self._output.name,
            self._told_form,
            self._writer.is_open,
            self._done.times + 1,
            bool(errors) or self._done.owns_errors,
            self._name,
            errors,
            self._output.tail(offset),
            self._output.inode,
            packing,
            length if packing else 0,
            self._writer.head,
            self._in_place.generation if self._in_place else 0,
            self._reader.within,
            self._done.sealed,
        )

    @property
    def _told_form(self) -> str:
        """The form of the lines, as it is committed."""
        return f"{self._form} with keys" if self._has_keys else self._form

    def _store(self, done: Committed, forget: list[str]) -> None:
        token = msgspec.json.encode(done).decode()
        self._protocol.commit(self._id, self._token, token, forget=forget)
        self._done, self._token = done, token
