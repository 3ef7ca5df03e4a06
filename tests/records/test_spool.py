"""Spools: results that wait in files of a run."""

import os
import resource
import zlib
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import msgspec
import pytest

from streamq.app import Abandon
from streamq.errors import Damaged
from streamq.model import Spec
from streamq.records import spool
from streamq.records.encoding import Verbatim, decode_result, encode_item, encode_result
from streamq.records.ranges import Range, copy_range, merged_ranges
from streamq.records.references import Reference, ReferenceReader
from streamq.records.spool import Spooled, SpoolReader, SpoolWriter, spooled_of
from streamq.records.writer import Writer

LINES = [b"line %d" % number for number in range(1_000)]
TEXT = b"".join(line + b"\n" for line in LINES)


def kept(writer: SpoolWriter, result: bytes = encode_result(LINES)) -> Spooled:
    """What the server is told of a result."""
    told = writer.keep(result, b"payload", b"1000 0 1")
    assert told
    assert len(told) < 200
    found = spooled_of(told)
    assert found
    return found


@pytest.fixture
def writer(tmp_path: Path) -> SpoolWriter:
    return SpoolWriter(str(tmp_path), "raw")


def text_of(reader: SpoolReader, spooled: Spooled) -> bytes | None:
    found = reader.find(spooled)
    return found.read() if found else None


class TestWriting:
    def test_lines_are_found_where_they_are_said_to_be(
        self, writer: SpoolWriter, tmp_path: Path
    ) -> None:
        both = [kept(writer), kept(writer, encode_result(LINES[::-1]))]

        reader = SpoolReader(tmp_path / "other")
        assert text_of(reader, both[0]) is None
        reader = SpoolReader(tmp_path)
        assert text_of(reader, both[0]) == TEXT
        assert text_of(reader, both[1]) == Writer("raw", []).lines(encode_result(LINES[::-1]))
        assert (both[0].payload, both[0].about) == (b"payload", b"1000 0 1")

    @pytest.mark.parametrize(
        "items",
        [LINES, [line.decode() for line in LINES], [*LINES, None], [Verbatim(TEXT + b"open")]],
        ids=["bytes", "text", "dropped", "verbatim"],
    )
    def test_lines_are_those_that_the_output_would_have(
        self, writer: SpoolWriter, tmp_path: Path, items: list[object]
    ) -> None:
        result = encode_result([encode_item(item) for item in items])

        found = text_of(SpoolReader(tmp_path), kept(writer, result))

        assert found == Writer("raw", []).lines(result)

    def test_values_become_lines_of_json(self, tmp_path: Path) -> None:
        result = encode_result([encode_item({"n": n}) for n in range(1_000)])

        found = text_of(SpoolReader(tmp_path), kept(SpoolWriter(str(tmp_path), "jsonl"), result))

        assert found == b"".join(b'{"n":%d}\n' % n for n in range(1_000))

    @pytest.mark.parametrize(
        ("form", "result"),
        [
            ("raw", encode_result([b"small"])),
            # The next line has to begin with a newline, which its own process cannot know.
            ("raw", encode_result(LINES, b"n" * 999 + b"0")),
            # The collector warns of what is not UTF-8.
            ("jsonl", encode_result([b"\xff" * 5_000])),
            ("raw", encode_result([None] * 10_000)),
        ],
        ids=["small", "open", "garbled", "nothing"],
    )
    def test_what_the_collector_has_to_see_is_not_spooled(
        self, tmp_path: Path, form: str, result: bytes
    ) -> None:
        assert SpoolWriter(str(tmp_path), form).keep(result, b"", b"") is None

    def test_without_a_folder_nothing_is_spooled(self, tmp_path: Path) -> None:
        writer = SpoolWriter(str(tmp_path / "gone"), "raw")

        assert writer.keep(encode_result(LINES), b"", b"") is None
        (tmp_path / "gone").mkdir()
        assert writer.keep(encode_result(LINES), b"", b"") is None

    def test_what_was_removed_is_written_to_no_more(
        self, writer: SpoolWriter, tmp_path: Path
    ) -> None:
        """A fleet's request may be retried after a collector has removed its spools."""
        first = kept(writer)
        (tmp_path / first.spool).unlink()

        second = kept(writer)

        assert second.spool != first.spool
        assert text_of(SpoolReader(tmp_path), second) == TEXT

    def test_when_the_disk_takes_no_more_results_go_to_the_server(
        self, writer: SpoolWriter, tmp_path: Path
    ) -> None:
        first = kept(writer)
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (len(TEXT) + 100, hard))
            assert writer.keep(encode_result(LINES), b"payload", b"1000 0 1") is None
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

        assert text_of(SpoolReader(tmp_path), first) == TEXT

    def test_nobody_else_reads_it_as_a_result(self, writer: SpoolWriter) -> None:
        told = writer.keep(encode_result(LINES), b"payload", b"1000 0 1")
        assert told

        with pytest.raises(Damaged, match="in a file of the run that writes it, or of its workers"):
            decode_result(told)
        for form in ("raw", "jsonl", "csv"):
            with pytest.raises(Damaged, match="in a file of the run that writes it"):
                Writer(form, []).lines(told)


class TestDamage:
    def test_a_spool_that_is_too_short_has_lost_its_lines(
        self, writer: SpoolWriter, tmp_path: Path
    ) -> None:
        spooled = kept(writer)
        reader = SpoolReader(tmp_path / "nothing")  # so that no checksum is compared
        reader._folder = tmp_path
        assert text_of(reader, spooled) == TEXT

        os.truncate(tmp_path / spooled.spool, len(TEXT) - 1)

        assert reader.find(spooled) is None

    def test_a_spool_from_before_a_crash_is_compared_with_its_checksum(
        self, writer: SpoolWriter, tmp_path: Path
    ) -> None:
        one, two = kept(writer), kept(writer)
        path = tmp_path / one.spool
        data = bytearray(path.read_bytes())
        data[two.offset + 70] ^= 1
        path.write_bytes(data)

        reader = SpoolReader(tmp_path)

        assert text_of(reader, one) == TEXT
        assert reader.find(two) is None

    def test_in_a_shared_folder_all_lines_are_compared_and_may_be_seen_late(
        self, writer: SpoolWriter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        reader = SpoolReader(tmp_path, is_shared=True)
        one, two = kept(writer), kept(writer)
        path = tmp_path / one.spool
        data = path.read_bytes()
        path.write_bytes(data[:70] + b"?" + data[71:])
        slept: list[float] = []

        def appears(seconds: float) -> None:
            slept.append(seconds)
            path.write_bytes(data)

        monkeypatch.setattr("streamq.records.spool.time.sleep", appears)
        assert text_of(reader, one) == TEXT
        assert len(slept) == 1
        path.write_bytes(data[:70] + b"?" + data[71:-1])
        monkeypatch.setattr("streamq.records.spool.time.sleep", slept.append)
        monkeypatch.setattr("streamq.records.spool._VISIBLE_S", 0.01)
        assert reader.find(one) is None
        waited = len(slept)
        assert waited > 1
        assert reader.find(two) is None
        assert len(slept) == waited

    def test_lines_of_several_blocks_have_one_checksum(
        self, writer: SpoolWriter, tmp_path: Path
    ) -> None:
        told = writer.keep_lines([TEXT, TEXT[:100]], b"payload", b"1010 0 1", is_text=False)
        assert told
        spooled = spooled_of(told)
        assert spooled

        assert text_of(SpoolReader(tmp_path), spooled) == TEXT + TEXT[:100]

    @pytest.mark.parametrize("name", ["../in.txt", "/etc/passwd", "7-0000abcd.1", "own.txt"])
    def test_only_spools_of_the_folder_are_opened(self, tmp_path: Path, name: str) -> None:
        (tmp_path / "spool").mkdir()
        (tmp_path / "in.txt").write_bytes(TEXT)
        (tmp_path / "spool" / "7-0000abcd.1").symlink_to(tmp_path / "in.txt")
        (tmp_path / "spool" / "own.txt").write_bytes(TEXT)

        found = SpoolReader(tmp_path / "spool").find(Spooled(name, 0, 5, 0, b"", b""))

        assert found is None

    def test_garbage_is_no_spooled_result(self) -> None:
        garbage = msgspec.msgpack.encode([msgspec.msgpack.Ext(6, b"x" * 50)])

        with pytest.raises(Damaged):
            spooled_of(garbage)
        assert spooled_of(b"\x91") is spooled_of(b"\x91\xc7") is spooled_of(b"") is None


class TestRemoving:
    def test_a_spool_is_removed_when_all_of_it_is_copied_and_another_is_begun(
        self, writer: SpoolWriter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(spool, "ROLL_BYTES", 2 * len(TEXT))
        reader = SpoolReader(tmp_path, lambda: [os.getpid()])
        parts = [kept(writer) for _ in range(3)]
        for part in parts:
            assert text_of(reader, part) == TEXT
        assert reader.size() == 3 * len(TEXT)

        reader.copied(parts[:1])
        assert len(list(tmp_path.iterdir())) == 2
        reader.copied(parts[1:])

        (left,) = tmp_path.iterdir()
        assert left.name == parts[2].spool
        assert reader.size() == 0

    def test_what_the_dead_left_does_not_count(self, tmp_path: Path, writer: SpoolWriter) -> None:
        reader = SpoolReader(tmp_path, lambda: [os.getpid()])
        kept(writer)
        assert reader.size() == len(TEXT)
        (tmp_path / f"{2**22 + 1}-0badcafe.1").write_bytes(TEXT)

        assert reader.size() == len(TEXT)

    def test_what_an_earlier_attempt_left_does_not_count_even_if_a_process_has_its_id(
        self, tmp_path: Path, writer: SpoolWriter
    ) -> None:
        earlier = kept(writer)
        reader = SpoolReader(tmp_path, lambda: [os.getpid()])
        assert reader.size() == 0

        assert text_of(reader, earlier) == TEXT
        reader.copied([earlier])
        assert not list(tmp_path.iterdir())


class TestCopying:
    def test_bytes_go_to_the_end_of_the_target(self, tmp_path: Path) -> None:
        (tmp_path / "source").write_bytes(TEXT)
        with (tmp_path / "source").open("rb") as source, (tmp_path / "t").open("wb") as target:
            target.write(b"before ")
            target.flush()
            copy_range(Range(source.fileno(), 5, 20), target.fileno())
            copy_range(Range(source.fileno(), 0, 3), target.fileno())

        assert (tmp_path / "t").read_bytes() == b"before " + TEXT[5:25] + TEXT[:3]

    def test_where_the_kernel_does_not_copy_bytes_are_read(self, tmp_path: Path) -> None:
        (tmp_path / "source").write_bytes(TEXT)
        read, write = os.pipe()  # no file, so copy_file_range refuses it
        with (tmp_path / "source").open("rb") as source:
            copy_range(Range(source.fileno(), 5, 2_000), write)
        os.close(write)
        with os.fdopen(read, "rb") as pipe:
            assert pipe.read() == TEXT[5:2_005]

    def test_a_source_that_is_too_short_is_an_error(self, tmp_path: Path) -> None:
        (tmp_path / "source").write_bytes(TEXT)
        with (
            (tmp_path / "source").open("rb") as source,
            (tmp_path / "t").open("wb") as target,
            pytest.raises(OSError, match="shorter"),
        ):
            copy_range(Range(source.fileno(), len(TEXT) - 5, 6), target.fileno())


class TestReading:
    """What a run reads by reference."""

    LINES = Spec(format="lines")

    def reference(self, path: Path, **more: int) -> bytes:
        path.write_bytes(TEXT)
        state = path.stat()
        found = Reference(5, 20, state.st_size, str(state.st_mtime_ns), **more)
        return msgspec.json.encode(found)

    @pytest.fixture
    def reader(self, tmp_path: Path) -> Iterator[ReferenceReader]:
        with closing(ReferenceReader(["in.txt"], str(tmp_path))) as reader:
            yield reader

    @pytest.mark.parametrize("is_open", [True, False], ids=["open", "closed"])
    def test_bytes_that_are_what_they_were_are_good_in_a_file_that_grows(
        self, reader: ReferenceReader, tmp_path: Path, is_open: bool
    ) -> None:
        wanted = self.reference(tmp_path / "in.txt", check=zlib.crc32(TEXT[5:25]))
        if is_open:
            assert reader.read("in.txt", wanted, self.LINES) == TEXT[5:25]
        with (tmp_path / "in.txt").open("ab") as file:
            file.write(b"more\n")

        assert reader.read("in.txt", wanted, self.LINES) == TEXT[5:25]

        (tmp_path / "in.txt").write_bytes(TEXT.replace(b"9", b"Z") + b"more\n")
        assert reader.read("in.txt", wanted, self.LINES) == TEXT[5:25]
        (tmp_path / "in.txt").write_bytes(TEXT.replace(b"line", b"LINE") + b"more\n")
        with pytest.raises(
            Abandon, match=r"changed since it was loaded: it had \d+ bytes, and has"
        ):
            reader.read("in.txt", wanted, self.LINES)

    def test_what_was_read_of_an_earlier_state_is_not_what_a_later_one_has(
        self, reader: ReferenceReader, tmp_path: Path
    ) -> None:
        path = tmp_path / "in.txt"
        assert reader.read("in.txt", self.reference(path), self.LINES) == TEXT[5:25]
        with path.open("r+b") as file:  # the file that is open
            file.write(TEXT.upper())
        state = path.stat()
        later = Reference(5, 20, state.st_size, str(state.st_mtime_ns))

        found = reader.read("in.txt", msgspec.json.encode(later), self.LINES)

        assert found == TEXT.upper()[5:25]

    def test_another_file_in_its_place_is_read_if_it_has_the_same_bytes(
        self, reader: ReferenceReader, tmp_path: Path
    ) -> None:
        wanted = self.reference(tmp_path / "in.txt", check=zlib.crc32(TEXT[5:25]))
        (tmp_path / "in.txt").rename(tmp_path / "before.txt")
        (tmp_path / "in.txt").write_bytes(TEXT)
        assert reader.read("in.txt", wanted, self.LINES) == TEXT[5:25]
        os.truncate(tmp_path / "in.txt", 24)

        with pytest.raises(Abandon, match="it was cut short"):
            reader.read("in.txt", wanted, self.LINES)

    def test_small_parts_that_follow_one_another_are_read_at_once(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        lines = [b"%07d\n" % n for n in range(100_000)]
        path = tmp_path / "in.txt"
        path.write_bytes(b"".join(lines))
        state, reads, pread = path.stat(), [], os.pread

        def counted(fd: int, size: int, offset: int) -> bytes:
            reads.append(offset)
            return pread(fd, size, offset)

        monkeypatch.setattr(os, "pread", counted)
        begins = [*range(0, len(lines), 50), 99_950, 5, 50_000]
        with closing(ReferenceReader(["in.txt"], str(tmp_path))) as reader:
            for begin in begins:
                where = Reference(begin * 8, 400, state.st_size, str(state.st_mtime_ns), 0)
                found = reader.read("in.txt", msgspec.json.encode(where), self.LINES)
                assert found == b"".join(lines[begin : begin + 50])

        assert len(reads) < 20

    def test_without_a_checksum_a_file_that_has_grown_is_refused(
        self, reader: ReferenceReader, tmp_path: Path
    ) -> None:
        wanted = self.reference(tmp_path / "in.txt")
        assert reader.read("in.txt", wanted, self.LINES) == TEXT[5:25]

        (tmp_path / "in.txt").write_bytes(TEXT + b"more\n")

        with pytest.raises(Abandon, match="and has"):
            reader.read("in.txt", wanted, self.LINES)

    def test_without_a_checksum_a_file_that_was_written_to_is_refused(
        self, reader: ReferenceReader, tmp_path: Path
    ) -> None:
        wanted = self.reference(tmp_path / "in.txt")
        assert reader.read("in.txt", wanted, self.LINES) == TEXT[5:25]
        os.utime(tmp_path / "in.txt", (1, 1))

        with pytest.raises(Abandon, match="was written to"):
            reader.read("in.txt", wanted, self.LINES)

    def test_rows_that_end_in_carriage_returns_are_read_as_they_are_loaded(
        self, tmp_path: Path, reader: ReferenceReader
    ) -> None:
        data = b'a,b\r1,"x\ry"\r2,z\r\n'
        (tmp_path / "in.txt").write_bytes(data)
        found = Reference(4, len(data) - 4, len(data), "later", zlib.crc32(b'1,"x\ry"\n2,z\r\n'))

        read = reader.read("in.txt", msgspec.json.encode(found), Spec(format="csv"))

        assert read == b'1,"x\ry"\n2,z\r\n'


class TestMerging:
    def test_ranges_that_follow_one_another_become_one(self) -> None:
        pieces: list[bytes | Range] = [
            b"head\n",
            Range(3, 0, 10),
            b"",
            Range(3, 10, 5),
            Range(3, 20, 5),
            Range(4, 25, 5),
            b"\n",
            Range(4, 30, 1),
        ]

        assert list(merged_ranges(pieces)) == [
            b"head\n",
            Range(3, 0, 15),
            Range(3, 20, 5),
            Range(4, 25, 5),
            b"\n",
            Range(4, 30, 1),
        ]
        assert list(merged_ranges([])) == []
