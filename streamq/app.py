"""Handlers: the functions that users write, and what a handler may raise or ask while it runs.

The queue carries names and bytes, never code: a worker runs the handlers of the App it was started
with, found by name.
"""

import inspect
import typing
from collections.abc import Callable
from typing import Any, TypeVar, overload

import msgspec

from streamq import units
from streamq.errors import InvalidValue
from streamq.model import RETRIES

F = TypeVar("F", bound=Callable[..., Any])


class Retry(Exception):
    """A handler raises this to be run again after the given time; it costs an attempt."""

    def __init__(self, message: str = "", *, after: str | float | None = None) -> None:
        super().__init__(message)
        self.after_ms = None if after is None else units.duration_ms(after, "after")


class Snooze(Exception):
    """A handler raises this to be run again after the given time; it costs no attempt.

    With ``scope="request"`` no part of the request starts until then. That is for an API that has
    answered "too many requests": its limit concerns all parts, not only this one.
    """

    def __init__(self, message: str = "", *, after: str | float, scope: str = "part") -> None:
        super().__init__(message)
        if scope not in ("part", "request"):
            raise InvalidValue(f"scope {scope!r} is neither part nor request")
        self.after_ms = units.duration_ms(after, "after")
        self.scope = scope


class Abandon(Exception):
    """A handler raises this when no further attempt can succeed; the part or record is given up."""


class Context:
    """What a handler can learn and say about its part. A parameter annotated with this gets one."""

    def __init__(
        self,
        request: str,
        part: int,
        attempt: int,
        *,
        source: str = "",
        should_stop: Callable[[], bool] = lambda: False,
        progress: Callable[[float], None] = lambda _: None,
    ) -> None:
        self.request = request
        self.part = part
        #: The file that the part was loaded from; "" for none.
        self.source = source
        #: 1 for the first run, one more for each error since.
        self.attempt = attempt
        self._should_stop = should_stop
        self._progress = progress

    def should_stop(self) -> bool:
        """Return whether nobody wants the result: the request was cancelled or the lease lost."""
        return self._should_stop()

    def progress(self, percent: float) -> None:
        """Store how far the part is, in percent, where the pool's parent can read it."""
        self._progress(percent)


class Handler(msgspec.Struct, frozen=True):
    """A function under a name, and how to call it."""

    name: str
    function: Callable[..., Any]
    #: True: called with each record of a part. False: called with the whole part.
    is_map: bool
    is_async: bool
    #: The annotation of the first parameter; ``inspect.Parameter.empty`` when it has none.
    annotation: Any
    #: The name of the parameter that is annotated with ``Context``, if there is one.
    context_name: str | None
    timeout_ms: int | None = None
    retries: int | None = None

    @property
    def offer(self) -> str:
        """The handler as ``claim`` is told of it: what it is called with, its name, its retries."""
        retries = RETRIES if self.retries is None else self.retries
        return f"{'records' if self.is_map else 'parts'} {self.name} {retries}"


class App:
    """Handlers by name."""

    def __init__(self) -> None:
        self.handlers: dict[str, Handler] = {}

    @overload
    def map(self, function: F) -> F: ...
    @overload
    def map(
        self,
        *,
        name: str | None = None,
        timeout: str | float | None = None,
        retries: int | None = None,
    ) -> Callable[[F], F]: ...
    def map(
        self,
        function: Any = None,
        *,
        name: str | None = None,
        timeout: str | float | None = None,
        retries: int | None = None,
    ) -> Any:
        """Register a function that is called with each record of a part."""
        options = {"name": name, "timeout": timeout, "retries": retries}
        return self._register(function, is_map=True, options=options)

    @overload
    def handler(self, function: F) -> F: ...
    @overload
    def handler(
        self,
        *,
        name: str | None = None,
        timeout: str | float | None = None,
        retries: int | None = None,
    ) -> Callable[[F], F]: ...
    def handler(
        self,
        function: Any = None,
        *,
        name: str | None = None,
        timeout: str | float | None = None,
        retries: int | None = None,
    ) -> Any:
        """Register a function that is called with a whole part."""
        options = {"name": name, "timeout": timeout, "retries": retries}
        return self._register(function, is_map=False, options=options)

    def _register(self, function: Any, *, is_map: bool, options: dict[str, Any]) -> Any:
        def register(wanted: F) -> F:
            handler = describe(wanted, is_map=is_map, **options)
            if handler.name in self.handlers:
                raise InvalidValue(f"two handlers of one app have the name {handler.name!r}")
            self.handlers[handler.name] = handler
            return wanted

        return register if function is None else register(function)


def describe(
    function: Callable[..., Any],
    *,
    is_map: bool,
    name: str | None = None,
    timeout: str | float | None = None,
    retries: int | None = None,
) -> Handler:
    """Return the function as a handler.

    Raises:
        InvalidValue: the function takes no record, or its name cannot be a handler's.
    """
    name = units.name(name or str(getattr(function, "__name__", "")), "handler")
    annotation, context_name = _parameters(name, function)
    return Handler(
        name,
        function,
        is_map,
        inspect.iscoroutinefunction(function),
        annotation,
        context_name,
        None if timeout is None else units.duration_ms(timeout, "timeout"),
        None if retries is None else units.whole(retries, "retries", 0),
    )


def _parameters(name: str, function: Callable[..., Any]) -> tuple[Any, str | None]:
    """Return the first parameter's annotation, and the name of the parameter for the context."""
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise InvalidValue(f"handler {name} yields: let it return the result of a record instead")
    try:
        hints = typing.get_type_hints(function, include_extras=True)
        signature = inspect.signature(function)
    except (NameError, TypeError, ValueError) as error:
        raise InvalidValue(f"handler {name}: {error}") from None
    context_name = next((p for p in signature.parameters if hints.get(p) is Context), None)
    try:
        signature.bind(None, **({context_name: None} if context_name else {}))
    except TypeError as error:
        raise InvalidValue(
            f"handler {name} is called with a record or a part, and its Context if it has one "
            f"after that: {error}"
        ) from None
    first = next(p for p in signature.parameters if p != context_name)
    annotation = hints.get(first, inspect.Parameter.empty)
    try:
        if annotation is not inspect.Parameter.empty:
            msgspec.json.Decoder(annotation)
    except TypeError as error:
        raise InvalidValue(f"handler {name}: {annotation} cannot be decoded: {error}") from None
    return annotation, context_name
