"""Decides what becomes of a part whose records have been run: done, tried again, or given up.

Failures are described here, too: which error, of which record, in which line of which file.
"""

import logging
from typing import Any

import msgspec

from streamq import backoff
from streamq.app import Abandon, Handler, Retry, Snooze
from streamq.errors import RecordError
from streamq.model import MAX_RESULT, RETRIES, Failure, Part, Spec
from streamq.protocol.replies import FailKind
from streamq.queue.outcomes import PartDone, PartNotDone, outcome_at_time_limit
from streamq.records import about
from streamq.records import decoding as records
from streamq.records import encoding as codec
from streamq.records.encoding import Item
from streamq.records.spool import SpoolWriter
from streamq.worker import kept_outcomes
from streamq.worker.calling import Timeout
from streamq.worker.kept_outcomes import DONE, FAILED, Outcomes
from streamq.worker.line_blocks import LineBlocks
from streamq.worker.tracebacks import Complaints, text_that_can_be_encoded, users_traceback

log = logging.getLogger(__name__)

#: The last 4,000 characters of a traceback are kept with a failure.
_TRACEBACK_CHARS = 4_000


class Verdicts:
    """Says what becomes of parts of one request, by the rules of its handler and its spec."""

    def __init__(
        self, handler: Handler, spec: Spec, max_result: int = MAX_RESULT, request_id: str = ""
    ) -> None:
        self.handler = handler
        #: Where results of parts by reference are kept in a run.
        self._spool: SpoolWriter | None = None
        self._spec = spec
        self._max_result = max_result
        given = spec.retries if spec.retries is not None else handler.retries
        self._retries = RETRIES if given is None else given
        #: The time limit of a record (of a map) or of a part, or 0.
        self.timeout_ms = spec.timeout_ms or handler.timeout_ms or 0
        self._begin(request_id)

    def _begin(self, request_id: str) -> None:
        """Forget what was noted of another request."""
        self._request_id = request_id
        self._complaints = Complaints()
        #: How the attempts at parts of the request went lately, for the pauses before others.
        self.troubles = backoff.BackoffTroubles()
        self._has_said_large = False

    def done(
        self,
        part: Part,
        items: list[Item],
        fresh: int,
        endings: bytes,
        outcomes: Outcomes | None = None,
    ) -> PartDone | PartNotDone:
        """Return what becomes of a part whose records are all done, some just now.

        ``outcomes``: what they came to, where some were done before.
        """
        result = codec.encode_result(items, endings)
        if len(result) <= self._max_result:
            size = 0
            # A part that was retried has results of some of its records in the output already:
            # the collector has to see the items one by one.
            if self._spool and part.reference and not part.partial:
                size = len(result)
                result = self._spool.keep(result, part.reference, part.about) or result
            return PartDone(result, self._count(part, fresh), spooled=size)
        return self._cut(
            part, [], outcomes or kept_outcomes.outcomes_of_items(items, len(items)), endings
        )

    def done_in_blocks(self, part: Part, found: LineBlocks) -> PartDone | PartNotDone:
        """Return the same of a part that was run block by block, just now and to its end."""
        lines = found.lines()
        if lines is None or sum(map(len, lines[0])) > self._max_result:
            items = found.items()
            return self.done(part, items, len(items), b"")
        blocks, is_text = lines
        count = self._count(part, found.count)
        if self._spool and part.reference:
            told = self._spool.keep_lines(blocks, part.reference, part.about, is_text=is_text)
            if told:
                return PartDone(told, count, spooled=sum(map(len, blocks)))
        return PartDone(codec.encode_lines(blocks, is_text=is_text), count)

    def give_up(
        self, part: Part, failures: list[Failure], outcomes: Outcomes, endings: bytes
    ) -> PartNotDone:
        """Return what becomes of a part some of whose records have failed for good."""
        items = [each[1] if each[0] == DONE else None for each in outcomes]
        fresh = sum(each[0] == DONE for each in outcomes)
        told = {id(failure) for failure in failures}
        earlier = [each[1] for each in outcomes if each[0] == FAILED and id(each[1]) not in told]
        failures = sorted(earlier + failures, key=lambda failure: failure.record)
        result = codec.encode_result(items, endings) if fresh else b""
        if len(result) > self._max_result:
            return self._cut(part, failures, outcomes, endings)
        return PartNotDone(
            "abandon",
            0,
            failures,
            (fresh, self._count(part, len(failures))),
            result,
            kept_outcomes.encode_outcomes_of_rest(outcomes) if len(outcomes) > 1 else b"",
        )

    def put_off(
        self,
        part: Part,
        failures: list[Failure],
        error: BaseException | None,
        outcomes: Outcomes | None = None,
        *,
        is_stopped: bool = False,
    ) -> PartNotDone:
        """Return what becomes of a part that runs again later, unless it has no attempt left."""
        kind: FailKind = "snooze" if is_stopped else "retry"
        delay_ms = None
        if failures:
            self.troubles.failed()
        if isinstance(error, Snooze):
            kind, delay_ms = "hold" if error.scope == "request" else "snooze", error.after_ms
        elif isinstance(error, Retry):
            delay_ms = error.after_ms
        if error is None and is_stopped:
            delay_ms = 0
        elif error is None and part.attempt > self._retries:
            kind = "abandon"
        if delay_ms is None:
            delay_ms = self.retry_ms(part)
        kept = self._kept(outcomes)
        return PartNotDone(kind, delay_ms, failures, (0, -1), partial=kept, is_stopped=is_stopped)

    def fail(self, part: Part, error: Exception) -> PartNotDone:
        """Return what becomes of a part that ended in an error of its own making."""
        return self.put_off(part, [self.describe(error, part, 0)], None)

    def time_out(self, part: Part) -> PartNotDone:
        """Return what becomes of a part that took too long."""
        failure = outcome_at_time_limit(part.number, part.attempt, self.timeout_ms)
        return self.put_off(part, [failure], None)

    def is_final(self, error: BaseException, part: Part) -> bool:
        """Return whether a record that ended in the error is not tried again."""
        if isinstance(error, Snooze):
            return False
        return isinstance(error, Abandon | RecordError) or self.is_last(part.attempt)

    def is_last(self, attempt: int) -> bool:
        """Return whether there is no other attempt after this one."""
        return attempt > self._retries

    def retry_ms(self, part: Part) -> int:
        """Return how long a part waits for its next attempt (ms)."""
        return backoff.retry_ms(
            part.attempt,
            self._spec.backoff_ms,
            self._spec.backoff_max_ms,
            are_few=self.troubles.are_few,
        )

    def describe(self, error: BaseException, part: Part, index: int) -> Failure:
        """Return the failure of a record, and log what the user may want to mend."""
        # For a record that does not decode or encode there is no frame of the user's code.
        trace = "" if isinstance(error, RecordError | Timeout) else users_traceback(error)
        if not isinstance(error, Snooze | Retry | Abandon | RecordError | Timeout):
            what = f"part {part.number} of {self._request_id} failed in {self.handler.name}"
            self._complaints.say(f"{what}, attempt {part.attempt}", error, trace)
        return Failure(
            error=type(error).__name__,
            message=text_that_can_be_encoded(error),
            part=part.number,
            record=index + 1,
            attempts=part.attempt,
            traceback=trace[-_TRACEBACK_CHARS:],
            **self.place(part, index),
        )

    def place(self, part: Part, index: int) -> dict[str, Any]:
        """Return file and line of a record, or of all of a part that is handled as a whole."""
        place = about.AboutPlace.of(part.about, self._spec)
        if place is None:
            return {}
        if self.handler.is_map or place.records <= 1:
            before = records.lines_before(part, index, self._spec) if index else 0
            return {"source": place.source, "line": place.line + before}
        return msgspec.structs.asdict(place)

    def source_of(self, part: Part) -> str:
        """Return the file that the part was loaded from; "" for none."""
        return str(self.place(part, 0).get("source", ""))

    def _cut(
        self, part: Part, failures: list[Failure], outcomes: Outcomes, endings: bytes
    ) -> PartNotDone:
        """Give up the records whose results have no room beside those of records before them."""
        for index in kept_outcomes.outcomes_without_room(outcomes, self._max_result - len(endings)):
            failure = Failure(
                error="ResultTooLarge",
                message=f"the results of its part have more than the {self._max_result} bytes "
                "allowed, and this one is left out: make parts smaller (--lines, --bytes)",
                part=part.number,
                record=index + 1,
                attempts=part.attempt,
                **self.place(part, index),
            )
            outcomes[index] = [FAILED, failure]
            failures.append(failure)
        return self.give_up(part, failures, outcomes, endings)

    def _count(self, part: Part, outcomes: int) -> int:
        """Return how many records outcomes stand for: a map has one outcome for each record."""
        if self.handler.is_map or about.is_one_payload(part):
            return outcomes
        return outcomes if part.records is None or not outcomes else part.records

    def _kept(self, outcomes: Outcomes | None) -> bytes:
        """Return what the next attempt is told of the records that have an outcome.

        It goes to the server and back with each attempt, so it may be no larger than a result.
        """
        kept = self._so_far(outcomes) if outcomes else b""
        if kept or not outcomes or not any(each[0] for each in outcomes):
            return kept
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

    def _so_far(self, outcomes: Outcomes) -> bytes:
        """Return what is kept of the outcomes: nothing if it is larger than a result may be."""
        kept = kept_outcomes.encode_kept_outcomes(outcomes)
        return kept if len(kept) <= self._max_result else b""
