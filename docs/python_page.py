"""Makes docs/python.md from the docstrings and signatures of the public names."""

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator
from enum import Enum
from typing import Any

import msgspec

import streamq
from streamq.errors import StreamqError

HEAD = """# The Python API

This page is written by `make docs` from the code.

**Only the names on this page are public**: those in `streamq.__all__`, and `streamq.__version__`.
Import them from the package `streamq` itself. All other names may change in any release; for
public names [the policy](upgrading.md#deprecations) holds. The package is typed.

Durations are seconds or text (`"90s"`, `"1h30m"`, `"7d"`), sizes are bytes or text (`"64k"`,
`"1MiB"`). What handlers may be given, and what they may return, is in
[workers and handlers](worker.md).

"""
#: In the order of the page; a test sees to it that every public name is there.
SECTIONS = {
    title: [name for name in names.split() if name in streamq.__all__]
    for title, names in {
        "Handlers": "App Context Retry Snooze Abandon",
        "Flows": "Flow Spread Failed",
        "Submitting and following": "Client Request AsyncClient AsyncRequest "
        "Start Webhook Status State Failure Item ItemStage ItemPart",
        "Files and workers": "run load collect find_run FoundRun Worker",
        "Settings": "Settings",
        "Building blocks": "Connection Protocol Janitor",
    }.items()
}
NOTES = {
    "Settings": "Fields, variables and defaults are in [the reference](reference.md#settings).\n",
    "Building blocks": "For tools and tests that need more than a `Client`. Their methods follow "
    "[the protocol](../lua/README.md), and change with it.\n",
}
#: Users are given these, and do not make them.
GIVEN = ("AsyncRequest", "Context", "Failed", "Flow", "FoundRun", "Request")
#: Of these the methods are not told: they are the protocol's.
BRIEF = ("Connection", "Protocol", "Janitor")
ERRORS = """## Errors

Everything that streamq raises on purpose is a `StreamqError`. Outcomes of normal running (nothing
to do, at the limit) are return values.

```python
from streamq import Client, RequestExists, ServerError

try:
    Client().submit(["a"], handler="shout", id="nightly")
except RequestExists as error:
    print("another submission has that id:", error)
except ServerError as error:
    print("try again later:", error)
```

| error | is a | raised when |
|---|---|---|
"""


def text() -> str:
    """The page."""
    return HEAD + "\n".join(
        [*(_section(title, names) for title, names in SECTIONS.items() if names), _errors()]
    )


def names() -> list[str]:
    """Every name on the page."""
    return sorted([*(name for some in SECTIONS.values() for name in some), *_error_names()])


def _section(title: str, names: list[str]) -> str:
    note = [NOTES[title]] if title in NOTES else []
    return "\n".join([f"## {title}\n", *note, *map(_class, names)])


def _class(name: str) -> str:
    kind = getattr(streamq, name)
    if inspect.isfunction(kind):
        return "\n".join([f"### {name}\n", _code(f"{name}{_signature(kind)}"), *_doc(kind)])
    lines = [f"### {name}\n", *_doc(kind)]
    if issubclass(kind, Enum):
        lines.append(", ".join(f"`{member.name}`" for member in kind) + "\n")
    elif issubclass(kind, msgspec.Struct):
        lines += [] if name == "Settings" else [_fields(kind)]
    elif "__init__" in vars(kind) and name not in GIVEN:
        lines += [_code(f"{name}{_signature(kind.__init__)}"), *_doc(kind.__init__)]
    if name not in BRIEF:
        for method, value in _methods(kind):
            is_property = isinstance(value, property)
            function = value.fget if is_property else getattr(kind, method)
            title = f"{name}.{method}"
            shown = title if is_property else f"{title}{_signature(function)}"
            lines += [f"#### {title}\n", _code(shown), *_doc(function)]
    return "\n".join(lines)


def _methods(kind: type) -> Iterator[tuple[str, Any]]:
    for name, value in vars(kind).items():
        is_member = inspect.isfunction(value) or isinstance(value, (property, classmethod))
        if is_member and not name.startswith("_"):
            yield name, value


def _signature(function: Any) -> str:
    """As one would call it; defaults and types as in the code."""
    signature = inspect.signature(function)
    given = [each for name, each in signature.parameters.items() if name not in ("self", "cls")]
    shown = str(signature.replace(parameters=given))
    shown = re.sub(r"\b(?:streamq|collections|pathlib|typing)(?:\.\w+)*\.(?=\w)", "", shown)
    # An annotation may be text, too; a default stays as it is.
    shown = re.sub(r"(?<=-> )'([^']+)'", r"\1", shown).removesuffix(" -> None")
    shown = re.sub(r"= <function .*? at \w+>", "= ...", shown)
    shown = re.sub(r"\*\*(\w+): \*<class '(\w+)'>", r"**\1: Unpack[\2]", shown)
    # What a process finds in its environment is no part of the page.
    shown = re.sub(r"= environ\(\{.*?\}\)", "= os.environ", shown, flags=re.DOTALL)
    if len(shown) <= 88:
        return shown
    inside, _, returned = shown.removeprefix("(").rpartition(")")
    arguments = re.split(r", (?![^\[(]*[\])])", inside)
    return "(\n" + "".join(f"    {each},\n" for each in arguments) + f"){returned}"


def _code(shown: str) -> str:
    return f"```python\n{shown}\n```\n"


def _doc(what: Any) -> Iterator[str]:
    """The paragraphs of a docstring; errors as a list, an example as code."""
    said = inspect.cleandoc(what.__doc__ or "")
    for part in re.split(r"\n\n(?=\S)", said):
        title, _, body = part.partition("\n")
        body = textwrap.dedent(body)
        if title == "Example:":
            yield _code(body)
        elif title == "Raises:":
            raised = re.sub(r"^(\w+): ", r"* `\1`: ", body, flags=re.MULTILINE)
            yield f"Raises:\n\n{_plain(raised)}\n"
        elif part:
            yield f"{_plain(part)}\n"


def _plain(said: str) -> str:
    return said.replace("``", "`")


def _fields(kind: type) -> str:
    """A table of a struct's fields, with the comments that stand above them."""
    source = textwrap.dedent(inspect.getsource(kind))
    lines = source.splitlines()
    (body,) = ast.parse(source).body
    assert isinstance(body, ast.ClassDef)
    rows = []
    for field in body.body:
        if isinstance(field, ast.AnnAssign):
            said: list[str] = []
            above = field.lineno - 2
            while (comment := lines[above].strip()).startswith("#:"):
                said.insert(0, comment.removeprefix("#:").strip())
                above -= 1
            assert isinstance(field.target, ast.Name)
            type_ = ast.unparse(field.annotation).replace("|", "\\|")
            rows.append(f"| `{field.target.id}` | `{type_}` | {_plain(' '.join(said))} |\n")
    return "| field | type | says |\n|---|---|---|\n" + "".join(rows)


def _error_names() -> list[str]:
    kinds = {name: getattr(streamq, name) for name in streamq.__all__}
    return [
        name
        for name, kind in kinds.items()
        if inspect.isclass(kind) and issubclass(kind, StreamqError)
    ]


def _errors() -> str:
    def row(name: str) -> str:
        kind = getattr(streamq, name)
        says = _plain(" ".join(inspect.cleandoc(kind.__doc__).split()))
        return f"| `{name}` | `{kind.__bases__[0].__name__}` | {says} |\n"

    return ERRORS + "".join(map(row, _in_tree_order(StreamqError)))


def _in_tree_order(kind: type[StreamqError]) -> list[str]:
    below = [name for each in kind.__subclasses__() for name in _in_tree_order(each)]
    return [each for each in (kind.__name__, *below) if each in streamq.__all__]
