"""How long to wait before a part runs again."""

import random


def retry_ms(attempt: int, base_ms: int, most_ms: int, jitter: float | None = None) -> int:
    """Return how long a part waits after the given attempt (from 1) before it is tried again.

    The first pause is a quarter of the base, because most errors are gone at once, and the last
    records of a request wait for it with nothing beside them. Each later one is four times as long,
    because an error that is still there may stay for long. Half of it is random.
    """
    if jitter is None:
        jitter = random.random()
    full = min(most_ms, (base_ms << min(2 * (attempt - 1), 80)) / 4)
    return round(full / 2 + full / 2 * jitter)


def delay_ms(attempt: int, base_ms: int, most_ms: int, jitter: float | None = None) -> int:
    """Return the delay after the given attempt (from 1): doubled each time, and half of it random.

    The random half spreads parts that failed together, so that they do not come back together.
    """
    if jitter is None:
        jitter = random.random()
    full = min(most_ms, base_ms << min(attempt - 1, 40))
    return round(full / 2 + full / 2 * jitter)
