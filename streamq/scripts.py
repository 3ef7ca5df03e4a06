"""Reads the Lua files and runs them by digest.

A script's header is its signature. The names after ``KEYS[n]`` and ``ARGV[n]``
are read from it here, so a caller passes names and never counts positions.
Scripts go by digest, so two versions may run side by side during a deploy, and a user of the
server can be allowed these and no others.
"""

import hashlib
import re
from collections.abc import Callable
from functools import cache
from importlib.resources import files
from typing import Any

from redis.exceptions import NoScriptError, ResponseError

from streamq.connection import Connection, translated
from streamq.errors import BY_CODE
from streamq.keys import QueueKeys, RequestKeys

_INCLUDE = re.compile(r"^-- @include (\w+)\n", re.MULTILINE)
_PARAMETER = re.compile(r"^-- (KEYS|ARGV)\[\d+(\+?)\]\s+(\w+)", re.MULTILINE)
_FLAGS = re.compile(r"^-- Flags\s+([a-z-]+)$", re.MULTILINE)


@cache
def source(name: str) -> str:
    """Text of ``lua/<name>.lua`` as the server gets it. Includes do not nest.

    Only code is sent: the first line says the flags, comments stay here.
    """
    lua = files("streamq.lua")
    text = (lua / f"{name}.lua").read_text("utf-8")
    flags = _FLAGS.search(text)
    first = f"#!lua flags={flags[1]}\n" if flags and flags[1] != "none" else "#!lua\n"
    body = _INCLUDE.sub(lambda m: (lua / "lib" / f"{m[1]}.lua").read_text("utf-8"), text)
    lines = (line for line in body.splitlines() if line and not line.lstrip().startswith("--"))
    return first + "\n".join(lines) + "\n"


@cache
def digest(name: str) -> str:
    """What the server calls the script."""
    return hashlib.sha1(source(name).encode(), usedforsecurity=False).hexdigest()


@cache
def signature(name: str) -> tuple[tuple[str, ...], tuple[str, ...], bool]:
    """Names of a script's keys, of its arguments, and whether the last takes many values."""
    text = (files("streamq.lua") / f"{name}.lua").read_text("utf-8")
    found = _PARAMETER.findall(text)
    keys = tuple(key for table, _, key in found if table == "KEYS")
    args = tuple(arg for table, _, arg in found if table == "ARGV")
    return keys, args, any(many for _, many, _ in found)


#: A script is loaded where its keys are; while they move between nodes, that is two places.
_LOADS = 2


class Scripts:
    """Runs scripts on one connection, and turns their refusals into exceptions."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def run(self, name: str, keys: RequestKeys | QueueKeys, /, **args: Any) -> Any:
        """Run one script with the arguments its header names; sent again if no answer comes."""
        return self._execute(self._connection.redis.execute_command, name, keys, args)

    def run_once(self, name: str, keys: RequestKeys | QueueKeys, /, **args: Any) -> Any:
        """The same, but never sent again."""
        return self._execute(self._connection.blocking(1).execute_command, name, keys, args)

    def _execute(
        self,
        execute: Callable[..., Any],
        name: str,
        keys: RequestKeys | QueueKeys,
        args: dict[str, Any],
    ) -> Any:
        key_names, arg_names, is_variadic = signature(name)
        if tuple(args) != arg_names:
            raise TypeError(f"{name}.lua takes {list(arg_names)}, not {list(args)}")
        argv = list(args.values())
        if is_variadic:
            argv.extend(argv.pop())
        key_values = [getattr(keys, key) for key in key_names]
        try:
            with translated(self._connection.where):
                for try_ in range(_LOADS + 1):
                    try:
                        return execute("EVALSHA", digest(name), len(key_values), *key_values, *argv)
                    except NoScriptError:
                        if try_ == _LOADS:
                            raise
                        self._load(name, key_values[0], try_)
        except ResponseError as reply:
            code, _, why = str(reply).partition(" ")
            if code not in BY_CODE:
                raise
            raise BY_CODE[code](why) from None

    def _load(self, name: str, key: str, try_: int) -> None:
        """Make the server know a script. EVAL would do, but nobody has to have the right to it."""
        self._connection.load_script(source(name), key, everywhere=try_ > 0)
