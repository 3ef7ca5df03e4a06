"""streamq: put a huge input through your function, on a shared fleet, and lose nothing."""

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
    "Client",
    "CollectorLost",
    "Connection",
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
    "State",
    "Status",
    "StreamqError",
    "WaitTimeout",
]
