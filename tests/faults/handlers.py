"""The handler of the fault runs: it notes its start and its end, and takes its time between."""

import os
import time

from streamq import App, Context

app = App()
LOG = os.environ.get("STREAMQ_TEST_LOG", os.devnull)


def note(word: str, request: str, part: int) -> None:
    """One line, whole whatever else is written at the moment."""
    line = f"{word} {time.monotonic():.6f} {os.getpid()} {request} {part}\n"
    descriptor = os.open(LOG, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(descriptor, line.encode())
    os.close(descriptor)


def do(payload: str) -> None:
    """Take so many milliseconds as the payload says; one that says ``die`` ends its process."""
    if payload == "die":
        os._exit(3)
    time.sleep(float(payload) / 1e3)


@app.map
def work(payload: str, context: Context) -> str:
    note("S", context.request, context.part)
    do(payload)
    note("E", context.request, context.part)
    return str(context.part)
