"""Running one part: what its records yield, and what becomes of those that fail.

The same steps serve plain functions and coroutines: they are a generator that yields
the value to call the handler with and is sent what came of it.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Generator
from typing import Any, Self

import msgspec

from streamq import backoff
from streamq.app import Abandon, Context, Handler, Retry, Snooze
from streamq.errors import (
    Damaged,
    DecodeError,
    EncodeError,
    RecordError,
    ResultTooLarge,
    damaged_if_unreadable,
)
from streamq.model import MAX_RESULT, RETRIES, Failure, Part, Spec
from streamq.protocol.replies import FailKind
from streamq.queue.outcomes import PartDone, PartNotDone, timed_out
from streamq.records import about
from streamq.records import decoding as records
from streamq.records import encoding as codec
from streamq.records.encoding import Item
from streamq.records.references import Reader
from streamq.worker.tracebacks import safe_text, users_traceback

log = logging.getLogger(__name__)

#: The last 4,000 characters of a traceback are kept with a failure.
_TRACEBACK_CHARS = 4_000
#: An error is logged in full at most once a second, then every 2 s, 4 s and so on up to 60 s.
_COMPLAIN_EVERY_S = 1.0
_MOST_SILENT_S = 60.0
_NONE, _DONE, _FAILED, _DELIVERED = range(4)


#: The outcome of a part of one record whose handler returned None.
_NOTHING = PartDone(codec.encode_result([None]), 1)


class Runner:
    """Runs parts of one request with one handler."""

    def __init__(
        self,
        handler: Handler,
        spec: Spec,
        max_result: int = MAX_RESULT,
        request_id: str = "",
        reader: Reader | None = None,
    ) -> None:
        self.handler = handler
        self._request_id = request_id
        self._spec = spec
        self._reader = (reader or Reader(())) if spec.by_reference else None
        self._max_result = max_result
        self._decode = records.decoder_for(handler, spec)
        self._is_text = spec.format in records.TEXT_FORMATS and handler.is_map
        self._has_blanks = spec.format == "jsonl"
        #: Whether the handler is called with the part as a whole, and with nothing else.
        self._is_whole = not (
            handler.is_map or handler.context_name or spec.by_reference or self._has_blanks
        )
        given = spec.retries if spec.retries is not None else handler.retries
        self._retries = RETRIES if given is None else given
        self._silent_until = 0.0
        self._silence_s = _COMPLAIN_EVERY_S
        self._unsaid = 0
        self._has_said_large = False
        #: The time limit of a part, or 0.
        self.timeout_ms = spec.timeout_ms or handler.timeout_ms or 0

    def for_request(self, request_id: str) -> Self:
        """Return a runner for another request of the same handler and spec."""
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__)
        other._request_id = request_id
        other._silent_until, other._silence_s, other._unsaid = 0.0, _COMPLAIN_EVERY_S, 0
        other._has_said_large = False
        return other

    def run(self, part: Part, context: Context | None) -> PartDone | PartNotDone:
        """Run a part with a plain function. The context is for a handler that wants one."""
        if self._is_whole and not part.partial:
            return self._run_whole(part)
        if self._reader and (trouble := self._fetch(part, self._reader)):
            return trouble
        call = self._bind(context)
        items: list[Item] = []
        if plain := self._plain_values(part):
            values, letter = plain
            error = self._run_plain(call, values, items)
            if len(items) == len(values):
                return self._done(part, items, len(items), letter * len(items))
            return self._run_rest(call, part, self._given(part), items, error)
        given = self._given(part)
        error = None if part.partial else self._run_straight(call, given, part, items)
        if len(items) == len(given):
            return self._done(part, items, len(items), self._endings(given))
        return self._run_rest(call, part, given, items, error)

    def _run_whole(self, part: Part) -> PartDone | PartNotDone:
        """Run a part by the shortest way: one value, one call, one item."""
        function, payload = self.handler.function, part.payload
        try:
            value = self._decode(payload, about.is_json(part))
        except Exception:  # noqa: BLE001  it is described there
            return self._run_rest(function, part, [payload], [], None)
        try:
            returned = function(value)
            if returned is None and about.is_one_payload(part):
                return _NOTHING
            item = self._encode(returned)
        except BaseException as error:  # noqa: BLE001  whatever it is, it is the part's
            return self._run_rest(function, part, [payload], [], error)
        return self._done(part, [item], 1, b"")

    def _run_rest(
        self,
        call: Callable[[Any], Any],
        part: Part,
        given: list[bytes],
        items: list[Item],
        error: BaseException | None,
    ) -> PartDone | PartNotDone:
        """Run records one by one, after those that have items; the next may have ended in error."""
        steps = self._steps(part, given, items)
        try:
            value = next(steps)
            while True:
                try:
                    if error:
                        raise error
                    returned = call(value)
                except BaseException as raised:  # noqa: BLE001  whatever it is, it is the part's
                    error = None
                    value = steps.throw(_tamed(raised))
                else:
                    value = steps.send(returned)
        except StopIteration as end:
            outcome: PartDone | PartNotDone = end.value
            return outcome

    def _plain_values(self, part: Part) -> tuple[list[Any], bytes] | None:
        if part.partial or not self.handler.is_map or about.is_json(part):
            return None
        return records.plain_values(part.payload, self.handler.annotation, self._spec)

    def _run_plain(
        self, call: Callable[[Any], Any], values: list[Any], items: list[Item]
    ) -> BaseException | None:
        """Call with each value. Returns what the last call ended in, if that was an error."""
        add, encode, most = items.append, self._encode, self._max_result
        try:
            for value in values:
                returned = call(value)
                kind = type(returned)
                is_plain = kind is bytes or (kind is str and returned.isascii())
                add(returned if is_plain and len(returned) <= most else encode(returned))
        except BaseException as error:  # noqa: BLE001  whatever it is, it is the part's
            return error
        return None

    def _run_straight(
        self, call: Callable[[Any], Any], given: list[bytes], part: Part, items: list[Item]
    ) -> BaseException | None:
        """Run records until one is out of the ordinary: most parts have none.

        Returns what the call of the first record without an item ended in, if it was called.
        """
        is_json = about.is_json(part)
        decode, encode, add = self._decode_record, self._encode, items.append
        if self._has_blanks and any(records.is_skipped(record, self._spec) for record in given):
            return None
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

    async def run_async(self, part: Part, context: Context | None) -> PartDone | PartNotDone:
        """Run a part with a coroutine."""
        reader = self._reader
        if reader and (trouble := await asyncio.to_thread(self._fetch, part, reader)):
            return trouble
        call: Callable[[Any], Awaitable[Any]] = self._bind(context)
        steps = self._steps(part, self._given(part), [])
        try:
            value = next(steps)
            while True:
                try:
                    returned = await call(value)
                except asyncio.CancelledError:
                    raise
                except BaseException as error:  # noqa: BLE001  whatever it is, it is the part's
                    value = steps.throw(_tamed(error))
                else:
                    value = steps.send(returned)
        except StopIteration as end:
            outcome: PartDone | PartNotDone = end.value
            return outcome

    def _fetch(self, part: Part, reader: Reader) -> PartNotDone | None:
        """Put the bytes a part refers to in their place, or say why that cannot be."""
        place = self._place(part, 0)
        is_whole = self._spec.format == "file"
        try:
            part.payload = reader.read(place["source"], part.payload, is_whole=is_whole)
            return None
        except Exception as error:  # noqa: BLE001  whatever reading leads to
            failure = Failure(
                error="Unreadable",
                message=safe_text(error),
                part=part.number,
                attempts=part.attempt,
                **place,
            )
            if isinstance(error, Abandon):
                return PartNotDone("abandon", 0, [failure], (0, -1))
            return self._put_off(part, [failure], None)

    def fail(self, part: Part, error: Exception) -> PartNotDone:
        """Return what becomes of a part that ended in an error of its own making."""
        return self._put_off(part, [self._describe(error, part, 0)], None)

    def time_out(self, part: Part) -> PartNotDone:
        """Return what becomes of a part that took too long."""
        failure = timed_out(part.number, part.attempt, self.timeout_ms)
        return self._put_off(part, [failure], None)

    def retry_ms(self, part: Part) -> int:
        """Return how long a part waits for its next attempt (ms)."""
        return backoff.delay_ms(part.attempt, self._spec.backoff_ms, self._spec.backoff_max_ms)

    def _bind(self, context: Context | None) -> Callable[[Any], Any]:
        function, name = self.handler.function, self.handler.context_name
        if name is None:
            return function
        return lambda value: function(value, **{name: context})

    def _steps(
        self, part: Part, given: list[bytes], items: list[Item]
    ) -> Generator[Any, Any, PartDone | PartNotDone]:
        try:
            outcomes = self._outcomes_so_far(part, given)
        except Damaged as error:
            return PartNotDone("abandon", 0, [self._describe(error, part, 0)], (0, -1))
        outcomes[: len(items)] = [[_DONE, item] for item in items]
        return (yield from self._call_each(part, given, outcomes))

    def _call_each(
        self, part: Part, given: list[bytes], outcomes: list[Any]
    ) -> Generator[Any, Any, PartDone | PartNotDone]:
        """Call the handler with each record that has no outcome yet, then sum up."""
        is_json = about.is_json(part)
        retry: BaseException | None = None
        failures: list[Failure] = []
        for index, record in enumerate(given):
            if outcomes[index][0] != _NONE:
                continue
            try:
                returned = yield self._decode_record(record, is_json)
                outcomes[index] = [_DONE, self._encode(returned)]
            except Exception as error:  # noqa: BLE001  whatever the handler raised
                failures.append(self._describe(error, part, index))
                if self._is_final(error, part):
                    outcomes[index] = [_FAILED, failures[-1]]
                else:
                    retry = _stronger(retry, error)
                if isinstance(error, Snooze):
                    break
        if retry is not None:
            return self._put_off(part, failures, retry, outcomes)
        if any(each[0] == _FAILED for each in outcomes):
            return self._give_up(part, failures, outcomes, self._endings(given))
        done = [each[1] if each[0] == _DONE else None for each in outcomes]
        fresh = sum(each[0] == _DONE for each in outcomes)
        return self._done(part, done, fresh, self._endings(given))

    def _endings(self, given: list[bytes]) -> bytes:
        return records.endings(given) if self._is_text else b""

    def _outcomes_so_far(self, part: Part, given: list[bytes]) -> list[Any]:
        if part.partial:
            return _read_outcomes(part.partial, len(given))
        spec = self._spec
        # A blank line is no record: it is not counted as one either.
        return [[_DELIVERED] if records.is_skipped(each, spec) else [_NONE] for each in given]

    def _given(self, part: Part) -> list[bytes]:
        """Return what the handler is called with in turn: records, or the part as a whole."""
        return records.records_in(part, self._spec) if self.handler.is_map else [part.payload]

    def _decode_record(self, record: bytes, is_json: bool) -> Any:
        try:
            return self._decode(records.bare(record) if self._is_text else record, is_json)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise DecodeError(f"the record does not decode: {error}") from None

    def _encode(self, returned: Any) -> Item:
        if returned is None or (type(returned) is bytes and len(returned) <= self._max_result):
            return returned
        try:
            item = codec.encode_item(returned)
        except (TypeError, msgspec.MsgspecError, RecursionError, UnicodeError) as error:
            raise EncodeError(f"the result cannot be encoded: {error}") from None
        if codec.size_of(item) > self._max_result:
            raise ResultTooLarge(f"the result has more than the {self._max_result} bytes allowed")
        return item

    def _is_final(self, error: BaseException, part: Part) -> bool:
        if isinstance(error, Snooze):
            return False
        return isinstance(error, Abandon | RecordError) or part.attempt > self._retries

    def _describe(self, error: BaseException, part: Part, index: int) -> Failure:
        # For a record that does not decode or encode there is no frame of the user's code.
        trace = "" if isinstance(error, RecordError) else users_traceback(error)
        if not isinstance(error, Snooze | Retry | Abandon | RecordError):
            what = f"part {part.number} of {self._request_id} failed in {self.handler.name}"
            self._complain(f"{what}, attempt {part.attempt}", trace)
        return Failure(
            error=type(error).__name__,
            message=safe_text(error),
            part=part.number,
            record=index + 1,
            attempts=part.attempt,
            traceback=trace[-_TRACEBACK_CHARS:],
            **self._place(part, index),
        )

    def _place(self, part: Part, index: int) -> dict[str, Any]:
        """Return file and line of a record, or of all of a part that is handled as a whole."""
        place = about.Place.of(part.about, self._spec)
        if place is None:
            return {}
        if self.handler.is_map or place.records <= 1:
            return {"source": place.source, "line": place.line + index}
        return msgspec.structs.asdict(place)

    def source_of(self, part: Part) -> str:
        """Return the file that the part was loaded from; "" for none."""
        return str(self._place(part, 0).get("source", ""))

    def _complain(self, what: str, trace: str) -> None:
        """Log an error in full, but not a thousand of them: then how many more there were."""
        now = time.monotonic()
        if now < self._silent_until:
            self._unsaid += 1
            return
        more = f" ({self._unsaid} more since the last one shown)" if self._unsaid else ""
        log.warning("%s%s:\n%s", what, more, trace.rstrip())
        self._silent_until, self._unsaid = now + self._silence_s, 0
        self._silence_s = min(2 * self._silence_s, _MOST_SILENT_S)

    def _done(
        self, part: Part, items: list[Item], fresh: int, endings: bytes
    ) -> PartDone | PartNotDone:
        result = codec.encode_result(items, endings)
        if len(result) <= self._max_result:
            return PartDone(result, self._count(part, fresh))
        return self._too_large(part, len(items))

    def _too_large(self, part: Part, outcomes: int) -> PartNotDone:
        failure = Failure(
            error="ResultTooLarge",
            message=f"the part's results have more than the {self._max_result} bytes allowed: "
            "make parts smaller (--lines, --bytes)",
            part=part.number,
            attempts=part.attempt,
        )
        return PartNotDone("abandon", 0, [failure], (0, self._count(part, outcomes)))

    def _count(self, part: Part, outcomes: int) -> int:
        """Return how many records outcomes stand for: a map has one outcome for each record."""
        if self.handler.is_map or about.is_one_payload(part):
            return outcomes
        return outcomes if part.records is None or not outcomes else part.records

    def _put_off(
        self,
        part: Part,
        failures: list[Failure],
        error: BaseException | None,
        outcomes: list[Any] | None = None,
    ) -> PartNotDone:
        kind: FailKind = "retry"
        delay_ms = None
        if isinstance(error, Snooze):
            kind, delay_ms = "hold" if error.scope == "request" else "snooze", error.after_ms
        elif isinstance(error, Retry):
            delay_ms = error.after_ms
        if error is None and part.attempt > self._retries:
            kind = "abandon"
        if delay_ms is None:
            delay_ms = self.retry_ms(part)
        return PartNotDone(kind, delay_ms, failures, (0, -1), partial=self._kept(outcomes))

    def _kept(self, outcomes: list[Any] | None) -> bytes:
        """Return what the next attempt is told of the records that have an outcome.

        It goes to the server and back with each attempt, so it may be no larger than a result.
        """
        if outcomes is None or not any(each[0] for each in outcomes):
            return b""
        partial = msgspec.msgpack.encode(outcomes)
        if len(partial) <= self._max_result:
            return partial
        if not self._has_said_large:
            self._has_said_large = True
            log.warning(
                "the outcomes of a part of %s that is tried again have more than the %d bytes of a "
                "result: all its records run again, not only those that failed. Make parts "
                "smaller (--lines, --bytes)",
                self._request_id,
                self._max_result,
            )
        return b""

    def _give_up(
        self, part: Part, failures: list[Failure], outcomes: list[Any], endings: bytes
    ) -> PartNotDone:
        items = [each[1] if each[0] == _DONE else None for each in outcomes]
        fresh = sum(each[0] == _DONE for each in outcomes)
        # For a redrive: these have been delivered, the others are to run.
        left = [[_NONE] if each[0] in (_NONE, _FAILED) else [_DELIVERED] for each in outcomes]
        told = {id(failure) for failure in failures}
        earlier = [each[1] for each in outcomes if each[0] == _FAILED and id(each[1]) not in told]
        failures = sorted(earlier + failures, key=lambda failure: failure.record)
        result = codec.encode_result(items, endings) if fresh else b""
        if len(result) > self._max_result:
            return self._too_large(part, len(outcomes))
        return PartNotDone(
            "abandon",
            0,
            failures,
            (fresh, self._count(part, len(failures))),
            result,
            msgspec.msgpack.encode(left) if len(outcomes) > 1 else b"",
        )


def _read_outcomes(partial: bytes, count: int) -> list[Any]:
    """Return what records came to in earlier attempts.

    Raises:
        Damaged: it is not of this part.
    """
    with damaged_if_unreadable("what earlier attempts left"):
        outcomes = msgspec.msgpack.decode(partial, type=list[list[Any]])
        for each in outcomes:
            if each[0] not in range(4) or len(each) != (2 if each[0] in (_DONE, _FAILED) else 1):
                raise ValueError("it says what no attempt does")
            if each[0] == _FAILED:
                each[1] = msgspec.convert(each[1], Failure)
            elif each[0] == _DONE:
                codec.decode_result(codec.encode_result(each[1:]))
        if len(outcomes) != count:
            raise ValueError(f"it is of {len(outcomes)} records, not of {count}")
    return outcomes


def _tamed(error: BaseException) -> Exception:
    """Return an error that ends only the part, instead of one that would end the process."""
    if isinstance(error, Exception):
        return error
    return RuntimeError(f"the handler raised {type(error).__name__}: {safe_text(error)}")


def _stronger(first: BaseException | None, second: BaseException) -> BaseException:
    """Return which of two errors says more about when to run the part again."""
    return second if first is None or isinstance(second, Snooze | Retry) else first
