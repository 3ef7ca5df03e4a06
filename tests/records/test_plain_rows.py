"""Rows of a part that are decoded at once are those that are decoded one by one."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamq.app import describe_handler
from streamq.errors import RecordError
from streamq.model import Spec
from streamq.records.boundaries import records_between_boundaries
from streamq.records.decoding import decoder_for, line_endings, plain_values, without_line_ending


class Row(msgspec.Struct):
    """Columns with types."""

    a: int
    b: str


KINDS = [Any, dict, dict[str, str], list, list[str], tuple[int, str], Row]
SPECS = [
    Spec(format="csv", header="a,b"),
    Spec(format="csv", names=("a", "b"), delimiter=";"),
    Spec(format="csv", header="a,b", quote=""),
    Spec(format="csv", header="a,b", escape="\\"),
]


def one_by_one(payload: bytes, annotation: Any, spec: Spec) -> list[Any] | None:
    """The values of all rows; None if one does not decode."""

    def handler(row: Any) -> None: ...

    handler.__annotations__["row"] = annotation
    decode = decoder_for(describe_handler(handler, is_map=True, name="h"), spec)
    try:
        return [
            decode(without_line_ending(row), False)
            for row in records_between_boundaries(payload, spec)
        ]
    except (RecordError, msgspec.MsgspecError, UnicodeDecodeError):
        return None


@pytest.mark.parametrize("spec", SPECS, ids=["header", "semicolons", "no quotes", "escapes"])
@pytest.mark.parametrize("annotation", KINDS, ids=str)
@given(text=st.text(st.sampled_from('ab1,; \t"\\\r\n\x0b\x85é\0'), max_size=40))
def test_any_text(text: str, annotation: Any, spec: Spec) -> None:
    payload = text.encode() + b"\n"

    found = plain_values(payload, annotation, spec)

    if found:
        values, letter = found
        assert values == one_by_one(payload, annotation, spec)
        assert letter * len(values) == line_endings(records_between_boundaries(payload, spec))


@pytest.mark.parametrize("ending", ["\n", "\r\n"])
@pytest.mark.parametrize("annotation", KINDS, ids=str)
def test_usual_rows_are_decoded_at_once(annotation: Any, ending: str) -> None:
    payload = "".join(f"{n},text é {n}{ending}" for n in range(100)).encode()

    found = plain_values(payload, annotation, SPECS[0])

    assert found
    assert found[0] == one_by_one(payload, annotation, SPECS[0])
    assert len(found[0]) == 100


@pytest.mark.parametrize(
    "payload",
    [b'1,"x"\n', b"1,x\n\n2,y\n", b"1,x\r\n\r\n", b"\n1,x\n", b"1,x", b"1,x\r\n2,y\n", b"1,\xff\n"],
)
def test_strange_rows_are_decoded_one_by_one(payload: bytes) -> None:
    assert plain_values(payload, Any, SPECS[0]) is None


@pytest.mark.parametrize("payload", [b"1\n", b"1,2,3\n", b"1,x\n" * 9 + b"1\n"])
def test_a_row_of_another_length_fails_by_itself(payload: bytes) -> None:
    assert plain_values(payload, Any, SPECS[0]) is None


def test_a_value_of_another_type_fails_by_itself() -> None:
    assert plain_values(b"1,x\nnone,y\n", Row, SPECS[0]) is None
