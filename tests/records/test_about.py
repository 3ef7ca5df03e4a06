"""The ``about`` of a part: what a loader writes there, and what is read out of it."""

import pytest

from streamq.model import Part, Spec
from streamq.records import about
from streamq.records.about import AboutPlace

FILES = Spec(files=("a.txt", "b.txt"))


@pytest.mark.parametrize(
    ("written", "bytes_", "place"),
    [
        (about.about_of_lines(237, 0, 1), b"237 0 1", AboutPlace("a.txt", 1, 237, 237)),
        (about.about_of_lines(2, 1, 5, 4), b"2 1 5 4", AboutPlace("b.txt", 5, 8, 2)),
        (about.about_of_lines(0, 0, 3, 2), b"0 0 3 2", AboutPlace("a.txt", 3, 4, 0)),
        (about.about_of_whole_file(1), b"1 1 1", AboutPlace("b.txt", 1, 1, 1)),
        (about.ONE_PAYLOAD, b"1", None),
        (about.ONE_JSON, b"1j", None),
    ],
)
def test_is_written_as_servers_have_it_and_read_again(
    written: bytes, bytes_: bytes, place: AboutPlace | None
) -> None:
    assert written == bytes_
    assert AboutPlace.of(written, FILES) == place
    assert Part(1, b"", written).records == int(bytes_.split()[0].rstrip(b"j"))


@pytest.mark.parametrize("text", [b"", b"x", b"1 9 1", b"1 0", b"1 0 x", b"1 0 1 x"])
def test_what_is_none_has_no_place(text: bytes) -> None:
    assert AboutPlace.of(text, FILES) is None


def test_payload_of_a_submission() -> None:
    given, value, loaded = (
        Part(1, b"", each)
        for each in (about.ONE_PAYLOAD, about.ONE_JSON, about.about_of_lines(1, 0, 1))
    )

    assert [about.is_json_payload(part) for part in (given, value, loaded)] == [False, True, False]
    assert [about.is_one_payload(part) for part in (given, value, loaded)] == [True, False, False]


def test_each_letter_has_an_ending() -> None:
    assert {bytes([letter]): end for letter, end in about.ENDINGS.items()} == {
        b"n": b"\n",
        b"r": b"\r\n",
        b"0": b"",
    }
    assert about.ENDING_LETTERS == b"nr0"
