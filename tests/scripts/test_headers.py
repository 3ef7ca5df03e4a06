"""Headers of the scripts tell the truth: body, includes, keys, errors and binding agree."""

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast, get_origin, get_type_hints

import pytest

from streamq import Connection, Protocol
from streamq.errors import BY_CODE
from streamq.model import Failure, FlowPlan, Policy, StagePlan, State
from streamq.protocol.keys import QueueKeys, RequestKeys
from streamq.protocol.lua import FOLDERS, script_digest, script_source
from streamq.protocol.replies import Terms, Tokens
from tests.scripts.script import LIBRARY, LUA, SCRIPTS, Script, offered, undeclared, words

LABELS = ["Returns", "Errors", "Cost", "Flags"]
#: What a full server refuses: scripts that bring work. All others are needed to drain it.
BRING_WORK = words("append index lay open redrive refuse submit")
READS = words(
    "EXISTS GET HEXISTS HGET HGETALL HLEN HMGET LPOS TIME XPENDING XRANGE ZCARD ZCOUNT "
    "ZRANGE ZRANGEBYSCORE ZSCORE"
)
#: Unbounded, blocking, or slow in what they free.
FORBIDDEN = words("BRPOP DEL FLUSHALL FLUSHDB KEYS SCAN SMEMBERS XTRIM ZSCAN")
#: Words that begin error replies of the servers themselves.
SERVER_WORDS = words(
    "ASK BUSY BUSYGROUP BUSYKEY CLUSTERDOWN CROSSSLOT DENIED ERR EXECABORT FAILOVER INPROG IOERR "
    "LOADING MASTERDOWN MISCONF MOVED NOAUTH NOGOODSLAVE NOGROUP NOMASTERLINK NONEXT NOPERM "
    "NOPROTO NOQUORUM NOREPLICAS NOSCRIPT NOSUB NOTBUSY NOTREADY OOM READONLY REDIRECT "
    "TRYAGAIN UNBLOCKED UNKILLABLE WRONGPASS WRONGTYPE"
)

each_script = pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)


@each_script
class TestHeader:
    def test_first_line_is_name_and_purpose(self, script: Script) -> None:
        assert re.match(rf"-- {script.name}: [^.\n]+\.\n--\n", script.header)

    def test_is_short_and_in_order(self, script: Script) -> None:
        lines = script.header.splitlines()
        labels = re.findall(r"^-- ([A-Z]\w+)\b", script.header, re.MULTILINE)

        assert len(lines) <= 38
        assert max(map(len, lines)) <= 100
        assert labels == sorted(labels, key=["KEYS", "ARGV", *LABELS].index)
        assert labels[-4:] == LABELS
        assert len(set(labels[:-4]) | set(LABELS)) == len(set(labels))

    def test_says_what_changes(self, script: Script) -> None:
        transitions = script.header.split("\n--\n")[1]

        assert all(re.match(r"--   (\(|\S.* -> )", line) for line in transitions.splitlines())
        assert ("(reads only)" in transitions) == (script.commands <= READS)

    @pytest.mark.parametrize("table", ["KEYS", "ARGV"])
    def test_documents_every_index_the_body_uses(self, script: Script, table: str) -> None:
        given = script.parameters(table)
        single = {each.index for each in given if not each.is_many}
        many = {each.index for each in given if each.is_many}

        assert [each.index for each in given] == list(range(1, len(given) + 1))
        assert many <= {len(given)}
        assert {int(n) for n in re.findall(rf"\b{table}\[(\d+)\]", script.code)} == single
        # A few may be unpacked, which has a limit of the server's; any number is gone through.
        starts = rf"\bunpack\({table}, (\d+)\b|\bfor i = (\d+), #{table}\b"
        found = {int(n or m) for n, m in re.findall(starts, script.code)}
        assert found == many
        assert many or not re.search(rf"#{table}|{table}\[\D", script.code)

    def test_words_that_are_answered_are_documented(self, script: Script) -> None:
        answered = re.findall(
            r'(?:\{ |answer\(|refuse\(|(?<![=~])= |and |return )"([a-z]+)"', script.code
        )

        told = set(re.findall(r"\w+", script.section("Returns")))
        assert set(answered) - set(State) <= told

    def test_errors_are_those_raised(self, script: Script) -> None:
        raised = re.findall(r'error_reply\((?:"([A-Z]+) )?', script.reached)

        assert script.errors == set(raised)
        assert script.errors or script.section("Errors").strip() == "none"

    def test_errors_are_known_and_not_the_servers_own(self, script: Script) -> None:
        assert script.errors <= set(BY_CODE)
        assert not script.errors & SERVER_WORDS
        assert all(len(word) >= 4 for word in script.errors)

    def test_flags_are_what_the_server_gets(self, script: Script) -> None:
        flags = script.section("Flags").strip()

        first = "#!lua" if flags == "none" else f"#!lua flags={flags}"
        assert script_source(script.name).splitlines()[0] == first
        assert flags in {"none", "allow-oom", "no-writes"}
        assert (flags == "no-writes") == (script.commands <= READS)
        assert (flags == "none") == (script.name in BRING_WORK)


@each_script
class TestKeys:
    def test_are_of_one_class_and_one_hash_tag(self, script: Script) -> None:
        known = [RequestKeys("id").all(), QueueKeys("name").all()]  # as FOLDERS

        owners = [keys for keys in known if set(script.key_names) <= set(keys)]
        assert len(owners) == 1
        assert owners[0] is known[FOLDERS.index(script.folder)]
        assert len({re.findall(r"{.*?}", owners[0][name])[0] for name in script.key_names}) == 1
        assert len(set(script.key_names)) == len(script.key_names)

    def test_are_of_the_type_the_key_layout_says(self, script: Script) -> None:
        layout = inspect.getsource(RequestKeys) + inspect.getsource(QueueKeys)
        types = {
            name: kind for kind, name in re.findall(r"#: (\w+).*\n\s+(?:self\.)?(\w+)[: ]", layout)
        }

        for name, kind in re.findall(r"^-- KEYS\[\d+\]\s+(\w+)\s+(\w+)", script.header, re.M):
            assert (name, kind) == (name, types[name])

    def test_have_their_names_in_the_body(self, script: Script) -> None:
        if script.name == "purge":  # which treats all of them alike
            assert "unpack(keys)" in script.code
            return

        names = {key.name: key.index for key in script.parameters("KEYS")}
        assert script.bound("KEYS") == names

    def test_are_all_used_and_all_that_are_used_are_declared(self, script: Script) -> None:
        if "local k = {" in script.code:
            named = {*script.key_names, *script.more_names}
            assert set(re.findall(r"\bk\.(\w+)", script.reached)) == named
            return

        for name in script.bound("KEYS"):
            assert len(re.findall(rf"\b{name}\b", script.code)) > 1, f"{name} is not used"


@each_script
class TestBody:
    def test_arguments_have_their_names_and_are_used(self, script: Script) -> None:
        given = {each.index: each.name for each in script.parameters("ARGV") if not each.is_many}

        for name, index in script.bound("ARGV").items():
            # `next` would hide a function of Lua's own, so it may be called next_number.
            said = given.get(index, name)
            assert name == said or name.startswith(f"{said}_")
            assert len(re.findall(rf"\b{name}\b", script.code)) > 1, f"{name} is not used"

    def test_includes_come_first_and_are_used(self, script: Script) -> None:
        lines = [line for line in script.body.splitlines() if line]
        includes = [f"-- @include {name}" for name in script.includes]

        assert [line for line in lines if "@include" in line] == lines[: len(includes)] == includes
        for name in script.includes:
            pattern = rf"\b({'|'.join(offered(name))})\b"
            assert re.search(pattern, script.reached), f"{name} is not used"

    def test_uses_no_name_that_is_not_declared_before(self, script: Script) -> None:
        _, _, text = script_source(script.name).partition("\n")

        assert list(undeclared(text)) == []

    def test_is_sent_with_no_function_that_it_does_not_call(self, script: Script) -> None:
        sent = re.findall(r"\w+", script_source(script.name))

        functions = re.findall(r"^local function (\w+)", script_source(script.name), re.MULTILINE)
        assert [name for name in functions if sent.count(name) < 2] == []

    def test_commands_are_upper_case_and_allowed(self, script: Script) -> None:
        assert all(command.isupper() for command in script.commands)
        assert not script.commands & FORBIDDEN
        # A large collection is gone through in steps of a stated size.
        assert script.code.count('"HSCAN"') == len(
            re.findall(r'"HSCAN".*"COUNT", \d+', script.code)
        )
        assert "redis.pcall" not in script.reached

    def test_server_loads_it_under_its_digest(self, script: Script, protocol: Protocol) -> None:
        loaded = protocol.connection.redis.script_load(script_source(script.name))

        assert loaded == script_digest(script.name)


class TestWhole:
    def test_library_does_not_include(self) -> None:
        assert [name for name, text in LIBRARY.items() if "@include" in text] == []

    def test_library_is_used(self) -> None:
        assert {name for script in SCRIPTS for name in script.includes} == set(LIBRARY)

    def test_names_of_scripts_are_unique_and_each_is_in_a_folder(self) -> None:
        names = [path.stem for folder in FOLDERS for path in (LUA / folder).glob("*.lua")]

        assert sorted(names) == sorted(set(names)) == [script.name for script in SCRIPTS]
        assert {path.name for path in LUA.iterdir() if path.is_dir()} - {"__pycache__"} == {
            *FOLDERS,
            "lib",
        }
        assert list(LUA.glob("*.lua")) == []

    def test_every_error_is_raised_by_a_script(self) -> None:
        assert {word for script in SCRIPTS for word in script.errors} == set(BY_CODE)

    def test_every_script_has_a_file_of_tests(self) -> None:
        tests = {
            (path.parent.name, path.stem) for path in Path(__file__).parent.glob("*/test_*.py")
        }

        assert tests == {(script.folder, f"test_{script.name}") for script in SCRIPTS}


class Sent(Exception):
    """What a binding would have sent to the server."""


@pytest.fixture
def bindings() -> Protocol:
    """A protocol without a server: it raises what it would send."""

    def call(*sent: Any) -> None:
        raise Sent(*sent)

    def call_all(calls: Any) -> None:
        # What is done in the queue stands before and behind.
        (sent,) = [each for each in calls if each[1] != script_digest("mint")]
        raise Sent(*sent)

    nowhere = SimpleNamespace(
        where="nowhere", is_cluster=False, call=call, call_once=call, call_all=call_all
    )
    return Protocol(cast(Connection, nowhere))


def arguments(method: Any) -> dict[str, Any]:
    """As few as a binding takes, each of its type."""
    hints = get_type_hints(method)
    samples = {
        str: "x",
        int: 1,
        float: 1.0,
        Policy: Policy(handler="h"),
        FlowPlan: FlowPlan("f", (StagePlan(kind="map", policy=Policy(handler="h")),)),
        Terms: Terms(),
        Failure: Failure(error="E"),
        Tokens: Tokens(),
    }
    parameters = inspect.signature(method).parameters.values()
    needed = {each.name: hints[each.name] for each in parameters if each.default is each.empty}
    empty: dict[Any, Any] = {dict: {}, Callable: lambda: ("", [])}
    return {
        name: samples[hint] if hint in samples else empty.get(get_origin(hint), [])
        for name, hint in needed.items()
    }


@each_script
class TestBinding:
    def test_passes_what_the_header_names(self, script: Script, bindings: Protocol) -> None:
        binding = getattr(bindings, script.name)

        with pytest.raises(Sent) as sent:
            binding(**arguments(binding))

        command, sha, count, *rest = sent.value.args
        keys = [key.rpartition("}:")[2].partition(":")[0] for key in rest[:count]]
        if script.name == "lay":  # only a flow is laid, so its keys are given
            keys = keys[: len(script.key_names)]
        if script.name == "aside":  # whose first key is any of them: here it is called x
            keys[0] = keys[0].replace("x", "spoilt")
        assert (command, sha, keys) == ("EVALSHA", script_digest(script.name), script.key_names)

    def test_promises_no_error_that_is_not_raised(self, script: Script) -> None:
        _, _, raises = (inspect.getdoc(getattr(Protocol, script.name)) or "").partition("Raises:")

        promised = set(re.findall(r"^    (\w+): ", raises, re.MULTILINE))
        assert promised <= {BY_CODE[word].__name__ for word in script.errors}
