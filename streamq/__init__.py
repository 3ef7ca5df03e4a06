"""streamq: put a huge input through your function, on a shared fleet, and lose nothing.

The names in ``__all__`` are public, and ``__version__`` beside them; everything else may change.
Names are imported when they are first used: a command that only prints its help, or a module that
only defines handlers, does not wait for the driver. This module imports next to nothing, because a
Ctrl-C during its import cannot be answered by the command.
"""

from importlib import import_module

# As in `typing`, whose import takes longer than all of this.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from streamq.app import Abandon, App, Context, Retry, Snooze
    from streamq.driver.connection import Connection
    from streamq.errors import (
        AppLoadError,
        CollectorLost,
        Damaged,
        DecodeError,
        EncodeError,
        FleetTooOld,
        FlowUntold,
        InvalidValue,
        LoadGap,
        PartlySubmitted,
        PartTooLarge,
        ProtocolError,
        RecordError,
        RequestEnded,
        RequestExists,
        RequestNewer,
        RequestOpen,
        RequestUnknown,
        ResultTooLarge,
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
        SubmissionLate,
        WaitTimeout,
    )
    from streamq.flows.flow import Flow
    from streamq.flows.values import Failed, Spread
    from streamq.model import Failure, State, Status
    from streamq.protocol.protocol import Protocol
    from streamq.queue.async_client import AsyncClient, AsyncRequest
    from streamq.queue.callbacks import Start, Webhook
    from streamq.queue.client import Client
    from streamq.queue.find import Item, ItemPart, ItemStage
    from streamq.queue.janitor import Janitor
    from streamq.queue.request import Request
    from streamq.runs.finding import FoundRun, find_run
    from streamq.runs.functions import collect, load, run
    from streamq.settings import Settings
    from streamq.worker.worker import Worker

    __version__: str

_HOMES = {
    "app": ("Abandon", "App", "Context", "Retry", "Snooze"),
    "errors": (
        "AppLoadError",
        "CollectorLost",
        "Damaged",
        "DecodeError",
        "EncodeError",
        "FleetTooOld",
        "FlowUntold",
        "InvalidValue",
        "LoadGap",
        "PartlySubmitted",
        "PartTooLarge",
        "ProtocolError",
        "RecordError",
        "RequestEnded",
        "RequestExists",
        "RequestNewer",
        "RequestOpen",
        "RequestUnknown",
        "ResultTooLarge",
        "ServerBehind",
        "ServerBusy",
        "ServerError",
        "ServerFull",
        "ServerMissing",
        "ServerRefused",
        "ServerUnreachable",
        "ServerUnsafe",
        "SettingsError",
        "StreamqError",
        "SubmissionLate",
        "WaitTimeout",
    ),
    "flows.flow": ("Flow",),
    "flows.values": ("Failed", "Spread"),
    "queue.async_client": ("AsyncClient", "AsyncRequest"),
    "queue.callbacks": ("Start", "Webhook"),
    "queue.client": ("Client",),
    "driver.connection": ("Connection",),
    "queue.find": ("Item", "ItemPart", "ItemStage"),
    "queue.janitor": ("Janitor",),
    "queue.request": ("Request",),
    "model": ("Failure", "State", "Status"),
    "protocol.protocol": ("Protocol",),
    "runs.finding": ("FoundRun", "find_run"),
    "runs.functions": ("collect", "load", "run"),
    "settings": ("Settings",),
    "worker.worker": ("Worker",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "Abandon",
    "App",
    "AppLoadError",
    "AsyncClient",
    "AsyncRequest",
    "Client",
    "CollectorLost",
    "Connection",
    "Context",
    "Damaged",
    "DecodeError",
    "EncodeError",
    "Failed",
    "Failure",
    "FleetTooOld",
    "Flow",
    "FlowUntold",
    "FoundRun",
    "InvalidValue",
    "Item",
    "ItemPart",
    "ItemStage",
    "Janitor",
    "LoadGap",
    "PartTooLarge",
    "PartlySubmitted",
    "Protocol",
    "ProtocolError",
    "RecordError",
    "Request",
    "RequestEnded",
    "RequestExists",
    "RequestNewer",
    "RequestOpen",
    "RequestUnknown",
    "ResultTooLarge",
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
    "Spread",
    "Start",
    "State",
    "Status",
    "StreamqError",
    "SubmissionLate",
    "WaitTimeout",
    "Webhook",
    "Worker",
    "collect",
    "find_run",
    "load",
    "run",
]

# Hidden from the type checker: with a `__getattr__` it would believe that every name exists.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> "Any":
        if name == "__version__":
            # The package's metadata have it, from pyproject.toml: it is written in no second place.
            return import_module("importlib.metadata").version("streamq")
        if name not in _HOME_OF:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(import_module(f"{__name__}.{_HOME_OF[name]}"), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
