"""Handlers: the functions that users write, and what a handler may raise or ask while it runs.

The queue carries names and bytes, never code: a worker runs the handlers of the App it was started
with, found by name.
"""

import inspect
import typing
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar, overload

import msgspec

from streamq import units
from streamq.errors import InvalidValue
from streamq.flows.flow import Flow
from streamq.model import RETRIES

F = TypeVar("F", bound=Callable[..., Any])


class Retry(Exception):
    """Raise it in a handler to have the record or part tried again; this spends an attempt.

    ``after`` is the time to wait, in seconds or as text; without it the request's backoff decides.

    Example:
        @app.map
        def fetch(url: str) -> str:
            reply = get(url)
            if reply.status == 503:
                raise Retry("not ready", after="10s")
            return reply.text
    """

    def __init__(self, message: str = "", *, after: str | float | None = None) -> None:
        super().__init__(message)
        self.after_ms = None if after is None else units.duration_ms(after, "after")


class Snooze(Exception):
    """Raise it in a handler to have the record or part run later; this spends no attempt.

    ``after`` is the time to wait, in seconds or as text. With ``scope="request"`` no part of the
    request starts until then: use it when an API says "too many requests".

    Example:
        @app.map
        async def ask(prompt: str) -> str:
            reply = await post(prompt)
            if reply.status == 429:
                raise Snooze(after="30s", scope="request")
            return reply.text
    """

    def __init__(self, message: str = "", *, after: str | float, scope: str = "part") -> None:
        super().__init__(message)
        if scope not in ("part", "request"):
            raise InvalidValue(f"scope {scope!r} is neither part nor request")
        self.after_ms = units.duration_ms(after, "after")
        self.scope = scope


class Abandon(Exception):
    """Raise it in a handler to give the record or part up at once; it is not tried again.

    Example:
        @app.map
        def parse(line: str) -> int:
            if not line.isdigit():
                raise Abandon(f"no number: {line}")
            return int(line)
    """


class Context:
    """Tell a handler about the part that it runs: annotate a parameter with this class.

    It has the attributes ``request`` (the request's id), ``part`` (the part's number, from 1),
    ``attempt`` (1 for the first run, one more for each error since) and ``source`` (the file that
    the part was loaded from, or "").

    Example:
        @app.handler
        def store(rows: list[dict], context: Context) -> int:
            save(rows, key=f"{context.request}/{context.part}")
            return len(rows)
    """

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
        #: Of a reduce with ``on_failure="run"``: how many parts before it failed.
        self.failed = 0
        #: The file that the part was loaded from; "" for none.
        self.source = source
        #: 1 for the first run, one more for each error since.
        self.attempt = attempt
        self._should_stop = should_stop
        self._progress = progress

    def should_stop(self) -> bool:
        """Return whether to stop: the request was cancelled, or another worker has the part."""
        return self._should_stop()

    def progress(self, percent: float) -> None:
        """Note how far the part is, in percent. ``streamq workers`` shows it."""
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
    #: The annotation of a second parameter, that of a join: what the children returned. ``...``
    #: where there is no such parameter.
    second: Any = ...
    #: It yields, and each value is a line of the output.
    is_generator: bool = False

    @property
    def takes_two(self) -> bool:
        """Whether it is called with two values, as the handler of a join."""
        return self.second is not ...

    @property
    def offer(self) -> str:
        """The handler as ``claim`` is told of it: what it is called with, its name, its retries."""
        retries = RETRIES if self.retries is None else self.retries
        return f"{'records' if self.is_map else 'parts'} {self.name} {retries}"


class App:
    """Collect handlers under their names; ``streamq worker module:app`` runs them.

    Example:
        app = App()

        @app.map
        def shout(line: str) -> str:
            return line.upper()
    """

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
        """Register a function or coroutine that is called with each record of a part.

        ``name`` is the handler's name, unless it is the function's. ``timeout`` bounds how long one
        record may take, and ``retries`` is how often a failure is tried again (3). Both hold for
        requests that do not say otherwise.

        Raises:
            InvalidValue: the function takes no record, or its name is taken or cannot be one.

        Example:
            @app.map(timeout="30s", retries=5)
            def price(order: dict) -> float:
                return order["count"] * 1.5
        """
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
        """Register a function or coroutine that is called with a whole part: all its records.

        The options are those of ``map``, but ``timeout`` is for the whole part.

        Raises:
            InvalidValue: the function takes no part, or its name is taken or cannot be one.

        Example:
            @app.handler
            def total(counts: list[int]) -> int:
                return sum(counts)
        """
        options = {"name": name, "timeout": timeout, "retries": retries}
        return self._register(function, is_map=False, options=options)

    def flow(self, name: str) -> Flow:
        """Return a flow of this name without stages; its methods add them.

        Example:
            shop = app.flow("shop").map(fetch).spread(photos).map(describe).join(merge)
            client.submit(urls, flow=shop)
        """
        return Flow(name, name_of=self._name_of)

    def _name_of(self, function: Any) -> str:
        """Return the name of a registered function.

        Raises:
            InvalidValue: it is no handler of this app.
        """
        for handler in self.handlers.values():
            if handler.function is function:
                return handler.name
        known = ", ".join(self.handlers) or "none"
        name = getattr(function, "__name__", repr(function))
        raise InvalidValue(f"{name:.80} is no handler of this app; its handlers: {known}")

    def _register(self, function: Any, *, is_map: bool, options: dict[str, Any]) -> Any:
        def register(wanted: F) -> F:
            handler = describe_handler(wanted, is_map=is_map, **options)
            if handler.name in self.handlers:
                raise InvalidValue(f"two handlers of one app have the name {handler.name!r}")
            self.handlers[handler.name] = handler
            return wanted

        return register if function is None else register(function)


def describe_handler(
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
    annotation, context_name, second = _handler_parameters(name, function, is_map=is_map)
    yields_async = inspect.isasyncgenfunction(function)
    return Handler(
        name,
        function,
        is_map,
        inspect.iscoroutinefunction(function) or yields_async,
        annotation,
        context_name,
        None if timeout is None else units.duration_ms(timeout, "timeout"),
        None if retries is None else units.whole(retries, "retries", 0),
        second,
        inspect.isgeneratorfunction(function) or yields_async,
    )


def _handler_parameters(
    name: str, function: Callable[..., Any], *, is_map: bool
) -> tuple[Any, str | None, Any]:
    """Return the first parameter's annotation, the name of the parameter for the context, and the
    annotation of a second parameter that must be given (``...``: there is none).
    """
    try:
        hints = typing.get_type_hints(function, include_extras=True)
        signature = inspect.signature(function)
    except (NameError, TypeError, ValueError) as error:
        raise InvalidValue(f"handler {name}: {error}") from None
    context_name = next((p for p in signature.parameters if hints.get(p) is Context), None)
    context = {context_name: None} if context_name else {}
    try:
        signature.bind(None, **context)
        takes_two = False
    except TypeError as error:
        takes_two = not is_map and _handler_takes_two_parameters(signature, context)
        if not takes_two:
            raise InvalidValue(
                f"handler {name} is called with a record or a part, and its Context if it has one "
                f"after that: {error}"
            ) from None
    first, *others = (p for p in signature.parameters if p != context_name)
    second = hints.get(others[0], inspect.Parameter.empty) if takes_two else ...
    annotation = hints.get(first, inspect.Parameter.empty)
    if is_map and (kind := table_kind_of_handler(annotation)):
        raise InvalidValue(
            f"handler {name} takes a {kind}, which is a whole part: register it with handler, "
            "not with map"
        )
    try:
        if annotation is not inspect.Parameter.empty:
            msgspec.json.Decoder(_checked_type_for_handler(annotation))
    except TypeError as error:
        raise InvalidValue(f"handler {name}: {annotation} cannot be decoded: {error}") from None
    return annotation, context_name, second


#: Types of tables that a handler may take and return. They are known by their names, so that
#: nothing is imported for them.
_TABLES = ("pyarrow.Table", "pyarrow.RecordBatch", "polars.DataFrame", "pandas.DataFrame")


def table_kind_of_handler(annotation: Any) -> str:
    """Return which type of table an annotation is, such as ``pyarrow.Table``; "" for no table."""
    library = str(getattr(annotation, "__module__", "")).partition(".")[0]
    name = f"{library}.{getattr(annotation, '__name__', '')}"
    return name if name in _TABLES else ""


def handler_takes_table(function: Callable[..., Any]) -> bool:
    """Return whether a parameter of a function is annotated with a type of table."""
    try:
        hints = typing.get_type_hints(function)
    except (NameError, TypeError):
        return False
    return any(table_kind_of_handler(hint) for name, hint in hints.items() if name != "return")


def handler_is_iterator(annotation: Any) -> bool:
    """Return whether the annotation is that of a reduce's handler: ``Iterator[Page]``."""
    return typing.get_origin(annotation) in (Iterator, Iterable) or annotation in (
        Iterator,
        Iterable,
    )


def _checked_type_for_handler(annotation: Any) -> Any:
    """Return the type that can be decoded: of an iterator, that of what it yields."""
    if not handler_is_iterator(annotation):
        return annotation
    args = typing.get_args(annotation)
    return args[0] if args else Any


def _handler_takes_two_parameters(signature: inspect.Signature, context: dict[str, None]) -> bool:
    """Return whether a function can be called with two values, as the handler of a join is."""
    try:
        signature.bind(None, None, **context)
    except TypeError:
        return False
    return True
