"""Handlers of the soak. What each part yields is known from its payload alone."""

import asyncio
import os
import time

from streamq import App, Context, Retry

app = App()


@app.map
def turned(line: str) -> str:
    return line[::-1]


@app.handler
def nap(number: int) -> int:
    time.sleep(number % 4 / 1e3)
    return number * 2


@app.map
async def later(number: int) -> int:
    await asyncio.sleep(0.002)
    return number * 2


@app.handler(retries=3)
def flaky(number: int, context: Context) -> int:
    """Every tenth never succeeds, and every tenth does so at the second attempt."""
    if number % 10 == 3:
        raise ValueError("never")
    if number % 10 == 7 and context.attempt == 1:
        raise Retry("not yet", after="50ms")
    return number * 2


@app.handler
def deadly(number: int) -> int:
    """The first part kills every process that runs it."""
    if number == 0:
        os._exit(1)
    return number * 2
