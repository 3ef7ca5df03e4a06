"""streamq with parts that take longer than the quantum: every part has a lease of its own."""

import os
import sys
import time
from pathlib import Path

import common

from streamq import App

app = App()


@app.handler
def nap(seconds: float) -> None:
    """Sleep for the time that a part takes."""
    time.sleep(seconds)
    common.tally.job()


def work() -> None:
    target = f"{Path(__file__).name}:app"
    command = [sys.executable, "-m", "streamq.cli", "worker", target, "--log-level", "warning"]
    os.environ["STREAMQ_URL"] = common.URL
    os.execv(sys.executable, [*command, "--quantum", "1ms"])


if __name__ == "__main__":
    common.main(sys.modules[__name__])
