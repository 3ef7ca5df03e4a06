"""The scripts with one rule of flows taken out, to see what breaks without it."""

from collections.abc import Generator
from contextlib import contextmanager
from typing import NamedTuple

import pytest

from streamq.protocol import lua, scripts


class Cut(NamedTuple):
    """A rule, and what stands in the scripts in its place: text, and what it becomes."""

    rule: str
    changes: tuple[tuple[str, str], ...]


CUTS = {
    "F1 one script": Cut(
        "handing over is another call, and its caller dies before it",
        (
            ("    add_parts(f, f.next, names, sizes, payloads, handed)\n", ""),
            (
                "        hand_over_part(own[i], runs[numbers[i]], first, first + counts[i] - 1, "
                "names, given_payloads)\n",
                "",
            ),
        ),
    ),
    "F2 what was acknowledged": Cut(
        "everything given is handed over",
        (
            ("  if call <= stored or is_gap(", "  if call < stored or is_gap("),
            ("  if acked == given then\n    record()", "  if true then\n    record()"),
        ),
    ),
    "F3 mercy hands over": Cut(
        "mercy acknowledges and counts, no more",
        (
            (
                "  record_one_by_one(false)\nend\n",
                '  counted = redis.call("XACK", k.parts, "w", unpack(numbers))\nend\n',
            ),
        ),
    ),
    "F4 counted last": Cut(
        "what is finished is counted before what was added",
        (
            (
                "  local change = f.added - finished\n",
                '  if tonumber(redis.call("GET", f.k.left)) <= finished then\n'
                '    end_request(f.k, f.r, f.now, "done")\n  end\n'
                "  local change = f.added - finished\n",
            ),
        ),
    ),
    "F5 a failed child counts": Cut(
        "a failed child does not count its group down",
        (('.. "!", 1)\n    count_child(f, origin)\n', '.. "!", 1)\n'),),
    ),
    "F5 a dropped child counts": Cut(
        "a child that returns nothing does not count its group down",
        (
            (
                '    redis.call("HDEL", f.join.got, origin)\n    count_child(f, origin)\n',
                '    redis.call("HDEL", f.join.got, origin)\n',
            ),
        ),
    ),
    "F6 its own item": Cut(
        "a number is believed without the lease",
        (("  return is_own and entry or nil\n", "  return entry\n"),),
    ),
    "F7 no gap": Cut(
        "a number is believed under the lease whatever call it is",
        (("  return steps > (is_own and 1 or 0)\n", "  return false\n"),),
    ),
    "F8 one join part": Cut(
        "a group that is completed again gets another part",
        (
            (
                '  if not number then\n'
                '    number = add_part(f, f.join',
                '  if true then\n'
                '    number = add_part(f, f.join',
            ),
        ),
    ),
    "F10 not after the join": Cut(
        "a child runs again although its join is made",
        (("    return not is_open\n", "    return false\n"),),
    ),
    "F10 not after the reduce": Cut(
        "an input runs again although its reduce is made",
        (
            (
                '    and redis.call("HEXISTS", b.failed, final) == 0 then\n'
                '    return true\n',
                '    and false then\n'
                '    return true\n',
            ),
        ),
    ),
    "F11 children first": Cut(
        "a join runs again while a child of it has failed",
        (("    return not is_whole\n", "    return false\n"),),
    ),
    "F12 all stages end": Cut(
        "the end is written to the stage that saw it",
        (
            (
                '    if number ~= f.own then\n'
                '      redis.call("HSET", meta_of(f, number), "state"',
                '    if false then\n'
                '      redis.call("HSET", meta_of(f, number), "state"',
            ),
        ),
    ),
    "F13 no token is believed": Cut(
        "a redrive believes the tokens of the other stages",
        (('    put(s, "out", 0)\n    put(s, "due_ms", 0)\n', '    put(s, "due_ms", 0)\n'),),
    ),
    "F14 tokens for the next": Cut(
        "handing over asks for no tokens",
        (
            (
                '      if s.is_touched then\n'
                '        tokens_for(f, s, reply)\n',
                '      if false then\n'
                '        tokens_for(f, s, reply)\n',
            ),
        ),
    ),
    "F15 tokens for the one before": Cut(
        "room that comes free is not told",
        (("  if has_room and is_live(r) and r.paused == 0 then\n", "  if false then\n"),),
    ),
    "F16 what is in hand is reserved": Cut(
        "a window counts what has come, not what is on its way",
        (
            (
                '  local room = math.floor((window - backlog) / each - in_hand)\n',
                '  local room = math.floor((window - backlog) / each)\n',
            ),
        ),
    ),
    "F17 an inbox does not count": Cut(
        "a window counts what waits for a reduce",
        (
            (
                '  if n.window == 0 then\n'
                '    return nil\n'
                '  end\n',
                '  if n.window == 0 then\n'
                '    n.window, n.total = 1, r.done\n'
                '  end\n',
            ),
        ),
    ),
}  # fmt: skip


#: Rules of callbacks that scripts keep (``tests/queue/test_callback_rules.py``).
CALLBACK_CUTS = {
    "K3 fence": Cut(
        "a submission is taken however long ago the debt was read",
        (('if first == "not_after" and now > tonumber(value) then', "if false then"),),
    ),
    "K4 outlive": Cut(
        "a callback is purged as any other request is",
        (
            ('  if force == "1" and r.finished_ms + r.outlive_ms > now then', "  if false then"),
            ("math.max(r.keep_ms, r.outlive_ms)", "r.keep_ms"),
            ('  if force == "0" and r.outlive_ms > 0 then', "  if false then"),
        ),
    ),
}


@contextmanager
def scripts_without(name: str) -> Generator[None]:
    """Use the scripts without a rule in the block. They have digests of their own."""
    cut, whole, used = (CUTS | CALLBACK_CUTS)[name], lua.script_source, set[str]()

    def source(script: str) -> str:
        text = whole(script)
        for old, new in cut.changes:
            if old in text:
                used.add(old)
                text = text.replace(old, new)
        return text

    patch = pytest.MonkeyPatch()
    patch.setattr(lua, "script_source", source)
    patch.setattr(scripts, "script_source", source)
    lua.script_digest.cache_clear()
    try:
        yield
    finally:
        patch.undo()
        lua.script_digest.cache_clear()
    assert used, f"{name}: nothing was taken out of any script that was called"
