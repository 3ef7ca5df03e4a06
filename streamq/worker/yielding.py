"""Calling a handler that yields: all its values together are what it returns for a record."""

from collections.abc import Callable
from contextlib import aclosing, closing
from typing import Any

from streamq.app import Handler
from streamq.errors import ResultTooLarge
from streamq.records import encoding as codec
from streamq.records.encoding import Item, Many

#: Each value counts for this many bytes more, so that no endless number of empty ones is kept.
_EACH = 16


class _EncodedYields:
    """What was yielded so far, each value as it is kept. A value that is None is left out."""

    def __init__(self, encode: Callable[[Any], Item], most: int) -> None:
        self.values = Many()
        self._encode = encode
        self._most = self._room = most

    def add(self, value: Any) -> None:
        """Add a value.

        Raises:
            EncodeError: the value cannot be encoded.
            ResultTooLarge: the values together are larger than a result may be.
        """
        item = self._encode(value)
        self._room -= codec.size_of_results(item) + _EACH
        if self._room < 0:
            raise ResultTooLarge(f"what was yielded has more than the {self._most} bytes allowed")
        if item is not None:
            self.values.append(item)


class _PlainYields:
    """What was yielded so far, as it is, and no more than so many values."""

    def __init__(self, most: int) -> None:
        self.values: list[Any] = []
        self._most = most

    def add(self, value: Any) -> bool | None:
        """Add a value. Return True if no more are wanted."""
        self.values.append(value)
        return len(self.values) >= self._most


def encoded_yields(
    handler: Handler, encode: Callable[[Any], Item], most: int
) -> Callable[..., Any]:
    """Return the function of a handler; of one that yields, a function that returns all values.

    ``most``: so many bytes may all values together have.
    """
    return _gathered_values(handler, lambda: _EncodedYields(encode, most))


def plain_yields(handler: Handler, most: int) -> Callable[..., Any]:
    """Return the same for values that are used as they are. After so many it does not go on."""
    return _gathered_values(handler, lambda: _PlainYields(most))


def _gathered_values(
    handler: Handler, begin: Callable[[], _EncodedYields | _PlainYields]
) -> Callable[..., Any]:
    function = handler.function
    if not handler.is_generator:
        return function

    def call(*args: Any, **options: Any) -> Any:
        found = begin()
        with closing(function(*args, **options)) as values:
            for value in values:
                if found.add(value):
                    break
        return found.values

    async def call_async(*args: Any, **options: Any) -> Any:
        found = begin()
        async with aclosing(function(*args, **options)) as values:
            async for value in values:
                if found.add(value):
                    break
        return found.values

    return call_async if handler.is_async else call
