"""Running the records of a part one by one."""

import typing
from typing import Any

from streamq.app import Retry, Snooze
from streamq.model import Failure, Part
from streamq.queue.outcomes import PartDone, PartNotDone, words_of_time_limit
from streamq.records import about
from streamq.records.encoding import Item
from streamq.worker.kept_outcomes import DONE, FAILED, NONE
from streamq.worker.part_watch import PartWatch
from streamq.worker.pieces import Pieces

if typing.TYPE_CHECKING:
    from streamq.worker.runner import Runner


class RecordByRecord:
    """An attempt at the records of a part that have no outcome yet, one after another."""

    def __init__(
        self,
        runner: "Runner",
        part: Part,
        given: list[bytes],
        items: list[Item],
        watch: PartWatch,
    ) -> None:
        """``items`` are what the first records yielded just now.

        Raises:
            Damaged: what earlier attempts left cannot be read.
        """
        self._runner = runner
        self._part = part
        self._given = given
        self._watch = watch
        self._is_json = about.is_json_payload(part)
        self.outcomes = runner.outcomes_so_far(part, given)
        self.outcomes[: len(items)] = [[DONE, item] for item in items]
        self._failures: list[Failure] = []
        self._retry: BaseException | None = None
        self._is_stopped = False
        left = [index for index, each in enumerate(self.outcomes) if each[0] == NONE]
        pieces = Pieces(part, left, len(given))
        #: What the server is to be told of before the next record is run: None for nothing.
        self.mark: bytes | None = None
        #: Whether the part is run as a whole. If it is run in pieces, the server is told of each.
        self.is_whole = not pieces.is_careful
        self._give_up_untried(pieces)
        self._order = list(pieces)
        self._place = self._index = -1
        #: What the handler is to be called with.
        self.value: Any = None

    def _give_up_untried(self, pieces: Pieces) -> None:
        """Give up records of which workers died, or that took too long in their last attempt."""
        runner, part = self._runner, self._part
        for index in pieces.deadly:
            deadly = self._untried(
                "Poison", _why_records_are_given_up(part, pieces), index, part.attempt
            )
            self.outcomes[index] = [FAILED, deadly]
        late = pieces.late
        if late and runner.is_last(late.attempt):
            message = words_of_time_limit(runner.timeout_ms)
            failure = self._untried("Timeout", message, late.index, late.attempt)
            self.outcomes[late.index] = [FAILED, failure]
            pieces.drop(late.index)
        if pieces.deadly or late:
            # It is kept before another record is run, which may end this process, too.
            self.mark = b""

    def _untried(self, error: str, message: str, index: int, attempts: int) -> Failure:
        return Failure(
            error=error,
            message=message,
            part=self._part.number,
            record=index + 1,
            attempts=attempts,
            **self._runner.place(self._part, index),
        )

    def advance(self) -> bool:
        """Go on to the next record that can be run. Returns whether there is one."""
        if isinstance(self._retry, Snooze):
            return False
        if self._watch.is_over():
            self._is_stopped = self._place + 1 < len(self._order)
            return False
        return self.decode()

    def stop(self) -> None:
        """Note that the record was stopped before it had an outcome."""
        self._is_stopped = True

    def decode(self) -> bool:
        """Go on to the next record that decodes. Returns whether there is one."""
        while self._place + 1 < len(self._order):
            self._place += 1
            self._index, mark = self._order[self._place]
            self.mark = self.mark if mark is None else mark
            try:
                self.value = self._runner.decode_record(self._given[self._index], self._is_json)
            except Exception as error:  # noqa: BLE001  whatever the user's types lead to
                self.failed(error)
                continue
            return True
        return False

    def begin(self) -> None:
        """Note that the handler is about to be called with the record."""
        self.mark = None
        self._watch.begin(self._index)

    def returned(self, returned: Any) -> None:
        """Note what the handler returned."""
        try:
            self.outcomes[self._index] = [DONE, self._runner.encode(returned)]
        except Exception as error:  # noqa: BLE001  whatever the result leads to
            self.failed(error)

    def failed(self, error: Exception) -> None:
        """Note that the record failed."""
        self._failures.append(self._runner.describe(error, self._part, self._index))
        if self._runner.is_final(error, self._part):
            self.outcomes[self._index] = [FAILED, self._failures[-1]]
        else:
            self._retry = _stronger_error(self._retry, error)

    def sum_up(self) -> PartDone | PartNotDone:
        """Return what the part came to."""
        runner, part, outcomes = self._runner, self._part, self.outcomes
        if self._is_stopped:
            # Records that failed have this attempt again, with those that never ran.
            return runner.put_off(part, self._failures, self._retry, outcomes, is_stopped=True)
        if self._retry is not None:
            return runner.put_off(part, self._failures, self._retry, outcomes)
        endings = runner.endings(self._given)
        if any(each[0] == FAILED for each in outcomes):
            return runner.give_up(part, self._failures, outcomes, endings)
        done = [each[1] if each[0] == DONE else None for each in outcomes]
        fresh = sum(each[0] == DONE for each in outcomes)
        return runner.done(part, done, fresh, endings, outcomes)


def _why_records_are_given_up(part: Part, pieces: Pieces) -> str:
    """Say why records are given up that are not run."""
    if pieces.is_hopeless:
        return f"it was not run: {part.crashes} workers died of its part"
    return "it was running each time its worker died"


def _stronger_error(first: BaseException | None, second: BaseException) -> BaseException:
    """Return which of two errors says more about when to run the part again."""
    return second if first is None or isinstance(second, Snooze | Retry) else first
