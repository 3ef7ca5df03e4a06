"""How long to wait before a part runs again."""

import random


def delay_ms(attempt: int, base_ms: int, most_ms: int, jitter: float | None = None) -> int:
    """Return the delay after the given attempt (from 1): doubled each time, and half of it random.

    The random half spreads parts that failed together, so that they do not come back together.
    """
    if jitter is None:
        jitter = random.random()
    full = min(most_ms, base_ms << min(attempt - 1, 40))
    return round(full / 2 + full / 2 * jitter)
