"""Collecting results: each once, in input order or as they come, also when killed.

What was written and where the next result goes are committed with the request, in the step
that forgets the results. Started again, a collector cuts the file to what is committed.
"""

import csv
import io
import logging
import secrets
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from streamq.errors import StreamqError, damaged_if_unreadable
from streamq.model import Failure, Spec
from streamq.protocol.protocol import Protocol
from streamq.protocol.snapshot import Snapshot
from streamq.queue.client import Request
from streamq.queue.results import BATCH, BATCH_BYTES, ResultReader
from streamq.records import encoding as codec
from streamq.records import outputs
from streamq.records.encoding import Item
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

log = logging.getLogger(__name__)

_ENDINGS = {ord("n"): b"\n", ord("r"): b"\r\n", ord("0"): b""}
_LOOK_S = 0.05
#: The first look after there was something comes soon: then there may well be more.
_SOON_S = 0.003


class Committed(msgspec.Struct, frozen=True):
    """How far a file has been written."""

    offset: int = 0
    next: int = 1
    #: Column names of a CSV.
    header: list[str] = []
    #: The file, and what is written to it.
    file: str = ""
    form: str = ""
    #: The last line has no newline, as in the input: whatever follows begins with one.
    is_open: bool = False
    #: How often something was committed: no two commits of a collector are the same.
    times: int = 0
    #: The file of failures beside it is this request's, and may be written over.
    owns_errors: bool = False
    #: A name that no other run of a collector has: the commits of two are never the same.
    collector: str = ""
    #: What the file of failures may hold: digests of what stood there and of what replaces it.
    errors: list[str] = []


def file_of(protocol: Protocol, request_id: str) -> str:
    """The file that results of the request were written to, and forgotten; "" for none."""
    told = protocol.inspect(request_id).optional_text("committed")
    with damaged_if_unreadable("how far results are written"):
        done = msgspec.json.decode(told, type=Committed) if told else Committed()
    return done.file if done.offset else ""


class Writer:
    """Turns the items of results into lines of a format."""

    def __init__(
        self, form: str, header: list[str], *, is_open: bool = False, preamble: bytes = b""
    ) -> None:
        """``preamble``: what lines that handlers returned begin with; values have none."""
        self._form = form
        self.header = header
        self.is_open = is_open
        self._preamble = preamble if form == "raw" else b""
        self._is_value = False
        self._left_out: set[str] = set()
        self._garbled = 0

    def lines(self, result: bytes) -> bytes:
        """The lines of one part's result. What is None writes no line."""
        with damaged_if_unreadable("a result"):
            was_open, self.is_open = self.is_open, False
            lines = self._lines(result)
        if not lines:
            self.is_open = was_open
            return lines
        if was_open:
            return b"\n" + lines
        preamble = self.preamble()
        if not preamble or self._is_value:
            return lines
        return preamble + (b"" if preamble.endswith(b"\n") else b"\n") + lines

    def preamble(self) -> bytes:
        """What is to stand before the first line, where nothing was written yet."""
        preamble, self._preamble = self._preamble, b""
        return preamble

    def warn(self) -> None:
        """Say what could not be written as it was."""
        if self._garbled:
            log.warning(
                "%d of the results hold bytes that are not UTF-8: there the output has U+FFFD "
                "instead; --output-format raw writes bytes as they are",
                self._garbled,
            )
        self._garbled = 0

    def _lines(self, result: bytes) -> bytes:
        found = codec.unchecked(result)
        self._is_value = False
        if self._form == "raw" and (whole := _plain_lines(found)) is not None:
            return whole
        items, endings = codec.checked(found)
        if len(items) == 1 and codec.is_verbatim(items[0]):
            return bytes(items[0].data)
        kept = [item for item in items if item is not None]
        if self._form == "raw":
            self._is_value = bool(kept) and isinstance(kept[0], msgspec.msgpack.Ext)
            lines = b"".join(
                _raw(item) + (_ENDINGS[endings[index]] if endings else b"\n")
                for index, item in enumerate(items)
                if item is not None
            )
            self.is_open = not lines.endswith(b"\n")
            return lines
        if self._form == "csv":
            return b"".join(self._row(item) for item in kept)
        return b"\n".join([*map(self._json, kept), b""])

    def _json(self, item: Item) -> Any:
        """An item as JSON: bytes, or what can be joined with them."""
        if isinstance(item, msgspec.msgpack.Ext):
            return item.data
        return msgspec.json.encode(self._readable(item))

    def _readable(self, value: object) -> object:
        """Bytes as text, as far as they are; anything else as it is."""
        if not isinstance(value, bytes):
            return value
        try:
            return value.decode()
        except UnicodeDecodeError:
            self._garbled += 1
            return value.decode("utf-8", "replace")

    def _cell(self, value: object) -> object:
        value = self._readable(value)
        return value if value is None or isinstance(value, str | int | float) else _text(value)

    def _row(self, item: Item) -> bytes:
        value = codec.decode_item(item)
        fields = value if isinstance(value, dict) else {"result": value}
        head = b""
        if not self.header:
            self.header = list(fields)
            head = _csv_line(self.header)
        for name in fields.keys() - self._left_out - set(self.header):
            self._left_out.add(name)
            log.warning(
                "a CSV has the columns of its first result: %s of a later one is left out", name
            )
        return head + _csv_line([self._cell(fields.get(name)) for name in self.header])


def _csv_line(cells: list[Any]) -> bytes:
    text = io.StringIO(newline="")
    # It quotes what has a character of the line's end in it.
    csv.writer(text, lineterminator="\r\n").writerow(cells)
    return text.getvalue().removesuffix("\r\n").encode() + b"\n"


def _plain_lines(items: list[Any]) -> bytes | None:
    """Items that are all bytes or all text as lines, in one go; None where they are not.

    Joining tells: it takes nothing else, and how lines ended is neither.
    """
    if not items:
        return b""
    if (lines := codec.as_lines(items)) is not None:
        return lines
    with suppress(TypeError):
        return b"\n".join([*items, b""])
    with suppress(TypeError):
        return "\n".join([*items, ""]).encode()
    return None


def _raw(item: Item) -> bytes:
    if isinstance(item, msgspec.msgpack.Ext):
        return bytes(item.data)
    return item.encode() if isinstance(item, str) else item or b""


def _text(value: object) -> str:
    return msgspec.json.encode(value).decode()


def show(protocol: Protocol, request_id: str, form: str, *, follow: bool) -> Iterator[bytes]:
    """Results in input order for somebody who only looks: nothing is forgotten."""
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
    """Write failures beside the output, one a line as JSON. Returns the file they are in.

    Raises:
        OutputError: they cannot be written.
    """
    return outputs.write_errors(output, outputs.error_lines(failures))


def _batches(results: dict[str, bytes]) -> Iterator[dict[str, bytes]]:
    """The same, as many at once as are written at once."""
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
        self._is_anew = False
        #: What failed, once everything else is written: for the file beside the output.
        self.failures: list[Failure] = []

    def run(
        self, *, is_ordered: bool, follow: bool, force: bool, renew: bool | None = None
    ) -> bool:
        """Write what there is; with ``follow`` until the request has ended.

        ``renew``: an output that was lost is begun anew, without what the server has no more;
        as ``force`` if it is not given.

        Returns whether it has ended, and all of it is written.

        Raises:
            OutputExists: the file is there, and not from this request.
            OutputError: the output cannot be written.
            CollectorLost: somebody else collects the same.
        """
        self._may_renew = force if renew is None else renew
        self._look(force)
        self._output.open(self._done.offset, has_begun=bool(self._token), force=force)
        try:
            # Until the file was locked another collector may have written more, and committed it.
            spec = self._look(force)
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
        if self._is_anew or (self._may_renew and self._output.lacks(self._done.offset)):
            self._begin_anew(found)
        return spec

    def _begin_anew(self, found: Snapshot) -> None:
        """Begin an output that was lost once more, and say which results were lost with it."""
        if not self._is_anew:
            gone = found.count("done") - found.known_count("results")
            before = self._done.next - 1
            some = f"{gone} parts" if gone > 0 else ""
            if which := f"parts 1 to {before}" if before else some:
                log.warning(
                    "the results of %s are gone: they were in the file that is missing, and the "
                    "server has them no more. Only later ones are written",
                    which,
                )
        self._is_anew = True
        self._done = msgspec.structs.replace(self._done, offset=0, header=[], is_open=False)

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
            # Before the first result is written: the file is this request's from now on.
            self._commit(b"", self._done.next, [])

    def _complete(self, force: bool) -> None:
        """Write what is to be there also without a result; the failures beside it are ours."""
        name, errors = self._output.name, self._done.errors
        self.failures = Request(self._protocol, self._id).errors()
        if name:
            if not force:
                self._check_errors(OutputError)
            # What stands there stays ours until it is replaced: we may be killed before that.
            lines = error_lines(self.failures)
            errors = sorted({errors_digest(Path(name)), digest_of(lines)})
        if (preamble := self._writer.preamble()) or errors != self._done.errors:
            self._commit(preamble, self._done.next, [], errors=errors)

    def _check_errors(self, error: type[StreamqError]) -> None:
        """Raise the error if the failures beside the output would replace what is not ours."""
        # An earlier version noted that the file is ours, and not what is in it.
        if not self._done.owns_errors or self._done.errors:
            check_errors(Path(self._output.name), error, self._done.errors)

    def _refuse_other(self, force: bool, inputs: Iterable[str]) -> None:
        """Raise InvalidValue if it is an input, or if what was begun is another file or form."""
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
        """Write the next results. Returns whether there may be more now."""
        found = self._reader.read()
        if found is not None and (found or self._reader.next != self._done.next):
            self._write(dict(found))
        return found is not None

    def _unordered(self) -> bool:
        """Write whatever is there. Returns whether there may be more now."""
        found = self._protocol.inspect(self._id)
        has_some = False
        for page in self._protocol.result_pages(self._id, BATCH_BYTES):
            # All of a page is forgotten before the next is asked for: nothing comes twice.
            for results in _batches(page):
                self._write(results)
                has_some = True
        # Read before the results: what they had then is all there will be.
        self._reader.is_over = not found.state.is_live and self._reader.is_settled(found)
        return has_some and not self._reader.is_over

    def _write(self, results: dict[str, bytes]) -> None:
        data = b"".join(map(self._writer.lines, results.values()))
        self._commit(data, self._reader.next, list(results))

    def _commit(
        self, data: bytes, next_number: int, forget: list[str], *, errors: list[str] | None = None
    ) -> None:
        """First the bytes, then the word that they are there."""
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
        self._protocol.collect(
            self._id, next_number=1, most=0, commit=(self._token, token), forget=forget
        )
        self._done, self._token = done, token
