"""streamq: one request of many parts, two slots a process; its waiter is told the end."""

import os
import sys
from pathlib import Path

import common

from streamq import App, Client

app = App()


@app.handler
def job(_: bytes) -> None:
    """Count an empty job."""
    common.tally.job()


PAYLOAD = common.PAYLOAD.encode()


def enqueue(n: int) -> None:
    client().submit([PAYLOAD] * n, handler="job", limit=64)


def one() -> None:
    client().submit([PAYLOAD], handler="job")


def batch(n: int) -> None:
    client().submit([PAYLOAD] * n, handler="job").wait(80)
    common.tally.callback()


def client(made: list[Client] = []) -> Client:  # noqa: B006  one for the process
    if not made:
        made.append(Client(common.URL))
    return made[0]


def work() -> None:
    target = f"{Path(__file__).name}:app"
    command = [sys.executable, "-m", "streamq.cli", "worker", target, "--log-level", "warning"]
    os.chdir(Path(__file__).parent)
    os.environ["STREAMQ_URL"] = common.URL
    os.execv(
        sys.executable,
        [*command, "-p", os.environ["BENCH_PROCESSES"], "-c", os.environ["BENCH_SLOTS"]],
    )


if __name__ == "__main__":
    common.main(sys.modules[__name__])
