"""``streamq server``."""

import signal
from pathlib import Path
from typing import Annotated

import typer

from streamq.errors import InvalidValue
from streamq.servers.local import LocalServer
from streamq.servers.local_cluster import LocalCluster


def server(
    cluster: Annotated[int, typer.Option(help="Start a cluster of so many primaries.")] = 0,
    replicas: Annotated[int, typer.Option(help="Replicas of each primary of a cluster.")] = 0,
    port: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=65_535,
            help="Listen on this port of 127.0.0.1, 0: a free one, instead of a unix socket.",
        ),
    ] = None,
    directory: Annotated[
        Path | None, typer.Option("--dir", help="Keep the data here, over restarts.")
    ] = None,
) -> None:
    """Start an embedded server or a real local cluster, for development.

    It prints the URL on stdout and runs until Ctrl-C. Without --dir the data are deleted then.

        streamq server --cluster 3 --replicas 1
    """
    if not cluster and replicas:
        raise InvalidValue("--replicas goes with --cluster")
    if cluster and (port is not None or directory):
        raise InvalidValue("--port and --dir do not go with --cluster")
    # Any of the usual signals stops it politely. The server ends with this process in any case.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.default_int_handler)
    started = (
        LocalCluster.start(primaries=cluster, replicas=replicas)
        if cluster
        else LocalServer.start(directory, persist=directory is not None, port=port)
    )
    with started:
        typer.echo(started.url)
        typer.echo(f"export STREAMQ_URL={started.url}    Ctrl-C stops it", err=True)
        try:
            while True:
                signal.pause()
        except KeyboardInterrupt:
            typer.echo("stopped", err=True)
