"""What many small requests cost: one part each, and ten.

    python bench/small.py [--requests 3000] [--rounds 3] [--against /path/of/another/checkout]

On an embedded server of its own, with a real pool of one process: requests are submitted one after
another, then the pool runs them, and its janitor closes them. For each shape it shows the
microseconds of the server's CPU, and those that pass, for each request:

* *submit*: until the server has all requests; one `Client.submit` after another, and with
  `Client.submit_many` where the checkout has it;
* *run*: from there until the pool has run them all and the janitor has closed them;
* *server*: both, and what is left of the server's CPU when its rest is taken off.

"A big request" has the parts of all of them. With ``--against`` each round measures both checkouts,
one after the other; the other needs a ``.venv``.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from streamq import App, Client
from streamq.servers.local import LocalServer

PAYLOAD = b"x" * 100
#: Requests with so many parts are compared.
SHAPES = (1, 10)

app = App()


@app.handler
def nothing(_: bytes) -> None:
    """Do nothing."""


def start(url: str) -> "subprocess.Popen[str]":
    """Start a pool of one process, and return it when it is ready."""
    here = Path(__file__)
    command = [sys.executable, "-m", "streamq.cli", "worker", f"{here.name}:app"]
    command += ["-p", "1", "--url", url]
    pool = subprocess.Popen(command, cwd=here.parent, stderr=subprocess.PIPE, text=True)
    assert pool.stderr
    while " ready: " not in pool.stderr.readline():
        if pool.poll() is not None:
            raise SystemExit("the pool does not start")
    return pool


def stop(pool: "subprocess.Popen[str]") -> None:
    """End a pool."""
    pool.send_signal(signal.SIGTERM)
    pool.communicate()


def cpu_s(redis: Any) -> float:
    """Return how long the server has computed."""
    used = redis.info("cpu")
    return float(used["used_cpu_sys"] + used["used_cpu_user"])


def submit_each(client: Client, requests: int, parts: int) -> None:
    """Submit the requests one after another."""
    for _ in range(requests):
        client.submit([PAYLOAD] * parts, handler="nothing")


def submit_many(client: Client, requests: int, parts: int) -> None:
    """Submit the requests together."""
    client.submit_many([[PAYLOAD] * parts] * requests, handler="nothing")


def measure(
    requests: int, parts: int, submit: Callable[[Client, int, int], None]
) -> dict[str, float]:
    """Return microseconds for each request: of the server, and that passed."""
    with LocalServer.start() as server, Client(server.url) as client:
        redis = client.protocol.connection.redis
        # Scripts are loaded, code is warm.
        submit(client, 50, parts)
        pool = start(server.url)
        try:
            _wait_until_closed(client)
        finally:
            stop(pool)
        first_s, begun = cpu_s(redis), time.monotonic()
        submit(client, requests, parts)
        submit_s, submitted = cpu_s(redis), time.monotonic()
        pool = start(server.url)
        _ready_s, ready = cpu_s(redis), time.monotonic()
        try:
            _wait_until_run(client)
            run = time.monotonic()
            _wait_until_closed(client)
        finally:
            stop(pool)
        end_s = cpu_s(redis)
    us = 1e6 / requests
    return {
        "submit": (submitted - begun) * us,
        "run": (run - ready) * us,
        "server submit": (submit_s - first_s) * us,
        "server run": (end_s - submit_s) * us,
        "server": (end_s - first_s) * us,
    }


def _wait_until_run(client: Client) -> None:
    protocol = client.protocol
    tokens = "sq:{q:default}:tokens:nothing:50"
    while protocol.connection.redis.llen(tokens):
        time.sleep(0.02)
    # Tokens come and go while a big request is run.
    for request_id in protocol.ids("default")[-3:]:
        client.get(request_id).wait(120)


def _wait_until_closed(client: Client) -> None:
    while client.protocol.ids("default"):
        time.sleep(0.1)


def measure_all(requests: int) -> dict[str, dict[str, float]]:
    """Return the figures of this checkout."""
    found = {}
    for parts in SHAPES:
        found[f"{parts} part{'s' * (parts > 1)}"] = measure(requests, parts, submit_each)
        if hasattr(Client, "submit_many"):
            found[f"{parts} part{'s' * (parts > 1)}, together"] = measure(
                requests, parts, submit_many
            )
    big = measure(1, requests * SHAPES[-1], submit_each)
    # For each part, as it is compared with those of small requests.
    found["a big request, a part"] = {what: us / requests / SHAPES[-1] for what, us in big.items()}
    return found


def elsewhere(checkout: Path, requests: int) -> dict[str, dict[str, float]]:
    """Return the figures of another checkout, measured by this file."""
    copy = checkout / "bench" / Path(__file__).name
    if not copy.exists():
        copy.write_text(Path(__file__).read_text())
    command = [str(checkout / ".venv" / "bin" / "python"), str(copy), "--json"]
    command += ["--requests", str(requests)]
    told = subprocess.run(command, check=True, capture_output=True, cwd=checkout).stdout
    found: dict[str, dict[str, float]] = json.loads(told)
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=3_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--against", type=Path, help="another checkout")
    parser.add_argument("--json", action="store_true", help="one round, for programs")
    args = parser.parse_args()
    if args.json:
        print(json.dumps(measure_all(args.requests)))
        return
    found: dict[str, list[dict[str, dict[str, float]]]] = {}
    for _ in range(args.rounds):
        if args.against:
            found.setdefault("before", []).append(elsewhere(args.against, args.requests))
        found.setdefault("now", []).append(measure_all(args.requests))
    load, rounds = os.getloadavg()[0], args.rounds
    print(f"us for each request, median of {rounds} rounds (load average {load:.2f})")
    for which, all_rounds in found.items():
        print(which)
        for shape in all_rounds[0]:
            told = ", ".join(
                f"{what} {statistics.median(each[shape][what] for each in all_rounds):.1f}"
                for what in all_rounds[0][shape]
            )
            print(f"  {shape}: {told}")


if __name__ == "__main__":
    main()
