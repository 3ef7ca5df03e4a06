"""Options of a request as people write them, checked and in the protocol's units."""

from collections.abc import Callable, Mapping

import msgspec

from streamq import units
from streamq.model import (
    LAST_LEVEL,
    LEVEL,
    LIMIT,
    MOST_WEIGHT,
    POISON,
    WEIGHT,
    Callback,
    Policy,
    Spec,
)
from streamq.records.keys import key_name

#: Returns what an option is called in messages: ``limit`` in Python, ``--limit`` in a command.
Named = Callable[[str], str]


def policy_of_options(  # noqa: PLR0913  the options of a request are many and flat
    *,
    handler: str,
    queue: str = "default",
    level: int = LEVEL,
    limit: int = LIMIT,
    weight: int = WEIGHT,
    rate: str | None = None,
    delay: str | float | None = None,
    retries: int | None = None,
    backoff: str | float = "1s",
    timeout: str | float | None = None,
    max_failures: str | int | None = None,
    keep: str | float = "7d",
    poison: int = POISON,
    labels: Mapping[str, str] | tuple[tuple[str, str], ...] = (),
    canary: int = 0,
    calls: tuple[Callback, ...] = (),
    key: str = "",
    spec: Spec = Spec(),  # noqa: B008  it is frozen
    named: Named = str,
) -> Policy:
    """Return the policy that the options describe. ``spec`` says how the input is read.

    Raises:
        InvalidValue: an option is not allowed. The message calls it what ``named`` returns.
    """
    tolerated, percent = units.tolerated_failures(max_failures)
    return Policy(
        handler=units.name(handler, "handler"),
        queue=units.name(queue, "queue"),
        level=units.whole(level, named("level"), 0, LAST_LEVEL),
        limit=units.whole(limit, named("limit"), 1),
        weight=units.whole(weight, named("weight"), 1, MOST_WEIGHT)
        if weight != WEIGHT
        else msgspec.UNSET,
        canary=units.whole(canary, named("canary"), 1) if canary != 0 else msgspec.UNSET,
        calls=calls or msgspec.UNSET,
        key=key_name(key, named("key")) if key else msgspec.UNSET,
        poison=units.whole(poison, named("poison"), 1),
        max_failures=tolerated,
        max_percent=percent,
        keep_ms=units.duration_ms(keep, named("keep")),
        rate_ms=0.0 if rate is None else units.rate_ms(rate, named("rate")),
        delay_ms=0 if delay is None else units.duration_ms(delay, named("delay")),
        labels=units.labels(dict(labels)) or msgspec.UNSET,
        spec=msgspec.structs.replace(
            spec,
            retries=None if retries is None else units.whole(retries, named("retries"), 0),
            backoff_ms=units.duration_ms(backoff, named("backoff")),
            timeout_ms=0 if timeout is None else units.duration_ms(timeout, named("timeout")),
        ),
    )
