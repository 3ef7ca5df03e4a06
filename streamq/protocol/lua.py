"""Reads the texts of ``lua/``: what the server gets of a script, its digest, its signature.

A script's header is its signature: the names after ``KEYS[n]`` and ``ARGV[n]`` are read from it.
Nothing here speaks to a server.
"""

import hashlib
import re
from collections import Counter
from functools import cache
from importlib.resources import files

#: The folders of scripts. A folder says whose keys its scripts touch: ``{r:ID}`` or ``{q:Q}``.
FOLDERS = ("request", "queue")

_INCLUDE = re.compile(r"^-- @include (\w+)\n", re.MULTILINE)
_PARAMETER = re.compile(r"^-- (KEYS|ARGV)\[\d+(\+?)\]\s+(\w+)", re.MULTILINE)
_FUNCTION = re.compile(r"^local function (\w+)\(.*?^end\n", re.MULTILINE | re.DOTALL)
_WORD = re.compile(r"\w+")
_FLAGS = re.compile(r"^-- Flags\s+([a-z-]+)$", re.MULTILINE)


@cache
def script_names() -> tuple[str, ...]:
    """Return the names of all scripts, sorted."""
    found = (file.name for folder in FOLDERS for file in (files("streamq.lua") / folder).iterdir())
    return tuple(sorted(name.removesuffix(".lua") for name in found if name.endswith(".lua")))


@cache
def script_text(name: str) -> str:
    """Return the text of a script's file. A name is in one folder only.

    Raises:
        FileNotFoundError: there is no such script.
    """
    for folder in FOLDERS:
        file = files("streamq.lua") / folder / f"{name}.lua"
        if file.is_file():
            return file.read_text("utf-8")
    raise FileNotFoundError(f"there is no script {name}.lua")


@cache
def script_source(name: str) -> str:
    """Return a script as the server gets it. Includes do not nest.

    Only code is sent: the first line says the flags, comments stay here. So do functions that the
    script does not come to: the server would make each of them anew for every call.
    """
    flags = _FLAGS.search(script_text(name))
    first = f"#!lua flags={flags[1]}\n" if flags and flags[1] != "none" else "#!lua\n"
    library = files("streamq.lua") / "lib"
    body = _INCLUDE.sub(lambda m: (library / f"{m[1]}.lua").read_text("utf-8"), script_text(name))
    lines = (line for line in body.splitlines() if line and not line.lstrip().startswith("--"))
    return first + _code_that_is_called("\n".join(lines) + "\n")


def _code_that_is_called(code: str) -> str:
    """Return the code without functions that nothing in it calls."""
    times = Counter(_WORD.findall(code))
    kept = _FUNCTION.sub(lambda found: found[0] if times[found[1]] > 1 else "", code)
    return code if kept == code else _code_that_is_called(kept)


@cache
def script_digest(name: str) -> str:
    """Return what the server calls the script: the SHA1 of what it gets."""
    return hashlib.sha1(script_source(name).encode(), usedforsecurity=False).hexdigest()


@cache
def script_signature(name: str) -> tuple[tuple[str, ...], tuple[str, ...], bool]:
    """Return names of a script's keys, of its arguments, and whether the last takes many values.

    Keys that only a stage of a flow has (``KEYS[n+]``) are not among them: see ``more_keys``.
    """
    found = _PARAMETER.findall(script_text(name))
    keys = tuple(key for table, many, key in found if table == "KEYS" and not many)
    args = tuple(arg for table, _, arg in found if table == "ARGV")
    return keys, args, any(many for table, many, _ in found if table == "ARGV")


@cache
def further_script_keys(name: str) -> str:
    """Return what the header calls the keys that a stage of a flow has besides; "" for none."""
    found = _PARAMETER.findall(script_text(name))
    return next((key for table, many, key in found if table == "KEYS" and many), "")
