"""Reads the Lua files and runs them by digest.

A script's header is its signature. The names after ``KEYS[n]`` and ``ARGV[n]``
are read from it here, so a caller passes names and never counts positions.
Scripts go by digest, so two versions may run side by side during a deploy, and a user of the
server can be allowed these and no others.
"""

import hashlib
import re
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from importlib.resources import files
from itertools import chain
from typing import Any

from streamq.driver.connection import Connection
from streamq.driver.errors import (
    NoScriptError,
    RedisClusterException,
    RedisError,
    ResponseError,
    translated,
)
from streamq.driver.lanes import Lane, pack
from streamq.errors import BY_CODE, Damaged, ProtocolError, StreamqError
from streamq.protocol.keys import QueueKeys, RequestKeys

#: A script's name, its keys, its arguments by name.
Call = tuple[str, RequestKeys | QueueKeys, dict[str, Any]]

_BROKEN = (RedisError, StreamqError, OSError)
_INCLUDE = re.compile(r"^-- @include (\w+)\n", re.MULTILINE)
_PARAMETER = re.compile(r"^-- (KEYS|ARGV)\[\d+(\+?)\]\s+(\w+)", re.MULTILINE)
_FUNCTION = re.compile(r"^local function (\w+)\(.*?^end\n", re.MULTILINE | re.DOTALL)
_WORD = re.compile(r"\w+")
_FLAGS = re.compile(r"^-- Flags\s+([a-z-]+)$", re.MULTILINE)


@cache
def source(name: str) -> str:
    """Text of ``lua/<name>.lua`` as the server gets it. Includes do not nest.

    Only code is sent: the first line says the flags, comments stay here. So do functions that the
    script does not come to: the server would make each of them anew for every call.
    """
    lua = files("streamq.lua")
    text = (lua / f"{name}.lua").read_text("utf-8")
    flags = _FLAGS.search(text)
    first = f"#!lua flags={flags[1]}\n" if flags and flags[1] != "none" else "#!lua\n"
    body = _INCLUDE.sub(lambda m: (lua / "lib" / f"{m[1]}.lua").read_text("utf-8"), text)
    lines = (line for line in body.splitlines() if line and not line.lstrip().startswith("--"))
    return first + _reached("\n".join(lines) + "\n")


def _reached(code: str) -> str:
    """The code without functions that nothing in it calls."""
    times = Counter(_WORD.findall(code))
    kept = _FUNCTION.sub(lambda found: found[0] if times[found[1]] > 1 else "", code)
    return code if kept == code else _reached(kept)


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


class Scripts:
    """Runs scripts on one connection, and turns their refusals into exceptions."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def run(self, name: str, keys: RequestKeys | QueueKeys, /, **args: Any) -> Any:
        """Run one script with the arguments its header names; sent again if no answer comes."""
        return self._execute(self._connection.call, name, keys, args)

    def run_once(self, name: str, keys: RequestKeys | QueueKeys, /, **args: Any) -> Any:
        """The same, but never sent again."""
        return self._execute(self._connection.call_once, name, keys, args)

    def run_all(self, calls: Iterable[Call], *, otherwise: Iterable[Call] = ()) -> list[Any]:
        """Run scripts in their order: in one round trip where there is one server.

        For scripts that refuse by themselves when one before them has failed. ``otherwise``: what
        to run at the end where that took more than one round trip.
        """
        if self._connection.is_cluster:
            return self._run_each(calls)
        made: list[Call] = []

        def words() -> Iterator[tuple[Any, ...]]:
            for call in calls:
                made.append(call)
                yield "EVALSHA", digest(call[0]), *_words(*call)

        try:
            replies = self._connection.call_all(words())
        except (RedisError, OSError):
            return self._run_each(chain(made, calls, otherwise))
        for index, reply in enumerate(replies):
            if isinstance(reply, NoScriptError):
                return replies[:index] + self._run_each(chain(made[index:], otherwise))
            if isinstance(reply, Exception):
                with _refusals(), translated(self._connection.where):
                    raise reply
        return replies

    def run_apart(self, calls: Iterable[Call]) -> list[Any]:
        """Run scripts that have nothing to do with each other: in one round trip where there is
        one server. A refusal is among the replies.
        """
        calls = list(calls)
        try:
            if self._connection.is_cluster:
                raise NoScriptError
            words = (("EVALSHA", digest(call[0]), *_words(*call)) for call in calls)
            replies = self._connection.call_all(words)
        except (RedisError, OSError):
            replies = [NoScriptError()] * len(calls)
        return [self._settled(*pair) for pair in zip(calls, replies, strict=True)]

    def _settled(self, call: Call, reply: Any) -> Any:
        """The reply to a call, which is made by itself if its script was not there."""
        name, keys, args = call
        try:
            if isinstance(reply, NoScriptError):
                return self.run(name, keys, **args)
            if isinstance(reply, Exception):
                with _refusals(), translated(self._connection.where):
                    raise reply
        except ProtocolError as refusal:
            return refusal
        return reply

    def _run_each(self, calls: Iterable[Call]) -> list[Any]:
        return [self.run(name, keys, **args) for name, keys, args in calls]

    def _execute(
        self,
        execute: Callable[..., Any],
        name: str,
        keys: RequestKeys | QueueKeys,
        args: dict[str, Any],
    ) -> Any:
        words = _words(name, keys, args)
        sha = digest(name)
        try:
            return execute("EVALSHA", sha, *words)
        except (RedisError, RedisClusterException, OSError) as error:
            # Here and not around it: most calls are spared a context that does nothing for them.
            with _refusals(), translated(self._connection.where):
                if not isinstance(error, NoScriptError):
                    raise
                # EVAL would do, but then everybody would have to have the right to it.
                self._connection.load_script(source(name), words[1], everywhere=False)
                with suppress(NoScriptError):
                    return execute("EVALSHA", sha, *words)
                # While slots move, a key is in two places.
                self._connection.load_script(source(name), words[1], everywhere=True)
                return execute("EVALSHA", sha, *words)


class Ahead:
    """Runs of scripts of which each is sent before the one before it is answered.

    When anything goes wrong on that way, a run is made again in the usual way, one after the
    other: so this is for scripts that may be repeated, and that refuse by themselves when
    one before them has failed. Answers are asked for in the order of the runs.
    """

    def __init__(self, scripts: Scripts, connection: Connection) -> None:
        self._scripts = scripts
        self._connection = connection
        self._lane: Lane | None = None

    def run(self, name: str, keys: RequestKeys, /, **args: Any) -> Callable[[], Any]:
        """Send it. Returns what waits for the answer."""
        words = _words(name, keys, args)
        try:
            self._lane = self._lane or self._connection.lane(keys.meta)
            self._lane.send(pack(("EVALSHA", digest(name), *words)))
        except _BROKEN:
            self.close()
        lane = self._lane

        def answer() -> Any:
            if lane and lane is self._lane:
                with suppress(*_BROKEN):
                    return lane.receive()
                self.close()
            return self._scripts.run(name, keys, **args)

        return answer

    def close(self) -> None:
        """Forget the answers that were not asked for."""
        lane, self._lane = self._lane, None
        if lane:
            lane.close()


def _words(name: str, keys: RequestKeys | QueueKeys, args: dict[str, Any]) -> list[Any]:
    """What follows the script in a call: how many keys, the keys, the arguments."""
    key_names, arg_names, is_variadic = signature(name)
    if tuple(args) != arg_names:
        raise TypeError(f"{name}.lua takes {list(arg_names)}, not {list(args)}")
    argv = list(args.values())
    if is_variadic:
        argv.extend(argv.pop())
    return [len(key_names), *keys.of(key_names), *argv]


@contextmanager
def _refusals() -> Generator[None]:
    """What a script refuses with becomes the exception of that code."""
    try:
        yield
    except ResponseError as reply:
        code, _, why = str(reply).partition(" ")
        if code not in BY_CODE:
            # All arguments are ours: what the script stumbled over was in the keys.
            raise Damaged(f"a script failed on what it found in the server: {reply}") from None
        raise BY_CODE[code](why) from None
