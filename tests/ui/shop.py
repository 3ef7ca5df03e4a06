"""Handlers that the pages show at work."""

import time

from streamq import Abandon, App

app = App()


@app.map(retries=0)
def clean(number: int) -> int:
    time.sleep(0.005)
    if 40 <= number < 60:
        raise Abandon(f"no answer from part {number} <img src=x onerror=alert(1)>")
    return number


@app.map
def slow(number: int) -> int:
    time.sleep(0.3)
    return number
