"""Makes calls of the scripts in ``lua/``, by digest.

A call names its keys and arguments as the script's header does, and nobody counts positions.
Scripts go by digest, so two versions may run side by side during a deploy, and a user of the server
can be allowed these and no others.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import chain
from typing import Any, TypeVar

from streamq.driver.connection import Connection
from streamq.driver.errors import (
    NoScriptError,
    RedisClusterException,
    RedisError,
    ResponseError,
    ScriptNotLoaded,
    our_error_of_driver,
)
from streamq.errors import (
    BY_CODE,
    UNREADABLE,
    Damaged,
    FlowUntold,
    RequestUnknown,
    ServerBusy,
    ServerError,
    ServerRefused,
    ServerUnreachable,
    StreamqError,
)
from streamq.protocol.call import Call
from streamq.protocol.keys import RequestKeys
from streamq.protocol.lua import script_source

T = TypeVar("T")

_DRIVER_ERRORS = (RedisError, RedisClusterException, OSError)


class Scripts:
    """Makes calls on one connection, and turns the scripts' refusals into exceptions."""

    def __init__(
        self,
        connection: Connection,
        retold: Callable[[Call[Any], FlowUntold], Call[Any]] | None = None,
    ) -> None:
        """``retold`` gives a call the keys of a flow, when its script asked for them."""
        self._connection = connection
        self._retold = retold

    def do(self, call: Call[T]) -> T:
        """Make one call. It is sent again if no answer comes, unless it must not be repeated."""
        connection = self._connection
        execute = connection.call if call.may_repeat else connection.call_once
        words = call.words()
        try:
            reply = execute(*words)
        except _DRIVER_ERRORS as error:
            reply = self._load_and_repeat(execute, call, words, error)
        # As ``Call.read`` does, without the cost of another function for every call.
        try:
            return call.parse(reply)
        except UNREADABLE as error:
            raise call.damaged(error) from error

    def do_in_order(
        self, calls: Iterable[Call[T]], *, otherwise: Iterable[Call[T]] = ()
    ) -> list[T]:
        """Make calls one after another: in one round trip where there is one server.

        The scripts must refuse by themselves when one before them has failed. ``otherwise``: calls
        to make at the end if it took more than one round trip (on a cluster, after a lost
        connection, or because a script was not loaded).
        """
        if self._connection.is_cluster:
            return [self.do(call) for call in calls]
        made: list[Call[T]] = []

        def words() -> Iterator[tuple[Any, ...]]:
            for call in calls:
                made.append(call)
                yield call.words()

        try:
            replies = self._connection.call_all(words())
        except (RedisError, OSError):
            return [self.do(call) for call in chain(made, calls, otherwise)]
        found: list[T] = []
        for index, (call, reply) in enumerate(zip(made, replies, strict=True)):
            if isinstance(reply, Exception) and self._is_of_server(reply):
                # The script is not there, or the server is not ready: ``do`` waits for it.
                return found + [self.do(call) for call in chain(made[index:], otherwise)]
            if isinstance(reply, Exception):
                raise self._meant(reply, call)
            found.append(call.read(reply))
        return found

    def do_apart(self, calls: Sequence[Call[T]]) -> list[T | StreamqError]:
        """Make calls of one script on one node that do not depend on each other, in one round trip.

        They must be calls that may be repeated. Returns for each its reply, or the error that
        ``do`` would raise: the error of one says nothing about the others.

        Raises:
            ServerUnreachable: the node does not answer.
            ServerBusy: the script is not there, and this user may not load it.
        """
        replies = self._ask_all(calls)
        if any(isinstance(reply, NoScriptError) for reply in replies):
            replies = self._load_and_ask_all(calls)
        found: list[T | StreamqError] = []
        last: StreamqError | None = None
        for call, reply in zip(calls, replies, strict=True):
            try:
                found.append(self._settle(call, reply, last))
            except StreamqError as error:
                last = error
                found.append(error)
        return found

    def _ask_all(self, calls: Sequence[Call[Any]]) -> list[Any]:
        """Return the replies as they came, refusals among them."""
        try:
            return self._connection.call_all(call.words() for call in calls)
        except _DRIVER_ERRORS as error:
            meant = our_error_of_driver(error, self._connection.where)
            if meant is None or isinstance(meant, ServerUnreachable):
                raise (meant or error) from None
            return [error] * len(calls)

    def _load_and_ask_all(self, calls: Sequence[Call[Any]]) -> list[Any]:
        """Load the calls' script and return the replies; wait for it if we may not load it."""
        try:
            self._load(calls[0], everywhere=False)
            return self._ask_all(calls)
        except ServerRefused:
            return self._when_loaded(calls[0], lambda: self._ask_all(calls))

    def _settle(self, call: Call[T], reply: Any, last: StreamqError | None) -> T:
        """Return the reply to a call, or make the call again by itself if the server refused it.

        ``last`` is what the latest refused call before it came to.
        """
        if not isinstance(reply, Exception):
            return call.read(reply)
        if not self._is_of_server(reply):
            raise self._meant(reply, call)
        if isinstance(last, ServerError) and not isinstance(last, ServerBusy):
            raise last  # this call would wait for the same as long
        # The keys may be on another node by now, and this way leads there.
        return self.do(call)

    def _is_of_server(self, reply: Exception) -> bool:
        """Return whether the server refused a call, and not the script."""
        return isinstance(reply, NoScriptError) or isinstance(
            our_error_of_driver(reply, self._connection.where), ServerError
        )

    def _load_and_repeat(
        self,
        execute: Callable[..., Any],
        call: Call[Any],
        words: tuple[Any, ...],
        error: Exception,
    ) -> Any:
        """Load the script and make the call again, if the error says that it is not there."""
        if isinstance(error, NoScriptError):
            try:
                # EVAL would do, but then everybody would have to have the right to it.
                self._load(call, everywhere=False)
                with suppress(NoScriptError):
                    return execute(*words)
                # While slots move, a key is in two places.
                self._load(call, everywhere=True)
                return execute(*words)
            except ServerRefused:
                return self._when_loaded(call, lambda: execute(*words))
            except _DRIVER_ERRORS as again:
                error = again
        meant = self._meant(error, call)
        if isinstance(meant, FlowUntold) and self._retold:
            try:
                return execute(*self._retold(call, meant).words())
            except _DRIVER_ERRORS as again:
                meant = self._meant(again, call)
        raise meant from None

    def _when_loaded(self, call: Call[Any], ask: Callable[[], T]) -> T:
        """Ask until another user has loaded the call's script, for as long as we are patient.

        Raises:
            ServerBusy: nobody has loaded it.
        """

        def attempt() -> T | Exception:
            try:
                replies = ask()
            except NoScriptError as error:
                raise self._not_loaded(call) from error
            except _DRIVER_ERRORS as error:
                if call.may_repeat:
                    raise
                return error
            many = replies if isinstance(replies, list) else []
            if any(isinstance(reply, NoScriptError) for reply in many):
                raise self._not_loaded(call)
            return replies

        try:
            found = self._connection.insist(attempt)
        except _DRIVER_ERRORS as error:
            found = error
        if isinstance(found, Exception):
            raise self._meant(found, call) from None
        return found  # type: ignore[no-any-return]

    @staticmethod
    def _not_loaded(call: Call[Any]) -> ScriptNotLoaded:
        return ScriptNotLoaded(
            f"it has no script {call.script}, and this user may not load scripts. A janitor "
            "(streamq janitor) loads them within a second; streamq doctor --fix as admin does too"
        )

    def _load(self, call: Call[Any], *, everywhere: bool) -> None:
        key = call.words()[3]
        self._connection.load_script(script_source(call.script), key, everywhere=everywhere)

    def _meant(self, error: Exception, call: Call[Any]) -> Exception:
        """Return what an error of the driver, or the refusal of a script, means to a caller."""
        meant = our_error_of_driver(error, self._connection.where)
        if meant or not isinstance(error, ResponseError):
            return meant or error
        code, _, why = str(error).partition(" ")
        kind = BY_CODE.get(code)
        if kind is RequestUnknown and isinstance(call.keys, RequestKeys):
            why = f"{call.keys.id}: {why}"  # the script does not know it
        if kind:
            return kind(why)
        # All arguments are ours: what the script stumbled over was in the keys.
        return Damaged(f"a script failed on what it found in the server: {error}")
