"""What several tests of loads need."""

import subprocess
from collections.abc import Callable

from streamq import Client, Request
from streamq.errors import StreamqError
from streamq.records.encoding import decode_result

Load = Callable[..., "subprocess.CompletedProcess[str]"]


def lines_of(request: Request) -> bytes:
    """What a map on lines returned, put together with the endings the lines had."""
    out = b""
    for _, result in request.raw_results(timeout=20):
        items, endings = decode_result(result)
        for index, item in enumerate(items):
            ending = {"n": b"\n", "r": b"\r\n", "0": b""}[chr(endings[index]) if endings else "n"]
            assert isinstance(item, bytes)
            out += item + ending
    return out


def total_of(client: Client, request_id: str) -> int:
    """Parts so far, 0 while the request is not there."""
    try:
        return client.get(request_id).status().parts.total
    except StreamqError:
        return 0
