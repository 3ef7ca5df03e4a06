"""``streamq demo``."""

import os
import signal
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from streamq.model import PREFIX, Policy, Spec
from streamq.records.sizes import PartSize
from streamq.runs import demo as demonstration
from streamq.runs.plan import Plan
from streamq.runs.progress import Progress
from streamq.runs.run import Run
from streamq.servers.local import FOR_ONE_RUN, LocalServer
from streamq.telemetry import logs

from ..ui import dashboard_shown_meanwhile

TARGET = "streamq.runs.demo:count_letters"
PROCESSES = 2
DEFAULT_LINES = 200_000


def demo(
    lines: Annotated[
        int, typer.Option(min=1_000, help="Make an input of so many lines.")
    ] = DEFAULT_LINES,
    has_chaos: Annotated[
        bool,
        typer.Option("--chaos/--no-chaos", help="Kill a worker process on the way, or do not."),
    ] = True,
    has_ui: Annotated[
        bool,
        typer.Option(
            "--ui", help="Show it in a browser, too, until Ctrl-C; with 10 times the lines."
        ),
    ] = False,
) -> None:
    """Show it all in a few seconds: a run on an embedded server, a worker killed on purpose.

    streamq demo
    """
    logs.send_logs_to_stderr("error", "text")
    lines = lines * 10 if has_ui and lines == DEFAULT_LINES else lines
    with tempfile.TemporaryDirectory(prefix="streamq-demo-") as folder:
        source, output = Path(folder, "words.txt"), Path(folder, "letters.jsonl")
        size = demonstration.make_input(source, lines)
        typer.echo(f"made      words.txt: {lines:,} lines, {size / 1e6:.1f} MB")
        typer.echo(f"running   streamq run words.txt --map {TARGET} -o letters.jsonl")
        plan = _demo_plan(source, output)
        home = Path(folder, "server")
        with LocalServer.start(home, persist=True, options=FOR_ONE_RUN) as server:
            run = Run(plan, server.url, PREFIX, log_level="error")
            killer = _DemoKiller(run, is_armed=has_chaos)
            with dashboard_shown_meanwhile(
                server.url, PREFIX, plan.policy.queue, plan.id, wanted=has_ui
            ):
                begun = time.monotonic()
                status = run.run(killer, force=True)
                seconds = time.monotonic() - begun
                if has_ui and run.is_complete:
                    typer.echo(f"done      in {seconds:.1f} s; the dashboard stays until Ctrl-C")
                    with suppress(KeyboardInterrupt):
                        signal.pause()
        if not run.is_complete:
            typer.echo("stopped")
            raise typer.Exit(128 + run.stopped_by)
        is_right = _is_demo_output_right(source, output)
    records = status.records
    typer.echo(f"done      in {seconds:.1f} s: {records.done:,} records, {records.failed} failed")
    if killer.victim:
        typer.echo(f"          process {killer.victim} was killed with signal 9 on the way")
    if not is_right:
        typer.echo("checked   THE RESULTS ARE NOT THOSE OF THE SAME LOOP IN ONE PROCESS")
        raise typer.Exit(1)
    typer.echo("checked   every line has its result, once, in input order: nothing was lost")
    typer.echo("\nnext      streamq run YOUR_FILE --map yourmodule:function -o out.jsonl")
    typer.echo("          streamq run --help, streamq worker --help")


def _demo_plan(source: Path, output: Path) -> Plan:
    spec = Spec(format="lines", files=(str(source),))
    return Plan(
        id="demo",
        target=TARGET,
        output=str(output),
        form="jsonl",
        policy=Policy(handler="count_letters", limit=PROCESSES, spec=spec),
        size=PartSize(bytes=32 * 1024),
        processes=PROCESSES,
        slots=1,
        window_bytes=2**28,
    )


class _DemoKiller:
    """Watches the progress, and kills a process once 20 parts are done."""

    def __init__(self, run: Run, *, is_armed: bool) -> None:
        self._run = run
        self._is_armed = is_armed
        self.victim = 0

    def __call__(self, progress: Progress) -> None:
        status = progress.status
        if self._is_armed and not self.victim and status.parts.done > 20:
            self.victim = self._run.processes()[0]
            os.kill(self.victim, signal.SIGKILL)
            typer.echo(
                f"killing   process {self.victim}, after {status.parts.done} of "
                f"{status.parts.total} parts"
            )


def _is_demo_output_right(source: Path, output: Path) -> bool:
    """Return whether the output is what the same function makes of the input in one process."""
    with source.open() as lines, output.open("rb") as results:
        for line, result in zip(lines, results, strict=True):
            wanted = demonstration.count_letters(line.rstrip("\n"))
            if msgspec.json.decode(result) != wanted:
                return False
    return True
