"""The program: runs scenarios, writes down their figures, and makes the page of them."""

import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from random import Random
from typing import Annotated, NamedTuple

import msgspec
import typer

from tests.faults.episodes import EPISODES, Episode, play
from tests.faults.ledger import Ledger
from tests.faults.report import renewed
from tests.faults.scenarios import SCENARIOS, Run, Scenario, small_disk
from tests.faults.sites import Cluster, Single, Site, has_movable_clock
from tests.faults.subjects import WAITERS, Seed, Streamq, Subject
from tests.faults.verdict import Figures, dead_slots, missing, overlap, repeated, silence

#: The scenarios that bite most, for every day.
SHORT = ("kill-process", "lost-replies", "black-hole", "server-kill")
SHORT_CLUSTER = ("cluster-failover", "slot-move")
SHORT_EPISODES = ("apps", "redrive", "id-again", "frozen")
#: A run that takes longer hangs.
LONGEST_S = 240

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def run(
    only: Annotated[list[str] | None, typer.Argument(help="Scenarios; all if none.")] = None,
    servers: Annotated[str, typer.Option(help="valkey, redis, cluster.")] = "valkey,redis,cluster",
    seeds: Annotated[int, typer.Option(help="Seeds on Valkey; the others have one.")] = 3,
    first: Annotated[int, typer.Option(help="The first seed.")] = 1,
    parts: Annotated[int, typer.Option(help="Parts of a request.")] = 5_000,
    subjects: Annotated[str, typer.Option(help="streamq, seed.")] = "streamq,seed",
    results: Annotated[Path | None, typer.Option(help="Add the figures to this file.")] = None,
    keep: Annotated[Path | None, typer.Option(help="Keep logs of what fails here.")] = None,
    told_within: Annotated[float, typer.Option(help="Seconds from the end to its waiters.")] = 3.0,
) -> None:
    """Put streamq and the design it grew from through the faults. Exits with 1 if streamq fails."""
    known = {each.name for each in SCENARIOS} | {each.name for each in EPISODES}
    if unknown := set(only or ()) - known:
        raise typer.BadParameter(f"no such scenario: {', '.join(sorted(unknown))}")
    is_whole = True
    for job in _jobs(only, servers.split(","), seeds, first):
        if job.subject not in subjects.split(","):
            continue
        make = (
            partial(_execute, job, parts, told_within) if job.is_scenario else partial(_play, job)
        )
        figures = _noted(job, partial(make, keep))
        if results:
            with results.open("ab") as file:
                file.write(msgspec.json.encode(figures) + b"\n")
        is_whole = is_whole and not (figures.broken and job.subject == "streamq")
    raise typer.Exit(0 if is_whole else 1)


class Job(NamedTuple):
    """One run to be made."""

    what: Scenario | Episode
    server: str
    seed: int
    subject: str = "streamq"

    @property
    def is_scenario(self) -> bool:
        """Whether it is a fault beside one request, or else a story of several."""
        return isinstance(self.what, Scenario)

    def __str__(self) -> str:
        return f"{self.what.name}-{self.server}-{self.seed}-{self.subject}"


def _jobs(only: list[str] | None, servers: list[str], seeds: int, first: int) -> Iterator[Job]:
    """All runs that are asked for."""
    for scenario in SCENARIOS:
        if not only or scenario.name in only:
            for server, seed, subject in _plan(scenario, servers, seeds, first):
                yield Job(scenario, server, seed, subject)
    for episode in EPISODES:
        if not only or episode.name in only:
            found = [server for server in servers if server in episode.servers]
            yield from (Job(episode, server, first) for server in found)


def _noted(job: Job, make: Callable[[], Figures]) -> Figures:
    """The figures of a run, printed. Of one that cannot be made there is only that to say."""
    try:
        with _at_most(LONGEST_S):
            figures = make()
    except Exception as error:  # noqa: BLE001  the others are still to be run
        traceback.print_exc()
        figures = Figures(
            scenario=job.what.name,
            subject=job.subject,
            server=job.server,
            seed=job.seed,
            parts=0,
            limit=0,
            broken=[f"it could not be run: {error!r}"],
        )
    print(_line(figures), flush=True)
    return figures


@app.command()
def short() -> None:
    """The scenarios that bite most, with one seed and few parts, on a machine that may be slow."""
    codes = []
    for names, server in ((SHORT + SHORT_EPISODES, "valkey"), (SHORT_CLUSTER, "cluster")):
        try:
            run(list(names), server, 1, parts=1_000, subjects="streamq", told_within=20.0)
        except typer.Exit as end:
            codes.append(end.exit_code)
    raise typer.Exit(max(codes))


@app.command()
def report(results: Path, output: Path) -> None:
    """Make the page from figures written down."""
    figures = []
    for line in results.read_bytes().splitlines():
        with suppress(msgspec.DecodeError):  # the last may be cut short
            figures.append(msgspec.json.decode(line, type=Figures))
    # A run that was made again counts in the place of the first.
    latest = {(f.scenario, f.subject, f.server, f.seed): f for f in figures}
    output.write_text(renewed(output.read_text(), list(latest.values())))


@contextmanager
def _at_most(seconds: int) -> Iterator[None]:
    """What hangs is given up, so that the others can be run."""

    def give_up(*_: object) -> None:
        raise TimeoutError(f"it took more than {seconds} s")

    signal.signal(signal.SIGALRM, give_up)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)


def _plan(
    scenario: Scenario, servers: list[str], seeds: int, first: int
) -> list[tuple[str, int, str]]:
    """Servers, seeds and subjects of a scenario: the old design once on each kind of site."""
    found = []
    for server in servers:
        site = "cluster" if server == "cluster" else "single"
        if site not in scenario.sites:
            continue
        if scenario.own_clock and not has_movable_clock(server):
            print(f"{scenario.name} {server}: not run, its clock cannot be moved here", flush=True)
            continue
        count = seeds if server == "valkey" else 1
        found += [(server, first + n, "streamq") for n in range(count)]
        if scenario.has_baseline and server != "redis":
            found.append((server, first, "seed"))
    return found


def _execute(job: Job, parts: int, told_within: float, keep: Path | None) -> Figures:
    scenario, server, seed, name = job
    assert isinstance(scenario, Scenario)
    with ExitStack() as stack:
        folder = Path(tempfile.mkdtemp(prefix="faults-"))
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        if scenario.name == "disk-full":
            stack.enter_context(small_disk(folder))
        site = _site(scenario, server, folder, seed)
        stack.callback(site.stop)
        ledger = Ledger(site.ports())
        stack.callback(ledger.close)
        kind = Streamq if name == "streamq" else Seed
        subject = kind(site, folder, scenario.limit)
        subject.level = scenario.level
        subject.may_die = bool(scenario.deadly)
        if scenario.old_recovers and isinstance(subject, Seed):
            subject.recover()
        subject.told_within_s = told_within
        way = Run(site, subject, folder, seed)
        payloads = scenario.payloads(Random(seed), parts)
        course = _drive(scenario, way, payloads)
        figures = _figures(scenario, server, seed, way, course, len(payloads))
        figures.charged = ledger.charges
        figures.died = dead_slots(way.subject.notes(), way.subject.deaths, 2)
        if name == "streamq":
            figures.broken += _wrongly_charged(figures, scenario)
        if keep and figures.broken:
            _keep(folder, keep / str(job))
    return figures


def _play(job: Job, keep: Path | None) -> Figures:
    assert isinstance(job.what, Episode)
    with ExitStack() as stack:
        folder = Path(tempfile.mkdtemp(prefix="faults-"))
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        figures = play(job.what, job.server, job.seed, folder)
        if keep and figures.broken:
            _keep(folder, keep / str(job))
    return figures


def _keep(folder: Path, kept: Path) -> None:
    """Logs of a run that broke something, for whoever wants to know why."""
    shutil.rmtree(kept, ignore_errors=True)
    shutil.copytree(folder, kept, ignore=shutil.ignore_patterns("*.sock", "disk", "out.txt"))


def _wrongly_charged(figures: Figures, scenario: Scenario) -> "list[str]":
    """Nobody is charged a crash who did not crash, as far as it can be known."""
    allowed = figures.died + scenario.charges(figures.faults)
    if figures.charged <= allowed:
        return []
    return [f"A11 {figures.charged} crashes were charged, {figures.died} slots died"]


def _site(scenario: Scenario, server: str, folder: Path, seed: int) -> Site:
    if server == "cluster":
        return Cluster(seed)
    home = folder / "disk" if scenario.name == "disk-full" else folder
    return Single(server, home, seed, scenario.fsync, own_clock=scenario.own_clock)


class Course(NamedTuple):
    """How a run went: when it ended, if it did, what was counted wrong and when who was told."""

    took_s: float
    is_ended: bool
    wrong: int
    told: list[float]


def _drive(scenario: Scenario, way: Run, payloads: list[str]) -> Course:
    """Start everything, disturb it, and let it come to its end."""
    subject = way.subject
    try:
        if scenario.is_early:
            subject.start()
            subject.submit(payloads)
        else:
            subject.submit(payloads)
            subject.await_waiters()
            subject.start()
        begun = time.monotonic()
        scenario.inject(way)
        way.site.calm()
        _await_end(subject)
        took_s = time.monotonic() - begun
        return Course(took_s, subject.is_ended(), *subject.settle())
    finally:
        subject.stop()


def _figures(
    scenario: Scenario, server: str, seed: int, way: Run, course: Course, count: int
) -> Figures:
    """What handlers, counts and proxies say of a run of so many parts, and what it broke."""
    subject, proxies, notes = way.subject, way.site.proxies, way.subject.notes()
    # A call that is repeated may come to another door.
    given = {call: number for proxy in proxies for call, number in proxy.given.items()}
    counted = sum(proxy.counted for proxy in proxies)
    figures = Figures(
        scenario=scenario.name,
        subject=subject.name,
        server=server,
        seed=seed,
        parts=count,
        limit=subject.limit,
        faults=way.faults,
        stalled=way.stalled,
        lost=missing(notes, count) - scenario.deadly,
        again=repeated(notes),
        wrong=course.wrong,
        overlap=overlap(notes, subject.deaths),
        silence_s=round(silence(notes, way.began), 2),
        took_s=round(course.took_s, 1),
        is_ended=course.is_ended,
        told=len(course.told),
        told_s=round(max(course.told, default=0.0), 2),
        waiters=WAITERS,
        pops=sum(proxy.pops for proxy in proxies),
        news=sum(proxy.news for proxy in proxies),
        claims=sum(proxy.granted for proxy in proxies) or len(notes) // 2,
        counted=counted,
        refused=sum(given.values()) - counted,
        ends=sum(note.word == "E" for note in notes),
        broken=subject.broken,
    )
    figures.broken += _broken(figures, scenario)
    if figures.told < WAITERS or figures.told_s > subject.told_within_s:
        figures.broken.append(f"A7 {figures.told} told, the last after {figures.told_s} s")
    return figures


def _await_end(subject: Subject) -> None:
    """Wait for the end, or until nothing has happened for too long."""
    seen, since = subject.progress(), time.monotonic()
    while not subject.is_ended():
        time.sleep(0.1)
        if subject.progress() != seen:
            seen, since = subject.progress(), time.monotonic()
        elif time.monotonic() - since > subject.patience_s:
            return


def _broken(figures: Figures, scenario: Scenario) -> "list[str]":
    found = []
    if figures.lost:
        found.append(f"A1 {figures.lost} parts never ran to their end")
    if figures.wrong:
        found.append(f"A2 {figures.wrong} counted wrong")
    if not figures.is_ended:
        found.append("A6 it did not end")
    if figures.again > scenario.again(figures.faults):
        found.append(f"A4 {figures.again} starts too many, {figures.faults} faults")
    if figures.overlap > figures.limit + figures.stalled:
        found.append(f"A5 {figures.overlap} ran at once, the limit is {figures.limit}")
    if figures.subject == "streamq":
        found += spins(figures)
    if figures.subject == "streamq" and scenario.is_seen and figures.is_ended:
        found += _uncounted(figures)
    return found


def spins(figures: Figures) -> "list[str]":
    """Tokens are about as many as claims, and news of lists in use come at most once a second."""
    found = []
    tokens = figures.pops - figures.news
    if tokens > 1.1 * figures.claims + figures.faults + 8:
        found.append(f"A9 {tokens} tokens popped for {figures.claims} claims")
    if figures.news > figures.took_s + figures.faults + 8:
        found.append(f"A9 {figures.news} news popped in {figures.took_s} s")
    return found


def _uncounted(figures: Figures) -> "list[str]":
    """Every result that came was counted once, and what ran twice came twice and was refused."""
    found = []
    if figures.counted != figures.parts:
        found.append(f"A10 {figures.counted} results counted for {figures.parts} parts")
    if figures.refused != figures.ends - figures.parts:
        found.append(
            f"A10 {figures.refused} results refused, {figures.ends} ends of {figures.parts} parts"
        )
    return found


def _line(figures: Figures) -> str:
    head = f"{figures.scenario} {figures.subject} {figures.server} {figures.seed}"
    end = "ended" if figures.is_ended else "STUCK"
    text = (
        f"{head}: {end} {figures.took_s} s, {figures.faults} faults, lost {figures.lost}, "
        f"again {figures.again}, wrong {figures.wrong}, overlap {figures.overlap}/{figures.limit}, "
        f"silence {figures.silence_s} s, "
        f"told {figures.told}/{figures.waiters} after {figures.told_s} s, "
        f"pops {figures.pops}/{figures.claims}, news {figures.news}, "
        f"charged {figures.charged}/{figures.died}"
    )
    if figures.scenario in {episode.name for episode in EPISODES}:
        text = (
            f"{head}: {end} {figures.took_s} s, {figures.faults} faults, lost {figures.lost}, "
            f"again {figures.again}, lines wrong {figures.wrong}, charged {figures.charged}, "
            f"slowest start {figures.start_s} s"
        )
    return "\n    ".join([text, *figures.broken])


def main() -> None:
    """The command line. Told to end, it ends what it has started."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    sys.exit(app())
