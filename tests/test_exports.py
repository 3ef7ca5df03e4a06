"""What the package offers."""

import inspect

import streamq
from streamq import errors


def test_everything_named_is_there_and_nothing_else() -> None:
    public = {
        name
        for name, value in vars(streamq).items()
        if not name.startswith("_") and not inspect.ismodule(value)
    }

    assert public == set(streamq.__all__)
    assert sorted(streamq.__all__) == streamq.__all__


def test_every_error_can_be_caught_by_its_name() -> None:
    tree = {
        name
        for name, value in vars(errors).items()
        if inspect.isclass(value) and issubclass(value, errors.StreamqError)
    }

    assert tree <= set(streamq.__all__)


def test_every_error_is_in_the_drawing_of_the_tree() -> None:
    for name, value in vars(errors).items():
        if inspect.isclass(value) and issubclass(value, errors.StreamqError):
            assert name in str(errors.__doc__)
            assert str(value.__doc__).endswith(".")
