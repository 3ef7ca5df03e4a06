"""Files as they are read: compressed, cut short, far too large, or none."""

import bz2
import gzip
import importlib
import lzma
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from streamq.records.inputs import BadInput, open_input
from streamq.records.sizes import PartSize
from tests.records.pieces import after, pieces


def zstd_compress(data: bytes) -> bytes:
    try:
        zstd: Any = importlib.import_module("compression.zstd")
    except ImportError:
        zstd = pytest.importorskip("backports.zstd")
    return bytes(zstd.compress(data))


@pytest.mark.parametrize("compress", [gzip.compress, bz2.compress, lzma.compress, zstd_compress])
def test_compressed_files_are_read_as_what_they_hold(file: Path, compress: object) -> None:
    data = b"".join(b"line %d\n" % n for n in range(5_000))
    file.write_bytes(compress(data))  # type: ignore[operator]

    found = pieces(file, size=PartSize(bytes=4_000))

    assert b"".join(piece.payload for piece in found) == data
    assert pieces(file, size=PartSize(bytes=4_000), start=after(found, 3)) == found[4:]


@pytest.fixture(params=[True, False], ids=["isal", "without isal"])
def isal(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the library that decompresses gzip faster, and without it."""
    if request.param:
        pytest.importorskip("isal")
    else:
        monkeypatch.setitem(sys.modules, "isal.igzip_lib", None)


@pytest.mark.usefixtures("isal")
@pytest.mark.parametrize("compress", [gzip.compress, bz2.compress, lzma.compress, zstd_compress])
class TestBehindTheCompressedData:
    DATA = b"".join(b"line %d\n" % number for number in range(20_000))

    def read(self, file: Path) -> bytes:
        with closing(open_input(str(file))) as source:
            return b"".join(iter(lambda: source.read(10_000), b""))

    def test_more_of_it_is_read(self, file: Path, compress: Callable[[bytes], bytes]) -> None:
        file.write_bytes(compress(self.DATA) + compress(b"") + compress(b"more"))

        assert self.read(file) == self.DATA + b"more"

    def test_zeros_are_padding(self, file: Path, compress: Callable[[bytes], bytes]) -> None:
        file.write_bytes(compress(self.DATA) + bytes(2**18))

        assert self.read(file) == self.DATA

    @pytest.mark.parametrize("garbage", [b"x", b"\0\0\0\0x", b"garbage\n" * 2**16])
    def test_anything_else_is_an_error(
        self, file: Path, compress: Callable[[bytes], bytes], garbage: bytes
    ) -> None:
        file.write_bytes(compress(self.DATA) + garbage)

        with pytest.raises(BadInput, match="after line"):
            self.read(file)

    def test_nothing_may_be_missing(self, file: Path, compress: Callable[[bytes], bytes]) -> None:
        whole = compress(self.DATA)
        for size in (len(whole) - 1, len(whole) // 2, 20):
            file.write_bytes(whole[:size])
            with pytest.raises(BadInput, match="end"):
                self.read(file)


@pytest.mark.usefixtures("isal")
def test_gzip_with_another_checksum_is_damaged(file: Path) -> None:
    data = bytearray(gzip.compress(b"line\n" * 20_000))
    data[-5] ^= 1
    file.write_bytes(data)

    with closing(open_input(str(file))) as source, pytest.raises(BadInput, match="after line"):
        list(iter(lambda: source.read(2**20), b""))


def test_gzip_of_several_members(file: Path) -> None:
    file.write_bytes(gzip.compress(b"a\n") + gzip.compress(b"b\n"))

    assert b"".join(piece.payload for piece in pieces(file)) == b"a\nb\n"


@pytest.mark.parametrize("name", ["missing", "."])
def test_what_is_no_file_is_named(tmp_path: Path, name: str) -> None:
    with pytest.raises(BadInput, match=r"No such file|Is a directory"):
        pieces(tmp_path / name)


@pytest.mark.slow
def test_a_bomb_is_refused(file: Path) -> None:
    file.write_bytes(gzip.compress(b"\n" * 120_000_000))

    with pytest.raises(BadInput, match="1000 times"):
        pieces(file)
