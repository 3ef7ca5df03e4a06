"""Runs the scripts of ``lua/`` by digest.

A caller passes the names that a script's header gives to its keys and arguments, and never counts
positions. Scripts go by digest, so two versions may run side by side during a deploy, and a user
of the server can be allowed these and no others.
"""

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import chain
from typing import Any

from streamq.driver.connection import Connection
from streamq.driver.errors import (
    NoScriptError,
    RedisClusterException,
    RedisError,
    ResponseError,
    ours,
    translating_driver_errors,
)
from streamq.driver.lanes import Lane, pack
from streamq.errors import (
    BY_CODE,
    Damaged,
    ProtocolError,
    ServerBusy,
    ServerError,
    ServerUnreachable,
    StreamqError,
)
from streamq.protocol.keys import QueueKeys, RequestKeys
from streamq.protocol.lua import digest, signature, source

#: A script's name, its keys, its arguments by name.
Call = tuple[str, RequestKeys | QueueKeys, dict[str, Any]]

_BROKEN = (RedisError, StreamqError, OSError)


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
                with _refusals(), translating_driver_errors(self._connection.where):
                    raise reply
        return replies

    def run_many(self, name: str, calls: Sequence[tuple[RequestKeys, dict[str, Any]]]) -> list[Any]:
        """Run a script that may be repeated on several requests of one node, in one round trip.

        Returns what the script answers for each of them, or the error that ``run`` would raise:
        that of one request says nothing about the others.

        Raises:
            ServerUnreachable: the node does not answer.
        """
        replies = self._call_all(name, calls)
        if any(isinstance(reply, NoScriptError) for reply in replies):
            [key] = calls[0][0].of(signature(name)[0][:1])
            self._connection.load_script(source(name), key, everywhere=False)
            replies = self._call_all(name, calls)
        found: list[Any] = []
        error: StreamqError | None = None
        for (keys, args), reply in zip(calls, replies, strict=True):
            try:
                if not isinstance(reply, Exception):
                    found.append(reply)
                elif not self._is_of_server(reply):
                    with _refusals(), translating_driver_errors(self._connection.where):
                        raise reply
                elif isinstance(error, ServerError) and not isinstance(error, ServerBusy):
                    found.append(error)  # the next would wait for the same as long
                else:
                    # The request may be on another node by now, and this way leads there.
                    found.append(self.run(name, keys, **args))
            except StreamqError as refusal:
                error = refusal
                found.append(refusal)
        return found

    def _call_all(
        self, name: str, calls: Sequence[tuple[RequestKeys, dict[str, Any]]]
    ) -> list[Any]:
        """The answers to one script for several requests, refusals among them."""
        sha = digest(name)
        try:
            return self._connection.call_all(
                ("EVALSHA", sha, *_words(name, keys, args)) for keys, args in calls
            )
        except (RedisError, RedisClusterException, OSError) as error:
            meant = ours(error, self._connection.where)
            if meant is None or isinstance(meant, ServerUnreachable):
                raise (meant or error) from None
            return [error] * len(calls)

    def _is_of_server(self, reply: Exception) -> bool:
        """Whether the server refused a call, and not the script."""
        return isinstance(reply, NoScriptError) or isinstance(
            ours(reply, self._connection.where), ServerError
        )

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
                with _refusals(), translating_driver_errors(self._connection.where):
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
            with _refusals(), translating_driver_errors(self._connection.where):
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
