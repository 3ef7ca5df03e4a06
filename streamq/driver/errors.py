"""Translates errors of redis-py into errors of ours.

Every error of the driver that a caller can act on is translated here, and nowhere else. Code
outside of this folder that must tell the driver's own errors apart imports them from here.
"""

from collections.abc import Generator
from contextlib import contextmanager

from redis import exceptions as driver
from redis.exceptions import NoScriptError, RedisClusterException, RedisError, ResponseError
from redis.sentinel import MasterNotFoundError

from streamq.errors import (
    Damaged,
    ServerBusy,
    ServerError,
    ServerFull,
    ServerRefused,
    ServerUnreachable,
    StreamqError,
)

__all__ = [
    "NoScriptError",
    "RedisClusterException",
    "RedisError",
    "ResponseError",
    "ScriptNotLoaded",
    "our_error_of_driver",
    "translating_driver_errors",
]


class ScriptNotLoaded(driver.ResponseError):
    """The server does not have a script, and does not let this user load it."""


# What redis-py raises, and what that means to a caller. The first row that fits counts.
_KINDS: tuple[tuple[type[Exception], type[ServerError], str], ...] = (
    (driver.AuthenticationError, ServerRefused, "does not let us in"),
    (driver.AuthorizationError, ServerRefused, "does not let us in"),
    (driver.NoPermissionError, ServerRefused, "does not let us do this"),
    (ScriptNotLoaded, ServerBusy, "is not ready"),
    (driver.OutOfMemoryError, ServerFull, "is out of memory: let workers drain it"),
    (driver.ReadOnlyError, ServerBusy, "is not ready"),
    (driver.BusyLoadingError, ServerBusy, "is not ready"),
    (driver.ClusterError, ServerBusy, "is not ready"),
    (driver.AskError, ServerBusy, "is not ready"),
    (driver.MasterDownError, ServerBusy, "is not ready"),
    (driver.TryAgainError, ServerBusy, "is not ready"),
    (driver.SlotNotCoveredError, ServerBusy, "is not ready"),
    (MasterNotFoundError, ServerBusy, "is not ready"),
    (driver.InvalidResponse, ServerUnreachable, "answers, but not as Redis or Valkey would"),
    (driver.ConnectionError, ServerUnreachable, "does not answer"),
    (driver.TimeoutError, ServerUnreachable, "does not answer"),
    (driver.RedisClusterException, ServerUnreachable, "does not answer as a cluster"),
    (OSError, ServerUnreachable, "does not answer"),
)
# The same for replies that redis-py has no class for, by the first word of the reply.
_WORDS: dict[str, tuple[type[StreamqError], str]] = {
    "WRONGTYPE": (Damaged, "has a key of another type than streamq writes"),
    "OOM": (ServerFull, "is out of memory: let workers drain it"),
    "NOAUTH": (ServerRefused, "does not let us in"),
    "WRONGPASS": (ServerRefused, "does not let us in"),
    "NOPERM": (ServerRefused, "does not let us do this"),
} | dict.fromkeys(
    ("UNBLOCKED", "MISCONF", "BUSY", "NOREPLICAS", "LOADING", "CLUSTERDOWN", "TRYAGAIN"),
    (ServerBusy, "is not ready"),
)


def our_error_of_driver(error: BaseException, where: str) -> StreamqError | None:
    """Return the driver's error as one of ours; None if a caller cannot act on it."""
    if isinstance(error, driver.RedisClusterException):
        # redis-py could use no node. The answer of the last node says more than this error.
        cause = error.__cause__ or error.__context__
        meant = our_error_of_driver(cause, where) if cause else None
        if meant:
            return meant
    for kind, type_, says in _KINDS:
        if isinstance(error, kind):
            return type_(f"{where} {says}: {error}")
    word = str(error).partition(" ")[0]
    if word in _WORDS:
        named, says = _WORDS[word]
        return named(f"{where} {says}: {error}")
    return None


@contextmanager
def translating_driver_errors(where: str) -> Generator[None]:
    """Turn errors of redis-py into ours. Refusals of scripts pass: ``scripts`` reads them."""
    try:
        yield
    except (driver.RedisError, driver.RedisClusterException, OSError) as error:
        meant = our_error_of_driver(error, where)
        if meant is None:
            raise
        raise meant from None
