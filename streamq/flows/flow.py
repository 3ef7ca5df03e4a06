"""A flow as users write it: stages in a line, each a handler and its options.

Nothing here speaks to a server, and no code is kept: a stage names its handler.
"""

from collections.abc import Callable, Iterable
from typing import Any, Literal

import msgspec

from streamq import units
from streamq.errors import InvalidValue
from streamq.flows.shape import Kind, Shape

#: What a join or reduce does when some of its inputs failed: it fails, too, or runs without them.
OnFailure = Literal["fail", "run"]
#: Largest number of children that one part of a spread may have.
MOST_CHILDREN = 1_000
#: Largest number of results that one part of a tree may have.
MOST_WIDTH = 5_000


class Stage(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True
):
    """One stage of a flow: what it does, its handler, and the options that are its own.

    An option that is None is that of the request, or of the handler.
    """

    kind: Kind
    handler: str
    queue: str | None = None
    level: int | None = None
    limit: int | None = None
    rate: str | None = None
    retries: int | None = None
    backoff: str | float | None = None
    timeout: str | float | None = None
    max_failures: str | int | None = None
    poison: int | None = None
    weight: int | None = None
    #: How much may be unfinished in this stage; the one before it waits then: ``"2000 parts"`` or
    #: a size such as ``"64 MiB"``.
    window: str | int | None = None
    on_failure: OnFailure = "fail"
    #: For a reduce that works as a tree: how many results each call gets.
    width: int | None = None


class Flow:
    """Describe work in several stages: each hands its results over to the next.

    ``App.flow`` makes one. Every method adds a stage and returns a new flow. A stage is given as
    the function or as the name of its handler, and with the options of ``Client.submit`` that are
    to hold for it: ``queue``, ``level``, ``limit``, ``rate``, ``retries``, ``backoff``,
    ``timeout``, ``max_failures``, ``poison``.

    Example:
        shop = (
            app.flow("shop")
            .map(fetch, limit=50, rate="20/s")
            .spread(photos)
            .map(describe, window="2000 parts")
            .join(merge, on_failure="run")
            .reduce(catalogue)
        )
    """

    def __init__(
        self,
        name: str,
        stages: Iterable[Stage] = (),
        name_of: Callable[[Any], str] | None = None,
        app: str = "",
    ) -> None:
        """``name_of`` returns the name of the handler that a function is.

        ``app`` names the app that has the handlers, as ``module:app``, where that is not plain.
        """
        self.name = units.name(name, "flow")
        self.stages = tuple(stages)
        self.app = app
        self._name_of = name_of

    def __repr__(self) -> str:
        stages = "".join(f".{each.kind}({each.handler!r})" for each in self.stages)
        return f"Flow({self.name!r}){stages}"

    def map(self, handler: str | Callable[..., Any], **options: Any) -> "Flow":
        """Add a stage that makes one part of each, or none where the handler returns None.

        ``window`` bounds what may be unfinished in the stage. When it is full, the stage before
        it waits.

        Example:
            app.flow("shop").map(fetch, limit=50).map(describe, window="2000 parts")
        """
        return self._with("map", handler, options)

    def spread(self, handler: str | Callable[..., Any], **options: Any) -> "Flow":
        """Add a stage that makes many parts of each: the handler returns a list, or a ``Spread``.

        Example:
            app.flow("crawl").map(fetch).spread(links).map(fetch_one)
        """
        return self._with("spread", handler, options)

    def join(self, handler: str | Callable[..., Any], **options: Any) -> "Flow":
        """Add a stage that makes one part of all children of one part of the spread before it.

        The handler is called with what the ``Spread`` kept and a list of what the children
        returned. If a child failed, the join fails, too; with ``on_failure="run"`` the list has a
        ``Failed`` in its place.

        Example:
            app.flow("shop").spread(photos).map(describe).join(merge, on_failure="run")
        """
        return self._with("join", handler, options)

    def reduce(self, handler: str | Callable[..., Any], **options: Any) -> "Flow":
        """Add a stage that makes one part of everything: its handler is given an iterator.

        The iterator yields results in input order and reads them some at a time.

        With ``width=1000`` the reduce works as a tree: its handler is called for each 1,000 results
        as they arrive, and for what those calls returned. So the server holds no more than some
        thousand results. The handler must not mind in which order they come, and must take what
        it returns: a sum, a maximum, a set.

        Example:
            app.flow("count").map(words).reduce(total, width=1000)
        """
        return self._with("reduce", handler, options)

    @property
    def owner(self) -> Any:
        """The app that made the flow; None for none."""
        return getattr(self._name_of, "__self__", None)

    @property
    def shape(self) -> Shape:
        """The kinds of the stages, checked.

        Raises:
            InvalidValue: there can be no such flow.
        """
        shape = Shape(tuple(stage.kind for stage in self.stages))
        try:
            shape.check()
        except InvalidValue as error:
            raise InvalidValue(f"flow {self.name}: {error}") from None
        return shape

    def _with(self, kind: Kind, handler: Any, options: dict[str, Any]) -> "Flow":
        name = handler if isinstance(handler, str) else self._named(handler)
        stages = (*self.stages, stage(kind, name, options))
        return Flow(self.name, stages, self._name_of, self.app)

    def _named(self, function: Any) -> str:
        if self._name_of is None:
            raise InvalidValue(f"{function!r:.80} is no handler's name")
        return self._name_of(function)


def stage(kind: Kind, handler: str, options: dict[str, Any]) -> Stage:
    """Return the stage with these options, checked.

    Raises:
        InvalidValue: there is no such option, or a stage of this kind has none such.
    """
    units.name(handler, "handler")
    known = {*Stage.__struct_fields__} - {"kind", "handler"}
    if unknown := sorted(set(options) - known):
        raise InvalidValue(f"stage {handler}: a stage has no option {', '.join(unknown)}")
    if kind not in ("join", "reduce") and "on_failure" in options:
        raise InvalidValue(f"stage {handler}: on_failure is for a join or a reduce, not a {kind}")
    if options.get("width") is not None:
        if kind != "reduce":
            raise InvalidValue(f"stage {handler}: width is for a reduce, not a {kind}")
        units.whole(options["width"], f"stage {handler}: width", 2, MOST_WIDTH)
    if kind in ("join", "reduce") and "window" in options:
        raise InvalidValue(
            f"stage {handler}: a {kind} has no window: its inputs have to wait there"
        )
    try:
        return msgspec.convert({"kind": kind, "handler": handler, **options}, Stage)
    except msgspec.ValidationError as error:
        raise InvalidValue(f"stage {handler}: {error}") from None


#: The default window of a stage: parts, and bytes, whichever is reached first.
_WINDOW = (10_000, 2**26)
_MOST_PARTS = 10**9


def flow_window_bounds(value: str | int | None, what: str = "window") -> tuple[int, int]:
    """Return the parts and the bytes (0: any number) of ``"2000 parts"`` or ``"64 MiB"``."""
    if value is None:
        return _WINDOW
    text = str(value).strip()
    count, _, unit = text.partition(" ")
    if unit.strip() in ("part", "parts") or text.isdecimal():
        if not count.isdecimal():
            raise InvalidValue(f"{what} {value!r}: write 2000 parts, or a size such as 64 MiB")
        return units.whole(int(count), what, 1, _MOST_PARTS), 0
    return _MOST_PARTS, units.size_bytes(text, what)
