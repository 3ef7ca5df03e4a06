"""The option ``--ui``: the dashboard beside a command, while it runs."""

from collections.abc import Generator
from contextlib import contextmanager

from streamq.errors import SettingsError

from . import render


@contextmanager
def dashboard_shown_meanwhile(
    url: str, prefix: str, queue: str, request_id: str, *, wanted: bool
) -> Generator[None]:
    """Serve the dashboard while the block lasts, if that is wanted, and print its address.

    The address leads to the page of the request.
    """
    if not wanted:
        yield
        return
    try:
        from streamq.gateway.ui import dashboard_served
    except ModuleNotFoundError as error:
        raise SettingsError(
            f"the dashboard needs the package {error.name}: pip install 'streamq[serve]'"
        ) from None
    with dashboard_served(url, prefix, queue, request_id) as address:
        render.note(f"watch it at {address} (this URL works once)")
        yield
