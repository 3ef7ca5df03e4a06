"""The program: makes mutants, lets the tests look for them, and says which nobody noticed.

Which mutants are made depends on the code and the seed alone: the same seed, the same score.
"""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import Annotated, NamedTuple

import msgspec
import typer

from tests.mutants import lua_code, python_code
from tests.mutants.mutant import Mutant
from tests.mutants.targets import TARGETS, Target

ROOT = Path(__file__).parents[2]
EXCUSES = Path(__file__).with_name("survivors.toml")
#: Of the mutants that count, so many percent must be noticed.
ENOUGH = 90.0
#: Tests have so many times what they take without a mutant, and at least so long.
PATIENCE, LEAST_S = 4.0, 30.0
#: And without a mutant so long.
MOST_S = 1_200.0
#: The tests that noticed the last mutants of a file look first at the next: so many, if so quick.
MOST_KILLERS, QUICK_S = 5, 2.0
_LEFT_OUT = (".git", ".venv*", "__pycache__", ".*_cache", "build", "dist", "*.egg-info")

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


class Excuse(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A mutant that does no harm, and why."""

    file: str
    #: The line where it begins, as it is in the file, without its indent.
    line: str
    mutation: str
    reason: str
    #: The line with the mutant, where others of the kind in the same line are not excused.
    becomes: str = ""
    #: Which of the lines of the file that read so, from 1; 0: each.
    nth: int = 0


class Verdict(NamedTuple):
    """What became of a mutant: killed, survived, excused; and the test that noticed."""

    mutant: Mutant
    word: str
    seconds: float = 0.0
    by: str = ""


class Seen(msgspec.Struct, frozen=True):
    """What came of tests: pytest's exit code, the first that failed, how long each took."""

    code: int
    failed: str
    seconds: dict[str, float]

    @property
    def is_well(self) -> bool:
        """Whether no test failed."""
        return self.code in (0, 5)


class Pace(msgspec.Struct, frozen=True):
    """How long a selection of tests may take, and how long each of them takes without a mutant."""

    limit_s: float = LEAST_S
    seconds: dict[str, float] = {}
    #: A test of which that is known has at least so long.
    each_s: float = 20.0


class Tree:
    """A copy of the checkout in which one file at a time is changed."""

    def __init__(self, root: Path, folder: Path) -> None:
        shutil.copytree(root, folder, ignore=shutil.ignore_patterns(*_LEFT_OUT))
        self.root = folder
        # As they are in the package, so that no other copy is found.
        for name in ("lua", "cli"):
            if (folder / name).is_dir() and (folder / "streamq").is_dir():
                (folder / "streamq" / name).symlink_to(folder / name)
        self._writes = 0
        env = os.environ | {"PYTHONPATH": str(folder), "STREAMQ_TEST_SERVERS": "valkey"}
        env.pop("PYTHONDONTWRITEBYTECODE", None)  # what is compiled once serves every run
        looker = Path(__file__).with_name("looker.py")
        self._looker = subprocess.Popen(
            [sys.executable, "-P", str(looker)],
            cwd=folder,
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )

    def close(self) -> None:
        """End the process that runs the tests."""
        for pipe in (self._looker.stdin, self._looker.stdout):
            assert pipe is not None
            pipe.close()
        self._looker.wait()

    def write(self, file: str, text: str) -> None:
        """Change a file. Its time is new each time, so that nobody takes a compiled one for it."""
        path = self.root / file
        path.write_text(text)
        self._writes += 1
        at = time.time() + self._writes
        os.utime(path, (at, at))

    def look(self, words: Iterable[str], pace: Pace | None = None) -> Seen:
        """Run tests, those first that are quickest, up to the first that fails.

        Raises:
            RuntimeError: there is no such test.
        """
        assert self._looker.stdin is not None
        assert self._looker.stdout is not None
        pace, words = pace or Pace(), list(words)
        order = {"words": words, **msgspec.structs.asdict(pace)}
        self._looker.stdin.write(json.dumps(order).encode() + b"\n")
        self._looker.stdin.flush()
        seen = msgspec.json.decode(self._looker.stdout.readline(), type=Seen)
        if seen.code == 5 and "--deselect" not in words:
            raise RuntimeError(f"no test is selected by {' '.join(words)}")
        return seen


def made(target: Target, root: Path, most: int, seed: int) -> list[Mutant]:
    """So many mutants of a target's files, always the same ones."""
    found: list[Mutant] = []
    for path in target.files(root):
        file, text = str(path.relative_to(root)), path.read_text()
        kind = lua_code if path.suffix == ".lua" else python_code
        found += kind.mutants(file, text)
    # An insertion elsewhere is not to choose others: each has a lot of its own.
    lots = {mutant: _lot(mutant, root, seed) for mutant in found}
    chosen = sorted(found, key=lambda mutant: (lots[mutant], mutant))[:most]
    return sorted(chosen)


def _lot(mutant: Mutant, root: Path, seed: int) -> float:
    line = mutant.line((root / mutant.file).read_text())
    return random.Random(f"{seed} {mutant.file} {line} {mutant.mutation} {mutant.text}").random()


def excuses(path: Path = EXCUSES) -> list[Excuse]:
    """What survivors are known, each with its reason."""
    found = tomllib.loads(path.read_text()).get("survivor", [])
    return msgspec.convert(found, list[Excuse])


def is_excused(mutant: Mutant, source: str, known: Iterable[Excuse]) -> bool:
    """Whether the mutant is one of the known survivors."""
    told, number = (mutant.file, mutant.line(source), mutant.mutation), mutant.line_number(source)
    becomes = mutant.applied(source).splitlines()[number - 1].strip()
    nth = [line.strip() for line in source.splitlines()[:number]].count(told[1])
    return any(
        (each.file, each.line, each.mutation) == told
        and each.becomes in ("", becomes)
        and each.nth in (0, nth)
        for each in known
    )


def judge(
    tree: Tree,
    mutant: Mutant,
    selections: Iterable[list[str]],
    pace_of: Callable[[list[str]], Pace],
) -> Verdict:
    """Apply a mutant, let the tests look for it, and take it back."""
    began = time.monotonic()
    for words in selections:
        # Before it is applied: it may have to be found out.
        pace = pace_of(words)
        left_out: list[str] = []
        while not (seen := _look_at(tree, mutant, words + left_out, pace)).is_well:
            if _is_certain(tree, mutant, words, seen):
                return Verdict(mutant, "killed", time.monotonic() - began, seen.failed)
            if "::" not in seen.failed:
                break  # all of them were well, given more time
            left_out += ["--deselect", seen.failed]
    return Verdict(mutant, "survived", time.monotonic() - began)


def _look_at(tree: Tree, mutant: Mutant, words: list[str], pace: Pace) -> Seen:
    source = (tree.root / mutant.file).read_text()
    tree.write(mutant.file, mutant.applied(source))
    try:
        return tree.look(words, pace)
    finally:
        tree.write(mutant.file, source)


def _is_certain(tree: Tree, mutant: Mutant, words: list[str], seen: Seen) -> bool:
    """Whether what failed is well without the mutant just now, and fails with it once more.

    On a machine that is busy tests fail, and take too long, without a mutant.
    """
    again = [seen.failed] if "::" in seen.failed else words
    began = time.monotonic()
    without = tree.look(again, Pace(MOST_S))
    if not without.is_well:
        return False
    limit_s = max(LEAST_S, PATIENCE * (time.monotonic() - began))
    return not _look_at(tree, mutant, again, Pace(limit_s, without.seconds)).is_well


class Lab:
    """Copies of the checkout, and what is found out in them."""

    def __init__(self, root: Path, folder: Path, jobs: int, *, is_short: bool = False) -> None:
        self._root = root
        self._is_short = is_short
        self._trees: SimpleQueue[Tree] = SimpleQueue()
        self._all = [Tree(root, folder / f"tree{number}") for number in range(jobs)]
        self._pool = ThreadPoolExecutor(jobs)
        self._paces: dict[tuple[str, ...], Pace] = {}
        self._locks: dict[tuple[str, ...], threading.Lock] = {}
        self._seconds: dict[str, float] = {}
        #: Of each file the tests that noticed its last mutants.
        self._killers: dict[str, list[str]] = {}
        self._lock = threading.Lock()
        for tree in self._all:
            self._trees.put(tree)

    def close(self) -> None:
        """End what runs in the copies."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        for tree in self._all:
            tree.close()

    def _pace(self, tree: Tree, words: list[str]) -> Pace:
        """How long tests take without a mutant; found out when they are first asked for.

        Raises:
            RuntimeError: they do not pass.
        """
        if all(word in self._seconds for word in words):
            known = {word: self._seconds[word] for word in words}
            return Pace(max(LEAST_S, PATIENCE * sum(known.values())), known)
        key = tuple(words)
        with self._lock:
            lock = self._locks.setdefault(key, threading.Lock())
        with lock:
            if key not in self._paces:
                self._paces[key] = self._measure(tree, words)
                self._seconds |= self._paces[key].seconds
            return self._paces[key]

    @staticmethod
    def _measure(tree: Tree, words: list[str]) -> Pace:
        # A machine that is busy may make one fail; twice is no accident.
        for _ in range(2):
            began = time.monotonic()
            seen = tree.look(words, Pace(MOST_S))
            if seen.is_well:
                limit_s = max(LEAST_S, PATIENCE * (time.monotonic() - began))
                return Pace(limit_s, seen.seconds)
        raise RuntimeError(f"without a mutant {seen.failed} fails, of {' '.join(words)}")

    def judge(self, target: Target, mutants: list[Mutant]) -> Iterator[Verdict]:
        """What becomes of each of the mutants."""
        known = excuses()

        def one(mutant: Mutant) -> Verdict:
            source = (self._root / mutant.file).read_text()
            if is_excused(mutant, source, known):
                return Verdict(mutant, "excused")
            selections = list(target.selections(self._root, mutant.file))
            some = selections[:1] if self._is_short else selections
            killers = self._killers.setdefault(mutant.file, [])
            tree = self._trees.get()
            try:
                first = [killers[:]] if killers else []
                verdict = judge(tree, mutant, first + some, lambda words: self._pace(tree, words))
            finally:
                self._trees.put(tree)
            if self._seconds.get(verdict.by, QUICK_S) < QUICK_S:
                killers[:] = [verdict.by, *(each for each in killers if each != verdict.by)][
                    :MOST_KILLERS
                ]
            return verdict

        return self._pool.map(one, mutants)


def score(verdicts: Iterable[Verdict]) -> float:
    """How many percent of those that are not excused were noticed."""
    words = [verdict.word for verdict in verdicts if verdict.word != "excused"]
    return 100.0 * words.count("killed") / len(words) if words else 100.0


@app.command()
def run(
    target: Annotated[
        list[str] | None,
        typer.Option(help="Only this one; again for more, which come in that order."),
    ] = None,
    mutants: Annotated[int, typer.Option(help="Mutants for each target, at most.")] = 30,
    seed: Annotated[int, typer.Option(help="Another one chooses others.")] = 1,
    jobs: Annotated[int, typer.Option(help="Tests run at once.")] = 2,
    least: Annotated[float, typer.Option(help="Percent of each that must be noticed.")] = ENOUGH,
    short: Annotated[bool, typer.Option("--short", help="Only the quickest tests look.")] = False,
) -> None:
    """Change the code a little, again and again: some test must notice.

    Exit code 1 if too few are noticed in any of the targets.
    """
    known = {each.name: each for each in TARGETS}
    if unknown := set(target or ()) - set(known):
        names = ", ".join(known)
        raise typer.BadParameter(f"no such target: {', '.join(sorted(unknown))}; there are {names}")
    found: dict[str, list[Verdict]] = {}
    print(f"seed {seed}, {mutants} mutants of each target at most", flush=True)
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        lab = Lab(ROOT, Path(folder), jobs, is_short=short)
        try:
            for each in [known[name] for name in target or known]:
                found[each.name] = []
                for verdict in lab.judge(each, made(each, ROOT, mutants, seed)):
                    found[each.name].append(verdict)
                    _tell(verdict)
                print(f"{table({each.name: found[each.name]})}\n", flush=True)
        finally:
            lab.close()
    print(table(found))
    raise typer.Exit(0 if all(score(each) >= least for each in found.values()) else 1)


def _tell(verdict: Verdict) -> None:
    mutant, source = verdict.mutant, (ROOT / verdict.mutant.file).read_text()
    by = f" ({verdict.by})" if verdict.by else ""
    print(
        f"{verdict.word:8} {verdict.seconds:5.1f} s {mutant.file}:{mutant.line_number(source)}: "
        f"{mutant.mutation}{by}",
        flush=True,
    )
    if verdict.word == "survived":
        print(mutant.diff(source), flush=True)


def table(found: dict[str, list[Verdict]]) -> str:
    """What became of the mutants of each target, as a table of Markdown."""
    rows = ["| target | mutants | killed | excused | score |", "|---|---|---|---|---|"]
    for name, verdicts in found.items():
        words = [verdict.word for verdict in verdicts]
        killed, excused = words.count("killed"), words.count("excused")
        rows.append(f"| {name} | {len(words)} | {killed} | {excused} | {score(verdicts):.0f} % |")
    return "\n".join(rows)


def main() -> None:
    """The command line. Told to end, it ends what it has started."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    sys.exit(app())
