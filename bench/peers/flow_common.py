"""What the adapters of ``bench/flow_peers.py`` share.

An adapter has ``flow(n)``, which returns the sum of ``(i + 1) * 2 + 3`` over the items 0 to n - 1,
each of the three steps a stage of its own; and ``work()``. It is run as ``NAME.py work`` and as
``NAME.py flow NUMBER``, which prints one JSON object: the seconds that it took, and the sum.
"""

import json
import os
import sys
import time
from collections.abc import Callable

URL = os.environ.get("BENCH_URL", "")
WAIT_S = 240.0


def main(flow: Callable[[int], int], work: Callable[[], None]) -> None:
    """Run the action that the command line names."""
    if sys.argv[1] == "work":
        work()
        return
    begun = time.perf_counter()
    total = flow(int(sys.argv[2]))
    print(json.dumps({"s": time.perf_counter() - begun, "sum": total}), flush=True)
    os._exit(0)  # whatever connections and threads are still open
