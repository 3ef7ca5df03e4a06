"""What is installed is what git holds: every module and every script, under its package."""

import os
import subprocess
from importlib.resources import files
from pathlib import Path

import pytest

ROOT = Path(os.environ.get("STREAMQ_CHECKOUT", Path(__file__).parents[2]))
FOLDERS = {"streamq": "streamq", "cli": "streamq.cli", "lua": "streamq.lua"}


def tracked() -> list[str]:
    """Files of the packages that git tracks; a source tree without git tells nothing."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    command = ["git", "-C", str(ROOT), "ls-files", *FOLDERS]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()


def test_every_module_and_script_is_installed() -> None:
    missing = []
    for name in tracked():
        folder, *rest = Path(name).parts
        if rest[-1].endswith((".py", ".lua", ".typed")):
            installed = files(FOLDERS[folder]).joinpath(*rest)
            if not installed.is_file():
                missing.append(name)

    assert missing == []


def test_scripts_are_read_from_the_package() -> None:
    names = sorted(each.name for each in files("streamq.lua").joinpath("request").iterdir())

    assert {"claim.lua", "finish.lua", "reap.lua"} <= set(names)
    assert files("streamq.lua").joinpath("queue", "mint.lua").is_file()
    assert files("streamq.lua").joinpath("lib", "clock.lua").is_file()


def test_package_says_that_it_is_typed() -> None:
    assert files("streamq").joinpath("py.typed").is_file()
