"""The options of a request that ``load`` and ``run`` share."""

from typing import Annotated

import msgspec
import typer

from streamq.model import LEVEL, Policy
from streamq.queue.options import policy
from streamq.records.names import FORMATS
from streamq.runs import options
from streamq.runs.options import Source, describe_source

from . import render
from .option_structs import named


class RequestOptions(msgspec.Struct, kw_only=True):
    """The options as they were typed. Annotated fields are options of both commands."""

    files: list[str] = []
    handler: str = ""
    queue: str = "default"
    limit: int = 1
    keep: str = "7d"
    form: Annotated[
        str,
        typer.Option(
            "--format",
            metavar="|".join(FORMATS),
            help="How files are split into records; auto goes by the name.",
        ),
    ] = "auto"
    part_bytes: Annotated[
        str,
        typer.Option("--bytes", metavar="SIZE", help="A part holds whole records up to this size."),
    ] = "256KiB"
    lines: Annotated[
        int,
        typer.Option("--lines", min=0, help="A part holds this many records, instead of --bytes."),
    ] = 0
    delimiter: Annotated[
        str,
        typer.Option("--delimiter", metavar="CHAR", help="Character between the fields of a CSV."),
    ] = ""
    quote: Annotated[
        str,
        typer.Option(
            "--quote", metavar="CHAR", help="Character around fields of a CSV; '' for none."
        ),
    ] = '"'
    escape: Annotated[
        str,
        typer.Option(
            "--escape", metavar="CHAR", help="Character before one that is meant literally."
        ),
    ] = ""
    header: Annotated[
        str,
        typer.Option("--header", metavar="A,B,C", help="Column names, for a CSV without a header."),
    ] = ""
    has_no_header: Annotated[
        bool, typer.Option("--no-header", help="The CSV has no header: handlers get rows as lists.")
    ] = False
    by_reference: Annotated[
        bool,
        typer.Option(
            "--by-reference", help="Store only where each part's bytes are; workers read the files."
        ),
    ] = False
    level: Annotated[int, typer.Option("--level", "--priority", help="0 goes first, 99 last.")] = (
        LEVEL
    )
    rate: Annotated[
        str,
        typer.Option(
            "--rate", metavar="N/s", help="Start at most N records (of a map) or parts a second."
        ),
    ] = ""
    retries: Annotated[int | None, typer.Option("--retries", help="Attempts after the first.")] = (
        None
    )
    timeout: Annotated[
        str, typer.Option("--timeout", metavar="TIME", help="Longest time that a part may run.")
    ] = ""
    max_failures: Annotated[
        str,
        typer.Option(
            "--max-failures",
            metavar="N|P%",
            help="More failures end the request; P% is checked after 1,000 records and at the end.",
        ),
    ] = ""

    def source(self) -> Source:
        """Return the request that the options describe.

        Raises:
            InvalidValue: an option is not allowed, or a file cannot be read.
        """
        return describe_source(
            self.files,
            handler=self.handler,
            queue=self.queue,
            limit=self.limit,
            keep=self.keep,
            named=named,
            warn=render.warning,
            **self.given(),
        )

    def given(self) -> options.RequestOptions:
        """Return the options that ``load`` and ``run`` have in common."""
        return {
            "format": self.form,
            "bytes": self.part_bytes,
            "lines": self.lines,
            "delimiter": self.delimiter,
            "quote": self.quote,
            "escape": self.escape,
            "header": self.header,
            "no_header": self.has_no_header,
            "by_reference": self.by_reference,
            "level": self.level,
            "rate": self.rate or None,
            "retries": self.retries,
            "timeout": self.timeout or None,
            "max_failures": self.max_failures or None,
        }

    def policy_of_each(self) -> Policy:
        """Return the policy that all requests of ``--format requests`` have in common."""
        return policy(
            handler=self.handler,
            queue=self.queue,
            level=self.level,
            limit=self.limit,
            rate=self.rate or None,
            retries=self.retries,
            timeout=self.timeout or None,
            max_failures=self.max_failures or None,
            keep=self.keep,
            named=named,
        )
