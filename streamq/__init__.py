"""streamq: put a huge input through your function, on a shared fleet, and lose nothing."""

from streamq.app import Abandon, App, Context, Retry, Snooze
from streamq.client import Client, Request
from streamq.connection import Connection
from streamq.errors import (
    CollectorLost,
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
from streamq.janitor import Janitor
from streamq.model import Failure, State, Status
from streamq.protocol import Protocol
from streamq.settings import Settings

__all__ = [
    "Abandon",
    "App",
    "Client",
    "CollectorLost",
    "Connection",
    "Context",
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
]
