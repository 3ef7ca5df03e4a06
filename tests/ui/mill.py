"""Handlers for pictures of the dashboard: quick and slow ones, some that fail, and a flow."""

import random
import time

from streamq import Abandon, App, Retry

app = App()


@app.map(retries=2)
def clean(row: int) -> int:
    time.sleep(random.uniform(0.001, 0.004))
    if 2_000 <= row < 2_600 and row % 3:
        raise Abandon(f"KeyError: no column 'sku' in row {row}")
    if row % 997 == 0:
        raise Abandon(f"row {row} is longer than 4,096 characters")
    if row % 389 == 0:
        raise Retry("the shop does not answer", after="3s")
    return row


@app.map(retries=0)
def ask(number: int) -> int:
    time.sleep(random.uniform(0.1, 0.7))
    if number % 41 == 0:
        raise Abandon(f"HTTPError: 503 from https://api.example.org/v1/items/{number}")
    return number


@app.map
def fetch(number: int) -> int:
    time.sleep(random.uniform(0.005, 0.03))
    return number


@app.map
def describe(number: int) -> str:
    time.sleep(random.uniform(0.02, 0.08))
    return f"item {number}"


@app.map
def store(text: str) -> str:
    time.sleep(0.01)
    return text


shop = app.flow("shop").map(fetch, limit=4).map(describe, limit=6, window="200 parts").map(store)
