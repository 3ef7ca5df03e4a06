"""``streamq server``."""

import os
import shlex
import signal
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer

from streamq.errors import InvalidValue, ServerError
from streamq.servers import detached
from streamq.servers.local import LocalServer
from streamq.servers.local_cluster import LocalCluster

from .. import render
from ..shared_options import JsonOption


def server(
    cluster: Annotated[
        int,
        typer.Option(
            help="Start a cluster with so many primaries, instead of one server.",
            show_default=False,
        ),
    ] = 0,
    replicas: Annotated[
        int,
        typer.Option(
            help="Give each primary of the cluster so many replicas.", show_default="none"
        ),
    ] = 0,
    port: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=65_535,
            help="Listen on this port of 127.0.0.1 instead of a unix socket; 0 for a free one.",
        ),
    ] = None,
    directory: Annotated[
        Path | None,
        typer.Option("--dir", metavar="DIR", help="Keep the data in this folder, over restarts."),
    ] = None,
    is_detached: Annotated[
        bool,
        typer.Option(
            "--detach",
            help="Start it in the background; it keeps its data in --dir, or .streamq-server.",
        ),
    ] = False,
    is_stopping: Annotated[
        bool, typer.Option("--stop", help="Stop the server of --dir, or of .streamq-server.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Start an embedded server or a real local cluster, for development.

    It prints the URL on stdout and runs until Ctrl-C. Without --dir the data are deleted then. With
    --detach it goes on in the background until --stop, and its data are kept; if a server runs in
    the folder already, that one's URL is printed and no second one starts.

        streamq server --detach
    """
    if not cluster and replicas:
        raise InvalidValue("--replicas goes with --cluster")
    if cluster and (port is not None or directory or is_detached or is_stopping):
        raise InvalidValue("--port, --dir, --detach and --stop do not go with --cluster")
    if is_stopping:
        if is_detached or port is not None:
            raise InvalidValue("--stop goes with --dir only")
        _stop_server(directory or detached.HOME, as_json=as_json)
    elif is_detached:
        _detach_server(directory or detached.HOME, port, as_json=as_json)
    else:
        _run_server_until_signal(cluster, replicas, port, directory, as_json=as_json)


def _run_server_until_signal(
    cluster: int, replicas: int, port: int | None, directory: Path | None, *, as_json: bool
) -> None:
    """Run a server in this process, until a signal comes."""
    # Any of the usual signals stops it politely. The server ends with this process in any case.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.default_int_handler)
    started = (
        LocalCluster.start(primaries=cluster, replicas=replicas)
        if cluster
        else LocalServer.start(directory, persist=directory is not None, port=port)
    )
    with detached.announced_server(directory, started.url) if directory else nullcontext(), started:
        if as_json:
            render.as_json(
                _server_as_dict(detached.Serving(started.url, os.getpid(), str(directory or "")))
            )
            sys.stdout.flush()
        else:
            typer.echo(started.url)
        typer.echo(f"export STREAMQ_URL={started.url}    Ctrl-C stops it", err=True)
        try:
            while True:
                signal.pause()
        except KeyboardInterrupt:
            typer.echo("stopped", err=True)


def _detach_server(folder: Path, port: int | None, *, as_json: bool) -> None:
    # -P: a module in the current folder must not be taken for one of ours.
    command = [sys.executable, "-P", "-m", "streamq.cli", "server", "--dir", str(folder.absolute())]
    if port is not None:
        command += ["--port", str(port)]
    serving, is_new = detached.start_detached(folder, command)
    if port and not serving.url.endswith(f":{port}"):
        raise ServerError(f"a server runs in {folder} already, at {serving.url}; --stop ends it")
    if as_json:
        render.as_json(_server_as_dict(serving) | {"new": is_new})
        return
    typer.echo(serving.url)
    where = "" if folder == detached.HOME else f" --dir {shlex.quote(str(folder))}"
    how = "started" if is_new else "runs already"
    render.note(f"{how}, process {serving.pid}; data in {folder}; streamq server --stop{where}")


def _stop_server(folder: Path, *, as_json: bool) -> None:
    serving = detached.stop_detached(folder)
    if as_json:
        render.as_json(_server_as_dict(serving) if serving else None)
    elif serving:
        render.note(f"stopped, process {serving.pid}; data stay in {folder}")
    if serving is None:
        raise ServerError(f"no server runs in {folder}")


def _server_as_dict(serving: detached.Serving) -> dict[str, Any]:
    return {"url": serving.url, "pid": serving.pid, "dir": serving.folder or None}
