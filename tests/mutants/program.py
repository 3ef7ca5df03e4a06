"""The program: makes mutants, lets the tests look for them, and says which nobody noticed.

Which mutants are made depends on the code alone: a module has the same ones until it is changed.
"""

import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from typing import Annotated, Any, NamedTuple

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
PATIENCE, LEAST_S = 4.0, 60.0
_LEFT_OUT = (".git", ".venv*", "__pycache__", ".*_cache", "build", "dist", "*.egg-info")

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


class Excuse(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A mutant that does no harm, and why."""

    file: str
    #: The line where it begins, as it is in the file, without its indent.
    line: str
    mutation: str
    reason: str


class Verdict(NamedTuple):
    """What became of a mutant: killed, survived, excused."""

    mutant: Mutant
    word: str
    seconds: float = 0.0


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

    def write(self, file: str, text: str) -> None:
        """Change a file. Its time is new each time, so that nobody takes a compiled one for it."""
        path = self.root / file
        path.write_text(text)
        self._writes += 1
        at = time.time() + self._writes
        os.utime(path, (at, at))

    def passes(self, words: Iterable[str], timeout_s: float) -> bool:
        """Run pytest. Whether all is well; what takes too long is not."""
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *words]
        env = os.environ | {"PYTHONPATH": str(self.root), "STREAMQ_TEST_SERVERS": "valkey"}
        out = subprocess.DEVNULL
        with subprocess.Popen(
            command, cwd=self.root, env=env, stdout=out, stderr=out, start_new_session=True
        ) as running:
            try:
                code = running.wait(timeout_s)
            except subprocess.TimeoutExpired:
                code = 1
            finally:
                # Whatever the tests started and a mutant kept them from ending.
                _end_group(running.pid)
        if code == 5:
            raise RuntimeError(f"no test is selected by {' '.join(words)}")
        return code == 0


def _end_group(leader: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)


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
    told = (mutant.file, mutant.line(source), mutant.mutation)
    return any((each.file, each.line, each.mutation) == told for each in known)


def judge(tree: Tree, mutant: Mutant, target: Target, timeouts: dict[str, float]) -> Verdict:
    """Apply a mutant, let the tests look for it, and take it back."""
    source = (tree.root / mutant.file).read_text()
    began = time.monotonic()
    tree.write(mutant.file, mutant.applied(source))
    try:
        for words in target.selections(tree.root, mutant.file):
            if not tree.passes(words, timeouts.get(" ".join(words), LEAST_S)):
                return Verdict(mutant, "killed", time.monotonic() - began)
    finally:
        tree.write(mutant.file, source)
    return Verdict(mutant, "survived", time.monotonic() - began)


class Lab:
    """Two copies of the checkout, and what is found out in them."""

    def __init__(self, root: Path, folder: Path, jobs: int) -> None:
        self._root = root
        self._trees: SimpleQueue[Tree] = SimpleQueue()
        self._pool = ThreadPoolExecutor(jobs)
        self._timeouts: dict[str, float] = {}
        for number in range(jobs):
            self._trees.put(Tree(root, folder / f"tree{number}"))

    def _in_a_tree(self, do: Callable[[Tree], Any]) -> Any:
        tree = self._trees.get()
        try:
            return do(tree)
        finally:
            self._trees.put(tree)

    def warm_up(self, target: Target, mutants: list[Mutant]) -> None:
        """See that the tests pass without a mutant, and how long they take.

        Raises:
            RuntimeError: they do not pass.
        """
        every = {m.file: list(target.selections(self._root, m.file)) for m in mutants}
        fresh = {" ".join(words): words for each in every.values() for words in each}
        todo = [(key, words) for key, words in fresh.items() if key not in self._timeouts]
        list(self._pool.map(lambda each: self._time(*each), todo))

    def _time(self, key: str, words: list[str]) -> None:
        # A machine that is busy may make one fail; twice is no accident.
        for _ in range(2):
            began = time.monotonic()
            if self._in_a_tree(lambda tree: tree.passes(words, 600)):
                self._timeouts[key] = max(LEAST_S, PATIENCE * (time.monotonic() - began))
                return
        raise RuntimeError(f"without a mutant these fail: {key}")

    def judge(self, target: Target, mutants: list[Mutant]) -> Iterator[Verdict]:
        """What becomes of each of the mutants."""
        known = excuses()

        def one(mutant: Mutant) -> Verdict:
            source = (self._root / mutant.file).read_text()
            if is_excused(mutant, source, known):
                return Verdict(mutant, "excused")
            verdict = self._in_a_tree(lambda tree: judge(tree, mutant, target, self._timeouts))
            assert isinstance(verdict, Verdict)
            return verdict

        return self._pool.map(one, mutants)


def score(verdicts: Iterable[Verdict]) -> float:
    """How many percent of those that are not excused were noticed."""
    words = [verdict.word for verdict in verdicts if verdict.word != "excused"]
    return 100.0 * words.count("killed") / len(words) if words else 100.0


@app.command()
def run(
    only: Annotated[list[str] | None, typer.Argument(help="Targets; all if none.")] = None,
    mutants: Annotated[int, typer.Option(help="Mutants for each target, at most.")] = 30,
    seed: Annotated[int, typer.Option(help="Another one chooses others.")] = 1,
    jobs: Annotated[int, typer.Option(help="Tests run at once.")] = 2,
    least: Annotated[float, typer.Option(help="Percent of them that must be noticed.")] = ENOUGH,
) -> None:
    """Change the code a little, again and again: some test must notice. Too few do: exit code 1."""
    targets = [target for target in TARGETS if not only or target.name in only]
    if unknown := set(only or ()) - {target.name for target in TARGETS}:
        names = ", ".join(target.name for target in TARGETS)
        raise typer.BadParameter(f"no such target: {', '.join(sorted(unknown))}; there are {names}")
    everything: list[Verdict] = []
    rows = []
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        lab = Lab(ROOT, Path(folder), jobs)
        for target in targets:
            chosen = made(target, ROOT, mutants, seed)
            lab.warm_up(target, chosen)
            verdicts = []
            for verdict in lab.judge(target, chosen):
                verdicts.append(verdict)
                _tell(verdict)
            everything += verdicts
            rows.append(_row(target.name, verdicts))
            print(rows[-1], flush=True)
    print("\n".join(["", *rows, _row("all", everything)]))
    raise typer.Exit(0 if score(everything) >= least else 1)


def _tell(verdict: Verdict) -> None:
    mutant, source = verdict.mutant, (ROOT / verdict.mutant.file).read_text()
    print(
        f"{verdict.word:8} {verdict.seconds:5.1f} s {mutant.file}:{mutant.line_number(source)}: "
        f"{mutant.mutation}",
        flush=True,
    )
    if verdict.word == "survived":
        print(mutant.diff(source), flush=True)


def _row(name: str, verdicts: list[Verdict]) -> str:
    words = [verdict.word for verdict in verdicts]
    counts = ", ".join(f"{words.count(word)} {word}" for word in ("killed", "survived", "excused"))
    return f"{name}: {len(words)} made, {counts}: {score(verdicts):.0f} %"


def main() -> None:
    """The command line. Told to end, it ends what it has started."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    sys.exit(app())
