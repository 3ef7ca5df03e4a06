"""streamq: three maps and a reduce, a part for each item. One process."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import flow_common

from streamq import App, Client

app = App()


@app.handler
def one(n: int) -> int:
    """Do the first step."""
    return n + 1


@app.handler
def two(n: int) -> int:
    """Do the second."""
    return n * 2


@app.handler
def three(n: int) -> int:
    """Do the third."""
    return n + 3


@app.handler
def total(found: Iterator[int]) -> int:
    """Add up."""
    return sum(found)


def flow(n: int) -> int:
    stages = app.flow("sum").map(one).map(two).map(three).reduce(total)
    with Client(flow_common.URL) as client:
        request = client.submit(list(range(n)), flow=stages)
        request.wait(flow_common.WAIT_S)
        ((_, result),) = request.results()
    return int(result)


def work() -> None:
    target = f"{Path(__file__).name}:app"
    command = [sys.executable, "-m", "streamq.cli", "worker", target, "--log-level", "warning"]
    os.environ["STREAMQ_URL"] = flow_common.URL
    os.execv(sys.executable, [*command, "-p", "1", "-c", "4"])


if __name__ == "__main__":
    flow_common.main(flow, work)
