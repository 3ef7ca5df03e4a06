"""A plugin of coverage: saves what was run every half second, in every process.

Pools kill their processes where their work is not wanted any more, and killed processes save
nothing themselves.
"""

import threading
import time
from contextlib import suppress
from typing import Any

from coverage import Coverage

EVERY_S = 0.5


def coverage_init(_registry: Any, _options: dict[str, Any]) -> None:
    """Start the thread; called by coverage in each process that it follows."""
    threading.Thread(target=_save_forever, name="coverage", daemon=True).start()


def _save_forever() -> None:
    while True:
        time.sleep(EVERY_S)
        current = Coverage.current()
        if current is not None:
            with suppress(Exception):  # its process is just ending, and saves by itself
                current.save()
