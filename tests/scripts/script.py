"""Reading the Lua files: what a header says, and what body and includes do."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from importlib.resources import files
from pathlib import Path

from streamq.protocol.lua import FOLDERS

LUA = Path(str(files("streamq.lua")))
LIBRARY = {path.stem: path.read_text() for path in LUA.glob("lib/*.lua")}

_FUNCTION = re.compile(r"^local function (\w+)\(.*?^end$", re.MULTILINE | re.DOTALL)
_CONSTANT = re.compile(r"^local ([A-Z_]+) =", re.MULTILINE)
_TOKEN = re.compile(r'"[^"]*"|[A-Za-z_]\w*|\d[\w.]*|\.\.|[=~<>]=|\S')


def words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_KNOWN = words(
    "and break do else elseif end false for function if in local nil not or repeat return then "
    "true until while ARGV KEYS ipairs math pairs redis string struct table tonumber unpack"
)


@dataclass(frozen=True)
class Parameter:
    """One ``KEYS[n]`` or ``ARGV[n]`` of a header; with a plus it stands for many values."""

    index: int
    is_many: bool
    name: str


def _code(text: str) -> str:
    """Without comments."""
    return re.sub(r"--.*", "", text)


class Script:
    """One script, as text."""

    def __init__(self, path: Path) -> None:
        self.name = path.stem
        self.folder = path.parent.name
        lines = path.read_text().splitlines()
        end = next(n for n, line in enumerate(lines) if not line.startswith("--"))
        self.header = "\n".join(lines[:end])
        self.body = "\n".join(lines[end:])
        #: The body without comments.
        self.code = _code(self.body)
        self.includes = re.findall(r"^-- @include (\w+)$", self.body, re.MULTILINE)

    @cached_property
    def reached(self) -> str:
        """Code of the body and of every library function that it calls, directly or not."""
        functions = {
            found[1]: _code(found[0])
            for name in self.includes
            for found in _FUNCTION.finditer(LIBRARY[name])
        }
        text = self.code
        while called := [name for name in functions if re.search(rf"\b{name}\b", text)]:
            text += "\n".join(functions.pop(name) for name in called)
        return text

    @property
    def commands(self) -> set[str]:
        """Commands that it may run."""
        return set(re.findall(r'redis\.call\("(\w+)"', self.reached))

    def parameters(self, table: str) -> list[Parameter]:
        """What the header says of KEYS or ARGV."""
        found = re.findall(rf"^-- {table}\[(\d+)(\+?)\]\s+(\w+)", self.header, re.MULTILINE)
        return [Parameter(int(index), many == "+", name) for index, many, name in found]

    @property
    def key_names(self) -> list[str]:
        return [key.name for key in self.parameters("KEYS") if not key.is_many]

    @property
    def more_names(self) -> list[str]:
        """What the header calls the keys that only a stage of a flow has."""
        return [key.name for key in self.parameters("KEYS") if key.is_many]

    def bound(self, table: str) -> dict[str, int]:
        """Names the body gives to KEYS or ARGV, and their indexes."""
        index = rf"{table}\[(\d+)\]|unpack\({table}, (\d+)\)"
        names = {}
        for left, right in re.findall(r"^local ([\w, ]+) = (?!\{ \w+ =)(.+)$", self.code, re.M):
            values = re.split(r", (?![^({]*[)}])", right)
            for name, value in zip(left.split(", "), values, strict=False):
                if found := re.search(index, value):
                    names[name] = int(found[1] or found[2])
        for name, number in re.findall(rf"(\w+) = {table}\[(\d+)\][,\s]", self.code):
            names.setdefault(name, int(number))
        for name, number in re.findall(rf"(\w+) = {{ unpack\({table}, (\d+)\) }}", self.code):
            names.setdefault(name, int(number))
        return names

    def section(self, label: str) -> str:
        """What the header says after a label, up to the next one."""
        found = re.search(rf"^-- {label} (.*?)(?=^-- [A-Z]|\Z)", self.header, re.M | re.S)
        assert found, f"no {label} in the header"
        return found[1]

    @property
    def errors(self) -> set[str]:
        """Code words of the header."""
        return set(re.findall(r"^(?:--)?\s+([A-Z]{2,}) ", self.section("Errors"), re.MULTILINE))


SCRIPTS = sorted(
    (Script(path) for folder in FOLDERS for path in (LUA / folder).glob("*.lua")),
    key=lambda script: script.name,
)


def offered(library: str) -> list[str]:
    """Names that an include brings."""
    functions = [found[1] for found in _FUNCTION.finditer(LIBRARY[library])]
    return functions + _CONSTANT.findall(LIBRARY[library])


def undeclared(text: str) -> Iterator[str]:
    """Names that nothing declares before: globals, and locals that are misspelt or come late.

    What is declared in an indented line, or as a parameter, is known up to the next ``end``
    at the left margin.
    """
    outer, inner, braces = set(_KNOWN), set[str](), 0
    for line in text.splitlines():
        if line.startswith("end"):
            inner.clear()
        outer.update(re.findall(r"\blocal function (\w+)", line))
        locals_ = re.findall(r"\blocal (?!function)([\w, ]+?)(?: =|$)", line)
        (inner if line.startswith(" ") else outer).update(", ".join(locals_).split(", "))
        for names in re.findall(r"\bfunction ?\w*\(([\w, ]*)\)|\bfor ([\w, ]+?) (?:in|=)", line):
            inner.update("".join(names).split(", "))
        tokens = ["", *_TOKEN.findall(line), ""]
        for before, token, after in zip(tokens, tokens[1:], tokens[2:], strict=False):
            braces += (token == "{") - (token == "}")
            is_field = before in (".", ":") or (braces > 0 and after == "=")
            if token.isidentifier() and not is_field and token not in outer | inner:
                yield f"{token} in: {line.strip()}"
