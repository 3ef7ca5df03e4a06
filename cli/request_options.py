"""The options of a request that ``load`` and ``run`` share."""

from typing import Annotated, Any

import msgspec
import typer

from streamq.flows.flow import Flow
from streamq.model import LEVEL, WEIGHT, Policy
from streamq.queue.options import policy_of_options
from streamq.records.names import FORMATS
from streamq.runs import options
from streamq.runs.options import Source, describe_flow, describe_source

from . import panels
from .option_structs import option_name

_OF_FILES = [each for each in FORMATS if each != "requests"]


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
            # `load` alone takes `requests`, and its own text explains that.
            metavar="|".join(_OF_FILES),
            help="What the files hold. auto goes by the name of a file; file makes each file one "
            "record.",
            rich_help_panel=panels.INPUT,
        ),
    ] = "auto"
    part_bytes: Annotated[
        str,
        typer.Option(
            "--bytes",
            metavar="SIZE",
            help="Put whole records into a part up to this size. A part is what a worker gets at a "
            "time.",
            show_default="what takes 0.25 s, up to 256KiB",
            rich_help_panel=panels.INPUT,
        ),
    ] = ""
    lines: Annotated[
        int,
        typer.Option(
            "--lines",
            min=0,
            help="Put this many records into a part, instead of going by --bytes.",
            show_default="as for --bytes",
            rich_help_panel=panels.INPUT,
        ),
    ] = 0
    delimiter: Annotated[
        str,
        typer.Option(
            "--delimiter",
            metavar="CHAR",
            help="Character between two fields.",
            show_default="a comma; a tab in .tsv",
            rich_help_panel=panels.CSV,
        ),
    ] = ""
    quote: Annotated[
        str,
        typer.Option(
            "--quote",
            metavar="CHAR",
            help="Character around fields that hold a delimiter; '' for none.",
            rich_help_panel=panels.CSV,
        ),
    ] = '"'
    escape: Annotated[
        str,
        typer.Option(
            "--escape",
            metavar="CHAR",
            help="Character before a quote or delimiter that belongs to the field, such as \\.",
            show_default="none; quotes are doubled",
            rich_help_panel=panels.CSV,
        ),
    ] = ""
    header: Annotated[
        str,
        typer.Option(
            "--header",
            metavar="A,B,C",
            help="Names of the columns, for files whose first line is not a header. One that has a "
            "header, too, needs --skip-rows 1.",
            rich_help_panel=panels.CSV,
        ),
    ] = ""
    has_no_header: Annotated[
        bool,
        typer.Option(
            "--no-header",
            help="The first line is data too: the function gets each row as a list.",
            rich_help_panel=panels.CSV,
        ),
    ] = False
    skip_rows: Annotated[
        int,
        typer.Option(
            "--skip-rows",
            min=0,
            metavar="N",
            help="Leave out the first N rows of each file: titles, or a header that --header "
            "replaces.",
            show_default="none",
            rich_help_panel=panels.CSV,
        ),
    ] = 0
    encoding: Annotated[
        str,
        typer.Option(
            "--encoding",
            metavar="NAME",
            help="How the text in the files is encoded: latin-1, cp1252, utf-16.",
            show_default="utf-8",
            rich_help_panel=panels.INPUT,
        ),
    ] = ""
    by_reference: Annotated[
        bool,
        typer.Option(
            "--by-reference",
            help="Send workers the place of the data instead of the data: for large files that "
            "every worker can read.",
            rich_help_panel=panels.INPUT,
        ),
    ] = False
    is_strict: Annotated[
        bool,
        typer.Option(
            "--strict",
            help="Stop at a file that cannot be read or is too large. Else it is one failure, and "
            "the others go on.",
            rich_help_panel=panels.FAILURES,
        ),
    ] = False
    key: Annotated[
        str,
        typer.Option(
            "--key",
            metavar="FIELD",
            help="Field by which streamq find knows a record: sku, user.id, or . for all of the "
            "record. Then a part is one record, unless --lines or --bytes is given.",
            show_default="none",
            rich_help_panel=panels.FIND,
        ),
    ] = ""
    track: Annotated[
        bool,
        typer.Option(
            "--track",
            help="Of a flow, keep where each item is, for streamq find --item. --key does so, too.",
            rich_help_panel=panels.FIND,
        ),
    ] = False
    trace: Annotated[
        bool,
        typer.Option(
            "--trace",
            help="Of a flow, keep what each item came to in each stage, for streamq find. It stays "
            "in the server's memory as long as the request.",
            rich_help_panel=panels.FIND,
        ),
    ] = False
    level: Annotated[
        int,
        typer.Option(
            "--level",
            "--priority",
            metavar="0-99",
            help="Priority among requests: 0 goes first, 99 last.",
            rich_help_panel=panels.SPEED,
        ),
    ] = LEVEL
    weight: Annotated[
        int,
        typer.Option(
            "--weight",
            metavar="1-64",
            help="Share among requests of the same level: a 4 gets half as many turns as an 8.",
            rich_help_panel=panels.SPEED,
        ),
    ] = WEIGHT
    rate: Annotated[
        str,
        typer.Option(
            "--rate",
            metavar="N/s",
            help="Start at most so many records in a time: 100/s, 30/m. Where the function takes "
            "a whole part, parts are counted.",
            show_default="no bound",
            rich_help_panel=panels.SPEED,
        ),
    ] = ""
    retries: Annotated[
        int | None,
        typer.Option(
            "--retries",
            help="Try a failed record again so many times.",
            show_default="what the function says, else 3",
            rich_help_panel=panels.FAILURES,
        ),
    ] = None
    timeout: Annotated[
        str,
        typer.Option(
            "--timeout",
            metavar="TIME",
            help="Longest time that a record may take: 30s, 5m, 1h30m. Where the function takes a "
            "whole part, or a program does, it is for the part.",
            show_default="what the function says, else none",
            rich_help_panel=panels.FAILURES,
        ),
    ] = ""
    max_failures: Annotated[
        str,
        typer.Option(
            "--max-failures",
            metavar="N|P%",
            help="End the request when more than N records, or P per cent of them, have failed. A "
            "percentage is checked after 1,000 records and at the end.",
            show_default="no bound",
            rich_help_panel=panels.FAILURES,
        ),
    ] = ""

    def source(self, flow: Flow | None = None) -> Source:
        """Return the request that the options describe, or that they and a flow describe.

        Raises:
            InvalidValue: an option is not allowed, or a file cannot be read.
        """
        common: dict[str, Any] = {
            "queue": self.queue,
            "limit": self.limit,
            "keep": self.keep,
            "named": option_name,
            **self.given(),
        }
        if flow:
            return describe_flow(flow, self.files, **common)
        return describe_source(self.files, handler=self.handler, **common)

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
            "skip_rows": self.skip_rows,
            "encoding": self.encoding,
            "strict": self.is_strict,
            "by_reference": self.by_reference,
            "level": self.level,
            "weight": self.weight,
            "rate": self.rate or None,
            "retries": self.retries,
            "timeout": self.timeout or None,
            "max_failures": self.max_failures or None,
            "key": self.key,
            "track": self.track,
            "trace": self.trace,
        }

    def policy_of_each(self) -> Policy:
        """Return the policy that all requests of ``--format requests`` have in common."""
        return policy_of_options(
            handler=self.handler,
            queue=self.queue,
            level=self.level,
            weight=self.weight,
            limit=self.limit,
            rate=self.rate or None,
            retries=self.retries,
            timeout=self.timeout or None,
            max_failures=self.max_failures or None,
            keep=self.keep,
            named=option_name,
        )
