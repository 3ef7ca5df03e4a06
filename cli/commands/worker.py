"""``streamq worker``."""

from typing import Annotated

import msgspec
import typer

from streamq.errors import AppLoadError, InvalidValue
from streamq.settings import Settings
from streamq.telemetry.logs import harmless_log_text
from streamq.worker.channel import MOST_PROCESSES, MOST_SLOTS, PoolOptions, ProcessConfig
from streamq.worker.options import ALL_LEVELS, LARGEST_RESULT, describe_pool, describe_process
from streamq.worker.program import words_of_program
from streamq.worker.spawning import Spawner

from .. import panels, render
from ..connecting import connected, url_of_options
from ..option_structs import option_name, with_options
from ..shared_options import (
    ExecOption,
    HealthPortOption,
    LogFormat,
    LogFormatOption,
    LogLevel,
    LogLevelOption,
    PrefixOption,
    QueueOption,
    UrlOption,
    shared_log_style,
    use_log_options,
)


class WorkerCommandOptions(msgspec.Struct, kw_only=True):
    """The options of a pool, as they were typed."""

    target: Annotated[
        str,
        typer.Argument(
            metavar="MODULE:APP",
            help="The app with the handlers: package.module:app or file.py:app.",
            rich_help_panel=panels.FUNCTION,
        ),
    ] = ""
    command: ExecOption = ""
    handler: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="With --exec: the name by which requests call the program.",
            rich_help_panel=panels.FUNCTION,
        ),
    ] = ""
    processes: Annotated[
        int,
        typer.Option(
            "-p",
            "--processes",
            min=1,
            max=MOST_PROCESSES,
            envvar="STREAMQ_PROCESSES",
            help="Run handlers in so many processes.",
            rich_help_panel=panels.SPEED,
        ),
    ] = 1
    slots: Annotated[
        int,
        typer.Option(
            "-c",
            "--concurrency",
            min=1,
            max=MOST_SLOTS,
            envvar="STREAMQ_CONCURRENCY",
            help="Run so many parts at once in each process: more than 1 where handlers wait, as "
            "for an API.",
            rich_help_panel=panels.SPEED,
        ),
    ] = 1
    queue: QueueOption = "default"
    levels: Annotated[
        str,
        typer.Option(
            metavar="RANGE",
            help="Take only requests of these priorities, such as 0-19.",
            rich_help_panel=panels.SPEED,
        ),
    ] = ALL_LEVELS
    is_burst: Annotated[
        bool,
        typer.Option(
            "--burst",
            help="Exit when nothing is left to do.",
            rich_help_panel=panels.STOPPING,
        ),
    ] = False
    max_idle: Annotated[
        str,
        typer.Option(
            metavar="TIME",
            help="Exit after this time without anything to do.",
            show_default="never",
            rich_help_panel=panels.STOPPING,
        ),
    ] = ""
    max_parts: Annotated[
        int,
        typer.Option(
            min=0,
            help="Replace a process by a new one after so many parts.",
            show_default="never",
            rich_help_panel=panels.STOPPING,
        ),
    ] = 0
    max_memory: Annotated[
        str,
        typer.Option(
            metavar="SIZE",
            help="Replace a process by a new one when it uses more memory than this.",
            show_default="never",
            rich_help_panel=panels.STOPPING,
        ),
    ] = ""
    max_result: Annotated[
        str,
        typer.Option(
            metavar="SIZE",
            help="Fail a part whose results are larger than this.",
            rich_help_panel=panels.SPEED,
        ),
    ] = LARGEST_RESULT
    grace: Annotated[
        str,
        typer.Option(
            metavar="TIME",
            envvar="STREAMQ_GRACE",
            help="After TERM or Ctrl-C, let running parts go on for so long.",
            rich_help_panel=panels.STOPPING,
        ),
    ] = "25s"
    cancel_grace: Annotated[
        str,
        typer.Option(
            metavar="TIME",
            help="Let a part whose request was cancelled go on for so long.",
            rich_help_panel=panels.STOPPING,
        ),
    ] = "10s"
    quantum: Annotated[
        str,
        typer.Option(
            metavar="TIME",
            help="Work on one request for so long before others of its priority have a turn.",
            rich_help_panel=panels.SPEED,
        ),
    ] = "50ms"
    lease: Annotated[
        str,
        typer.Option(
            metavar="TIME",
            help="Other workers take over the parts of this one when it has been silent for so "
            "long, and some seconds more.",
            show_default="20s",
            rich_help_panel=panels.STOPPING,
        ),
    ] = ""
    health_port: HealthPortOption = ""
    allow_read: Annotated[
        list[str],
        typer.Option(
            metavar="DIR|URL",
            help="Let requests loaded with --by-reference read files below this; may be repeated.",
            show_default="none",
            rich_help_panel=panels.FUNCTION,
        ),
    ] = []
    spool: Annotated[
        list[str],
        typer.Option(
            metavar="DIR",
            help="Keep results of requests loaded with --spool in this folder, which the machine "
            "of the collector has, too; may be repeated.",
            show_default="none",
            rich_help_panel=panels.FUNCTION,
        ),
    ] = []
    allow_post: Annotated[
        list[str],
        typer.Option(
            metavar="URL",
            help="Post webhooks of requests to URLs below this; may be repeated.",
            show_default="none",
            rich_help_panel=panels.FUNCTION,
        ),
    ] = []
    is_reloading: Annotated[
        bool,
        typer.Option(
            "--reload",
            help="Restart the processes when the code changes, for development.",
            rich_help_panel=panels.FUNCTION,
        ),
    ] = False
    log_level: LogLevelOption = LogLevel.INFO
    log_format: LogFormatOption = LogFormat.TEXT

    def config(self, url: str | None, prefix: str | None) -> ProcessConfig:
        """Return the configuration of the pool's processes."""
        argv = words_of_program(self.command)
        if bool(self.target) == bool(argv) or bool(argv) != bool(self.handler):
            raise InvalidValue("give MODULE:APP, or --exec 'PROGRAM ARGS' --handler NAME")
        return describe_process(
            self.target,
            url=url_of_options(url),
            prefix=prefix or Settings.from_env().prefix,
            command=self.command,
            handler=self.handler,
            queue=self.queue,
            concurrency=self.slots,
            levels=self.levels,
            quantum=self.quantum,
            lease=self.lease or None,
            max_result=self.max_result,
            allow_read=self.allow_read,
            allow_post=self.allow_post,
            spool=self.spool,
            log_level=self.log_level.value,
            log_format=shared_log_style(self.log_format),
            named=option_name,
        )

    def pool(self) -> PoolOptions:
        """Return the options of the pool's parent."""
        return describe_pool(
            processes=self.processes,
            concurrency=self.slots,
            burst=self.is_burst,
            max_idle=self.max_idle or None,
            max_parts=self.max_parts,
            max_memory=self.max_memory or None,
            grace=self.grace,
            cancel_grace=self.cancel_grace,
            reload=self.is_reloading,
            named=option_name,
        )


@with_options
def worker(
    options: WorkerCommandOptions, url: UrlOption = None, prefix: PrefixOption = None
) -> None:
    """Run the handlers of an app on parts of requests, in processes that are restarted if they die.

    After TERM or Ctrl-C running parts may finish, and the rest is handed back. A second Ctrl-C
    stops at once; nothing is lost then either. HUP restarts the processes, USR1 stops taking parts,
    USR2 logs what runs.

    With --exec a program is the handler, under the name that --handler gives it.

        streamq worker shop.tasks:app -p 4 -c 8
    """
    config, pool = options.config(url, prefix), options.pool()
    use_log_options(options.log_level, options.log_format)
    try:
        with Spawner(config.slots, pool.processes) as spawner:
            # Importing redis-py takes about as long as the processes take to start.
            from streamq.worker.service import serve_pool

            with connected(url, prefix, is_patient=False, is_warned=True) as protocol:
                try:
                    code = serve_pool(
                        protocol,
                        config,
                        pool,
                        spawner,
                        levels=options.levels,
                        health_port=options.health_port,
                    )
                except AppLoadError as error:
                    typer.echo(harmless_log_text(error.trace), err=True, nl=False)
                    render.error(str(error))
                    code = 4
    except KeyboardInterrupt:
        code = 0  # stopped before any part was taken
    raise typer.Exit(code)
