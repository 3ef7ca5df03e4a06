"""A request at one moment, typed: everything that ``inspect`` tells of it."""

from typing import Literal

import msgspec

from streamq import units
from streamq.errors import UNREADABLE, Damaged, damaged_if_unreadable
from streamq.model import (
    WEIGHT,
    Callback,
    CallbackStatus,
    PartCounts,
    RecordCounts,
    Spec,
    State,
    Status,
)

#: What is counted, or kept as a number. Times are in ms, by the server's clock.
Number = Literal[
    # Worked out by the script.
    "now_ms",
    "left",
    "leases",
    "alive",
    "retry",
    "handed_back",
    "results",
    # Kept with the request.
    "bytes",
    "ceiling",
    "created_ms",
    "deadline_ms",
    "delivered",
    "done",
    "failed",
    "finished_ms",
    "hold_ms",
    "keep_ms",
    "level",
    "limit",
    "max_failures",
    "max_percent",
    "owes",
    "rate_at_ms",
    "rate_ms",
    "records",
    "records_done",
    "records_failed",
    "redrives",
    "settled",
    "stages",
    "started_ms",
    "suspected_ms",
    "total",
    "weight",
]
Text = Literal[
    "calls",
    "committed",
    "cursor",
    "digest",
    "handler",
    "key",
    "labels",
    "parent",
    "queue",
    "reason",
    "source",
    "spec",
    "state",
]


class Snapshot:
    """A request at one moment. Everything is read when it is asked for.

    So a field that somebody else has spoilt raises ``Damaged`` only where it is needed.
    """

    def __init__(self, request_id: str, fields: dict[str, str]) -> None:
        self.id = request_id
        #: As the server has them.
        self.fields = fields

    def number(self, name: Number) -> float:
        """Return a number; 0 where the request has none of that name.

        Raises:
            Damaged: it is no number.
        """
        try:
            return float(self.fields.get(name) or 0)
        except ValueError as error:
            raise self._damaged(error) from error

    def count(self, name: Number) -> int:
        """Return a whole number; 0 where the request has none of that name.

        Raises:
            Damaged: it is no number.
        """
        try:
            return int(float(self.fields.get(name) or 0))
        except UNREADABLE as error:
            raise self._damaged(error) from error

    def known_count(self, name: Number) -> int:
        """Return a whole number that every request has.

        Raises:
            Damaged: it is not there, or no whole number.
        """
        try:
            return int(self.fields[name])
        except UNREADABLE as error:
            raise self._damaged(error) from error

    def text(self, name: Text) -> str:
        """Return a text that every request has.

        Raises:
            Damaged: it is not there.
        """
        try:
            return self.fields[name]
        except KeyError as error:
            raise self._damaged(error) from error

    def optional_text(self, name: Text) -> str:
        """Return a text, or "" where the request has none of that name."""
        return self.fields.get(name, "")

    @property
    def state(self) -> State:
        """Where the request is."""
        try:
            return State(self.text("state"))
        except ValueError as error:
            raise self._damaged(error) from error

    @property
    def is_paused(self) -> bool:
        """Whether it was paused, and not resumed since."""
        return self.fields.get("paused") == "1"

    @property
    def is_held(self) -> bool:
        """Whether none of its parts may start now: it is paused, or its delay is not over."""
        return self.is_paused or self.number("hold_ms") > self.number("now_ms")

    @property
    def startable(self) -> int:
        """How many of its parts may start: all, but for a canary that is not released."""
        total, ceiling = self.count("total"), self.count("ceiling")
        return min(total, ceiling) if ceiling > 0 else total

    @property
    def is_sealed(self) -> bool:
        """Whether its load is complete."""
        return "sealed" in self.fields

    @property
    def spec(self) -> Spec:
        """What workers need to know of it."""
        with damaged_if_unreadable(f"the options of {self.id}"):
            return msgspec.json.decode(self.fields["spec"], type=Spec)

    @property
    def labels(self) -> dict[str, str]:
        """What it was labelled with."""
        text = self.optional_text("labels")
        with damaged_if_unreadable(f"the labels of {self.id}"):
            return msgspec.json.decode(text, type=dict[str, str]) if text else {}

    @property
    def calls(self) -> list[Callback]:
        """What is started when it has ended."""
        text = self.optional_text("calls")
        with damaged_if_unreadable(f"the callbacks of {self.id}"):
            return msgspec.json.decode(text, type=list[Callback]) if text else []

    @property
    def is_owed(self) -> bool:
        """Whether callbacks of its last end are to be started."""
        is_unpaid = self.count("settled") <= self.count("redrives")
        return not self.state.is_live and self.count("owes") > 0 and is_unpaid

    def _callbacks(self) -> list[CallbackStatus]:
        run, is_settled = self.count("redrives"), not self.state.is_live and not self.is_owed
        return [
            CallbackStatus(
                each.event,
                each.url or each.policy.handler,
                each.id_of(self.id, run) if is_settled and each.fits(self.state) else None,
            )
            for each in self.calls
        ]

    def status(self) -> Status:
        """Return what users are told of it.

        Raises:
            Damaged: something that is needed for that cannot be read.
        """
        with damaged_if_unreadable(f"what the server has of {self.id}"):
            return self._status()

    def _status(self) -> Status:
        number, state = self.count, self.state
        total, done = number("total"), number("done")
        failed, retry = number("failed"), number("retry")
        # One lease runs one part; the other parts that its holder has still wait.
        held = number("delivered") - done - failed - retry
        running = min(number("leases"), held) if state is not State.CANCELLED else 0
        # Parts that were handed back wait as those do that nobody had: no attempt of them failed.
        retry -= number("handed_back")
        finished_ms = number("finished_ms") or None
        started_ms = number("started_ms") or None
        records = RecordCounts(number("records"), number("records_done"), number("records_failed"))
        seconds = ((finished_ms or number("now_ms")) - started_ms) / 1e3 if started_ms else 0.0
        rate = (records.done + records.failed) / seconds if seconds > 0 else 0.0
        left = records.total - records.done - records.failed
        return Status(
            id=self.id,
            queue=units.name(self.text("queue"), "queue"),
            handler=self.text("handler"),
            state=state,
            paused=self.is_paused and state.is_live,
            level=number("level"),
            limit=number("limit"),
            weight=number("weight") or WEIGHT,
            deadline_ms=number("deadline_ms") or None,
            reason=self.optional_text("reason") if state is State.FAILED else "",
            callbacks=self._callbacks(),
            canary=(ceiling := number("ceiling")) or None,
            waits_for_release=state.is_live and 0 < ceiling <= done + failed and ceiling < total,
            parts=PartCounts(
                total, total - done - failed - retry - running, running, retry, done, failed
            ),
            records=records,
            created_ms=number("created_ms"),
            started_ms=started_ms,
            finished_ms=finished_ms,
            rate=round(rate, 3),
            eta_s=round(left / rate, 1) if state is State.OPEN and rate > 0 else None,
            labels=self.labels,
            held_until_ms=number("hold_ms") if number("hold_ms") > number("now_ms") else None,
            rate_limit=round(1e3 / rate_ms, 6) if (rate_ms := self.number("rate_ms")) > 0 else None,
            max_failures=None if (most := self._bound("max_failures")) is None else int(most),
            max_percent=self._bound("max_percent"),
            retried=number("redrives"),
            results=number("results"),
            keep_ms=number("keep_ms"),
        )

    def _bound(self, name: Number) -> float | None:
        """Return a number that bounds something; None where there is none, or it is negative."""
        value = self.number(name) if name in self.fields else -1.0
        return value if value >= 0 else None

    def _damaged(self, error: Exception) -> Damaged:
        return Damaged(f"what the server has of {self.id} cannot be read: {error}")
