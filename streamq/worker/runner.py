"""Running one part: the handler is called with its records, and what it returns is encoded.

Most parts are run by the shortest way, many records at a stretch. A ``RecordByRecord`` runs the
others, for plain functions and coroutines alike: it says which value the handler is called with
next, and is told what came of it.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Self

import msgspec

from streamq.app import Abandon, Context, Handler
from streamq.errors import Damaged, DecodeError, EncodeError, RecordError, ResultTooLarge
from streamq.model import MAX_RESULT, Failure, Part, Spec
from streamq.queue.outcomes import FORGET, PartDone, PartNotDone, words_of_time_limit
from streamq.records import about
from streamq.records import decoding as records
from streamq.records import encoding as codec
from streamq.records.arrow_tables import TABLE_FORMATS, table_columns_of_rows
from streamq.records.encoding import Item
from streamq.records.references import ReferenceReader
from streamq.records.spool import SpoolWriter
from streamq.worker import kept_outcomes, yielding
from streamq.worker.calling import Timeout, error_that_ends_one_part, telling_the_watch
from streamq.worker.kept_outcomes import DELIVERED, NONE, Outcomes
from streamq.worker.line_blocks import LineBlocks, blocks_of, can_be_cut_into_blocks
from streamq.worker.part_watch import UNWATCHED, CancelReason, PartWatch, Stretch
from streamq.worker.record_by_record import RecordByRecord
from streamq.worker.tracebacks import text_that_can_be_encoded
from streamq.worker.verdicts import Verdicts

log = logging.getLogger(__name__)

#: The outcome of a part of one record whose handler returned None.
_NOTHING = PartDone(codec.encode_result([None]), 1)


def _kept_outcomes_of(items: list[Item], count: int) -> Outcomes:
    return kept_outcomes.outcomes_of_items(items[:], count)


class Runner(Verdicts):
    """Runs parts of one request with one handler."""

    def __init__(
        self,
        handler: Handler,
        spec: Spec,
        max_result: int = MAX_RESULT,
        request_id: str = "",
        reader: ReferenceReader | None = None,
        spool: SpoolWriter | None = None,
    ) -> None:
        super().__init__(handler, spec, max_result, request_id)
        self._spool = spool
        self._reader = (reader or ReferenceReader(())) if spec.by_reference else None
        self._decode = records.decoder_for(handler, spec)
        self._function = self._callable()
        is_table = spec.format in TABLE_FORMATS
        #: The only columns of a table that the handler can see, if it does not see all.
        self._columns = table_columns_of_rows(handler.annotation) if is_table else None
        self._is_text = spec.format in records.TEXT_FORMATS and handler.is_map
        self._has_blanks = spec.format == "jsonl"
        self._has_empty_rows = spec.format == "csv"
        #: Whether the handler is called with the part as a whole, and with nothing else.
        self._is_whole = not (
            handler.is_map or handler.context_name or spec.by_reference or self._has_blanks
        )
        self._stretch = Stretch()

    def for_request(self, request_id: str) -> Self:
        """Return a runner for another request of the same handler and spec."""
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__)
        other._begin(request_id)
        other._stretch = Stretch()
        return other

    def run(
        self, part: Part, context: Context | None, watch: PartWatch = UNWATCHED
    ) -> PartDone | PartNotDone:
        """Run a part with a plain function. The context is for a handler that wants one."""
        if self._is_whole and not part.partial:
            return self._run_whole(part)
        if self._reader and (trouble := self._fetch(part, self._reader)):
            return trouble
        call = self._bind(context)
        if part.partial or part.mark or part.crashes:
            return self._run_rest(call, part, self._given(part), [], None, watch)
        return self._run_quickly(call, part, watch)

    def _run_quickly(
        self, call: Callable[[Any], Any], part: Part, watch: PartWatch
    ) -> PartDone | PartNotDone:
        items: list[Item] = []
        if self.timeout_ms and self.handler.is_map:
            call = telling_the_watch(call, items, watch)
        elif self.handler.is_map and can_be_cut_into_blocks(part.payload, self._spec):
            return self._run_in_blocks(call, part, watch)
        if plain := self._plain_values(part, part.payload):
            values, letter = plain
            count = len(values)
            run = partial(self._run_plain, call, items)
            so_far = partial(_kept_outcomes_of, items, count)
            error = self._run_stretches(run, values, items, watch, so_far, is_last_use=True)
            if len(items) == count:
                return self.done(part, items, count, letter * count)
            return self._run_rest(call, part, self._given(part), items, error, watch)
        given, error = self._given(part), None
        # Where some lines are blank, records are run one by one.
        if not (self._may_skip(part) and any(map(self._is_blank, given))):
            run = partial(self._run_straight, call, items, about.is_json_payload(part))
            so_far = partial(_kept_outcomes_of, items, len(given))
            error = self._run_stretches(run, given, items, watch, so_far)
            if len(items) == len(given):
                return self.done(part, items, len(items), self.endings(given))
        return self._run_rest(call, part, given, items, error, watch)

    def _run_in_blocks(
        self, call: Callable[[Any], Any], part: Part, watch: PartWatch
    ) -> PartDone | PartNotDone:
        """Run a large part a block of its lines at a time."""
        found, payload, error = LineBlocks(), part.payload, None

        def so_far() -> Outcomes:
            return found.outcomes(payload.count(b"\n"))

        for block in blocks_of(payload):
            items = found.block
            values: list[Any]
            run: Callable[[list[Any]], BaseException | None]
            if plain := self._plain_values(part, block):
                values, run = plain[0], partial(self._run_plain, call, items)
            else:
                values, run = (
                    block.splitlines(keepends=True),
                    partial(self._run_straight, call, items, False),
                )
            count = len(values)
            if watch.is_over() or records.holds_blanks(block, self._spec):
                break
            error = self._run_stretches(run, values, items, watch, so_far, is_last_use=True)
            if len(items) < count:
                break
            found.end_block()
            if watch.is_due():
                watch.keep(self._so_far(so_far()), b"")
        else:
            return self.done_in_blocks(part, found)
        return self._run_rest(call, part, self._given(part), found.items(), error, watch)

    def _run_stretches(
        self,
        run: Callable[[list[Any]], BaseException | None],
        values: list[Any],
        items: list[Item],
        watch: PartWatch,
        so_far: Callable[[], Outcomes],
        *,
        is_last_use: bool = False,
    ) -> BaseException | None:
        """Run records some at a time, until one is out of the ordinary or it is time to stop.

        ``so_far``: what the part's records came to. ``is_last_use``: ``values`` may be emptied.
        Returns what the call of the first record without an item ended in, if it was called.
        """
        count = len(values)
        if count == 1:
            return run(values)
        watch.offer(lambda: self._so_far(so_far()))
        while True:
            size, before = self._stretch.size, len(items)
            is_all = is_last_use and before == 0 and size >= count
            stretch = values if is_all else values[before : before + size]
            wanted, began = len(stretch), time.monotonic()
            watch.stretch = stretch
            error = run(stretch)
            watch.stretch = None
            done = len(items) - before
            self._stretch.observe(done, time.monotonic() - began)
            # A stretch that is shorter than it was and has values left met a strange record.
            is_strange = done < wanted and len(stretch) > 0
            if error or is_strange or is_all or len(items) == count or watch.is_over():
                return error
            if watch.is_due():
                watch.keep(self._so_far(so_far()), b"")

    def _run_whole(self, part: Part) -> PartDone | PartNotDone:
        """Run a part by the shortest way: one value, one call, one item."""
        function, payload = self._function, part.payload
        try:
            value = self._decode(payload, about.is_json_payload(part))
        except Exception:  # noqa: BLE001  it is described there
            return self._run_rest(function, part, [payload], [], None, UNWATCHED)
        try:
            returned = function(value)
            if returned is None and about.is_one_payload(part) and not self._spec.stage:
                return _NOTHING
            item = self.encode(returned)
        except BaseException as error:  # noqa: BLE001  whatever it is, it is the part's
            return self._run_rest(function, part, [payload], [], error, UNWATCHED)
        return self.done(part, [item], 1, b"")

    def _run_rest(
        self,
        call: Callable[[Any], Any],
        part: Part,
        given: list[bytes],
        items: list[Item],
        error: BaseException | None,
        watch: PartWatch,
    ) -> PartDone | PartNotDone:
        """Run records one by one, after those that have items; the next may have ended in error."""
        run = self._one_by_one(part, given, items, watch)
        if not isinstance(run, RecordByRecord):
            return run
        if error and run.decode():
            run.failed(error_that_ends_one_part(error))
        if run.is_whole and len(given) > 1:
            watch.offer(lambda: self._so_far(run.outcomes))
        return self._call_each(call, run, watch)

    def _call_each(
        self, call: Callable[[Any], Any], run: RecordByRecord, watch: PartWatch
    ) -> PartDone | PartNotDone:
        while run.advance():
            if run.mark is not None:
                watch.keep(self._so_far(run.outcomes), run.mark, must=True)
            run.begin()
            try:
                returned = call(run.value)
            except BaseException as raised:  # noqa: BLE001  whatever it is, it is the part's
                run.failed(error_that_ends_one_part(raised))
            else:
                run.returned(returned)
            if run.is_whole and watch.is_due() and not watch.is_over():
                watch.keep(self._so_far(run.outcomes), b"")
        return run.sum_up()

    def _plain_values(self, part: Part, payload: bytes) -> tuple[list[Any], bytes] | None:
        if part.partial or not self.handler.is_map or about.is_json_payload(part):
            return None
        return records.plain_values(payload, self.handler.annotation, self._spec)

    def _run_plain(
        self, call: Callable[[Any], Any], items: list[Item], values: list[Any]
    ) -> BaseException | None:
        """Call with each value. Returns what the last call ended in, if that was an error."""
        encode, most = self.encode, self._max_result
        try:
            for value in values:
                returned = call(value)
                kind = type(returned)
                if (kind is bytes or (kind is str and returned.isascii())) and len(
                    returned
                ) <= most:
                    items.append(returned)
                else:
                    items.append(encode(returned))
        except BaseException as error:  # noqa: BLE001  whatever it is, it is the part's
            return error
        return None

    def _run_straight(
        self, call: Callable[[Any], Any], items: list[Item], is_json: bool, given: list[bytes]
    ) -> BaseException | None:
        """Run records until one is out of the ordinary: most parts have none.

        Returns what the call of the first record without an item ended in, if it was called.
        """
        decode, encode, add = self.decode_record, self.encode, items.append
        for record in given:
            try:
                value = decode(record, is_json)
            except RecordError:
                return None
            try:
                add(encode(call(value)))
            except BaseException as error:  # noqa: BLE001  whatever it is, it is the part's
                return error
        return None

    async def run_async(
        self, part: Part, context: Context | None, watch: PartWatch = UNWATCHED
    ) -> PartDone | PartNotDone:
        """Run a part with a coroutine. The watch may cancel the call of a record."""
        reader = self._reader
        if reader and (trouble := await asyncio.to_thread(self._fetch, part, reader)):
            return trouble
        run = self._one_by_one(part, self._given(part), [], watch)
        if not isinstance(run, RecordByRecord):
            return run
        return await self._await_each(self._bind(context), run, watch)

    async def _await_each(
        self, call: Callable[[Any], Awaitable[Any]], run: RecordByRecord, watch: PartWatch
    ) -> PartDone | PartNotDone:
        while run.advance():
            if run.mark is not None:
                await watch.keep_later(self._so_far(run.outcomes), run.mark, must=True)
            run.begin()
            try:
                returned = await call(run.value)
            except asyncio.CancelledError:
                if (reason := watch.cancelled()) == "unwanted":
                    run.stop()
                    break
                run.failed(self._cancelled(reason))
            except BaseException as error:  # noqa: BLE001  whatever it is, it is the part's
                run.failed(error_that_ends_one_part(error))
            else:
                run.returned(returned)
            if run.is_whole and watch.is_due():
                await watch.keep_later(self._so_far(run.outcomes), b"")
        return run.sum_up()

    def _cancelled(self, reason: CancelReason) -> Exception:
        is_ours = reason == "timeout"
        message = (
            words_of_time_limit(self.timeout_ms) if is_ours else "the handler cancelled itself"
        )
        return (Timeout if is_ours else RuntimeError)(message)

    def _one_by_one(
        self, part: Part, given: list[bytes], items: list[Item], watch: PartWatch
    ) -> "RecordByRecord | PartNotDone":
        """Return an attempt at the records without an outcome; or what becomes of the part."""
        try:
            return RecordByRecord(self, part, given, items, watch)
        except Damaged as error:
            # The outcomes that the server keeps cannot be read: a redrive runs all of the part.
            log.warning("part %d of %s is given up: %s", part.number, self._request_id, error)
            failure = Failure(
                error="Damaged",
                message=text_that_can_be_encoded(error),
                part=part.number,
                attempts=part.attempt,
                **self.place(part, 0),
            )
            return PartNotDone("abandon", 0, [failure], (0, -1), partial=FORGET)

    def _fetch(self, part: Part, reader: ReferenceReader) -> PartNotDone | None:
        """Put the bytes a part refers to in their place, or say why that cannot be."""
        place = self.place(part, 0)
        try:
            source, reference, form = place["source"], part.payload, self._spec.format
            if form in TABLE_FORMATS:
                part.payload = reader.read_table(source, reference, form, self._columns)
            else:
                part.payload = reader.read(source, reference, self._spec)
            part.reference = reference
            return None
        except Exception as error:  # noqa: BLE001  whatever reading leads to
            failure = Failure(
                error="Unreadable",
                message=text_that_can_be_encoded(error),
                part=part.number,
                attempts=part.attempt,
                **place,
            )
            if isinstance(error, Abandon):
                return PartNotDone("abandon", 0, [failure], (0, -1))
            return self.put_off(part, [failure], None)

    def _callable(self) -> Callable[..., Any]:
        """Return what is called with a record, and returns what it came to."""
        return yielding.encoded_yields(self.handler, self.encode, self._max_result)

    def _bind(self, context: Context | None) -> Callable[[Any], Any]:
        function, name = self._function, self.handler.context_name
        if name is None:
            return function
        return lambda value: function(value, **{name: context})

    def endings(self, given: list[bytes]) -> bytes:
        """Return how the lines of a part's records end."""
        return records.line_endings(given) if self._is_text else b""

    def outcomes_so_far(self, part: Part, given: list[bytes]) -> Outcomes:
        """Return what the records came to in earlier attempts.

        Raises:
            Damaged: what they left cannot be read.
        """
        if part.partial:
            outcomes = kept_outcomes.decode_kept_outcomes(part.partial, len(given))
        else:
            outcomes = kept_outcomes.outcomes_of_items([], len(given))
        can_skip = self._may_skip(part)
        for index, record in enumerate(given):
            # A blank line is no record: it is not counted as one either.
            if can_skip and outcomes[index][0] == NONE and self._is_blank(record):
                outcomes[index] = [DELIVERED]
        return outcomes

    def _is_blank(self, record: bytes) -> bool:
        return records.is_blank_record(record, self._spec)

    def _may_skip(self, part: Part) -> bool:
        """Return whether lines of the part may be no records: the loader said so of a CSV."""
        return self._has_blanks or (self._has_empty_rows and about.about_has_other_lines(part))

    def _given(self, part: Part) -> list[bytes]:
        """Return what the handler is called with in turn: records, or the part as a whole."""
        return records.records_in(part, self._spec) if self.handler.is_map else [part.payload]

    def decode_record(self, record: bytes, is_json: bool) -> Any:
        """Return what the handler is called with."""
        try:
            return self._decode(
                records.without_line_ending(record) if self._is_text else record, is_json
            )
        except UnicodeDecodeError as error:
            byte = error.object[error.start]
            raise DecodeError(
                f"the record is not UTF-8: {error.reason} 0x{byte:02x}; files that are encoded "
                "otherwise are read with --encoding latin-1, for example"
            ) from None
        except (msgspec.MsgspecError, RecursionError) as error:
            raise DecodeError(f"the record does not decode: {error}") from None

    def encode(self, returned: Any) -> Item:
        """Return what the handler returned, as it is kept."""
        if returned is None or (type(returned) is bytes and len(returned) <= self._max_result):
            return returned
        try:
            item = codec.encode_item(returned)
        except (TypeError, msgspec.MsgspecError, RecursionError, UnicodeError) as error:
            raise EncodeError(f"the result cannot be encoded: {error}") from None
        if codec.size_of_results(item) > self._max_result:
            raise ResultTooLarge(f"the result has more than the {self._max_result} bytes allowed")
        return item
