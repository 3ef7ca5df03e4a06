"""Each script has a call, whose keys and arguments are those that the script's header names.

None of this needs a server: a call is what would be sent, and how the answer is read.
"""

import struct
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

from streamq.errors import Damaged, InvalidValue
from streamq.model import Failure, FlowPlan, Policy, StagePlan, State
from streamq.protocol import part_calls, queue_calls, request_calls
from streamq.protocol.call import Call
from streamq.protocol.keys import KeySpace
from streamq.protocol.lua import script_digest, script_signature
from streamq.protocol.replies import PassedPart, Terms, Tokens
from tests.scripts.script import SCRIPTS

SPACE = KeySpace("p")
R = SPACE.request("r")
Q = SPACE.queue("q", "h:07")
POLICY = Policy(handler="h", delay_ms=5)
FLOW = FlowPlan("f", (StagePlan(kind="map", policy=POLICY), StagePlan(kind="map", policy=POLICY)))
LATER = [*POLICY.fields, *FLOW.stages[1].fields]

#: A call of each script, and its arguments behind the keys as they go to the server.
CALLS: dict[str, tuple[Call[Any], list[Any]]] = {
    "open": (
        request_calls.open(R, "d", POLICY, b"s"),
        ["d", 5, *POLICY.fields, "source", b"s"],
    ),
    "index": (request_calls.index(R, 3, [1, "a", 2, "b"]), [3, 1, "a", 2, "b"]),
    "lay": (
        request_calls.lay(R, "d", FLOW),
        [
            "d", f"{len(FLOW.stages[0].fields) + 4} {len(LATER)}",
            *FLOW.stages[0].fields, b"flow", b"f", b"stages", 2, *LATER,
        ],
    ),
    "pass_on": (
        part_calls.pass_on(
            R, "me", 2, [PassedPart(8, "8", ["1@8"], [b"yes"]), PassedPart(9, "9", [], [])], 6,
            Terms(3, 99, 500), 12, "map parts",
        ),
        [
            "me 2 3 99 500 12 6 0", "map parts", struct.pack("<2Q", 8, 9), "8 9",
            struct.pack("<2I", 1, 0), struct.pack("<I", 3), "1@8", b"yes",
        ],
    ),
    "append": (request_calls.append(R, 3, "a", "c", 9, [b"x", b"1"]), [3, "a", "c", 9, b"x", b"1"]),
    "refuse": (request_calls.refuse(R, 3, "a", "c", b"f"), [3, "a", "c", b"f"]),
    "submit": (
        request_calls.submit(R, POLICY, "c", [b"x", b"1", b"y", b"1"]),
        [POLICY.digest, "c", 5, 2, *POLICY.fields, b"x", b"1", b"y", b"1"],
    ),
    "seal": (request_calls.seal(R, 4, "c"), [4, "c"]),
    "set": (request_calls.set(R, limit=3), ["", 3, "", "", ""]),
    "pause": (request_calls.pause(R), []),
    "resume": (request_calls.resume(R), []),
    "cancel": (request_calls.cancel(R), []),
    "redrive": (request_calls.redrive(R, iter([4, 2])), [4, 2]),
    "collect": (
        request_calls.collect(
            R, next_number=7, most=2, max_bytes=99, commit=("a", "b"), forget=[5, "6.1"]
        ),
        ["a", "b", 7, 2, 99, 5, "6.1"],
    ),
    "purge": (request_calls.purge(R, force=True), [1]),
    "settle": (request_calls.settle(R, 5, 2), [5, 2]),
    "expire": (request_calls.expire(R), []),
    "inspect": (request_calls.inspect(R, "r"), []),
    "locate": (request_calls.locate(R, [1, 2]), [1, 2]),
    "claim": (
        part_calls.claim(R, "me", Terms(3, 99, 500), ["parts h 3"], 7, 12),
        ["me", 7, 3, 99, 500, 12, "parts h 3"],
    ),
    "finish": (
        part_calls.finish(R, "me", 2, [8, b"yes", 9, b""], 6, Terms(3, 99, 500), 12),
        ["me", 2, 3, 99, 500, 12, 6, struct.pack("<2Q", 8, 9), struct.pack("<2I", 3, 0), b"yes"],
    ),
    "fail": (
        part_calls.fail(
            R, "me", 2, 8, [Failure(error="E")], kind="snooze", delay_ms=4, records=(1, 2),
            result=b"r", partial=b"p",
        ),
        ["me", 2, 8, "snooze", 4, 1, 2, b'[{"error":"E"}]', b"r", b"p", ""],
    ),
    "keep": (part_calls.keep(R, "me", 2, 8, b"p", b"m", 12), ["me", 2, 12, 8, b"p", b"m"]),
    "handback": (part_calls.handback(R, "me", 2, iter([8, 9])), ["me", 2, 8, 9]),
    "release": (part_calls.release(R, "me", 2), ["me", 2, "", part_calls._POISON]),
    "renew": (part_calls.renew(R, 500, {"me": 8, "you": None}), [500, "me", 8, "you", ""]),
    "reap": (part_calls.reap(R, 9, {"pool": 40}), [9, part_calls._POISON, "pool", 40]),
    "audit": (part_calls.audit(R, 3), [3]),
    "mint": (
        queue_calls.mint(Q, "r", Tokens(2, "h:07", 60), mode="ensure", register="yes", believed=5),
        ["r", 2, "ensure", 60, "yes", 2, "h:07"],
    ),
    "tick": (queue_calls.tick(Q, 10, 500, ["r"], 77), [10, 500, 77, "r"]),
    "aside": (queue_calls.aside(SPACE.spoilt("q", "due"), "zset"), ["zset"]),
    "close": (queue_calls.close(Q, "r", 1.5, 0), ["r", 1.5, 0]),
    "note": (queue_calls.note(Q, b"c"), [b"c"]),
    "watch": (queue_calls.watch(Q, 9, 500), [9, 500]),
    "show": (queue_calls.show(Q, b"s"), [b"s"]),
    "beat": (
        queue_calls.beat(SPACE.worker("q", "w"), "w", 900, b"{}", 500, ["r"]),
        ["w", 900, b"{}", 500, "r"],
    ),
}  # fmt: skip

each_call = pytest.mark.parametrize("name", sorted(CALLS))


def test_every_script_has_a_call() -> None:
    assert set(CALLS) == {script.name for script in SCRIPTS}


@each_call
class TestWords:
    def test_arguments_are_those_of_the_header_in_its_order(self, name: str) -> None:
        call, _ = CALLS[name]

        assert call.script == name
        assert tuple(call.args) == script_signature(name)[1]

    def test_are_the_digest_the_keys_and_the_values(self, name: str) -> None:
        call, values = CALLS[name]

        keys = call.keys.all()
        named = [keys[key] for key in script_signature(name)[0]]
        assert call.words() == ("EVALSHA", script_digest(name), len(named), *named, *values)

    def test_stay_as_they_are_when_they_are_asked_for_again(self, name: str) -> None:
        call, _ = CALLS[name]

        assert call.words() == call.words()

    def test_only_a_claim_must_not_be_repeated(self, name: str) -> None:
        assert CALLS[name][0].may_repeat == (name != "claim")


@pytest.mark.parametrize("module", [request_calls, part_calls, queue_calls])
def test_functions_are_called_as_their_scripts(module: ModuleType) -> None:
    made = {
        name
        for name, each in vars(module).items()
        if getattr(each, "__module__", "") == module.__name__ and not name.startswith("_")
    }

    # What is there beside the scripts: other verbs of one, and what two modules have in common.
    others = {"commit", "first_tokens", "forget_unadded", "state_and_tokens", "submit_new"}
    assert made - others <= set(CALLS)


def test_arguments_that_no_header_names_are_refused() -> None:
    call = Call("seal", R, {"cursor": "c", "total": 4}, int)

    with pytest.raises(TypeError, match=r"seal.lua takes \['total', 'cursor'\]"):
        call.words()


def test_name_that_cannot_be_is_refused_before_anything_is_sent() -> None:
    with pytest.raises(InvalidValue):
        SPACE.request("no name")


def test_commit_reads_no_results() -> None:
    call = request_calls.commit(R, "a", "b", [5])

    assert call.words()[-6:] == ("a", "b", 1, 0, 2**22, 5)


class TestRead:
    def test_gives_the_reply_its_type(self) -> None:
        assert request_calls.seal(R, 1, "").read([b"open", 2, b"h:07", 0]) == (
            State.OPEN,
            Tokens(2, "h:07"),
        )

    def test_renew_tells_of_each_holder(self) -> None:
        call = part_calls.renew(R, 500, {"me": 8, "you": None})

        assert call.read([b"open", 0, 1, 0]) == (State.OPEN, False, {"me": True, "you": False})

    @pytest.mark.parametrize("batch", [1, 3])
    def test_parts_are_as_they_were_packed(self, batch: int) -> None:
        payloads = [b"x" * n for n in range(1, batch + 1)]
        told = [
            b" ".join(b"%d-0" % n for n in range(1, batch + 1)),
            b"\n".join([b"1"] * batch),
            struct.pack(f"<{batch}I", *map(len, payloads)),
            b"".join(payloads),
        ]
        claim, finish = CALLS["claim"][0], CALLS["finish"][0]

        grants = [
            claim.read([b"ok", 0, b"h:07", 0, b"h", b"{}", 12, 3, [], *told]),
            finish.read([b"ok", 0, b"h:07", 0, 2, [], *told]),
        ]

        for grant in grants:
            assert [part.payload for part in grant.parts] == payloads

    @each_call
    @pytest.mark.parametrize("reply", [[b"nonsense"], None])
    def test_of_nonsense_is_damaged_or_a_plain_value(self, name: str, reply: Any) -> None:
        call = CALLS[name][0]
        plain: list[Callable[[Any], Any]] = [bool, request_calls._list]
        if call.parse in plain and reply is not None:
            return

        if call.parse is bool:
            assert call.read(reply) is False
            return
        with pytest.raises(Damaged, match=f"what {name} was told cannot be read"):
            call.read(reply)
