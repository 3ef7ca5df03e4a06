"""streamq: put a huge input through your function, on a shared fleet, and lose nothing.

Names that need redis-py are imported when they are first used. So a command that only prints its
help, or a module that only defines handlers, does not wait for that import.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from streamq.errors import (
    AppLoadError,
    CollectorLost,
    Damaged,
    InvalidValue,
    LoadGap,
    PartTooLarge,
    ProtocolError,
    RequestEnded,
    RequestExists,
    RequestOpen,
    RequestUnknown,
    ServerBehind,
    ServerBusy,
    ServerError,
    ServerFull,
    ServerMissing,
    ServerRefused,
    ServerUnreachable,
    ServerUnsafe,
    SettingsError,
    StreamqError,
    WaitTimeout,
)

if TYPE_CHECKING:
    from streamq.app import Abandon, App, Context, Retry, Snooze
    from streamq.driver.connection import Connection
    from streamq.model import Failure, State, Status
    from streamq.protocol.protocol import Protocol
    from streamq.queue.client import Client, Request
    from streamq.queue.janitor import Janitor
    from streamq.runs.functions import collect, load, run
    from streamq.settings import Settings
    from streamq.worker.worker import Worker

_HOMES = {
    "app": ("Abandon", "App", "Context", "Retry", "Snooze"),
    "queue.client": ("Client", "Request"),
    "driver.connection": ("Connection",),
    "queue.janitor": ("Janitor",),
    "model": ("Failure", "State", "Status"),
    "protocol.protocol": ("Protocol",),
    "runs.functions": ("collect", "load", "run"),
    "settings": ("Settings",),
    "worker.worker": ("Worker",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "Abandon",
    "App",
    "AppLoadError",
    "Client",
    "CollectorLost",
    "Connection",
    "Context",
    "Damaged",
    "Failure",
    "InvalidValue",
    "Janitor",
    "LoadGap",
    "PartTooLarge",
    "Protocol",
    "ProtocolError",
    "Request",
    "RequestEnded",
    "RequestExists",
    "RequestOpen",
    "RequestUnknown",
    "Retry",
    "ServerBehind",
    "ServerBusy",
    "ServerError",
    "ServerFull",
    "ServerMissing",
    "ServerRefused",
    "ServerUnreachable",
    "ServerUnsafe",
    "Settings",
    "SettingsError",
    "Snooze",
    "State",
    "Status",
    "StreamqError",
    "WaitTimeout",
    "Worker",
    "collect",
    "load",
    "run",
]

# Hidden from the type checker: with a `__getattr__` it would believe that every name exists.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name not in _HOME_OF:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(import_module(f"{__name__}.{_HOME_OF[name]}"), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
