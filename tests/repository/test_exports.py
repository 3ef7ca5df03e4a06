"""Public names: each can be imported, and importing the package imports no driver."""

import inspect
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import streamq
from streamq import errors


def test_everything_named_is_there_and_nothing_else() -> None:
    # What the module itself is made with is in its sources, and no part of what it offers.
    own = {"TYPE_CHECKING", "Any", "import_module"}
    public = {
        name
        for name in dir(streamq)
        if not name.startswith("_") and not inspect.ismodule(getattr(streamq, name))
    }

    assert public - own == set(streamq.__all__)
    assert sorted(streamq.__all__) == streamq.__all__


def test_version_is_that_of_the_project_and_of_the_changelog() -> None:
    root = Path(__file__).parents[2]
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    releases = re.findall(
        r"^## (\d\S*) - \d{4}-\d\d-\d\d$", (root / "CHANGELOG.md").read_text(), re.M
    )

    assert streamq.__version__ == project["version"] == releases[0]


def test_version_is_not_looked_up_before_it_is_asked_for() -> None:
    words = [sys.executable, "-X", "importtime", "-c", "import streamq"]
    done = subprocess.run(words, capture_output=True, text=True, check=True)

    assert "importlib.metadata" not in done.stderr


def test_a_name_that_is_not_offered_is_no_attribute() -> None:
    name = "Clinet"
    with pytest.raises(AttributeError, match="no attribute 'Clinet'"):
        getattr(streamq, name)


@pytest.mark.parametrize(
    "words",
    [
        ["-c", "import streamq"],
        ["-c", "from streamq import App"],
        ["-m", "streamq.cli"],
        # These start processes before they import it, and here see their mistake before that.
        ["-m", "streamq.cli", "run"],
        ["-m", "streamq.cli", "worker"],
    ],
)
def test_the_driver_is_imported_by_those_who_need_it(words: list[str]) -> None:
    """It takes longer to import than everything else together."""
    done = subprocess.run(
        [sys.executable, "-X", "importtime", *words], capture_output=True, text=True, check=False
    )

    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "streamq" in imported
    assert not imported & {"redis", "streamq.driver.connection", "pydantic"}


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
            assert str(value.__doc__).rstrip().endswith(".")
