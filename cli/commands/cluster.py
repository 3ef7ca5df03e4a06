"""``streamq cluster``: its commands are ``create`` and ``status``."""

from collections.abc import Sequence
from typing import Annotated

import typer

from streamq import units
from streamq.admin import cluster as clusters
from streamq.admin.cluster import ClusterStatus, NodeStatus
from streamq.driver.url import ServerURL
from streamq.servers.topology import SLOTS
from streamq.settings import Settings, url_with_login

from .. import render
from ..connecting import url_of_options
from ..shared_options import JsonOption, UrlOption


def cluster(url: UrlOption = None) -> None:
    """Make a cluster of running servers, or show one. No other tool is needed.

    streamq cluster create 10.0.0.1:6379 10.0.0.2:6379 10.0.0.3:6379 --replicas 0
    """


def create(
    nodes: Annotated[
        list[str],
        typer.Argument(
            metavar="HOST:PORT", help="Empty servers, started with cluster-enabled yes."
        ),
    ],
    replicas: Annotated[int, typer.Option(min=0, help="Give each primary so many replicas.")] = 1,
    timeout: Annotated[
        str,
        typer.Option(metavar="TIME", help="Wait so long for all nodes to agree on the cluster."),
    ] = "60s",
    is_waiting: Annotated[
        bool,
        typer.Option("--wait", help="Wait up to --timeout for servers that do not answer yet."),
    ] = False,
    is_json: JsonOption = False,
    url: UrlOption = None,
) -> None:
    """Make a cluster of empty servers, and wait until all of them see the whole cluster.

    Password and TLS are those of the URL, if there is one. A replica is put on another host than
    its primary where possible. Servers with data or in another cluster are refused. If the servers
    already are the cluster asked for, nothing is done. A command that was cut short can be run
    again.

        streamq cluster create n1:6379 n2:6379 n3:6379 n4:6379 n5:6379 n6:6379
    """
    target = _target_nodes(url, nodes)
    is_insecure = Settings.from_env().insecure
    timeout_s = units.duration_ms(timeout, "--timeout") / 1e3
    is_new = clusters.create_cluster(
        target, replicas, timeout_s, is_waiting=is_waiting, is_insecure=is_insecure
    )
    found = clusters.status_of_cluster(target, is_insecure=is_insecure)
    if is_json:
        render.as_json(found)
    else:
        _show_cluster(found)
    render.note("the cluster is made" if is_new else "the cluster stands already, as asked")
    for node in found.nodes:
        if node.primary and _host_of_address(node.address) == _host_of_address(node.primary):
            render.warning(f"{node.address} is on the host of its primary: both may go at once")
            break


def status(
    nodes: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="HOST:PORT", help="Any node of the cluster; by default those of the URL."
        ),
    ] = None,
    is_json: JsonOption = False,
    url: UrlOption = None,
) -> None:
    """Show the nodes of a cluster, the slots of each, and what is wrong.

    This asks every node itself. It exits with 1 if something is wrong.

        streamq cluster status
    """
    target = _target_nodes(url, nodes or [])
    found = clusters.status_of_cluster(target, is_insecure=Settings.from_env().insecure)
    if is_json:
        render.as_json(found)
    else:
        _show_cluster(found)
    if found.state != "ok":
        raise typer.Exit(1)


def _target_nodes(url: str | None, nodes: Sequence[str]) -> ServerURL:
    """Return the given nodes, or those of the URL, with login and TLS of the URL."""
    settings = Settings.from_env()
    places = [clusters.host_and_port_of(node) for node in nodes]
    is_named = bool(url or settings.url)
    hosts = f"redis+cluster://{','.join(nodes)}"
    target = ServerURL(
        url_of_options(url) if is_named or not nodes else url_with_login(hosts, settings)
    )
    target.hosts = places or target.hosts
    return target


def _show_cluster(found: ClusterStatus) -> None:
    headers = ("NODE", "ROLE", "STATE", ">KEYS", "SLOTS", "FOLLOWS")
    render.data(render.table(headers, map(_row_of_node, found.nodes)))
    render.data("")
    roles = [node.role for node in found.nodes]
    primaries = (
        "1 primary" if roles.count("primary") == 1 else f"{roles.count('primary')} primaries"
    )
    replicas = render.count(roles.count("replica"), "replica")
    render.data(f"{found.state}: {primaries}, {replicas}, {found.slots} of {SLOTS} slots")
    for problem in found.problems:
        render.data(render.alarm(f"  {problem}"))


def _row_of_node(node: NodeStatus) -> Sequence[str]:
    slots = ",".join(
        f"{first}-{last}" if first != last else str(first) for first, last in node.slots
    )
    return (
        node.address,
        node.role,
        node.state,
        render.NOTHING if node.keys is None else f"{node.keys:,}",
        slots or render.NOTHING,
        node.primary or render.NOTHING,
    )


def _host_of_address(address: str) -> str:
    return address.rpartition(":")[0]
