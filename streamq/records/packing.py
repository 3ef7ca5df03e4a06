"""Compressed outputs: what is written at once is a whole member (gzip) or frame (zstd).

Members and frames may stand one behind the other, so a file can be cut where one ends, and go on
there. It decompresses to all that was written.
"""

import gzip
import importlib
from contextlib import suppress
from pathlib import Path
from typing import Any

from streamq.errors import InvalidValue

#: How an output is compressed, by the suffix of its name.
PACKINGS = {".gz": "gzip", ".zst": "zstd"}


def packing_of(name: str) -> str:
    """Return how an output of that name is compressed; "" where it is not."""
    return PACKINGS.get(Path(name).suffix.lower(), "")


def name_without_compression(path: Path) -> Path:
    """Return the name of an output without the suffix that says how it is compressed."""
    return path.with_suffix("") if packing_of(path.name) else path


def zstd(name: str) -> Any:
    """Return the module that compresses zstd.

    Raises:
        InvalidValue: it is not installed.
    """
    for module in ("compression.zstd", "backports.zstd"):
        with suppress(ImportError):
            return importlib.import_module(module)
    raise InvalidValue(f"{name} is zstd: pip install 'streamq[zstd]'")


def packed_output(packing: str, data: bytes) -> bytes:
    """Return data as they are written: as one member or frame, or as they are.

    The same data always give the same bytes.
    """
    if packing == "gzip":
        return gzip.compress(data, compresslevel=6, mtime=0)
    if packing == "zstd":
        packed: bytes = zstd("the output").compress(data)
        return packed
    return data
