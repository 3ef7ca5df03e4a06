"""Says in words why a request is not faster."""

import time

import msgspec

from streamq.dashboard.census import Census
from streamq.model import State, Status


class Reason(msgspec.Struct, frozen=True):
    """What holds a request back: a word for programs, and a sentence."""

    code: str
    says: str


def reason_held_back(status: Status, census: Census, peak: int = 0) -> Reason | None:
    """Return what holds the request back most; None if it has ended.

    ``peak``: how many of its parts ran at once lately.
    """
    if not status.state.is_live:
        return None
    return (
        _reason_for_parts_kept_back(status)
        or _reason_it_is_stopped(status, census)
        or _reason_its_own_limits_hold_it(status, max(peak, status.parts.running))
        or _reason_other_requests_hold_it(status, census)
        or Reason("running", "nothing holds it back: it is as fast as its parts are")
    )


def _reason_for_parts_kept_back(status: Status) -> Reason | None:
    if status.waits_for_release:
        return Reason("canary", "its canary has ended, and the others wait for the release")
    return None


def _reason_it_is_stopped(status: Status, census: Census) -> Reason | None:
    parts = status.parts
    if status.paused:
        return Reason("paused", "it is paused")
    if status.held_until_ms:
        left_s = max(0, status.held_until_ms - time.time() * 1e3) / 1e3
        return Reason(
            "held", f"it is held for another {words_of_time(left_s)}, by a delay or a snooze"
        )
    if parts.waiting + parts.running + parts.retry == 0 and status.state is State.LOADING:
        return Reason("loading", "its loader is slower than the workers: no part waits")
    if not census.has_handler(status.handler):
        if census.has_slots:
            return Reason("handler", f"no live worker has the handler {status.handler}")
        return Reason("nobody", "no worker of this queue is alive")
    return _reason_it_waits_between_attempts(status)


def _reason_it_waits_between_attempts(status: Status) -> Reason | None:
    parts = status.parts
    if parts.retry and not parts.waiting and not parts.running:
        return Reason("retry", f"{words_of_count(parts.retry, 'part')} wait for another attempt")
    return None


def _reason_its_own_limits_hold_it(status: Status, running: int) -> Reason | None:
    if status.rate_limit is not None and running < status.limit:
        rate = status.rate_limit
        says = f"{rate:g} a second" if rate >= 1 else f"one in {words_of_time(1 / rate)}"
        return Reason("rate", f"its rate lets {says} start")
    if running >= status.limit:
        return Reason("limit", f"it is at its limit: {status.limit} at once")
    return None


def _reason_other_requests_hold_it(status: Status, census: Census) -> Reason | None:
    parts = status.parts
    if not parts.waiting:
        return Reason("tail", "its last parts run") if parts.running else None
    slots, busy = census.slots_of(status.handler)
    if slots and max(busy, census.curve.peak()) >= slots:
        before = census.waiting_before(status.level)
        which = f"all {slots:,} slots that can" if slots > 1 else "the only slot that can"
        is_busy = "are busy" if slots > 1 else "is busy"
        says = f"{which} run {_handler_of_run(status)} {is_busy}"
        if before:
            return Reason(
                "level", f"{says}, and {words_of_count(before, 'part')} wait at better levels"
            )
        return Reason("slots", says)
    return None


def _handler_of_run(status: Status) -> str:
    # A run has handlers of its own, which are named after it.
    return status.handler.removesuffix(f"-{status.id.partition('/')[0]}")


def words_of_count(number: int, noun: str) -> str:
    """Return a number with its noun, as ``1 part`` or ``2,000 parts``."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def words_of_time(seconds: float) -> str:
    """Return a time in its largest unit, as ``2.5 h``."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    if seconds < 3_600:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3_600:.1f} h"
