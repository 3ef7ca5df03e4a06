"""Loads all scripts into servers that have forgotten them.

A server keeps scripts in memory only: after a restart or a failover it has none. Users who may load
scripts load each one when they first need it (``scripts``). The other users wait for a janitor,
which calls ``fill`` once a second.
"""

import logging
import threading
from typing import Any

from streamq.driver.connection import Connection
from streamq.errors import ServerError, ServerUnreachable
from streamq.protocol import lua

log = logging.getLogger(__name__)

#: A janitor asks every primary this often which scripts it has.
EVERY_S = 1.0


class ScriptCache:
    """The scripts that a server, or each primary of a cluster, has loaded."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._is_failing = False

    def missing(self, node: Any) -> list[str]:
        """Return the names of our scripts that a node does not have."""
        digests = map(lua.script_digest, lua.script_names())
        there = self._connection.ask_node(node, "SCRIPT EXISTS", *digests)
        return [
            name for name, is_there in zip(lua.script_names(), there, strict=True) if not is_there
        ]

    def load(self, node: Any, names: list[str]) -> None:
        """Load scripts into a node."""
        for name in names:
            self._connection.ask_node(node, "SCRIPT LOAD", lua.script_source(name))

    def fill(self) -> None:
        """Load what is missing, everywhere. A failure is logged once, until all goes well again.

        A server that does not answer is not logged: the janitor's sweeps report it.
        """
        failure: ServerError | None = None
        for node in self._connection.primaries():
            try:
                missing = self.missing(node)
                self.load(node, missing)
            except ServerUnreachable:
                continue
            except ServerError as error:
                failure = error
            else:
                if missing:
                    where = node.name if node else self._connection.where
                    log.info("loaded %d scripts into %s", len(missing), where)
        if failure and not self._is_failing:
            log.warning("cannot load scripts for other users: %s; trying on", failure)
        self._is_failing = failure is not None

    def keep_filled(self, stop: threading.Event) -> None:
        """Fill every server again and again, until told to stop."""
        while not stop.wait(EVERY_S):
            self.fill()
