"""Checks what a report says of the parts of its ticket, and turns it into calls under the lease."""

from collections.abc import Sequence

from msgspec import UNSET

from streamq import backoff
from streamq.errors import InvalidValue
from streamq.gateway import payloads, stages
from streamq.gateway.messages import Done, Failed, Report
from streamq.gateway.ticket import MOST_FAILURES, Ticket
from streamq.model import Failure, Part
from streamq.queue.outcomes import PartDone, PartNotDone

#: How many of the last characters of a traceback, and of the first of a message, are kept with a
#: failure.
_TRACEBACK_CHARS = 4_000
_MESSAGE_CHARS = 4_000


class Outcomes:
    """The outcomes of the parts of a ticket."""

    def __init__(self, ticket: Ticket, report: Report) -> None:
        """Raises:
        InvalidValue: the report names a part that is not in the ticket, or names one twice.
        """
        records = ticket.records_by_part()
        named = [each.part for each in report.done]
        named += [each.part for each in report.failed] + report.back
        _check_parts_of_outcomes(named, records)
        if report.crashed is not None:
            _check_parts_of_outcomes([*named, report.crashed], records)
        #: How many parts were run.
        self.ran = len(report.done) + len(report.failed)
        self.crashed = report.crashed
        self.done: list[tuple[Part, PartDone]] = []
        self.not_done: list[tuple[Part, PartNotDone]] = [
            (_bare_part_of_outcomes(each.part), _outcome_of_part_not_done(ticket, each))
            for each in report.failed
        ]
        for each in report.done:
            self._add(ticket, each, records[each.part])
        if len(self.not_done) > MOST_FAILURES:
            raise InvalidValue(
                f"{len(self.not_done)} parts failed, and a report tells of {MOST_FAILURES} at most"
            )
        left = records.keys() - set(named) - {report.crashed}
        self.back = sorted({*report.back, *left})

    @property
    def goes_on(self) -> bool:
        """Whether more parts may be asked for under the lease."""
        return self.crashed is None and not self.back

    def counts(self) -> dict[str, int]:
        """Return how many parts were reported, by their outcome."""
        return {
            "done": len(self.done),
            "failed": len(self.not_done),
            "back": len(self.back),
            "crashed": int(self.crashed is not None),
        }

    def _add(self, ticket: Ticket, done: Done, records: int) -> None:
        result = payloads.encoded_result_payload(done.result)
        part = Part(done.part, b"", ticket.about_of(done.part))
        try:
            self.done.append((part, stages.outcome_of_stage(part, records, result, ticket.facts)))
        except stages.BAD as error:
            word, why = type(error).__name__, str(error)
            failed = Failed(part=done.part, kind="abandon", error=word, message=why)
            self.not_done.append((part, _outcome_of_part_not_done(ticket, failed)))


def _check_parts_of_outcomes(named: Sequence[int], known: dict[int, int]) -> None:
    if len(set(named)) < len(named):
        raise InvalidValue("the report names a part twice")
    if strange := sorted(set(named) - known.keys()):
        raise InvalidValue(f"part {strange[0]} is not in the ticket")


def _outcome_of_part_not_done(ticket: Ticket, failed: Failed) -> PartNotDone:
    attempt = ticket.attempts.get(failed.part, 1)
    delay_ms = failed.after_ms
    if delay_ms is UNSET:
        delay_ms = backoff.retry_ms(attempt, ticket.backoff_ms, ticket.backoff_max_ms)
    failure = Failure(
        error=failed.error,
        message=failed.message[:_MESSAGE_CHARS],
        part=failed.part,
        attempts=attempt,
        traceback=failed.traceback[-_TRACEBACK_CHARS:],
    )
    return PartNotDone(failed.kind, delay_ms, [failure], (0, -1))


def _bare_part_of_outcomes(number: int) -> Part:
    return Part(number, b"", b"")
