"""``streamq results``."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from streamq import units
from streamq.errors import InvalidValue
from streamq.model import State, Status
from streamq.queue.request import Request
from streamq.records.outputs import FORMS, FileOutput, form_of, is_stream
from streamq.runs.collect import Collector, file_of, show, write_errors

from .. import render
from ..connecting import connected, naming
from ..shared_options import PrefixOption, UrlOption


def results(
    request_id: Annotated[str, typer.Argument(metavar="ID")],
    output: Annotated[
        str, typer.Option("-o", "--output", metavar="FILE", help="Write here instead of stdout.")
    ] = "",
    is_ordered: Annotated[
        bool, typer.Option("--ordered/--unordered", help="In input order, or as they come.")
    ] = True,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on until the request has ended.")
    ] = False,
    form: Annotated[
        str,
        typer.Option(
            "--output-format",
            metavar="|".join(FORMS),
            help="Form of the lines; by the file's name if not given.",
        ),
    ] = "",
    force: Annotated[
        bool,
        typer.Option(
            "--force", help="Replace a file that exists, or go on in one that was renamed."
        ),
    ] = False,
    url: UrlOption = None,
    prefix: PrefixOption = None,
) -> None:
    """Write the results of a request: one line for each record that returned something.

    Each result goes into the file exactly once, and is then deleted from the server. A command that
    was killed continues if run again. Failures of out.jsonl go to out.errors.jsonl. Without a file,
    results are shown on stdout and stay in the server.

        streamq results ID -o out.jsonl --follow
    """
    form = form or form_of(output)
    if form not in FORMS:
        raise InvalidValue(f"--output-format {form!r} is none of {', '.join(FORMS)}")
    if not output and not is_ordered:
        raise InvalidValue("--unordered goes with -o FILE")
    units.file_name(str(Path(output).absolute()))
    if output and is_stream(Path(output)):
        raise InvalidValue(f"{output} is no regular file: leave -o out, and use the shell's >")
    with connected(url, prefix) as protocol, naming(request_id):
        if not output:
            for data in show(protocol, request_id, form, follow=follow):
                sys.stdout.buffer.write(data)
            sys.stdout.buffer.flush()
            _account(Request(protocol, request_id), file_of(protocol, request_id))
            return
        collector = Collector(protocol, request_id, FileOutput(Path(output), request_id), form)
        try:
            is_complete = collector.run(is_ordered=is_ordered, follow=follow, force=force)
        except KeyboardInterrupt:
            render.note("stopped; the same command goes on")
            raise
        if is_complete:
            request = Request(protocol, request_id)
            render.failures(collector.failures, write_errors(collector.failures, Path(output)))
            _refuse_cancelled(request.status())
        else:
            render.note(f"{request_id} still runs: the same command goes on, --follow to its end")


def _account(request: Request, file: str) -> None:
    """Tell the user which results were not among those shown."""
    status = request.status()
    if file:
        render.note(
            f"results that were written to {file} are not shown: the server has them no more"
        )
    if status.records.failed:
        render.note(
            f"{render.count(status.records.failed, 'record')} failed: streamq errors {status.id}"
        )
    _refuse_cancelled(status)


def _refuse_cancelled(status: Status) -> None:
    """Exit with 5 for a cancelled request, as ``wait`` does: its results are not complete."""
    if status.state is State.CANCELLED:
        done, total = status.parts.done, status.parts.total
        render.note(f"{status.id} was cancelled: {done} of {total} parts were done")
        raise typer.Exit(5)
