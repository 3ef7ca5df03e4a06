"""Handlers of the tests. What they did is read from a log that all of them append to."""

import asyncio
import ctypes
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec

from streamq import Abandon, App, Context, Retry, Snooze

app = App()
LOG = os.environ.get("STREAMQ_TEST_LOG", os.devnull)


def note(word: str, context: Context) -> None:
    """One line, whole whatever else is written at the moment."""
    line = f"{word} {time.monotonic():.6f} {os.getpid()} {context.request} {context.part}\n"
    descriptor = os.open(LOG, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(descriptor, line.encode())
    os.close(descriptor)


class Order(msgspec.Struct):
    """A record with a shape."""

    item: str
    count: int


@app.map
def shout(line: str) -> str:
    return line.upper()


@app.map
def echo(payload: bytes) -> bytes:
    return payload


@app.map
def as_given(value):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201  that is the point
    return [type(value).__name__, value if not isinstance(value, bytes) else value.decode()]


@app.handler
def total(orders: list[Order]) -> int:
    return sum(order.count for order in orders)


@app.map
def priced(order: Order) -> dict[str, int]:
    return {order.item: order.count * 3}


@app.map
def fields(row: list[str]) -> list[str]:
    return row


@app.map(retries=0)
def abandons_tenths(number: int) -> int:
    """Fails for every tenth number, until a file says that it is mended."""
    if number % 10 == 0 and not Path(f"{LOG}.mended").exists():
        raise Abandon("a tenth")
    return number


@app.map(retries=0)
def deadly(line: str) -> str:
    """Takes its process along, or never ends, for one line of many."""
    if line == "350":
        os._exit(3)
    if line == "450":
        time.sleep(1_000)
    return line


@app.handler(retries=0)
def deadly_in_parts(lines: list[str]) -> int:
    """The same for a handler of parts: none of its records is done alone."""
    return len([deadly(line) for line in lines])


@app.map
async def doubled(number: int) -> int:
    await asyncio.sleep(0.01)
    return number * 2


@app.handler
def nap(seconds: float, context: Context) -> float:
    context.progress(25)
    note("S", context)
    time.sleep(seconds)
    note("E", context)
    return seconds


@app.handler
async def nap_async(seconds: float, context: Context) -> float:
    note("S", context)
    try:
        await asyncio.sleep(seconds)
    except asyncio.CancelledError:
        note("C", context)
        raise
    note("E", context)
    return seconds


@app.handler
def until_told(_: int, context: Context) -> str:
    note("S", context)
    while not context.should_stop():
        time.sleep(0.01)
    note("C", context)
    return "told"


@app.handler
def deaf(seconds: float, context: Context) -> None:
    note("S", context)
    time.sleep(seconds)
    note("E", context)


@app.handler(retries=2)
def fails(text: str, context: Context) -> None:
    note("S", context)
    raise ValueError(text)


@app.handler
def tells(word: str, context: Context) -> int:
    """Says each of the words a handler may raise, once, and is content the next time."""
    note("S", context)
    trace = Path(f"{LOG}.{context.request}.{context.part}")
    again = trace.exists()
    trace.touch()
    if word == "abandon":
        raise Abandon("never")
    if not again and word == "retry":
        raise Retry("later", after="50ms")
    if not again and word == "snooze":
        raise Snooze("not now", after="50ms")
    if not again and word == "hold":
        raise Snooze("none of you", after="300ms", scope="request")
    return context.attempt


@app.handler(retries=0)
def odd(what: str, context: Context) -> object:
    """Everything a handler can do to its process."""
    note("S", context)
    return ODD[what](context)


def _fork(context: Context) -> str:
    if os.fork() == 0:
        note("F", context)
        return "child"
    return "parent"


def _close_stdin(_: Context) -> str:
    os.close(0)
    return "closed"


def _print(_: Context) -> str:
    print("words on stdout")
    return "printed"


def _close_stderr(_: Context) -> str:
    sys.stderr.close()
    return "closed"


def _exit(_: Context) -> None:
    sys.exit(3)


def _half_a_character(_: Context) -> str:
    return "\udcff"


def _unspeakable(_: Context) -> None:
    class Unspeakable(Exception):
        def __str__(self) -> str:
            raise ValueError("no words")

    raise Unspeakable


def _garbled(_: Context) -> None:
    raise ValueError("half a character: \udcff")


def _cancelled(_: Context) -> None:
    raise asyncio.CancelledError


ODD = {
    "half": _half_a_character,
    "unspeakable": _unspeakable,
    "garbled": _garbled,
    "cancelled": _cancelled,
    "leaves": lambda _: os._exit(0),
    "fine": lambda _: "fine",
    "exit": _exit,
    "die": lambda _: os._exit(3),
    "killed": lambda _: os.kill(os.getpid(), signal.SIGKILL),
    "unencodable": lambda _: object(),
    "large": lambda _: "x" * 5_000_000,
    "fork": _fork,
    "close_stdin": _close_stdin,
    "close_stderr": _close_stderr,
    "print": _print,
}


@app.handler(timeout="400ms", retries=1)
def overdue(seconds: float, context: Context) -> float:
    note("S", context)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass
    note("E", context)
    return seconds


@app.handler(timeout="400ms", retries=1)
async def overdue_async(seconds: float, context: Context) -> float:
    note("S", context)
    await asyncio.sleep(seconds)
    note("E", context)
    return seconds


@app.handler
def holds_gil(seconds: float, context: Context) -> float:
    """Sleeps in C without letting any other thread of the process run."""
    note("S", context)
    ctypes.PyDLL(None).usleep(int(seconds * 1e6))
    note("E", context)
    return seconds


_grown: list[bytes] = []


@app.handler
def grow(mebibytes: int) -> int:
    """Keeps so much memory for as long as its process lives."""
    _grown.append(os.urandom(mebibytes * 2**20))
    return len(_grown)


@app.handler(retries=0)
async def odd_async(what: str) -> str:
    """Everything a coroutine can do to its loop."""
    await asyncio.sleep(0)
    if what == "exit":
        sys.exit(3)
    if what == "cancel":
        raise asyncio.CancelledError
    if what == "exit beside":
        await asyncio.gather(_exit_beside())
    if what == "fork":
        is_copy = os.fork() == 0
        await asyncio.sleep(0 if is_copy else 0.3)
        return "child" if is_copy else "parent"
    return what


async def _exit_beside() -> None:
    sys.exit(3)


@app.handler
def big(size: int) -> bytes:
    """A result that takes long to send."""
    return os.urandom(size)


@app.handler(timeout="1s", retries=0)
def half_a_second(_: int) -> str:
    time.sleep(0.5)
    return "in time"


@app.handler
def low(text: str) -> str:
    return text.lower()


@app.handler
def stops_a_program(_: int) -> float:
    """How long a program that is told to stop goes on."""
    program = subprocess.Popen(["sleep", "5"])
    begun = time.monotonic()
    program.terminate()
    program.wait()
    return time.monotonic() - begun
