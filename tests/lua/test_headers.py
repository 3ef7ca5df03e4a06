"""The headers of lua/*.lua tell the truth: body, includes, keys, errors and binding agree."""

import inspect
import re
from collections.abc import Iterator
from functools import cache
from importlib.resources import files
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast, get_args, get_type_hints

import pytest

from streamq import Connection, Protocol
from streamq.errors import BY_CODE
from streamq.keys import QueueKeys, RequestKeys
from streamq.model import Failure, Policy, State, Terms, Tokens
from streamq.scripts import digest, source

LUA = Path(str(files("streamq.lua")))
SCRIPTS = sorted(LUA.glob("*.lua"))
LIBRARY = {path.stem: path.read_text() for path in LUA.glob("lib/*.lua")}

#: What a full server refuses: scripts that bring work. All others are needed to drain it.
BRING_WORK = {"append", "open", "redrive"}
LABELS = ["Returns", "Errors", "Cost", "Flags"]
READS = set(
    "EXISTS GET HEXISTS HGET HGETALL HLEN HMGET LPOS TIME XPENDING XRANGE ZCARD ZCOUNT "
    "ZRANGE ZRANGEBYSCORE ZSCORE".split()
)
#: Not in scripts: unbounded, blocking, or slow for what they free.
FORBIDDEN = set("BRPOP DEL FLUSHALL FLUSHDB HSCAN KEYS SCAN SMEMBERS XTRIM ZSCAN".split())
#: Words that begin error replies of the servers themselves.
SERVER_WORDS = set(
    "ASK BUSY BUSYGROUP BUSYKEY CLUSTERDOWN CROSSSLOT DENIED ERR EXECABORT FAILOVER INPROG IOERR "
    "LOADING MASTERDOWN MISCONF MOVED NOAUTH NOGOODSLAVE NOGROUP NOMASTERLINK NONEXT NOPERM "
    "NOPROTO NOQUORUM NOREPLICAS NOSCRIPT NOSUB NOTBUSY NOTREADY OOM READONLY REDIRECT "
    "SYNTAX TRYAGAIN UNBLOCKED UNKILLABLE WRONGPASS WRONGTYPE".split()
)
LUA_WORDS = set(
    "and break do else elseif end false for function if in local nil not or repeat return then "
    "true until while".split()
)
LUA_NAMES = set("ARGV KEYS ipairs math pairs redis string table tonumber unpack".split())

FUNCTION = re.compile(r"^local function (\w+)\(.*?^end$", re.MULTILINE | re.DOTALL)
CONSTANT = re.compile(r"^local ([A-Z_]+) =", re.MULTILINE)


def split(path: Path) -> tuple[str, str]:
    """Header (the first run of comment lines) and body."""
    lines = path.read_text().splitlines()
    end = next(n for n, line in enumerate(lines) if not line.startswith("--"))
    return "\n".join(lines[:end]), "\n".join(lines[end:])


def code(text: str) -> str:
    """Without comments."""
    return re.sub(r"--.*", "", text)


def included(path: Path) -> list[str]:
    return re.findall(r"^-- @include (\w+)$", split(path)[1], re.MULTILINE)


@cache
def reached(path: Path) -> str:
    """Code of the body and of every library function that it calls, directly or not."""
    functions = {
        found[1]: code(found[0])
        for name in included(path)
        for found in FUNCTION.finditer(LIBRARY[name])
    }
    text = code(split(path)[1])
    while called := [name for name in functions if re.search(rf"\b{name}\b", text)]:
        text += "\n".join(functions.pop(name) for name in called)
    return text


def documented(path: Path, table: str) -> list[tuple[int, bool, str]]:
    """Index, whether it stands for many values, and name of each parameter in the header."""
    found = re.findall(rf"^-- {table}\[(\d+)(\+?)\]\s+(\w+)", split(path)[0], re.MULTILINE)
    return [(int(index), many == "+", name) for index, many, name in found]


def section(path: Path, label: str) -> str:
    """What the header says after a label, up to the next one."""
    found = re.search(rf"^-- {label} (.*?)(?=^-- [A-Z]|\Z)", split(path)[0], re.M | re.S)
    assert found, f"no {label} in the header"
    return found[1]


def errors(path: Path) -> set[str]:
    """Code words of the header."""
    return set(re.findall(r"^(?:--)?\s+([A-Z]{2,}) ", section(path, "Errors"), re.MULTILINE))


def commands(path: Path) -> set[str]:
    return set(re.findall(r'redis\.call\("(\w+)"', reached(path)))


def bound(path: Path, table: str) -> dict[str, int]:
    """Names the body gives to KEYS or ARGV, and their indexes."""
    body = code(split(path)[1])
    index = rf"{table}\[(\d+)\]|unpack\({table}, (\d+)\)"
    names = {}
    for left, right in re.findall(r"^local ([\w, ]+) = ([^{\n].*|{ unpack.*)$", body, re.MULTILINE):
        values = re.split(r", (?![^({]*[)}])", right)
        for name, value in zip(left.split(", "), values, strict=False):
            if found := re.search(index, value):
                names[name] = int(found[1] or found[2])
    for name, number in re.findall(rf"(\w+) = {table}\[(\d+)\][,\s]", body):
        names.setdefault(name, int(number))
    return names


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
class TestHeader:
    def test_first_line_is_name_and_purpose(self, path: Path) -> None:
        first = split(path)[0].splitlines()[0]

        assert re.fullmatch(rf"-- {path.stem}: [^.]+\.", first)

    def test_is_short_and_in_order(self, path: Path) -> None:
        lines = split(path)[0].splitlines()
        labels = [found[1] for line in lines if (found := re.match(r"-- ([A-Z]\w+)\b", line))]

        assert len(lines) <= 36
        assert max(map(len, lines)) <= 100
        assert list(dict.fromkeys(labels)) == sorted(
            dict.fromkeys(labels), key=["KEYS", "ARGV", *LABELS].index
        )
        assert labels[-4:] == LABELS

    def test_says_what_changes(self, path: Path) -> None:
        blocks = split(path)[0].split("\n--\n")
        transitions = blocks[1].splitlines()

        assert all(re.match(r"--   (\(|\S.* -> )", line) for line in transitions)
        assert ("(reads only)" in blocks[1]) == (commands(path) <= READS)

    @pytest.mark.parametrize("table", ["KEYS", "ARGV"])
    def test_documents_every_index_the_body_uses(self, path: Path, table: str) -> None:
        body = code(split(path)[1])
        given = documented(path, table)
        single = {index for index, many, _ in given if not many}
        many = {index for index, many, _ in given if many}

        assert [index for index, _, _ in given] == list(range(1, len(given) + 1))
        assert many <= {len(given)}
        assert {int(n) for n in re.findall(rf"\b{table}\[(\d+)\]", body)} == single
        assert {int(n) for n in re.findall(rf"\bunpack\({table}, (\d+)\)", body)} == many
        assert not re.search(rf"#{table}|{table}\[\D", body)

    def test_keys_have_their_names_in_the_body(self, path: Path) -> None:
        names = {name: index for index, _, name in documented(path, "KEYS")}

        if path.stem == "purge":
            assert "unpack(keys)" in split(path)[1]
        else:
            assert bound(path, "KEYS") == names

    def test_arguments_have_their_names_in_the_body(self, path: Path) -> None:
        given = {index: name for index, many, name in documented(path, "ARGV") if not many}

        for name, index in bound(path, "ARGV").items():
            # `next` would hide a function of Lua's, so it may be called next_number.
            assert index not in given or name == given[index] or name.startswith(f"{given[index]}_")

    def test_keys_are_of_one_class_and_one_hash_tag(self, path: Path) -> None:
        names = [name for _, _, name in documented(path, "KEYS")]
        known: list[dict[str, str]] = [vars(RequestKeys("id")), vars(QueueKeys("name"))]

        owners = [keys for keys in known if set(names) <= set(keys)]
        assert len(owners) == 1
        assert len({re.findall(r"{.*?}", owners[0][name])[0] for name in names}) == 1
        assert len(names) == len(set(names))

    def test_keys_are_of_the_type_the_key_layout_says(self, path: Path) -> None:
        layout = inspect.getsource(RequestKeys) + inspect.getsource(QueueKeys)
        types = {name: type_ for type_, name in re.findall(r"#: (\w+).*\n\s+self\.(\w+) =", layout)}
        found = re.findall(r"^-- KEYS\[\d+\]\s+(\w+)\s+(\w+)", split(path)[0], re.MULTILINE)

        assert found
        assert {name: type_ for name, type_ in found if types[name] != type_} == {}

    def test_every_key_is_used_and_every_key_used_is_declared(self, path: Path) -> None:
        names = {name for _, _, name in documented(path, "KEYS")}
        text = reached(path)

        if path.stem != "purge" and "local k = {" in text:
            assert set(re.findall(r"\bk\.(\w+)", text)) == names
        elif path.stem != "purge":
            assert {name for name in names if len(re.findall(rf"\b{name}\b", text)) < 2} == set()

    def test_words_that_are_answered_are_documented(self, path: Path) -> None:
        body = code(split(path)[1])
        words = set(
            re.findall(r'(?:\{ |answer\(|refuse\(|(?<![=~])= |and |return )"([a-z]+)"', body)
        )

        assert words - set(State) <= set(re.findall(r"\w+", section(path, "Returns")))

    def test_errors_are_those_raised(self, path: Path) -> None:
        text = reached(path)

        assert errors(path) == set(re.findall(r'error_reply\("([A-Z]+) ', text))
        assert len(re.findall(r"error_reply\(", text)) == len(
            re.findall(r'error_reply\("[A-Z]+ ', text)
        )
        assert errors(path) or section(path, "Errors").strip() == "none"

    def test_errors_are_known_and_not_the_servers_own(self, path: Path) -> None:
        assert errors(path) <= set(BY_CODE)
        assert not errors(path) & SERVER_WORDS
        assert all(len(word) >= 4 for word in errors(path))

    def test_flags_are_what_the_server_gets(self, path: Path) -> None:
        flags = section(path, "Flags").strip()
        first = "#!lua" if flags == "none" else f"#!lua flags={flags}"

        assert source(path.stem).splitlines()[0] == first
        assert flags in {"none", "allow-oom", "no-writes"}
        assert (flags == "no-writes") == (commands(path) <= READS)
        assert (flags == "none") == (path.stem in BRING_WORK)


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
class TestBody:
    def test_includes_exist_and_are_used(self, path: Path) -> None:
        text = reached(path)

        for name in included(path):
            library = LIBRARY[name]
            offered = [found[1] for found in FUNCTION.finditer(library)]
            offered += CONSTANT.findall(library)
            assert any(re.search(rf"\b{each}\b", text) for each in offered), f"{name} is not used"

    def test_includes_come_first(self, path: Path) -> None:
        lines = [line for line in split(path)[1].splitlines() if line]

        count = len(included(path))
        assert all(line.startswith("-- @include ") for line in lines[:count])
        assert "@include" not in "\n".join(lines[count:])

    def test_uses_no_name_that_is_not_declared_before(self, path: Path) -> None:
        assert list(undeclared(source(path.stem))) == []

    def test_commands_are_upper_case_and_allowed(self, path: Path) -> None:
        assert all(command.isupper() for command in commands(path))
        assert not commands(path) & FORBIDDEN
        assert "redis.pcall" not in reached(path)

    def test_server_loads_it_under_its_digest(self, path: Path, protocol: Protocol) -> None:
        assert protocol.connection.redis.script_load(source(path.stem)) == digest(path.stem)


def test_library_does_not_include() -> None:
    assert [name for name, text in LIBRARY.items() if "@include" in text] == []


def test_library_is_used() -> None:
    assert {name for path in SCRIPTS for name in included(path)} == set(LIBRARY)


def test_every_error_is_raised_by_a_script() -> None:
    assert set().union(*map(errors, SCRIPTS)) == set(BY_CODE)


def undeclared(text: str) -> Iterator[str]:
    """Names in a script that nothing declares before: globals, and misspelt or late locals.

    What is declared in an indented line, or as a parameter, is known up to the next ``end``
    at the left margin.
    """
    known, inner = LUA_NAMES | LUA_WORDS, set[str]()
    for line in text.splitlines()[1:]:
        if line.startswith("end"):
            inner.clear()
        bare = re.sub(r'"[^"]*"', '""', line)
        for names in re.findall(r"\blocal (?!function)([\w, ]+?)(?: =|$)", bare):
            (inner if line.startswith(" ") else known).update(names.split(", "))
        known.update(re.findall(r"\blocal function (\w+)", bare))
        for names in re.findall(r"\bfunction ?\w*\(([\w, ]*)\)|\bfor ([\w, ]+?) (?:in|=)", bare):
            inner.update(", ".join(filter(None, names)).split(", "))
        fields = (
            re.sub(r"([{,]|^) *\w+ = ", r"\1 ", bare) if "{" in text[: text.find(line)] else bare
        )
        for name in re.findall(r"(?<![\w.:])[A-Za-z_]\w*", fields):
            if name not in known and name not in inner:
                yield f"{name} in: {line.strip()}"


class Sent(Exception):  # noqa: N818  it is what we wait for
    """What a binding would have sent to the server."""


class TestBinding:
    @pytest.fixture
    def bindings(self) -> Protocol:
        """A protocol without a server: it raises what it would send."""

        def execute_command(*words: Any) -> None:
            raise Sent(*words)

        connection = SimpleNamespace(
            where="nowhere", redis=SimpleNamespace(execute_command=execute_command)
        )
        return Protocol(cast(Connection, connection))

    @pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
    def test_of_the_script_passes_what_its_header_names(
        self, path: Path, bindings: Protocol
    ) -> None:
        method = getattr(bindings, path.stem)

        with pytest.raises(Sent) as sent:
            method(**{name: sample(hint) for name, hint in required(method)})

        command, sha, count, *rest = sent.value.args
        keys, argv = rest[:count], rest[count:]
        given = documented(path, "ARGV")
        assert (command, sha) == ("EVALSHA", digest(path.stem))
        assert [key.rpartition("}:")[2].partition(":")[0] for key in keys] == [
            name for _, _, name in documented(path, "KEYS")
        ]
        assert len(argv) >= len([index for index, many, _ in given if not many])

    @pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
    def test_of_the_script_promises_no_error_it_does_not_raise(self, path: Path) -> None:
        text = inspect.getdoc(getattr(Protocol, path.stem)) or ""
        promised = re.findall(r"^    (\w+): ", text.partition("Raises:")[2], re.MULTILINE)

        assert set(promised) <= {BY_CODE[code].__name__ for code in errors(path)}

    def test_has_a_file_of_tests_for_each_script(self) -> None:
        tests = {path.stem for path in Path(__file__).parent.glob("test_*.py")}

        assert tests == {f"test_{path.stem}" for path in SCRIPTS} | {"test_headers"}


def required(method: Any) -> list[tuple[str, Any]]:
    """Parameters without a default, and their types."""
    hints = get_type_hints(method)
    parameters = inspect.signature(method).parameters.values()
    return [(p.name, hints[p.name]) for p in parameters if p.default is inspect.Parameter.empty]


def sample(hint: Any) -> Any:
    """A value of a type that a binding takes."""
    plain = {
        str: "x",
        int: 1,
        float: 1.0,
        bytes: b"x",
        Policy: Policy(handler="h"),
        Terms: Terms(),
        Failure: Failure(error="E"),
        Tokens: Tokens(),
    }
    if hint in plain:
        return plain[hint]
    return {} if dict in (hint, getattr(hint, "__origin__", None)) else [] if get_args(hint) else 0
