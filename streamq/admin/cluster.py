"""Making a cluster of running servers, and examining one, without another tool."""

import socket
import time
from collections.abc import Generator, Iterable, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Literal
from urllib.parse import urlsplit

import msgspec

from streamq.driver.connection import refuse_open
from streamq.driver.node import NodeClient
from streamq.driver.url import ServerURL
from streamq.errors import InvalidValue, ServerBusy, ServerRefused, ServerUnreachable
from streamq.servers import topology
from streamq.servers.topology import SLOTS, ClusterMember, Peer, View

_POLL_S = 0.2

Groups = list[list[Peer]]
"""Each primary with the replicas behind it."""

Role = Literal["primary", "replica"]


class NodeStatus(msgspec.Struct, frozen=True):
    """One node. ``failed``: the other nodes say so; ``unreachable``: we could not connect."""

    id: str
    address: str
    role: Role
    state: Literal["ok", "failed", "unreachable"]
    #: The address of a replica's primary.
    primary: str | None
    slots: tuple[tuple[int, int], ...]
    keys: int | None


class ClusterStatus(msgspec.Struct, frozen=True):
    """A cluster. ``ok``: no problems; ``down``: the cluster takes no commands."""

    state: Literal["ok", "degraded", "down"]
    #: How many of the 16384 slots are served.
    slots: int
    nodes: tuple[NodeStatus, ...]
    problems: tuple[str, ...]


def host_and_port_of(text: str) -> tuple[str, int]:
    """Return host and port of ``HOST:PORT``.

    Raises:
        InvalidValue: the text is not of that form.
    """
    try:
        split = urlsplit(f"//{text}")
        host, port = split.hostname, split.port
    except ValueError:
        host = port = None
    if not host or not port or split.netloc != text or "@" in text:
        raise InvalidValue(f"{text!r} is not HOST:PORT")
    return host, port


def create_cluster(
    target: ServerURL, replicas: int, timeout_s: float, *, is_waiting: bool, is_insecure: bool
) -> bool:
    """Make a cluster of the target's hosts. Return False if they already are the wanted one.

    With ``is_waiting``, wait for servers that do not answer yet. Return when all nodes see the
    same, whole cluster. A call that was cut short can be made again and goes on.

    Raises:
        InvalidValue: so many nodes cannot make such a cluster.
        ServerError: a node cannot be used, has data, or belongs to another cluster.
    """
    places = target.hosts
    primaries = _primaries_of_new_cluster(len(set(places)), len(places), replicas)
    if not is_insecure:
        refuse_open(target, ", ".join(_host_and_port_of_cluster(*place) for place in places))
    if is_waiting:
        _wait_until_nodes_answer(target, timeout_s)
    with _connected_cluster_nodes(places, target) as peers:
        views = {peer.name: topology.view_of_nodes(peer) for peer in peers}
        _refuse_same_node_twice(peers, views)
        if _is_wanted_cluster(list(views.values()), primaries, replicas):
            topology.settle_cluster(peers, timeout_s)
            return False
        groups = arranged_cluster_groups(peers, replicas)
        for peer in peers:
            _refuse_used_cluster_node(peer, peers, views)
        _refuse_other_layout(groups, views)
        if replicas and "password" in target.options:
            _refuse_without_masterauth(peers)
        topology.join_nodes(groups, timeout_s)
    return True


def _wait_until_nodes_answer(target: ServerURL, timeout_s: float) -> None:
    """Wait until every node answers."""
    deadline = time.monotonic() + timeout_s
    for place in target.hosts:
        while True:
            try:
                NodeClient(target, *place).close()
                break
            except (ServerUnreachable, ServerBusy):
                if time.monotonic() > deadline:
                    raise
                time.sleep(_POLL_S)


def arranged_cluster_groups(peers: Sequence[Peer], replicas: int) -> Groups:
    """Return groups with primaries on as many machines as possible, and replicas on others."""
    spread = _nodes_by_machine_in_turn(peers)
    count = len(peers) // (1 + replicas)
    groups = [[peer] for peer in spread[:count]]
    for begin in range(count, len(spread), count):
        newcomers = spread[begin : begin + count]
        placed = _cluster_groups_with_newcomers(newcomers, groups)
        left = [peer for peer in newcomers if peer not in placed.values()]
        for index, group in enumerate(groups):
            group.append(placed[index] if index in placed else left.pop(0))
    return groups


def status_of_cluster(target: ServerURL, *, is_insecure: bool) -> ClusterStatus:
    """Return the cluster of the first of the target's hosts that answers, as all its nodes see it.

    Raises:
        ServerError: no host answers, or the host is no node of a cluster.
    """
    places = target.hosts
    if not places:
        raise InvalidValue("a cluster is reached by host and port, not by a socket")
    if not is_insecure:
        refuse_open(target, ", ".join(_host_and_port_of_cluster(*place) for place in places))
    with ExitStack() as stack:
        first = stack.enter_context(_first_node_that_answers(places, target))
        _refuse_node_without_cluster(first)
        known = topology.view_of_nodes(first)
        peers: dict[str, Peer] = {}
        for member in known.values():
            place = (member.host or first.machine, member.port)
            try:
                peers[member.id] = stack.enter_context(_connected_cluster_node(place, target))
            except ServerUnreachable:
                continue
        return _cluster_status(first, known, peers)


def _primaries_of_new_cluster(distinct: int, count: int, replicas: int) -> int:
    if distinct < count:
        raise InvalidValue("a node is given twice")
    primaries, left = divmod(count, 1 + replicas)
    if left:
        raise InvalidValue(
            f"{count} nodes cannot be {1 + replicas} for each primary: give {count - left} or "
            f"{count - left + 1 + replicas}, or another --replicas"
        )
    if primaries < 3:
        raise InvalidValue(
            f"{count} nodes with --replicas {replicas} make {primaries} primaries, and a cluster "
            f"needs 3 to agree on anything: give {3 * (1 + replicas)} nodes"
        )
    return primaries


@contextmanager
def _connected_cluster_node(place: tuple[str, int], target: ServerURL) -> Generator[Peer]:
    host, port = place
    node = NodeClient(target, host, port)
    name = _host_and_port_of_cluster(host, port)
    try:
        # CLUSTER MEET takes addresses, not names.
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        yield Peer(name, str(found[0][4][0]), port, node.ask)
    except socket.gaierror as error:
        raise ServerUnreachable(f"{name} does not answer: {error}") from None
    finally:
        node.close()


@contextmanager
def _connected_cluster_nodes(
    places: Iterable[tuple[str, int]], target: ServerURL
) -> Generator[list[Peer]]:
    with ExitStack() as stack:
        peers = [stack.enter_context(_connected_cluster_node(place, target)) for place in places]
        for peer in peers:
            _refuse_node_without_cluster(peer)
        yield peers


@contextmanager
def _first_node_that_answers(
    places: Sequence[tuple[str, int]], target: ServerURL
) -> Generator[Peer]:
    """Give the first peer that answers."""
    with ExitStack() as stack:
        for index, place in enumerate(places):
            try:
                peer = stack.enter_context(_connected_cluster_node(place, target))
                break
            except ServerUnreachable:
                if index == len(places) - 1:
                    raise
        yield peer


def _refuse_node_without_cluster(peer: Peer) -> None:
    if "cluster_enabled:1" not in peer.ask("INFO", "cluster"):
        raise ServerRefused(f"{peer.name} is a server by itself: start it with cluster-enabled yes")


def _refuse_same_node_twice(peers: Sequence[Peer], views: dict[str, View]) -> None:
    seen: dict[str, str] = {}
    for peer in peers:
        twin = seen.setdefault(topology.own_member(views[peer.name]).id, peer.name)
        if twin != peer.name:
            raise InvalidValue(f"{twin} and {peer.name} are one and the same server")


def _refuse_used_cluster_node(peer: Peer, peers: Iterable[Peer], views: dict[str, View]) -> None:
    """Raise unless the server knows only the given servers and has no keys.

    A node that the server has just been introduced to has a made-up id until it answers: such a
    node is known by its address.
    """
    ours = {topology.own_member(known).id for known in views.values()}
    places = {(each.machine, each.port) for each in peers}
    strangers = [
        member
        for member in views[peer.name].values()
        if member.id not in ours
        and not ("handshake" in member.flags and (member.host, member.port) in places)
    ]
    if strangers:
        others = ", ".join(
            sorted(_host_and_port_of_cluster(member.host, member.port) for member in strangers)
        )
        raise ServerRefused(f"{peer.name} is already in a cluster, with {others}")
    keys = _keys_of_cluster_node(peer)
    if keys:
        raise ServerRefused(
            f"{peer.name} has data ({keys} keys): only empty servers are made into a cluster"
        )


def _refuse_other_layout(groups: Groups, views: dict[str, View]) -> None:
    """Raise if the nodes are in a cluster of another layout: we undo nothing that we did not do."""
    for index, (primary, *replicas) in enumerate(groups):
        mine = topology.own_member(views[primary.name])
        planned = (topology.share_of_slots(index, len(groups)),)
        is_as_planned = not mine.primary and mine.slots in ((), planned)
        for replica in replicas:
            its = topology.own_member(views[replica.name])
            is_as_planned &= its.primary in ("", mine.id) and not its.slots
        if not is_as_planned:
            raise ServerRefused(
                f"{primary.name} is already in a cluster, of another layout than asked for: "
                "CLUSTER RESET takes an empty node out of it"
            )


def _refuse_without_masterauth(peers: Iterable[Peer]) -> None:
    for peer in peers:
        try:
            _, _, secret = peer.ask("CONFIG", "GET", "masterauth").partition("\n")
        except ServerRefused:
            continue  # the user may not read the configuration
        if not secret:
            raise ServerRefused(
                f"{peer.name} has a password but no masterauth: as a replica it could not log in "
                "at its primary. Start every node with masterauth as well as requirepass"
            )


def _is_wanted_cluster(views: list[View], primaries: int, replicas: int) -> bool:
    """Return whether the nodes are one cluster, of so many primaries with so many replicas each."""
    known = views[0]
    if known.keys() != {topology.own_member(each).id for each in views}:
        return False
    followers = dict.fromkeys((m.id for m in known.values() if not m.primary), 0)
    for member in known.values():
        if member.primary in followers:
            followers[member.primary] += 1
    is_agreed = len({topology.shape_of_cluster(each) for each in views}) == 1
    is_asked = list(followers.values()) == [replicas] * primaries
    return is_agreed and is_asked and _slots_that_cluster_serves(known.values()) == SLOTS


def _slots_that_cluster_serves(members: Iterable[ClusterMember]) -> int:
    return sum(last - first + 1 for member in members for first, last in member.slots)


def _nodes_by_machine_in_turn(peers: Sequence[Peer]) -> list[Peer]:
    """Return the peers, one of each machine in turn."""
    machines: dict[str, list[Peer]] = {}
    for peer in peers:
        machines.setdefault(peer.machine, []).append(peer)
    longest = max(map(len, machines.values()))
    return [row[i] for i in range(longest) for row in machines.values() if i < len(row)]


def _cluster_groups_with_newcomers(newcomers: Sequence[Peer], groups: Groups) -> dict[int, Peer]:
    """Place as many newcomers as possible, each in a group with no node on its machine."""
    placed: dict[int, Peer] = {}

    def place(peer: Peer, tried: set[int]) -> bool:
        for index, group in enumerate(groups):
            if index in tried or peer.machine in {member.machine for member in group}:
                continue
            tried.add(index)
            # The newcomer placed there may fit into another group.
            if index not in placed or place(placed[index], tried):
                placed[index] = peer
                return True
        return False

    for peer in newcomers:
        place(peer, set())
    return placed


def _keys_of_cluster_node(peer: Peer) -> int:
    lines = peer.ask("INFO", "keyspace").splitlines()
    counts = (line.partition("keys=")[2].partition(",")[0] for line in lines if "keys=" in line)
    return sum(map(int, counts))


def _host_and_port_of_cluster(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _cluster_status(first: Peer, known: View, peers: dict[str, Peer]) -> ClusterStatus:
    names = {
        member.id: _host_and_port_of_cluster(member.host or first.machine, member.port)
        for member in known.values()
    }
    nodes = []
    for member in sorted(known.values(), key=partial(_rank_of_cluster_node, known)):
        reached = peers.get(member.id)
        nodes.append(
            NodeStatus(
                id=member.id,
                address=names[member.id],
                role="replica" if member.primary else "primary",
                state="failed" if member.is_failed else "ok" if reached else "unreachable",
                primary=names.get(member.primary),
                slots=member.slots,
                keys=_keys_of_cluster_node(reached) if reached else None,
            )
        )
    problems = tuple(_cluster_problems(known, nodes, peers))
    is_up = topology.is_cluster_ok(first)
    return ClusterStatus(
        state="down" if not is_up else "degraded" if problems else "ok",
        slots=_slots_that_cluster_serves(known.values()),
        nodes=tuple(nodes),
        problems=problems,
    )


def _rank_of_cluster_node(known: View, member: ClusterMember) -> tuple[object, ...]:
    """Return a key that sorts primaries by their slots, and replicas behind their primary."""
    leader = known.get(member.primary, member)
    return leader.slots, leader.id, member.primary, member.port


def _cluster_problems(
    known: View, nodes: Sequence[NodeStatus], peers: dict[str, Peer]
) -> Generator[str]:
    missing = SLOTS - _slots_that_cluster_serves(known.values())
    if missing:
        yield f"{missing} of {SLOTS} slots are served by nobody"
    for node in nodes:
        if node.state == "failed":
            yield f"{node.address} is down, say the others"
        elif node.state == "unreachable":
            yield f"{node.address} does not answer here"
    yield from _cluster_problems_of_replicas(known, nodes, peers)
    for id_, peer in peers.items():
        if topology.shape_of_cluster(topology.view_of_nodes(peer)) != topology.shape_of_cluster(
            known
        ):
            yield f"{_cluster_address(nodes, id_)} sees another cluster than the first node asked"


def _cluster_problems_of_replicas(
    known: View, nodes: Sequence[NodeStatus], peers: dict[str, Peer]
) -> Generator[str]:
    for node in nodes:
        peer = peers.get(node.id)
        if node.role == "replica" and peer and not topology.is_replica_linked(peer):
            yield f"{node.address} does not get the data of its primary"
    followed = {member.primary for member in known.values() if not member.is_failed}
    for node in nodes:
        if node.role == "primary" and node.slots and followed != {""} and node.id not in followed:
            yield f"{node.address} has no replica, others have"


def _cluster_address(nodes: Sequence[NodeStatus], id_: str) -> str:
    return next(node.address for node in nodes if node.id == id_)
