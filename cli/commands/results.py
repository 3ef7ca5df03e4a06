"""``streamq results``."""

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer

from streamq import units
from streamq.errors import InvalidValue
from streamq.model import State, Status
from streamq.queue.request import Request
from streamq.records.errors_file import errors_beside
from streamq.records.gaps import gaps_beside
from streamq.records.manifest import check_manifest, write_manifest
from streamq.records.outputs import (
    FORMS,
    FileOutput,
    check_output_keys,
    check_output_name,
    form_by_output_name,
    is_stream_output,
)
from streamq.runs.collect import Collector, show_results, write_collected_errors
from streamq.runs.committed import file_of_committed
from streamq.runs.spooled_results import spools_of_fleet

from .. import render
from ..connecting import connected, naming_request
from ..failure_lines import show_failures
from ..finding import FoundPlace, place_of_request
from ..shared_options import PrefixOption, RunIdArgument, UrlOption


def results(  # noqa: PLR0913  the options of a collection are many and flat
    request_id: RunIdArgument = None,
    *,
    output: Annotated[
        str,
        typer.Option(
            "-o",
            "--output",
            metavar="FILE",
            help="Write results to this file, instead of standard output.",
        ),
    ] = "",
    is_ordered: Annotated[
        bool,
        typer.Option(
            "--ordered/--unordered",
            help="Write results in the order of the input, or as they come.",
        ),
    ] = True,
    follow: Annotated[
        bool,
        typer.Option(
            "--follow",
            "-f",
            help="Go on until the request has ended, and write results as they come.",
        ),
    ] = False,
    form: Annotated[
        str,
        typer.Option(
            "--output-format",
            metavar="|".join(FORMS),
            help="Write each result as JSON, as a row of CSV or TSV, or as the text it is.",
            show_default="by the name of the output",
        ),
    ] = "",
    has_keys: Annotated[
        bool,
        typer.Option(
            "--with-keys",
            help="Write the numbers of part and record with each result, for JSON lines and CSV.",
        ),
    ] = False,
    has_manifest: Annotated[
        bool,
        typer.Option(
            "--manifest",
            help="Write out.manifest.json beside out.jsonl, when it is complete: counts and "
            "digests, by which streamq verify compares them.",
        ),
    ] = False,
    spool: Annotated[
        str,
        typer.Option(
            metavar="DIR",
            help="Read results that workers keep in this folder, by the same option, and remove "
            "those that are written.",
            show_default="none",
        ),
    ] = "",
    force: Annotated[
        bool,
        typer.Option(
            "--force", help="Replace a file that exists, or go on in one that was renamed."
        ),
    ] = False,
    is_json: Annotated[
        bool,
        typer.Option("--json", help="With -o: print the summary at the end as JSON, for programs."),
    ] = False,
    url: UrlOption = None,
    prefix: PrefixOption = None,
) -> None:
    """Write the results of a request: one line for each record that returned something.

    Each result goes into the file exactly once, and is then deleted from the server. A command that
    was killed continues if run again. Failures of out.jsonl go to out.errors.jsonl. Results of
    parts that were retried are put in their place in the file. Without a file, results are shown on
    stdout and stay in the server.

        streamq results ID -o out.jsonl --follow
    """
    check_output_name(output, form)
    form = form or form_by_output_name(output)
    _check_result_options(form, output, is_ordered=is_ordered, has_keys=has_keys, is_json=is_json)
    place = place_of_request(request_id, url, prefix)
    request_id = place.ids[0]
    _refuse_results_of_run(place, output)
    with connected(place.url, place.prefix) as protocol, naming_request(request_id):
        request = Request(protocol, request_id)
        if not output:
            _show_results_on_stdout(
                show_results(protocol, request_id, form, follow=follow, has_keys=has_keys)
            )
            _account_for_unshown_results(request, file_of_committed(protocol, request_id))
            return
        path = Path(output)
        if has_manifest:
            check_manifest(path, force=force)
        collector = Collector(
            protocol,
            request_id,
            FileOutput(path, request_id),
            form,
            gaps=gaps_beside(path, request_id),
            has_keys=has_keys,
            spools=spools_of_fleet(protocol, request_id, form, spool, has_keys=has_keys),
        )
        try:
            is_complete = collector.run(is_ordered=is_ordered, follow=follow, force=force)
        except KeyboardInterrupt:
            render.note("stopped; the same command goes on")
            raise
        if is_json:
            _print_results_summary(request.status(), path, is_complete=is_complete)
        if is_complete:
            show_failures(collector.failures, write_collected_errors(collector.failures, path))
            if has_manifest:
                files = protocol.inspect(request_id).spec.files
                write_manifest(path, request.status(), files, form)
            _refuse_results_of_cancelled(request.status())
        else:
            render.note(f"{request_id} still runs: the same command goes on, --follow to its end")


def _show_results_on_stdout(lines: Iterable[bytes]) -> None:
    for data in lines:
        sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()


def _print_results_summary(status: Status, output: Path, *, is_complete: bool) -> None:
    """Print what is in a file now. Failures are written once all results are there."""
    has_failures = is_complete and status.records.failed > 0
    render.as_json(
        {
            "request": status.id,
            "state": status.state,
            "is_complete": is_complete,
            "parts": status.parts,
            "records": status.records,
            "output": str(output.absolute()),
            "errors_file": str(errors_beside(output.absolute())) if has_failures else None,
        }
    )


def _refuse_results_of_run(place: FoundPlace, output: str) -> None:
    """Refuse to write the results of a run of this folder: it does that itself."""
    if place.run and output:
        raise InvalidValue(f"run {place.run.id} itself writes its results, to {place.run.output}")


def _check_result_options(
    form: str, output: str, *, is_ordered: bool, has_keys: bool, is_json: bool
) -> None:
    if form not in FORMS:
        raise InvalidValue(f"--output-format {form!r} is none of {', '.join(FORMS)}")
    if has_keys:
        check_output_keys(form, "--with-keys")
    if not output and not is_ordered:
        raise InvalidValue("--unordered goes with -o FILE")
    if not output and is_json:
        raise InvalidValue("--json goes with -o FILE: results are on standard output")
    units.file_name(str(Path(output).absolute()))
    if output and is_stream_output(Path(output)):
        raise InvalidValue(f"{output} is no regular file: leave -o out, and use the shell's >")


def _account_for_unshown_results(request: Request, file: str) -> None:
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
    _refuse_results_of_cancelled(status)


def _refuse_results_of_cancelled(status: Status) -> None:
    """Exit with 5 for a cancelled request, as ``wait`` does: its results are not complete."""
    if status.state is State.CANCELLED:
        done, total = status.parts.done, status.parts.total
        render.note(f"{status.id} was cancelled: {done} of {total} parts were done")
        raise typer.Exit(5)
