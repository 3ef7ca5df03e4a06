"""Every folder of the packages is named in pyproject.toml: one that is not, is not installed."""

import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = {
    "streamq": "streamq",
    "cli": "streamq.cli",
    "lua": "streamq.lua",
    "proto": "streamq.proto",
}


def test_every_folder_is_installed() -> None:
    told = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    folders = {
        ".".join([package, *path.parent.relative_to(ROOT / top).parts])
        for top, package in PACKAGES.items()
        for path in (ROOT / top).rglob("*")
        if path.suffix in (".py", ".lua", ".proto")
    }

    assert sorted(told) == sorted(folders)
