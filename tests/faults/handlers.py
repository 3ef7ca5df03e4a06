"""The handlers of the fault runs: they note start and end, and take their time between."""

import os
import time
from pathlib import Path

from streamq import Abandon, App, Context, Retry

app = App()
#: An app that has none of the handlers above.
other = App()
LOG = os.environ.get("STREAMQ_TEST_LOG", os.devnull)
#: While this file is missing, ``fussy`` does not like what is bad.
MENDED = Path(f"{LOG}.mended")


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


@app.map
def fussy(payload: str, context: Context) -> str:
    """Abandon what is bad, until it is mended."""
    if payload == "bad" and not MENDED.exists():
        raise Abandon("bad")
    return str(context.part)


@app.map
def slow_then_late(payload: str, context: Context) -> str:
    """Take 4 s over what is old; what is new wants to be run again after 6 s."""
    note("S", context.request, context.part)
    if payload == "old":
        time.sleep(4)
    elif context.attempt == 1:
        raise Retry("later", after="6s")
    note("E", context.request, context.part)
    return f"{payload} {context.part}"


@app.map
def large(payload: str, context: Context) -> str:
    """Return a line of so many bytes, that begins with the part's number."""
    return f"{context.part} ".ljust(int(payload), "x")


@app.map
def careful(payload: str, context: Context) -> str:
    """Note each record by its name. It ends its process, is bad until it is mended, or takes ms."""
    name, _, takes = payload.partition(" ")
    note("S", context.request, int(name))
    if takes == "bad" and not MENDED.exists():
        raise Abandon("bad")
    do("0" if takes == "bad" else takes)
    note("E", context.request, int(name))
    return name


@other.map
def elsewhere(payload: str, context: Context) -> str:
    return f"{payload} {context.part}"
