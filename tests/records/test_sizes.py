"""How large parts are cut when nobody says: by how long their records take."""

import random
from collections.abc import Callable, Iterator
from contextlib import closing
from math import inf
from pathlib import Path

import pytest

from streamq.model import Spec
from streamq.records.inputs import BadInput, open_input
from streamq.records.sizes import (
    AS_LARGE_AS_ALLOWED,
    MOST_RECORDS,
    GrowingSize,
    Measured,
    PartSize,
    RecordPace,
    Step,
    records_for_size,
)
from streamq.records.splitting import Chunk, Cursor, split_by_steps


class Played:
    """A pool whose records take the same time each, as far as parts were run."""

    def __init__(
        self, record_s: float, record_bytes: int = 0, *, is_coroutine: bool = False
    ) -> None:
        self.record_s = record_s
        self.record_bytes = record_bytes
        self.is_coroutine = is_coroutine
        self.known: Measured | None = Measured(0, 0.0, is_coroutine=is_coroutine)

    def ran(self, records: int) -> None:
        assert self.known
        seconds = self.known.seconds + records * self.record_s
        size = self.known.result_bytes + records * self.record_bytes
        self.known = Measured(
            self.known.records + records, seconds, size, is_coroutine=self.is_coroutine
        )

    def sizing(self, slots: int = 1, at_once: int = 2, most: int = MOST_RECORDS) -> GrowingSize:
        return GrowingSize(lambda: self.known, slots, at_once, most)


def grown(played: Played, sizing: GrowingSize) -> list[int]:
    """The sizes of parts, until they stay the same."""
    sizes = [sizing.step(0, inf).records]
    while True:
        played.ran(sizes[-1])
        sizes.append(sizing.step(0, inf).records)
        if sizes[-1] == sizes[-2]:
            return sizes


class TestGrowing:
    def test_begins_with_one_record_for_each_slot_and_one_that_waits(self) -> None:
        sizing = Played(1.0).sizing(at_once=7)

        assert sizing.step(0, inf) == Step(1, 14)
        assert sizing.step(13, inf) == Step(1, 1)
        assert sizing.step(14, inf) == Step(1, 0)
        assert sizing.step(99, inf) == Step(1, 0)

    def test_grows_to_a_quarter_of_a_second(self) -> None:
        played = Played(0.002)

        assert grown(played, played.sizing()) == [1, 16, 125, 125]

    def test_cheap_records_reach_the_byte_limit_in_four_steps(self) -> None:
        played = Played(1e-6)

        assert grown(played, played.sizing())[:5] == [1, 16, 267, 4459, 74465]

    def test_large_results_make_small_parts(self) -> None:
        played = Played(1e-6, 2**17)

        assert grown(played, played.sizing()) == [1, 8, 8]

    def test_slow_records_stay_alone(self) -> None:
        played = Played(3.0)

        assert grown(played, played.sizing()) == [1, 1]

    def test_is_not_larger_than_a_rate_allows(self) -> None:
        played = Played(1e-6)

        assert grown(played, played.sizing(most=25)) == [1, 16, 25, 25]

    def test_slow_first_call_is_forgotten(self) -> None:
        played = Played(2.0)
        sizing = played.sizing()
        played.ran(1)
        assert sizing.step(0, inf).records == 1
        played.record_s = 0.002

        sizes = [sizing.step(0, inf).records]
        for _ in range(20):
            played.ran(sizes[-1])
            sizes.append(sizing.step(0, inf).records)

        assert sizes[-1] > 100

    def test_shrinks_when_records_take_longer(self) -> None:
        played = Played(0.002)
        sizing = played.sizing()
        grown(played, sizing)
        played.record_s = 1.0

        for _ in range(10):
            played.ran(2)
            size = sizing.step(0, inf).records

        assert size == 1

    def test_loads_half_a_second_ahead_once_it_has_grown(self) -> None:
        played = Played(0.001)
        sizing = played.sizing(at_once=4, most=10)
        grown(played, sizing)

        assert sizing.step(0, inf) == Step(10, 200)
        assert sizing.step(150, inf) == Step(10, 50)

    def test_loads_as_far_ahead_when_the_byte_limit_is_reached(self) -> None:
        played = Played(0.001)
        sizing = played.sizing(at_once=4)
        for records in (1, 10, 10):
            sizing.step(0, 10.0)
            played.ran(records)

        assert sizing.step(0, 10.0) == Step(250, 200)

    def test_waits_until_a_process_is_ready(self) -> None:
        played = Played(0.1)
        sizing = played.sizing()
        played.known = None

        assert sizing.step(0, inf).parts == 0

    def test_handler_of_whole_parts_gets_parts_of_the_largest_size(self) -> None:
        played = Played(0.1)
        played.known = Measured(0, 0.0, is_map=False)

        assert played.sizing().step(1_000, inf) == AS_LARGE_AS_ALLOWED


class TestCoroutines:
    def test_that_waits_keeps_parts_of_one_record(self) -> None:
        played = Played(0.05, is_coroutine=True)

        assert grown(played, played.sizing(slots=30, at_once=30)) == [1, 1]

    def test_that_does_not_wait_is_sized_as_a_function(self) -> None:
        played = Played(0.0001, is_coroutine=True)

        assert grown(played, played.sizing(slots=30, at_once=30))[-1] == 2_500

    @pytest.mark.parametrize(("slots", "records"), [(1, 1), (4, 1), (5, 50), (100, 50)])
    def test_process_must_keep_up_with_parts_of_one_record(self, slots: int, records: int) -> None:
        assert records_for_size(0.005 - 1e-9, is_coroutine=True, slots=slots) == records


def test_pace_is_unknown_at_first_and_only_what_is_new_counts() -> None:
    pace = RecordPace()

    assert pace.record_s == 0
    assert not pace.observe(Measured(0, 5.0))
    assert pace.observe(Measured(2, 6.0))
    assert not pace.observe(Measured(2, 9.0))
    assert pace.record_s == pytest.approx(3.0)


class TestSteps:
    @pytest.mark.parametrize("seed", range(40))
    def test_parts_are_the_input_whatever_the_steps(self, tmp_path: Path, seed: int) -> None:
        chance = random.Random(seed)
        lines = [b"x" * chance.randrange(60) + b"\n" for _ in range(chance.randrange(300))]
        data = b"".join(lines) + chance.choice([b"", b"the end"])
        size = PartSize(bytes=chance.choice([61, 200, 5_000]), most=5_000)
        asked: list[Step] = []

        def steer() -> Step:
            records, parts = chance.choice([1, 2, 63, 64, 65, 200]), chance.choice([1, 3, 50])
            asked.append(Step(records, parts))
            return asked[-1]

        got, records = b"", 0
        for chunk in cut(tmp_path, data, size, steer):
            got += b"".join(chunk.payloads)
            records += chunk.records
            assert (chunk.end.offset, chunk.end.record) == (len(got), records + 1)
            assert all(0 < len(payload) <= size.bytes for payload in chunk.payloads)
            counts = [len(payload.splitlines()) for payload in chunk.payloads]
            assert sum(counts) == chunk.records
            assert max(counts) <= asked[-1].records
            assert len(counts) <= asked[-1].parts
        assert got == data

    def test_rows_are_cut_where_they_end(self, tmp_path: Path) -> None:
        data = b'a,"1\n2"\nb,3\n"c\n\nd",4\n'

        chunks = cut(tmp_path, data, PartSize(), lambda: Step(1, 9), Spec(format="csv"))

        assert payloads(chunks) == [b'a,"1\n2"\n', b"b,3\n", b'"c\n\nd",4\n']

    def test_records_up_to_the_largest_size_are_taken_and_longer_ones_refused(
        self, tmp_path: Path
    ) -> None:
        size = PartSize(bytes=10, most=100)

        chunks = cut(tmp_path, b"x" * 99 + b"\ny\n", size, lambda: Step(5, 9))

        assert payloads(chunks) == [b"x" * 99 + b"\n", b"y\n"]
        with pytest.raises(BadInput, match="longer than the 100 bytes"):
            list(cut(tmp_path, b"x" * 101 + b"\ny\n", size, lambda: Step(5, 9)))


def payloads(chunks: Iterator[Chunk]) -> list[bytes]:
    return [payload for chunk in chunks for payload in chunk.payloads]


def cut(
    folder: Path, data: bytes, size: PartSize, steer: Callable[[], Step], spec: Spec | None = None
) -> Iterator[Chunk]:
    (folder / "in").write_bytes(data)
    with closing(open_input(str(folder / "in"))) as source:
        chunks = split_by_steps(source, spec or Spec(format="lines"), size, Cursor(), steer)
        yield from chunks
