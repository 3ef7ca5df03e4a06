"""Decompresses a stream of bytes that has several compressed streams one behind the other."""

import io
from collections.abc import Callable
from typing import Any

_PACKED_BYTES = 2**17


class Unpacked:
    """Decompresses streams that stand one behind the other. Zeros after a stream are padding.

    The readers of the standard library stop without an error where other bytes follow a stream.
    """

    def __init__(self, make: Callable[[], Any], raw: io.BufferedReader) -> None:
        self._make = make
        self._raw = raw
        self._stream = make()

    def read1(self, size: int) -> bytes:
        """Return the next bytes, perhaps fewer than that many; none at the end."""
        while True:
            stream, given = self._stream, b""
            if stream.eof:
                given = self._next_stream()
                if not given:
                    return b""
            elif stream.needs_input and not (given := self._raw.read1(_PACKED_BYTES)):
                raise EOFError
            if data := self._stream.decompress(given, size):
                return bytes(data)

    def _next_stream(self) -> bytes:
        """Begin with the next stream. Return its first bytes; nothing at the end."""
        given: bytes = self._stream.unused_data
        while not (given := given.lstrip(b"\0")):
            given = self._raw.read1(_PACKED_BYTES)
            if not given:
                return b""
        self._stream = self._make()
        return given
