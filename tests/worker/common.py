"""What several tests of pools need: results, and a pool's end."""

import signal
import subprocess
from typing import Any

import pytest

from streamq import Request
from tests.conftest import KINDS

#: Where the server matters little; but routing to nodes must do what one server does.
TWO_KINDS = pytest.mark.parametrize(
    "kind", [kind for kind in KINDS if kind != "redis"], indirect=True
)


def values(request: Request) -> list[Any]:
    """Results in input order."""
    return [result for _, result in request.results(timeout=20)]


def stop(pool: "subprocess.Popen[bytes]", number: int = signal.SIGTERM) -> int:
    pool.send_signal(number)
    return pool.wait(15)
