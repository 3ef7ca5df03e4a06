"""The values that handlers of a spread return, and that handlers of a join are given."""

from collections.abc import Iterable
from typing import Any

import msgspec


class Spread:
    """Return it from a handler of a spread: its children, and what to keep for their join.

    A handler that keeps nothing may return the list of children itself.

    Example:
        @app.handler
        def photos(page: Page) -> Spread:
            return Spread(page.photo_urls, keep={"sku": page.sku})
    """

    def __init__(self, children: Iterable[Any], *, keep: Any = None) -> None:
        self.children = children
        self.keep = keep


class Failed(msgspec.Struct, frozen=True):
    """Stand for a child that failed, in the list that a join with ``on_failure="run"`` is given.

    Example:
        good = [child for child in children if not isinstance(child, Failed)]
    """

    #: The name of the exception, and its message.
    error: str
    message: str = ""
