"""Stories of parts of many records: what records came to outlives the process that ran them."""

import os
import signal
import time
import typing
from collections import Counter
from contextlib import suppress
from pathlib import Path

from streamq.model import State
from tests.support.waiting import wait_until

if typing.TYPE_CHECKING:
    from tests.faults.episodes import Stage

#: Records of the first story, in how many parts, and what each takes.
RECORDS = 3_000
IN_A_PART = 1_500
RECORD_MS = 5
#: Two of them end their process each time.
DEADLY = ("400", "1900")
#: While this long no process is killed. What records came to is kept every 0.5 s.
BETWEEN_KILLS_S = 1.0
KILLS = 6
#: A process that is killed has run records that were not kept yet: those of the last 0.5 s.
NOT_KEPT_S = 0.6
#: After a worker died of a part, it is run in pieces, and what came to pass before each is kept. So
#: the next that dies of it has run half a piece in the mean.
PIECES = 16
#: The second story: a part of ten records, of which two are bad until they are mended.
FROZEN_RECORDS = 10
FROZEN_MS = 300
BAD = (8, 9)


def _load(stage: "Stage", lines: list[str], name: str, *options: str) -> None:
    source = stage.folder / f"{name}.txt"
    source.write_text("".join(f"{line}\n" for line in lines))
    stage.figures.parts += len(lines)
    stage.command("load", str(source), "--id", name, *options)
    stage.requests.append(stage.client.get(name))


def records(stage: "Stage") -> None:
    """Processes are killed while they run parts of many records, two of which kill them, too."""
    for _ in range(2):
        stage.pool("-p", "1", "-c", "1")
    name = f"{stage.id}-records"
    lines = [f"{n} {'die' if str(n) in DEADLY else RECORD_MS}" for n in range(1, RECORDS + 1)]
    _load(stage, lines, name, "--handler", "careful", "--lines", str(IN_A_PART))
    (request,) = stage.requests
    wait_until(lambda: stage.begun(request) > 100, 30)
    for _ in range(KILLS):
        stage.figures.faults += _kill_one(stage)
        time.sleep(BETWEEN_KILLS_S)
    stage.ends(request, within_s=120)
    starts = Counter(note.part for note in stage.fleet.notes("S", request.id))
    deaths = sum(starts[int(deadly)] for deadly in DEADLY)
    stage.deaths = stage.figures.faults + deaths
    stage.counts(request, RECORDS - len(DEADLY), len(DEADLY))
    expected = [str(n) for n in range(1, RECORDS + 1) if str(n) not in DEADLY]
    stage.accounts("results", stage.results(request), expected)
    found = [failure.line for failure in request.errors()]
    if sorted(found) != sorted(map(int, DEADLY)):
        stage.breaks(f"A12 failures are of the lines {found}, not of {DEADLY}")
    stage.figures.again = sum(starts.values()) - len(starts)
    first = stage.figures.faults + len(DEADLY)
    most = round(first * NOT_KEPT_S * 1e3 / RECORD_MS + deaths * IN_A_PART / PIECES / 2)
    if stage.figures.again > most:
        stage.breaks(f"A4 {stage.figures.again} records ran again, {most} would be explained")


def _kill_one(stage: "Stage") -> int:
    """Kill a process that works. Returns whether there was one."""
    working = {note.pid for note in stage.fleet.notes("S")[-20:]}
    pids = [pid for pool in stage.pools for pid in stage.fleet.children(pool) if pid in working]
    if not pids:
        return 0
    with suppress(ProcessLookupError):
        os.kill(stage.chance.choice(pids), signal.SIGKILL)
    return 1


def frozen(stage: "Stage") -> None:
    """A worker freezes over a part, others fail some of it, and it wakes when that is retried."""
    stage.pool("-p", "1", "-c", "1")
    name = f"{stage.id}-frozen"
    lines = [f"{n} {'bad' if n in BAD else FROZEN_MS}" for n in range(1, FROZEN_RECORDS + 1)]
    _load(stage, lines, name, "--handler", "careful", "--lines", str(FROZEN_RECORDS))
    (request,) = stage.requests
    wait_until(lambda: stage.begun(request) >= 3, 30)
    (sleeper,) = stage.pools
    pids = [sleeper.pid, *stage.fleet.children(sleeper)]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    stage.figures.faults += 1
    stage.pool("-p", "1", "-c", "1")
    stage.ends(request, within_s=60)
    stage.counts(request, FROZEN_RECORDS - len(BAD), len(BAD))
    other = stage.pools.pop()
    other.terminate()
    other.wait()
    Path(f"{stage.fleet.log}.mended").touch()
    stage.command("retry", name)
    if request.status().state is not State.OPEN:
        stage.breaks(f"A6 {name} is {request.status().state.value} after the retry, not open")
    for pid in pids:
        os.kill(pid, signal.SIGCONT)
    stage.ends(request, within_s=60)
    stage.counts(request, FROZEN_RECORDS)
    expected = [str(n) for n in range(1, FROZEN_RECORDS + 1)]
    stage.accounts("results", stage.results(request), expected)
