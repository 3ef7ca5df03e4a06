"""Mutants of Lua scripts, found in their text. Comments, and so headers, are not touched."""

import re
from collections.abc import Iterator

from tests.mutants.mutant import Mutant

_WRITES = (
    "DECR|DECRBY|DEL|EXPIRE|HDEL|HINCRBY|HSET|INCR|INCRBY|LPUSH|LREM|PEXPIRE|PUBLISH|RENAME|RPUSH|SET"
    "|SPUBLISH|UNLINK|XACK|XADD|XCLAIM|XDEL|XGROUP|ZADD|ZREM|ZREMRANGEBYSCORE"
)
#: A statement that begins a line, up to its opening parenthesis.
_STATEMENT = re.compile(
    rf'^[ ]*(redis\.call\("(?:{_WRITES})"|put\(|write_tries\(|save\()', re.MULTILINE
)
_FLIPS = {"==": "~=", "~=": "==", "<=": "<", ">=": ">", "<": "<=", ">": ">="}
_COMPARISON = re.compile(r" (==|~=|<=|>=|<|>) ")
_LOGIC = re.compile(r"\b(and|or)\b")
_SUM = re.compile(r" ([+-]) ")
_CONDITION = re.compile(r"\b(?:if|elseif) (.+?) then$", re.MULTILINE)
_NUMBER = re.compile(r"(?<![\w.#])(\d{1,2})(?![\w.])")
#: Lines whose numbers are places in the signature, or limits that only set a pace.
_SIGNATURE = re.compile(r"\b(KEYS|ARGV)\b|^local [A-Z_]+ = ")
_BLANKED = re.compile(r'"(?:[^"\\\n]|\\.)*"|--[^\n]*')


def mutants(file: str, source: str) -> list[Mutant]:
    """All that can be made of a script, in the order of the text."""
    bare = _BLANKED.sub(lambda found: _blank(found[0]), source)
    found = [*_dropped(file, source, bare), *_turned(file, bare), *_negated(file, source, bare)]
    return sorted(found, key=lambda mutant: (mutant.start, mutant.end, mutant.text))


def _blank(text: str) -> str:
    """Something as long that no pattern finds; quotes stay, so that it is seen where text was."""
    return '"' + "_" * (len(text) - 2) + '"' if text.startswith('"') else " " * len(text)


def _dropped(file: str, source: str, bare: str) -> Iterator[Mutant]:
    """Statements that write, left out."""
    for found in _STATEMENT.finditer(source):
        start = found.start(1)
        if bare[start : found.end(1)].strip() == "":
            continue  # in a comment
        depth, at = 0, start
        while at < len(bare):
            depth += {"(": 1, ")": -1}.get(bare[at], 0)
            at += 1
            if depth == 0 and bare[at - 1] == ")":
                break
        if bare[at : at + 1] == "\n":
            yield Mutant(file, start, at, "do end", "a write is left out")


def _turned(file: str, bare: str) -> Iterator[Mutant]:
    """Comparisons, conditions, sums and numbers that say something else."""
    for found in _COMPARISON.finditer(bare):
        flipped = _FLIPS[found[1]]
        yield Mutant(file, found.start(1), found.end(1), flipped, "a comparison is flipped")
    for found in _LOGIC.finditer(bare):
        other = "or" if found[1] == "and" else "and"
        yield Mutant(file, found.start(1), found.end(1), other, "and is or, or is and")
    for found in _SUM.finditer(bare):
        other = "-" if found[1] == "+" else "+"
        yield Mutant(file, found.start(1), found.end(1), other, "plus is minus, minus is plus")
    for found in _NUMBER.finditer(bare):
        line = bare[bare.rfind("\n", 0, found.start()) + 1 :].partition("\n")[0]
        if not _SIGNATURE.search(line):
            more = str(int(found[1]) + 1)
            yield Mutant(file, found.start(1), found.end(1), more, "a number is one more")


def _negated(file: str, source: str, bare: str) -> Iterator[Mutant]:
    for found in _CONDITION.finditer(bare):
        start, end = found.span(1)
        negated = f"not ({source[start:end]})"
        yield Mutant(file, start, end, negated, "a condition is negated")
