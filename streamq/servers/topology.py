"""The nodes of a cluster as they see each other, and how single servers are made into one.

Making a cluster is a row of steps. A step that was done before is left out, so a call that was cut
short can simply be made again.
"""

import time
from collections.abc import Callable, Sequence

import msgspec

from streamq.errors import ServerError

SLOTS = 16384

_POLL_S = 0.02

Ranges = tuple[tuple[int, int], ...]
View = dict[str, "ClusterMember"]
"""Everybody a node knows, itself too, by id."""


class Peer(msgspec.Struct, frozen=True):
    """A server that is, or is to be, a node. ``ask`` sends it a command and returns a string."""

    #: HOST:PORT, as the user gave it.
    name: str
    #: The address of the server's machine. Servers on one machine fail together.
    machine: str
    port: int
    ask: Callable[..., str]


class ClusterMember(msgspec.Struct, frozen=True):
    """A line of CLUSTER NODES: what one node knows of another or of itself."""

    id: str
    #: The name that the node announces, else its address; empty while the node does not know it.
    host: str
    port: int
    bus_port: int
    flags: frozenset[str]
    #: The id of its primary; empty for a primary.
    primary: str
    epoch: int
    slots: Ranges

    @property
    def is_failed(self) -> bool:
        """Whether one or more nodes believe that this node is down."""
        return bool(self.flags & {"fail", "fail?", "noaddr"})


def view_of_nodes(peer: Peer) -> View:
    """Return what the peer knows of all nodes."""
    return {
        member.id: member for member in map(_member_of_line, _lines_of_cluster_reply(peer, "NODES"))
    }


def own_member(known: View) -> ClusterMember:
    """Return the node that has this view."""
    return next(member for member in known.values() if "myself" in member.flags)


def shape_of_cluster(known: View) -> frozenset[tuple[str, str, Ranges]]:
    """Return each node's primary and slots: that on which all nodes have to agree."""
    return frozenset((member.id, member.primary, member.slots) for member in known.values())


def share_of_slots(index: int, primaries: int) -> tuple[int, int]:
    """Return the first and the last slot of one of so many primaries."""
    begin, end = (SLOTS * i // primaries for i in (index, index + 1))
    return begin, end - 1


def join_nodes(groups: Sequence[Sequence[Peer]], timeout_s: float) -> None:
    """Make one cluster: the first of each group is the primary that the others of it follow.

    Raises:
        ServerError: the nodes do not agree in time.
    """
    peers = [peer for group in groups for peer in group]
    ids = {peer.name: own_member(view_of_nodes(peer)).id for peer in peers}
    wait = _WaitForNodes(timeout_s)
    for index, peer in enumerate(peers):
        # With different epochs from the start, the nodes need not settle which of them is newer.
        known = view_of_nodes(peer)
        if len(known) == 1 and not own_member(known).epoch:
            peer.ask("CLUSTER", "SET-CONFIG-EPOCH", str(index + 1))
    for index, (primary, *_) in enumerate(groups):
        if not own_member(view_of_nodes(primary)).slots:
            primary.ask("CLUSTER", "ADDSLOTSRANGE", *map(str, share_of_slots(index, len(groups))))
    _introduce_nodes(peers, wait)
    for primary, *replicas in groups:
        for replica in replicas:
            if own_member(view_of_nodes(replica)).primary != ids[primary.name]:
                replica.ask("CLUSTER", "REPLICATE", ids[primary.name])
    _settle_nodes(peers, wait)


def settle_cluster(peers: Sequence[Peer], timeout_s: float) -> None:
    """Wait until replicas have their data and all nodes see the same, whole cluster.

    Nodes that lost each other because their addresses changed are introduced again.

    Raises:
        ServerError: the nodes do not agree in time.
    """
    wait = _WaitForNodes(timeout_s)
    if not all(map(_is_cluster_whole, peers)):
        _introduce_nodes(peers, wait)
    _settle_nodes(peers, wait)


def is_replica_linked(peer: Peer) -> bool:
    """Return whether the node is a primary, or a replica that gets its primary's data."""
    return "\nmaster_link_status:down" not in peer.ask("INFO", "replication")


def is_cluster_ok(peer: Peer) -> bool:
    """Return whether the node takes commands for the slots of the cluster."""
    return "cluster_state:ok" in _lines_of_cluster_reply(peer, "INFO")


class _WaitForNodes:
    """One deadline for several waits."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._deadline = time.monotonic() + timeout_s

    def until(self, condition: Callable[[Peer], bool], peer: Peer) -> None:
        while not condition(peer):
            if time.monotonic() > self._deadline:
                raise ServerError(
                    f"the nodes do not agree within {self._timeout_s:g} s: {_likely_trouble(peer)}"
                )
            time.sleep(_POLL_S)


def _introduce_nodes(peers: Sequence[Peer], wait: _WaitForNodes) -> None:
    first, *others = peers
    for peer in others:
        bus_port = own_member(view_of_nodes(peer)).bus_port
        first.ask("CLUSTER", "MEET", peer.machine, str(peer.port), str(bus_port))

    def knows_all(peer: Peer) -> bool:
        known = view_of_nodes(peer)
        is_shaking_hands = any("handshake" in member.flags for member in known.values())
        return len(known) == len(peers) and not is_shaking_hands

    for peer in peers:
        wait.until(knows_all, peer)


def _settle_nodes(peers: Sequence[Peer], wait: _WaitForNodes) -> None:
    for condition in (is_replica_linked, _is_cluster_whole):
        for peer in peers:
            wait.until(condition, peer)
    wait.until(
        lambda _: len({shape_of_cluster(view_of_nodes(peer)) for peer in peers}) == 1, peers[0]
    )


def _is_cluster_whole(peer: Peer) -> bool:
    is_covered = f"cluster_slots_ok:{SLOTS}" in _lines_of_cluster_reply(peer, "INFO")
    is_failing = any(member.is_failed for member in view_of_nodes(peer).values())
    return is_cluster_ok(peer) and is_covered and not is_failing


def _likely_trouble(peer: Peer) -> str:
    """Return a likely reason, in words for the person who has to mend it."""
    known = view_of_nodes(peer)
    mine = own_member(known)
    strangers = [m for m in known.values() if "handshake" in m.flags or m.is_failed]
    if strangers or len(known) == 1:
        port = strangers[0].bus_port if strangers else mine.bus_port
        return (
            f"{peer.name} does not reach the others; is the port of the cluster bus "
            f"({port} and so on) open between the nodes?"
        )
    if not is_replica_linked(peer):
        return (
            f"{peer.name} does not get the data of its primary; "
            "servers with a password need it as masterauth too"
        )
    return f"{peer.name} says {' '.join(_lines_of_cluster_reply(peer, 'INFO')[:6])}"


def _lines_of_cluster_reply(peer: Peer, word: str) -> list[str]:
    return peer.ask("CLUSTER", word).splitlines()


def _member_of_line(line: str) -> ClusterMember:
    id_, address, flags, primary, _, _, epoch, _, *slots = line.split()
    # The address is ip:port@busport. After commas come the announced name and, from newer servers,
    # more fields.
    place, *announced = address.split(",")
    place, _, bus_port = place.partition("@")
    host, _, port = place.rpartition(":")
    name = announced[0] if announced and "=" not in announced[0] else ""
    return ClusterMember(
        id=id_,
        host=name or host,
        port=int(port),
        bus_port=int(bus_port or 0),
        flags=frozenset(flags.split(",")),
        primary="" if primary == "-" else primary,
        epoch=int(epoch),
        slots=tuple(_slot_range(text) for text in slots if not text.startswith("[")),
    )


def _slot_range(text: str) -> tuple[int, int]:
    first, _, last = text.partition("-")
    return int(first), int(last or first)
