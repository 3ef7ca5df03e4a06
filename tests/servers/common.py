"""Asking a server, and seeing that its process is gone."""

import os
import sys
from pathlib import Path

from redis import Redis


def is_gone(pid: int) -> bool:
    """Ended, whether or not somebody has taken notice."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    stat = Path(f"/proc/{pid}/stat")
    try:
        return stat.read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except OSError:
        return sys.platform == "linux"


def ask(url: str, *words: str) -> object:
    with Redis.from_url(url, decode_responses=True) as redis:
        return redis.execute_command(*words)
