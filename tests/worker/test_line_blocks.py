"""Large parts run a block of their lines at a time: what they come to is the same."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from streamq import Abandon
from streamq.app import describe_handler
from streamq.model import Part, Spec
from streamq.queue.outcomes import PartDone, PartNotDone
from streamq.records.decoding import plain_values
from streamq.records.encoding import decode_item, decode_result
from streamq.records.references import Reference, ReferenceReader
from streamq.records.spool import SpoolWriter, spooled_of
from streamq.records.writer import Writer
from streamq.worker import line_blocks
from streamq.worker.line_blocks import LineBlocks, blocks_of, can_be_cut_into_blocks
from streamq.worker.part_watch import PartWatch
from streamq.worker.runner import Runner

LINES = Spec(format="lines", retries=0)
JSON = Spec(format="jsonl", retries=0)
CSV = Spec(format="csv", header="a,b\n", retries=0)
COUNT = 2_000


def same(line: bytes) -> bytes:
    return line


def text(line: str) -> str:
    return line + "é"


def dropping(line: bytes) -> bytes | None:
    return None if line.endswith(b"7") else line


def mixed(line: str) -> Any:
    return {"line": line} if line.endswith("3") else line if line.endswith("5") else line.encode()


def breaking(line: bytes) -> bytes:
    return line + b"\nmore"


def failing(line: bytes) -> bytes:
    if line.endswith(b"77"):
        raise Abandon("sevens")
    return line


def parsed(record: dict[str, Any]) -> str:
    return str(record["n"])


def row(record: dict[str, str]) -> str:
    return record["b"]


SHARED: dict[str, int] = {"calls": 0}


def shared(line: bytes) -> dict[str, int]:
    """Return the same object each time: it has to be encoded before the next call."""
    SHARED["calls"] += 1
    return SHARED


def lines(count: int = COUNT) -> bytes:
    return b"".join(b"line %d\n" % n for n in range(count))


def rows(odd: bytes = b"") -> bytes:
    return b"".join(b"%d,%d\n" % (n, n) for n in range(COUNT)) + odd


def objects(odd: bytes = b"") -> bytes:
    return b"".join(json.dumps({"n": n}).encode() + b"\n" for n in range(COUNT)) + odd


CASES: list[tuple[Callable[..., Any], Spec, bytes]] = [
    (same, LINES, lines()),
    (text, LINES, lines()),
    (text, LINES, lines() + b"\xff\n" + lines()),
    (dropping, LINES, lines()),
    (mixed, LINES, lines()),
    (breaking, LINES, lines()),
    (failing, LINES, lines()),
    (shared, LINES, lines()),
    (same, LINES, lines() + b"open"),
    (same, LINES, lines().replace(b"\n", b"\r\n")),
    (same, LINES, lines() + b"\n\n" + lines()),
    (same, LINES, lines() + b"x" * 100_000 + b"\n" + lines()),
    (parsed, JSON, objects()),
    (parsed, JSON, objects(b"\n \n") + objects()),
    (same, JSON, objects(b"\n \n") + objects()),
    (parsed, JSON, objects(b"{}\n") + objects()),
    (parsed, JSON, objects(b'{"n": 1}{"n": 2}\n') + objects()),
    (parsed, JSON, objects(b"no JSON\n") + objects()),
    (row, CSV, rows()),
    (row, CSV, rows(b"\n") + rows()),
    (same, CSV, rows(b"\n") + rows()),
    (row, CSV, rows(b"1,2,3\n") + rows()),
    (row, CSV, rows(b'1,"a\nb"\n') + rows()),
]


def ran(function: Callable[..., Any], spec: Spec, payload: bytes) -> tuple[Any, ...]:
    """Run a part. Return all that it came to, in the form in which it does not matter how."""
    SHARED["calls"] = 0
    part = Part(1, payload, b"%d 0 1 %d" % (payload.count(b"\n"), payload.count(b"\n")))
    outcome = Runner(describe_handler(function, is_map=True), spec).run(part, None)
    items, endings = decode_result(outcome.result)
    failures = outcome.failures if isinstance(outcome, PartNotDone) else []
    told = [(each.record, each.error, each.message) for each in failures]
    raw = Writer("raw", []).lines(outcome.result)
    return type(outcome), outcome.records, [decode_item(each) for each in items], endings, told, raw


@pytest.mark.parametrize(("function", "spec", "payload"), CASES)
@pytest.mark.parametrize("size", [1, 64, 5_000])
def test_a_part_comes_to_the_same_in_blocks(
    monkeypatch: pytest.MonkeyPatch,
    function: Callable[..., Any],
    spec: Spec,
    payload: bytes,
    size: int,
) -> None:
    monkeypatch.setattr(line_blocks, "BLOCK_BYTES", 2**40)
    whole = ran(function, spec, payload)
    monkeypatch.setattr(line_blocks, "BLOCK_BYTES", size)

    assert ran(function, spec, payload) == whole


def test_a_line_that_holds_a_newline_stays_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(line_blocks, "BLOCK_BYTES", 64)

    _, records, items, *_ = ran(breaking, LINES, lines())

    assert records == COUNT
    assert items == [breaking(line) for line in lines().splitlines()]


@pytest.mark.parametrize(
    "payload",
    [
        b'{"a":1}{"b":2}\n{"c":3}\n',
        # Two lines and two objects, but the second begins in a line that the first ends.
        b'{"a":\n1} {"b":2}\n',
        b'{"a":1}\n\n{"b":2}\n',
        b'{"a":1}\n[1]\n',
        b'{"a":1}\n{"b":2}',
        b'{"a":1}\n{"b":\n',
    ],
)
def test_objects_are_decoded_at_once_only_if_each_line_is_one(payload: bytes) -> None:
    assert plain_values(payload, Any, JSON) is None
    assert plain_values(b'{"a":1}\n' + b'{"b":2}\n', Any, JSON) == ([{"a": 1}, {"b": 2}], b"")


def test_only_lines_that_are_records_are_cut() -> None:
    large = lines(20_000)
    assert can_be_cut_into_blocks(large, LINES)
    assert can_be_cut_into_blocks(large, CSV)
    assert not can_be_cut_into_blocks(large[:-1], LINES)
    assert not can_be_cut_into_blocks(large + b"a\r\n", LINES)
    assert not can_be_cut_into_blocks(large + b'"a\nb"\n', CSV)
    assert can_be_cut_into_blocks(large + b'"a\nb"\n', LINES)
    assert not can_be_cut_into_blocks(large, Spec(format="file"))
    assert not can_be_cut_into_blocks(lines(10), LINES)


def test_blocks_are_all_of_the_part_and_end_with_lines() -> None:
    payload = lines(20_000) + b"x" * 200_000 + b"\n" + lines(3)

    found = list(blocks_of(payload))

    assert b"".join(found) == payload
    assert all(each.endswith(b"\n") for each in found)
    assert max(len(each) for each in found if b"xx" not in each) <= line_blocks.BLOCK_BYTES


class Watching(PartWatch):
    """Stops a part after so many looks, and keeps what it is told to."""

    def __init__(self, looks: int, *, is_due: bool = False) -> None:
        self.looks = looks
        self.kept: list[bytes] = []
        self.due = is_due

    def is_over(self) -> bool:
        self.looks -= 1
        return self.looks < 0

    def is_due(self) -> bool:
        return self.due

    def keep(self, partial: bytes, mark: bytes, *, must: bool = False) -> None:
        self.kept.append(partial)


@pytest.mark.parametrize("looks", [0, 1, 7, 40])
def test_a_part_that_is_stopped_keeps_what_it_has_and_goes_on_there(
    monkeypatch: pytest.MonkeyPatch, looks: int
) -> None:
    monkeypatch.setattr(line_blocks, "BLOCK_BYTES", 64)
    calls: list[bytes] = []

    def counting(line: bytes) -> bytes:
        calls.append(line)
        return line

    runner = Runner(describe_handler(counting, is_map=True), LINES)
    part = Part(1, lines(), b"%d 0 1" % COUNT)

    first = runner.run(part, None, Watching(looks))
    assert isinstance(first, PartNotDone)
    assert first.is_stopped
    assert len(calls) < COUNT
    second = runner.run(Part(1, lines(), part.about, partial=first.partial), None)

    assert isinstance(second, PartDone)
    assert Writer("raw", []).lines(second.result) == lines()
    assert calls == lines().splitlines()


def test_a_part_that_takes_long_is_kept_between_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(line_blocks, "BLOCK_BYTES", 5_000)
    watch = Watching(10**6, is_due=True)
    runner = Runner(describe_handler(same, is_map=True), LINES)

    runner.run(Part(1, lines(), b"%d 0 1" % COUNT), None, watch)

    done = [partial.count(b"line ") for partial in watch.kept]
    assert done == sorted(done)
    assert COUNT in done


def test_what_came_so_far_is_told_at_any_moment() -> None:
    found = LineBlocks()
    found.block.extend([b"a", b"b"])
    assert found.items() == [b"a", b"b"]
    found.end_block()
    assert found.items() == [b"a", b"b"]
    found.block.append(None)
    assert found.items() == [b"a", b"b", None]
    assert [each[0] for each in found.outcomes(5)] == [1, 1, 1, 0, 0]
    found.end_block()
    assert found.lines() is None
    assert found.count == 3


@pytest.mark.parametrize("form", ["raw", "jsonl"])
@pytest.mark.parametrize("function", [same, text, mixed], ids=["bytes", "text", "mixed"])
def test_what_a_run_yields_in_blocks_goes_to_its_spool(
    tmp_path: Path, form: str, function: Callable[..., Any]
) -> None:
    data, count = lines(20_000), 20_000
    (tmp_path / "in.txt").write_bytes(data)
    (tmp_path / "spool").mkdir()
    state = (tmp_path / "in.txt").stat()
    reference = Reference(0, len(data), state.st_size, str(state.st_mtime_ns))
    spec = Spec(format="lines", by_reference=True, files=("in.txt",))
    reader = ReferenceReader(["in.txt"], str(tmp_path))
    spool = SpoolWriter(str(tmp_path / "spool"), form)
    runner = Runner(describe_handler(function, is_map=True), spec, reader=reader, spool=spool)

    done = runner.run(Part(1, msgspec.json.encode(reference), b"%d 0 1" % count), None)
    reader.close()

    assert isinstance(done, PartDone)
    assert done.records == count
    told = spooled_of(done.result)
    assert told
    written = (tmp_path / "spool" / told.spool).read_bytes()
    whole = Runner(describe_handler(function, is_map=True), LINES).run(
        Part(1, data, b"%d 0 1" % count), None
    )
    assert written == Writer(form, []).lines(whole.result)
