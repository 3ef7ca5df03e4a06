"""Signatures of handlers: those that cannot be called with a record are refused at once."""

from typing import Any

import pytest

from streamq import App, Context
from streamq.app import describe_handler
from streamq.errors import InvalidValue


@pytest.mark.parametrize(
    "function",
    [
        lambda: None,
        lambda *, key: key,
        lambda one, two: (one, two),
    ],
)
def test_function_that_cannot_be_called_with_a_record_is_refused(function: Any) -> None:
    with pytest.raises(InvalidValue):
        describe_handler(function, is_map=True, name="f")


def test_context_before_the_record_is_refused() -> None:
    def wrong(context: Context, line: str) -> None: ...

    with pytest.raises(InvalidValue, match="record"):
        describe_handler(wrong, is_map=True)


def test_annotation_that_cannot_be_decoded_is_refused_at_once() -> None:
    def wrong(value: int | bytes | str) -> None: ...

    with pytest.raises(InvalidValue, match="cannot be decoded"):
        App().map(wrong)
