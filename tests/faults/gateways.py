"""Faults between workers in other languages, gateways and the server: ``make faults-gateway``.

Three gateways with the same keys stand behind a door, through which workers in Node, Go and bash
and a loader in Node reach them. The loader submits, follows and prints results. While the request
runs, something breaks again and again; then it must come to its end, and everything is counted.
"""

import os
import random
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec
import typer

from streamq import Client
from streamq.gateway import keys
from streamq.gateway.roles import Role
from tests.clients.conftest import CLIENTS, HERE, kill_group
from tests.faults.ledger import Ledger
from tests.faults.proxy import Proxy
from tests.faults.report import replaced
from tests.faults.sites import Cluster, Single, Site
from tests.faults.verdict import overlap, repeated
from tests.support.command import COMMAND, environment
from tests.support.fleet import Note, read_notes
from tests.support.waiting import wait_until

LANGUAGES = ("node", "go", "bash")
GATEWAYS = 3
#: What a worker runs at once, and how long a part takes. Faults go on for so long.
SLOTS = 2
PART_MS = 20
WINDOW_S = 12.0
#: A request that has not ended after so long will not.
LONGEST_S = 150.0
#: Parts of a worker that died run again within this time.
BACK_S = 10.0


class Figures(msgspec.Struct, kw_only=True):
    """What one run came to."""

    scenario: str
    server: str
    parts: int = 0
    faults: int = 0
    #: Parts without their result; parts that the request or the output has too few or too often.
    lost: int = 0
    wrong: int = 0
    again: int = 0
    overlap: int = 0
    #: The longest time from a worker's death until a part that it ran was run by another.
    back_s: float = 0.0
    charged: int = 0
    died: int = 0
    took_s: float = 0.0
    broken: list[str] = []


class Door(Proxy):
    """Leads each connection to the next of several gateways."""

    def __init__(self, ports: list[int], seed: int) -> None:
        self._ports = ports
        self._next = 0
        super().__init__(ports[0], seed)

    def target(self) -> int:
        self._next += 1
        return self._ports[self._next % len(self._ports)]


class Gateways:
    """Gateways as users start them, with the defaults, that are started again when they end."""

    def __init__(self, site: Site, folder: Path, queue: str, seed: int) -> None:
        self._file = folder / "streamq.keys"
        self.key = keys.add_key(self._file, "mill", Role.OPERATOR)
        self._site, self._folder, self._queue = site, folder, queue
        self.ports = [_free_port() for _ in range(GATEWAYS)]
        self._running = [self._start(port) for port in self.ports]
        self.door = Door(self.ports, seed)
        for number in range(GATEWAYS):
            wait_until(partial(self._is_ready, number), 60)

    def _start(self, port: int) -> "subprocess.Popen[bytes]":
        words = ["serve", "--url", self._site.url, "--queue", self._queue]
        words += ["--listen", f"127.0.0.1:{port}", "--keys", str(self._file)]
        with (self._folder / f"gateway{port}.err").open("ab") as log:
            return subprocess.Popen([*COMMAND, *words], env=environment(), stderr=log)

    def _is_ready(self, number: int) -> bool:
        log = self._folder / f"gateway{self.ports[number]}.err"
        return log.read_text().count("serving at") > 0

    def end_one(self, chance: random.Random, number: signal.Signals) -> None:
        """End a gateway, and start another in its place."""
        index = chance.randrange(GATEWAYS)
        self._running[index].send_signal(number)
        self._running[index].wait(60)
        self._running[index] = self._start(self.ports[index])

    def said(self) -> str:
        """Return what the gateways logged."""
        return "".join(path.read_text() for path in sorted(self._folder.glob("gateway*.err")))

    def stop(self) -> None:
        for each in self._running:
            each.kill()
            each.wait()
        self.door.close()


@contextmanager
def _janitor(site: Site, folder: Path, queue: str) -> Iterator[None]:
    """Run a janitor for the length of the block."""
    words = ["janitor", "--url", site.url, "--queue", queue]
    with (folder / "janitor.err").open("ab") as log:
        process = subprocess.Popen([*COMMAND, *words], env=environment(), stderr=log)
    try:
        yield
    finally:
        process.kill()
        process.wait()


class Worker(NamedTuple):
    """A worker's process, and the number in its notes."""

    number: int
    process: "subprocess.Popen[bytes]"


class Workers:
    """A worker of each language."""

    def __init__(self, gateways: Gateways, folder: Path, queue: str, go: str) -> None:
        self._env = {
            "STREAMQ_GATEWAY": f"http://127.0.0.1:{gateways.door.port}",
            "STREAMQ_KEY": gateways.key,
            "STREAMQ_QUEUE": queue,
        }
        self._folder = folder
        self.notes_file = folder / "notes"
        bash = [str(CLIENTS / "bash" / "worker.sh"), "-n", str(SLOTS), "-m", "10", "shout"]
        self._commands = {
            "node": ["node", str(HERE / "worker.mjs")],
            "go": [go],
            "bash": [*bash, str(HERE / "shout.sh")],
        }
        self._started = 0
        self.running = {language: self._start(language) for language in LANGUAGES}
        #: When workers were killed.
        self.deaths: dict[int, float] = {}

    def _start(self, language: str) -> Worker:
        self._started += 1
        variables = self._env | {
            "NOTES": str(self.notes_file),
            "WORKER": str(self._started),
            "SLOTS": str(SLOTS),
            "PAUSE_MS": str(PART_MS),
            "PAUSE_S": str(PART_MS / 1e3),
        }
        with (self._folder / f"{language}{self._started}.err").open("ab") as log:
            command = self._commands[language]
            process = subprocess.Popen(
                command, env=environment(**variables), stderr=log, start_new_session=True
            )
        return Worker(self._started, process)

    def kill_one(self, chance: random.Random) -> None:
        """Kill a worker and all that it started, and start another in its place."""
        language = chance.choice(LANGUAGES)
        worker = self.running[language]
        kill_group(worker.process)  # type: ignore[arg-type]
        self.deaths[worker.number] = time.time()
        self.running[language] = self._start(language)

    def load(self, request_id: str, payloads: list[str]) -> "subprocess.Popen[bytes]":
        """Start a loader, which prints the results in input order."""
        (self._folder / "in").write_text("".join(f"{each}\n" for each in payloads))
        command = ["node", str(CLIENTS / "node" / "examples" / "load.js"), request_id, "shout"]
        with (
            (self._folder / "in").open("rb") as given,
            (self._folder / "out").open("wb") as out,
            (self._folder / "load.err").open("wb") as log,
        ):
            return subprocess.Popen(
                command, env=environment(**self._env), stdin=given, stdout=out, stderr=log
            )

    def notes(self) -> list[Note]:
        return read_notes(self.notes_file)

    def stop(self) -> dict[str, int]:
        """Stop politely. Returns how each worker ended."""
        for worker in self.running.values():
            os.kill(worker.process.pid, signal.SIGTERM)
        return {language: each.process.wait(40) for language, each in self.running.items()}

    def end(self) -> None:
        for worker in self.running.values():
            kill_group(worker.process)  # type: ignore[arg-type]


class Run:
    """One scenario on its way."""

    def __init__(
        self, site: Site, gateways: Gateways, workers: Workers, seed: int, window_s: float
    ) -> None:
        self.site, self.gateways, self.workers = site, gateways, workers
        self.chance = random.Random(seed)
        self.faults = 0
        self.until = time.monotonic() + window_s

    def goes_on(self, pause_s: float) -> bool:
        time.sleep(pause_s)
        return time.monotonic() < self.until


def nothing(run: Run) -> None:
    while run.goes_on(0.5):
        pass


def kill_gateways(run: Run) -> None:
    while run.goes_on(1.0):
        run.gateways.end_one(run.chance, signal.SIGKILL)
        run.faults += 1


def stop_gateways(run: Run) -> None:
    while run.goes_on(2.0):
        run.gateways.end_one(run.chance, signal.SIGTERM)
        run.faults += 1


def kill_workers(run: Run) -> None:
    while run.goes_on(2.0):
        run.workers.kill_one(run.chance)
        run.faults += 1


def lose_answers(run: Run) -> None:
    doors = [run.gateways.door, *run.site.proxies]
    for door in doors:
        door.lose = 0.02
    while run.goes_on(0.5):
        pass
    for door in doors:
        door.calm()
    run.faults = sum(door.lost for door in doors)


def reset_connections(run: Run) -> None:
    while run.goes_on(0.5):
        for door in (run.gateways.door, *run.site.proxies):
            door.reset()
        run.faults += 1


def hang(run: Run) -> None:
    """For a second nothing comes through to the gateways; connections of that time stay dead."""
    while run.goes_on(2.0):
        run.gateways.door.open_hole()
        time.sleep(1.0)
        run.gateways.door.close_hole()
        run.faults += 1


def server_away(run: Run) -> None:
    assert isinstance(run.site, Single)
    for away_s in (0.5, 5.0):
        run.goes_on(1.5)
        run.site.kill()
        time.sleep(away_s)
        run.site.start_again()
        run.faults += 1


def primary_away(run: Run) -> None:
    assert isinstance(run.site, Cluster)
    for key in ("{q:faults}", "{r:batch}"):
        run.goes_on(1.5)
        run.site.kill(run.site.owner(key))
        run.faults += 1


def everything(run: Run) -> None:
    for door in (run.gateways.door, *run.site.proxies):
        door.lose = 0.01
    while run.goes_on(1.0):
        run.gateways.end_one(run.chance, signal.SIGKILL)
        run.workers.kill_one(run.chance)
        run.faults += 2
    run.gateways.door.calm()
    run.site.calm()


class Scenario(NamedTuple):
    """A fault, and what may follow from it."""

    name: str
    says: str
    inject: Callable[[Run], None]
    #: Whether workers die: only then parts may be charged and run again.
    is_deadly: bool = False
    #: Whether connections break under parts: these may run again.
    may_repeat: bool = False
    #: How many crashes may be charged besides, by what happened: a gateway cannot tell an answer
    #: that was swallowed behind it from a worker that died as soon as it had its part.
    charges: Callable[[Run], int] = lambda _: 0
    servers: tuple[str, ...] = ("valkey", "redis", "cluster")
    fsync: str = ""
    #: Whether a ``streamq janitor`` runs beside the gateways, as in ``deploy/``. Without it only
    #: they take parts back.
    has_janitor: bool = False


SCENARIOS = (
    Scenario("nothing", "nothing at all", nothing),
    Scenario(
        "kill-gateways",
        "kill -9 of one of three gateways every second",
        kill_gateways,
        may_repeat=True,
    ),
    Scenario("stop-gateways", "TERM of one of three gateways every 2 s", stop_gateways),
    Scenario("kill-workers", "kill -9 of a worker every 2 s", kill_workers, is_deadly=True),
    Scenario(
        "lose-answers",
        "2 % of answers lost, those of gateways and those of the server",
        lose_answers,
        may_repeat=True,
    ),
    Scenario(
        "reset",
        "every connection reset every 500 ms",
        reset_connections,
        may_repeat=True,
    ),
    Scenario(
        "hole",
        "1 s in 3 nothing reaches the gateways, and connections stay dead",
        hang,
        may_repeat=True,
        charges=lambda run: run.faults * SLOTS * len(LANGUAGES),
    ),
    Scenario(
        "server-away",
        "kill -9 of the server, away 0.5 s and 5 s, AOF synced always",
        server_away,
        may_repeat=True,
        servers=("valkey", "redis"),
        fsync="always",
    ),
    Scenario(
        "primary-away",
        "kill -9 of the queue's primary, then of the request's",
        primary_away,
        may_repeat=True,
        servers=("cluster",),
    ),
    Scenario(
        "everything",
        "1 % of answers lost, a gateway and a worker killed every second, a janitor beside",
        everything,
        is_deadly=True,
        may_repeat=True,
        has_janitor=True,
    ),
)


def play(
    scenario: Scenario,
    server: str,
    seed: int,
    parts: int,
    folder: Path,
    go: str,
    window_s: float = WINDOW_S,
) -> Figures:
    """Make one run, and return what it came to."""
    figures = Figures(scenario=scenario.name, server=server, parts=parts)
    limit = SLOTS * len(LANGUAGES) - 1
    with ExitStack() as stack:
        site: Site = (
            Cluster(seed) if server == "cluster" else Single(server, folder, seed, scenario.fsync)
        )
        stack.callback(site.stop)
        queue, request_id = site.names()
        ledger = Ledger(site.ports())
        stack.callback(ledger.close)
        gateways = Gateways(site, folder, queue, seed)
        stack.callback(gateways.stop)
        if scenario.has_janitor:
            stack.enter_context(_janitor(site, folder, queue))
        workers = Workers(gateways, folder, queue, go)
        stack.callback(workers.end)
        payloads = [f"line {number} of zoë" for number in range(1, parts + 1)]
        client = stack.enter_context(Client(site.url))
        loader = workers.load(request_id, payloads)
        stack.callback(loader.kill)
        wait_until(lambda: workers.notes(), 60)
        client.get(request_id).set(limit=limit)
        run = Run(site, gateways, workers, seed, window_s)
        begun = time.monotonic()
        scenario.inject(run)
        try:
            loader.wait(LONGEST_S)
        except subprocess.TimeoutExpired:
            figures.broken.append(f"the loader did not end within {LONGEST_S:g} s")
        figures.took_s = round(time.monotonic() - begun, 1)
        figures.faults = run.faults
        status = client.get(request_id).wait(timeout=20).parts
        # ``tr`` of bash workers knows single bytes only.
        expected = [line.upper().replace("Ë", "ë") for line in payloads]
        out = (folder / "out").read_text().replace("Ë", "ë").splitlines()
        figures.lost = parts - status.done
        figures.wrong = abs(status.total - parts) + _differences(out, expected)
        codes = workers.stop()
        notes = workers.notes()
        figures.again = repeated(notes)
        figures.overlap = overlap(notes, workers.deaths)
        figures.back_s = round(max(_back_s(notes, workers.deaths), default=0.0), 1)
        figures.charged, figures.died = ledger.charges, _died_at_work(notes, workers.deaths)
        excused = scenario.charges(run)
        figures.broken += _broken(scenario, figures, codes, gateways.said(), limit, excused)
    return figures


def _broken(
    scenario: Scenario,
    figures: Figures,
    codes: dict[str, int],
    said: str,
    limit: int,
    excused: int,
) -> list[str]:
    """Return the promises that a run did not keep."""
    found = []
    if figures.lost or figures.wrong:
        found.append(f"{figures.lost} parts lost, {figures.wrong} counted or printed wrong")
    if figures.charged > figures.died + excused:
        found.append(f"{figures.charged} crashes charged, {figures.died} slots died")
    if figures.back_s > BACK_S:
        found.append(f"a part of a dead worker ran again after {figures.back_s} s")
    # A part whose lease was lost may still run at its first worker while the next runs it.
    if not scenario.may_repeat and figures.overlap > limit:
        found.append(f"{figures.overlap} parts at once, {limit} allowed")
    if figures.again and not scenario.may_repeat and not scenario.is_deadly:
        found.append(f"{figures.again} parts run again")
    found += [f"{name} ended with {code}" for name, code in codes.items() if code]
    if "Traceback" in said:
        found.append("a gateway logged a traceback")
    return found


def _differences(out: list[str], expected: list[str]) -> int:
    pairs = zip(out, expected, strict=False)
    return abs(len(out) - len(expected)) + sum(one != two for one, two in pairs)


def _running_at(notes: list[Note], worker: int) -> list[Note]:
    """Return the starts without an end of a worker that died."""
    ended = {note.part for note in notes if note.pid == worker and note.word == "E"}
    return [
        note for note in notes if note.pid == worker and note.word == "S" and note.part not in ended
    ]


def _died_at_work(notes: list[Note], deaths: dict[int, float]) -> int:
    """Return how many slots died with their workers: as many parts may be charged."""
    return sum(SLOTS for worker in deaths if any(note.pid == worker for note in notes))


def _back_s(notes: list[Note], deaths: dict[int, float]) -> Iterator[float]:
    """Yield how long parts that ran when their worker died waited for another."""
    starts = [note for note in notes if note.word == "S"]
    for worker, died in deaths.items():
        for part in {note.part for note in _running_at(notes, worker)}:
            others = (each for each in starts if each.part == part and each.pid != worker)
            later = [each.time for each in others if each.time > died]
            if later:
                yield min(later) - died


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@contextmanager
def built_go() -> Iterator[str]:
    """Build the worker in Go."""
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        program = f"{folder}/goworker"
        subprocess.run(["go", "build", "-o", program, "."], cwd=HERE / "goworker", check=True)
        yield program


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    only: Annotated[list[str] | None, typer.Argument(help="Scenarios; all if none.")] = None,
    servers: Annotated[str, typer.Option(help="valkey, redis, cluster.")] = "valkey",
    seeds: Annotated[int, typer.Option(help="Runs of each, with other seeds.")] = 1,
    parts: Annotated[int, typer.Option(help="Parts of a request.")] = 2_500,
    page: Annotated[Path | None, typer.Option(help="Write the table into this page.")] = None,
    keep: Annotated[Path | None, typer.Option(help="Keep logs of what fails here.")] = None,
) -> None:
    """Put workers in other languages and gateways through faults. Exits with 1 if one fails."""
    made: list[Figures] = []
    with built_go() as go:
        for scenario in SCENARIOS:
            for server in servers.split(","):
                if (only and scenario.name not in only) or server not in scenario.servers:
                    continue
                for seed in range(1, seeds + 1):
                    made.append(_played(scenario, server, seed, parts, keep, go))
                    print(_line(made[-1]), flush=True)
    if page:
        page.write_text(replaced(page.read_text(), "gateways", table(made)))
    raise typer.Exit(int(any(each.broken for each in made)))


def _played(
    scenario: Scenario, server: str, seed: int, parts: int, keep: Path | None, go: str
) -> Figures:
    folder = Path(tempfile.mkdtemp(prefix="faults-"))
    try:
        figures = play(scenario, server, seed, parts, folder, go)
        if keep and figures.broken:
            shutil.copytree(folder, keep / f"{scenario.name}-{server}-{seed}", dirs_exist_ok=True)
        return figures
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _line(figures: Figures) -> str:
    said = msgspec.json.encode(figures).decode()
    return f"{'KEPT' if not figures.broken else 'BROKEN'} {said}"


_HEAD = (
    "| fault | runs | parts | faults | lost | counted wrong | run again | at once / limit "
    "| back after s | charged / died |\n|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|\n"
)


def table(made: list[Figures]) -> str:
    """Return the figures as a table: the worst of the runs of each fault."""
    rows = []
    for scenario in SCENARIOS:
        own = [each for each in made if each.scenario == scenario.name]
        if not own:
            continue

        def most(name: str, own: list[Figures] = own) -> str:
            return f"{max(getattr(each, name) for each in own):,}"

        limit = SLOTS * len(LANGUAGES) - 1
        cells = [scenario.says, f"{len(own)}", *map(most, ("parts", "faults", "lost", "wrong"))]
        cells += [most("again"), f"{most('overlap')} / {limit}"]
        cells += [
            most("back_s") if scenario.is_deadly else "",
            f"{most('charged')} / {most('died')}",
        ]
        rows.append(f"| {' | '.join(cells)} |\n")
    kept = sum(not each.broken for each in made)
    broken = [f"* {f.scenario} on {f.server}: {each}\n" for f in made for each in f.broken]
    return (
        _HEAD
        + "".join(rows)
        + f"\nOf {len(made)} runs {kept} kept every promise.\n"
        + "".join(broken)
    )


if __name__ == "__main__":
    app()
