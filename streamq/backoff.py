"""Works out how long a part waits before it runs again."""

import random

#: Each attempt counts for a sixteenth in the share of failures: after 22 good ones in a row it is
#: below a quarter.
_WEIGHT = 1 / 16
_FEW = 1 / 4


class BackoffTroubles:
    """The share of the latest attempts at parts of a request that failed, as one process saw it."""

    def __init__(self) -> None:
        #: While nothing is known, it is as if all had failed.
        self._share = 1.0

    def went_well(self) -> None:
        """Note that an attempt at a part went well."""
        self._share -= self._share * _WEIGHT

    def failed(self) -> None:
        """Note that an attempt at a part failed."""
        self._share += (1.0 - self._share) * _WEIGHT

    @property
    def are_few(self) -> bool:
        """Return whether less than a quarter failed lately."""
        return self._share < _FEW


def retry_ms(
    attempt: int,
    base_ms: int,
    most_ms: int,
    jitter: float | None = None,
    *,
    are_few: bool = False,
) -> int:
    """Return how long a part waits after the given attempt (from 1) before it is tried again.

    The first pause is a quarter of the base, because most errors are gone at once, and the last
    records of a request wait for it with nothing beside them. Each later one is four times as long,
    because an error that is still there may stay for long. Where few parts of the request fail
    (``are_few``), whatever the parts call is well, and each later pause is only twice as long. Half
    of a pause is random.
    """
    if jitter is None:
        jitter = random.random()
    doublings = (attempt - 1) * (1 if are_few else 2)
    full = min(most_ms, (base_ms << min(doublings, 80)) / 4)
    return round(full / 2 + full / 2 * jitter)


def delay_ms(attempt: int, base_ms: int, most_ms: int, jitter: float | None = None) -> int:
    """Return the delay after the given attempt (from 1): doubled each time, and half of it random.

    The random half spreads parts that failed together, so that they do not come back together.
    """
    if jitter is None:
        jitter = random.random()
    full = min(most_ms, base_ms << min(attempt - 1, 40))
    return round(full / 2 + full / 2 * jitter)
