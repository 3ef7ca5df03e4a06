"""What parts, results and files hold: any bytes are split, kept and given back, or refused."""

import bz2
import gzip
import lzma
import socket
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamq.app import App, Context
from streamq.errors import Damaged
from streamq.model import Part, Spec
from streamq.queue.outcomes import PartDone
from streamq.records import decoding as records
from streamq.records import encoding as codec
from streamq.records.boundaries import ended_by_newlines, fields_of_csv_row, mask_of_boundaries
from streamq.records.inputs import BadInput, open_input
from streamq.records.sizes import PartSize
from streamq.records.splitting import Chunk, Cursor, input_as_one_part, split_input
from streamq.records.writer import Writer
from streamq.worker.channel import Channel, Command, IdleFor, Ready, VisitAt
from streamq.worker.runner import Runner
from tests.fuzz.profile import fuzz, garbage

#: Bytes with what ends lines and opens quotes in them.
CONTENT = st.lists(
    st.sampled_from([b"\n", b"\r\n", b"\r", b'"', b'""', b",", b"a", b"\xff", b"\x00", b"{}", b" "])
    | st.binary(max_size=8),
    max_size=40,
).map(b"".join)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=5,
)
VALUES = st.none() | st.binary(max_size=20) | st.text(max_size=20) | JSON
#: Of one part: a few of any kind, or of one kind.
RETURNED = (
    st.lists(VALUES, max_size=5)
    | st.lists(st.binary(), max_size=5)
    | st.lists(st.text(), max_size=5)
)
SIZES = st.builds(PartSize, st.integers(1, 60), st.integers(0, 4), st.integers(60, 80))
PACKERS: dict[str, Callable[[bytes], bytes]] = {
    "plain": bytes,
    "gzip": gzip.compress,
    "bzip2": bz2.compress,
    "xz": lzma.compress,
}
FORMATS = st.sampled_from(["lines", "jsonl", "csv"])


class TestResults:
    @fuzz(80)
    @given(values=RETURNED, letters=st.sampled_from([b"", b"nr0r0"]))
    def test_what_handlers_return_is_given_back(self, values: list[Any], letters: bytes) -> None:
        endings = letters[: len(values)]
        kept = codec.encode_result([codec.encode_item(value) for value in values], endings)

        items, found = codec.decode_result(kept)

        assert [codec.decode_item(item) for item in items] == values
        assert found == endings

    @fuzz(80)
    @given(values=st.lists(st.binary(), max_size=5) | st.lists(st.text(), max_size=5))
    def test_lines_are_written_as_they_were_returned(self, values: list[Any]) -> None:
        written = Writer("raw", []).lines(codec.encode_result(values))

        each = [value.encode() if isinstance(value, str) else value for value in values]
        assert written == b"".join(value + b"\n" for value in each)

    @fuzz(120)
    @given(
        result=garbage
        | st.builds(msgspec.msgpack.encode, JSON | st.lists(JSON))
        | st.builds(
            lambda before, code, data, after: msgspec.msgpack.encode(
                [*before, msgspec.msgpack.Ext(code, data), *after]
            ),
            st.sampled_from([[], [None]]),
            st.integers(0, 6),
            st.binary(max_size=5),
            st.sampled_from([[], [b"x"], [msgspec.msgpack.Ext(2, b"n")]]),
        ),
        form=st.sampled_from(["raw", "jsonl", "csv"]),
    )
    def test_garbage_is_refused(self, result: bytes, form: str) -> None:
        with suppress(Damaged):
            items, _ = codec.decode_result(result)
            assert len([codec.decode_item(item) for item in items]) == len(items)
        with suppress(Damaged):
            assert isinstance(Writer(form, []).lines(result), bytes)


class TestRecords:
    @fuzz(80)
    @given(payload=CONTENT, form=st.sampled_from(["lines", "jsonl", "csv", ""]))
    def test_records_of_a_part_are_all_of_it(self, payload: bytes, form: str) -> None:
        found = records.records_in(Part(1, payload, b"1"), Spec(format=form))

        assert b"".join(found) == payload
        assert [records.without_line_ending(record) for record in found[:-1]] == [
            record[: len(record) - (2 if record.endswith(b"\r\n") else 1)] for record in found[:-1]
        ]

    def test_field_may_be_as_long_as_its_row(self) -> None:
        spec = Spec(format="csv", header="a,b\n")
        row = b"1," + b"x" * 500_000

        assert fields_of_csv_row(row, spec) == ["1", "x" * 500_000]

    @fuzz(120)
    @given(
        payload=CONTENT | garbage,
        about=garbage | st.sampled_from([b"1", b"1j", b"3 0 1", b"3 9 1", b"1 x y"]),
        partial=st.just(b"") | garbage | st.builds(msgspec.msgpack.encode, JSON),
        form=st.sampled_from(["", "lines", "jsonl", "csv", "file", "other"]),
        name=st.sampled_from(["as_bytes", "as_text", "as_dict", "as_given", "as_a_whole", "fails"]),
        attempt=st.integers(1, 9),
    )
    def test_any_part_has_an_outcome(
        self, payload: bytes, about: bytes, partial: bytes, form: str, name: str, attempt: int
    ) -> None:
        spec = Spec(format=form, header="a,b\n", files=("f",))
        part = Part(1, payload, about, attempt=attempt, partial=partial)

        outcome = Runner(HANDLERS.handlers[name], spec).run(part, CONTEXT)

        if not isinstance(outcome, PartDone):
            assert msgspec.json.encode(outcome.failures) != b"[]"


def parts_of(path: Path, form: str, size: PartSize, start: Cursor) -> list[Chunk]:
    """What a load makes of a file, from a cursor on."""
    with closing(open_input(str(path))) as source:
        source.seek(start.offset)
        return list(split_input(source, Spec(format=form), size, start))


def as_loaded(content: bytes, form: str) -> bytes:
    """What the parts of a file hold: rows of a CSV that end in a return end in a newline."""
    if form != "csv":
        return content
    return ended_by_newlines(content, mask_of_boundaries(Spec(format=form))(content), is_end=True)[
        0
    ]


class TestFiles:
    @pytest.mark.parametrize("packer", PACKERS)
    @fuzz(40)
    @given(content=CONTENT, form=FORMATS, size=SIZES)
    def test_parts_of_a_file_are_all_of_it(
        self, shelf: Path, packer: str, content: bytes, form: str, size: PartSize
    ) -> None:
        shelf.write_bytes(PACKERS[packer](content))

        with suppress(BadInput):
            chunks = parts_of(shelf, form, size, Cursor())
            payloads = [payload for chunk in chunks for payload in chunk.payloads]
            assert b"".join(payloads) == as_loaded(content, form)
            assert all(0 < len(payload) <= size.most for payload in payloads)
            counts = [int(about.split()[0]) for chunk in chunks for about in chunk.abouts]
            spec = Spec(format=form)
            assert counts == [
                sum(
                    not records.is_blank_record(record, spec)
                    for record in records.records_in(Part(1, payload, b""), spec)
                )
                for payload in payloads
            ]
            for chunk in chunks:
                rest = parts_of(shelf, form, size, chunk.end)
                assert chunk.end.offset + sum(each.size for each in rest) == len(content)

    @pytest.mark.parametrize("packer", PACKERS)
    @fuzz(40)
    @given(content=CONTENT, at=st.integers(0, 99), damage=st.binary(max_size=4), form=FORMATS)
    def test_damaged_file_is_read_or_refused(
        self, shelf: Path, packer: str, content: bytes, at: int, damage: bytes, form: str
    ) -> None:
        packed = PACKERS[packer](content)
        shelf.write_bytes(packed[:at] + damage + packed[at + len(damage) + 1 :])

        with suppress(BadInput):
            parts_of(shelf, form, PartSize(), Cursor())
        with suppress(BadInput), closing(open_input(str(shelf))) as source:
            input_as_one_part(source, 0, 1_000)

    @fuzz(60)
    @given(
        head=st.sampled_from(
            [b"\x1f\x8b\x08", b"BZh91AY&SY", b"\xfd7zXZ\x00", b"\x28\xb5\x2f\xfd"]
        ),
        rest=st.binary(max_size=100),
    )
    def test_what_only_looks_compressed_is_refused(
        self, shelf: Path, head: bytes, rest: bytes
    ) -> None:
        shelf.write_bytes(head + rest)

        with suppress(BadInput):
            parts_of(shelf, "lines", PartSize(), Cursor())


class TestWords:
    @fuzz(40)
    @given(lines=st.lists(garbage.filter(lambda line: b"\n" not in line), max_size=5))
    def test_between_pool_and_process_are_passed_over_when_garbled(
        self, lines: list[bytes]
    ) -> None:
        ours, theirs = map(Channel, socket.socketpair())
        said = [Ready(["a"], []), IdleFor(1.5), VisitAt(2), Command("stop")]
        for word in said:
            theirs.socket.sendall(b"".join(line + b"\n" for line in lines))
            theirs.send(word)
        theirs.close()

        messages, is_gone = ours.ready_messages()

        ours.close()
        assert (messages, is_gone) == (said, True)


HANDLERS = App()
CONTEXT = Context("r", 1, 1, should_stop=lambda: False, progress=lambda _: None)


@HANDLERS.map
def as_bytes(record: bytes) -> bytes:
    return record


@HANDLERS.map
def as_text(record: str) -> str:
    return record


@HANDLERS.map
def as_dict(record: dict[str, Any]) -> dict[str, Any]:
    return record


@HANDLERS.map
def as_given(record: Any) -> Any:
    return record


@HANDLERS.handler
def as_a_whole(part: list[str]) -> int:
    return len(part)


@HANDLERS.map
def fails(record: bytes) -> None:
    raise ValueError(record)


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file that is written again and again."""
    return tmp_path_factory.mktemp("fuzz") / "input"
