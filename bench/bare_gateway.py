"""No queue at all: the messages of a gateway over HTTP, with LPOP and INCRBY behind them.

``bench/gateway.py`` measures the same node worker here: what is left is the web server, JSON and
the worker. No lease, limit, request, result, retry, key or metric.
"""

import asyncio
import json
import os
import sys
from typing import Any

import uvicorn
from redis.asyncio import Redis

BATCH = 200
redis = Redis.from_url(os.environ["BENCH_URL"])


async def answer(scope: dict[str, Any], receive: Any, send: Any) -> None:
    """Take parts, or count those that are done and take the next."""
    if scope["type"] != "http":
        return
    body, is_more = b"", True
    while is_more:
        message = await receive()
        body, is_more = body + message.get("body", b""), message.get("more_body", False)
    said = json.loads(body)
    if done := said.get("done"):
        await redis.incrby("bare:done", len(done))
    is_beat = scope["path"] == "/v1/beat"
    payloads: Any = [] if is_beat else await redis.lpop("bare", BATCH) or []
    if not payloads and not is_beat:
        await asyncio.sleep(0.05)
    parts = [{"number": n, "text": each.decode()} for n, each in enumerate(payloads, 1)]
    told = json.dumps({"ticket": "t", "handler": "job", "request": "r", "parts": parts}).encode()
    status = 200 if parts else 204
    headers = [(b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": told if parts else b""})


def main() -> None:
    """Serve at a free port, and say which."""
    config = uvicorn.Config(
        answer, port=0, loop="uvloop", http="httptools", log_config=None, lifespan="off"
    )
    sock = config.bind_socket()
    print("port", sock.getsockname()[1], file=sys.stderr, flush=True)
    uvicorn.Server(config).run(sockets=[sock])


if __name__ == "__main__":
    main()
