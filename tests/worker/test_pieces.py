"""Finding the records that kill workers, by running their part in smaller and smaller pieces."""

import math

import pytest

from streamq.model import Part
from streamq.worker import marks
from streamq.worker.marks import Late, MarkedRecords
from streamq.worker.pieces import Pieces, most_deaths_of_piece


class Story:
    """What becomes of a part of which some records kill their worker, attempt after attempt."""

    def __init__(self, count: int, deadly: set[int], poison: int = 3) -> None:
        self.part = Part(1, b"", b"%d" % count, poison=poison)
        self.left = list(range(count))
        self.given_up: set[int] = set()
        self.told = 0
        self._deadly = deadly
        self._count = count
        while self._dies():
            self.part.crashes += 1

    def _dies(self) -> bool:
        """One attempt. The server knows nothing of records that ran since it was last told."""
        pieces = Pieces(self.part, self.left, self._count)
        self.given_up |= {*pieces.deadly}
        kept = [each for each in self.left if each not in pieces.deadly]
        if pieces.deadly:
            self.left = list(kept)
        for index, mark in pieces:
            if mark is not None:
                self.part.mark, self.told = mark, self.told + 1
                self.left = list(kept)
            if index in self._deadly:
                return True
            kept.remove(index)
        assert not kept
        return False


def levels(count: int) -> int:
    """How often a sixteenth is taken until it is one record."""
    return math.ceil(round(math.log(count, 16), 9))


@pytest.mark.parametrize("poison", [1, 2, 3])
@pytest.mark.parametrize("count", [2, 3, 16, 17, 60, 256, 257, 5_000])
def test_one_deadly_record_is_found_and_no_other_is_given_up(count: int, poison: int) -> None:
    for place in {0, 1, count // 2, count - 1}:
        story = Story(count, {place}, poison)

        assert story.given_up == {place}
        assert story.part.crashes <= poison + levels(count)


def test_server_is_told_of_sixteen_pieces_in_an_attempt_not_of_each_record() -> None:
    story = Story(5_000, {4_999})

    assert story.told <= 2 * 16 * (story.part.crashes + 1)


@pytest.mark.parametrize("poison", [1, 3])
@pytest.mark.parametrize("count", [2, 20, 300])
def test_part_full_of_deadly_records_costs_a_bounded_number_of_workers(
    count: int, poison: int
) -> None:
    story = Story(count, set(range(count)), poison)

    assert story.given_up == set(range(count))
    assert story.part.crashes <= most_deaths_of_piece(count, poison) + 1
    assert most_deaths_of_piece(count, poison) == poison * (2 + levels(count))


def test_two_deadly_records_are_both_found() -> None:
    story = Story(16, {3, 9})

    assert (story.given_up, story.part.crashes) == ({3, 9}, 7)


def test_part_of_one_record_is_no_business_of_workers() -> None:
    part = Part(1, b"", b"1", crashes=2, poison=3, mark=b"begun 0 1 0 1 9")
    pieces = Pieces(part, [0], 1)

    assert (pieces.deadly, list(pieces)) == ([], [(0, None)])


def test_end_of_an_attempt_without_a_death_is_not_counted() -> None:
    part = Part(1, b"", b"9", crashes=1, poison=1)
    part.mark = marks.written_mark(part, MarkedRecords(4, 5, 0))
    assert Pieces(part, list(range(9)), 9).deadly == [], "nobody died since"

    part.crashes += 1
    assert Pieces(part, list(range(9)), 9).deadly == [4]


def test_mark_of_a_run_before_counts_no_more() -> None:
    part = Part(1, b"", b"9", crashes=3, poison=1, run=1, mark=b"begun 0 1 4 5 3")
    assert marks.read_mark(part) is None
    part.mark = b"late 0 2 5"
    assert marks.read_mark(part) is None


@pytest.mark.parametrize("mark", [b"", b"x", b"begun", b"begun 0 1", b"late 0 x 3", b"\xff 0 1 2"])
def test_mark_that_cannot_be_read_is_none(mark: bytes) -> None:
    assert marks.read_mark(Part(1, b"", b"9", crashes=1, mark=mark)) is None


def test_record_that_took_too_long_is_run_after_the_others() -> None:
    part = Part(1, b"", b"4", attempt=2, mark=b"late 0 1 2")
    pieces = Pieces(part, [0, 1, 3], 4)

    assert pieces.late == Late(1, 1)
    assert [index for index, _ in pieces] == [0, 3, 1]
    pieces.drop(1)
    assert [index for index, _ in pieces] == [0, 3]


def test_record_of_a_piece_that_killed_a_worker_has_killed_none_by_itself() -> None:
    part = Part(1, b"", b"4", crashes=2, poison=3)
    part.mark = marks.written_mark(Part(1, b"", b"4", crashes=1, poison=3), MarkedRecords(0, 2, 0))

    told = [mark for _, mark in Pieces(part, [0, 1, 2, 3], 4) if mark]

    assert told[0] == marks.written_mark(part, MarkedRecords(0, 1, 0))
