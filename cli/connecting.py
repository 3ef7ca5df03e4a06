"""Connects a command to the server that its options name.

redis-py is imported inside the functions that use it, so that ``--help`` does not wait for it.
"""

import functools
from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from streamq.driver.url import ServerURL
from streamq.errors import (
    ProtocolError,
    RequestUnknown,
    ServerBusy,
    ServerUnreachable,
    SettingsError,
)
from streamq.settings import Settings, url_with_login

from . import render

if TYPE_CHECKING:
    from streamq.protocol.protocol import Protocol

NO_URL = """which server? Give its URL in one of three ways:
  --url redis://HOST:PORT          for this command
  export STREAMQ_URL=...           for all commands
  export STREAMQ_URL_FILE=FILE     a file that holds it, for URLs with a password"""


def url_of_options(given: str | None) -> str:
    """Return the server's URL, from the option or the settings.

    Raises:
        SettingsError: there is none.
    """
    settings = Settings.from_env()
    url = given or settings.url
    if not url:
        raise SettingsError(NO_URL)
    is_typed = given is not None and given != settings.url
    if is_typed and {"password", "ssl_password"} & ServerURL(url).options.keys():
        _warn_of_insecurity(
            "everybody on this machine can see the password in --url (ps shows it): "
            "better give it in STREAMQ_PASSWORD_FILE, STREAMQ_URL or STREAMQ_URL_FILE"
        )
    return url_with_login(url, settings)


@functools.cache
def _warn_of_insecurity(text: str) -> None:
    render.warning(text)


@contextmanager
def connected(
    url: str | None,
    prefix: str | None,
    *,
    is_patient: bool = True,
    is_warned: bool = False,
    advice: str = "run the same command again to go on",
) -> "Generator[Protocol]":
    """Connect to the server that the options or the settings name.

    ``is_warned``: also warn of settings of the server that should be mended. The first calls wait
    for a server that fails over or starts; with ``is_patient`` all calls do. Commands without it
    have their own way to wait. ``advice`` is added to the error if the wait was in vain.

    Raises:
        SettingsError: neither names a server.
        ServerError: the server cannot be used.
    """
    from streamq.protocol import connecting

    address, settings = url_of_options(url), Settings.from_env()
    with connecting.connected_protocol(
        address,
        prefix or settings.prefix,
        is_insecure=settings.insecure,
        say=render.warning,
        warn=_warn_of_insecurity if is_warned else len,
        is_patient=is_patient,
    ) as protocol:
        try:
            yield protocol
        except (ServerBusy, ServerUnreachable) as error:
            if not is_patient or not advice:
                raise
            raise type(error)(f"{error}; {advice}") from None


def named_server(url: str | None, prefix: str | None) -> str:
    """Return the URL of the server that option or settings name, once it answers; "" if none."""
    settings = Settings.from_env()
    named = url or settings.url
    if named:
        with connected(url, prefix, is_patient=False):
            named = url_with_login(named, settings)
    return named


@contextmanager
def naming_request(request_id: str) -> Generator[None]:
    """Put the request's id before the message of a refusal: scripts do not know it."""
    try:
        yield
    except RequestUnknown:
        raise  # its message names the id
    except ProtocolError as error:
        raise type(error)(f"{request_id}: {error}") from None
