"""Servers that speak TLS and know only the users of ``streamq acl``: one, a cluster, sentinels."""

import os
import re
import shutil
import signal
import subprocess
import tempfile
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from redis import Redis

from streamq.servers.launcher import LOOPBACK, Launcher, ask_server, start_on_free_port
from streamq.servers.local import server_command_line
from tests.support import warm
from tests.support.waiting import wait_until

#: Why there is none, or nothing.
MISSING = ", ".join(
    f"no {program}" for program in ("redis-server", "openssl") if not shutil.which(program)
)
_ROLES = {"worker": "worker", "janitor": "janitor", "run": "runner"}
_ROLES |= dict.fromkeys(("status", "ls", "top", "workers", "wait", "errors", "doctor"), "reader")
_OPEN = "user default on nopass ~* &* +@all\n"


def as_role(url: str, command: str) -> str:
    """The URL by which the command's own user comes to a secure server; others stay as they are."""
    return as_user(url, _ROLES.get(command, "loader")) if "://admin:" in url else url


def as_user(url: str, user: str) -> str:
    """The same server's URL for another user."""
    folder = Path(parse_qs(urlsplit(url).query)["ssl_ca_certs"][0]).parent
    return re.sub("://[^@]*@", f"://{user}:{password_of(folder, user)}@", url)


def password_of(folder: Path, user: str) -> str:
    return (folder / f"{user}.password").read_text().strip()


class Secured:
    """Nodes with a TLS port each; the plain way in is a socket that only its owner may use."""

    def __init__(self, *, is_asking: bool = False) -> None:
        """With ``is_asking`` they want a client certificate."""
        self.folder = Path(tempfile.mkdtemp(prefix="streamq-secure-"))
        self._is_asking = is_asking
        self._users = self.folder / "users.acl"
        self._launcher = Launcher(self.folder)
        #: Port and process of each node.
        self.nodes: dict[int, int] = {}
        make_certificates(self.folder)
        streamq("acl", str(self.folder))

    def start(self, *options: tuple[str, ...], first: tuple[str, ...] = ()) -> int:
        """One more node, which lets in anybody until ``lock``. Returns its port."""
        home = self.folder / f"node{len(self.nodes)}"
        home.mkdir()
        (home / "users.acl").write_text(_OPEN)

        def run(port: int) -> int:
            base = [
                ("port", "0"),
                ("tls-port", str(port)),
                ("bind", LOOPBACK),
                ("unixsocket", str(home / "s")),
                ("unixsocketperm", "700"),
                ("tls-ca-cert-file", str(self.folder / "ca.crt")),
                ("tls-cert-file", str(self.folder / "server.crt")),
                ("tls-key-file", str(self.folder / "server.key")),
                ("tls-auth-clients", "yes" if self._is_asking else "no"),
                ("tls-replication", "yes"),
                ("masteruser", "replica"),
                ("masterauth", password_of(self.folder, "replica")),
                ("repl-diskless-sync-delay", "0"),
                ("save", ""),
                ("aclfile", str(home / "users.acl")),
            ]
            argv = server_command_line(
                Path(shutil.which("redis-server") or ""), home, base, options
            )
            argv[1:1] = first
            self.nodes[port] = self._launcher.run(argv, home, str(home / "s"))
            return port

        return start_on_free_port(run)

    def lock(self) -> None:
        """Let in the users that ``streamq acl`` wrote, and nobody else."""
        for home in self.folder.glob("node*"):
            (home / "users.acl").write_text(self._users.read_text())
            ask_server(str(home / "s"), "ACL", "LOAD")

    def kill(self, port: int) -> None:
        """End a node at once with signal 9."""
        self._launcher.end(self.nodes.pop(port), signal.SIGKILL)

    def url_of(self, scheme: str, ports: list[int], path: str = "") -> str:
        """The way of an administrator to nodes."""
        hosts = ",".join(f"{LOOPBACK}:{port}" for port in ports)
        login = f"admin:{password_of(self.folder, 'admin')}"
        return f"{scheme}://{login}@{hosts}{path}?ssl_ca_certs={self.folder / 'ca.crt'}"

    def stop(self) -> None:
        self._launcher.stop()
        shutil.rmtree(self.folder)


class SecureServer(Secured):
    """One server."""

    def __init__(self, *, is_asking: bool = False) -> None:
        super().__init__(is_asking=is_asking)
        self.port = self.start()
        self.lock()
        self.url = self.url_of("rediss", [self.port])


class SecureCluster(Secured):
    """Three primaries and three replicas, made into a cluster by our command."""

    def __init__(self) -> None:
        super().__init__()
        options = (
            ("cluster-enabled", "yes"),
            ("tls-cluster", "yes"),
            ("cluster-node-timeout", "2000"),
        )
        ports = [self.start(*options) for _ in range(6)]
        self.lock()
        self.url = self.url_of("rediss+cluster", ports[:3])
        streamq("cluster", "create", *(f"{LOOPBACK}:{port}" for port in ports), url=self.url)


class SecureSentinel(Secured):
    """A primary and a replica, and a sentinel that watches them as the user made for it."""

    def __init__(self) -> None:
        super().__init__()
        self.primary = self.start()
        self.replica = self.start(("replicaof", LOOPBACK, str(self.primary)))
        self.lock()
        # A sentinel asks for replicas when it starts, and then every ten seconds.
        wait_until(self._has_replica, 30.0)
        file = self.folder / "sentinel.conf"
        file.write_text(
            f"sentinel monitor main {LOOPBACK} {self.primary} 1\n"
            "sentinel down-after-milliseconds main 500\n"
            "sentinel auth-user main sentinel\n"
            f"sentinel auth-pass main {password_of(self.folder, 'sentinel')}\n"
        )
        # Who is primary is no secret: whoever has TLS may ask.
        asked = self.start(first=(str(file), "--sentinel"))
        self.url = self.url_of("rediss+sentinel", [asked], "/main")

    def _has_replica(self) -> bool:
        way, password = str(self.folder / "node0" / "s"), password_of(self.folder, "admin")
        with Redis(unix_socket_path=way, username="admin", password=password) as primary:
            found: Any = primary.info("replication")
        return "slave0" in found and found["slave0"]["state"] == "online"


def streamq(*words: str, url: str = "") -> None:
    """A command of ours that must go well."""
    ran = warm.run_text([*warm.MODULE, *words], env=os.environ | {"STREAMQ_URL": url})
    assert ran.returncode == 0, ran.stderr


def make_certificates(folder: Path) -> None:
    """An authority, and a certificate of its for a server and for a client."""

    def openssl(*words: str) -> None:
        subprocess.run(["openssl", *words], cwd=folder, check=True, capture_output=True)

    key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    basic = ["-days", "2", "-addext", "keyUsage=critical,keyCertSign,digitalSignature"]
    openssl(
        "req",
        "-x509",
        *key,
        *basic,
        "-subj",
        "/CN=authority",
        "-keyout",
        "ca.key",
        "-out",
        "ca.crt",
    )
    for name, extension in (("server", "subjectAltName=IP:127.0.0.1"), ("client", "")):
        (folder / "extensions").write_text(extension)
        openssl(
            "req", *key, "-subj", f"/CN={name}", "-keyout", f"{name}.key", "-out", f"{name}.csr"
        )
        signed = ["-CA", "ca.crt", "-CAkey", "ca.key", "-CAcreateserial", "-days", "2"]
        files = ["-in", f"{name}.csr", "-out", f"{name}.crt", "-extfile", "extensions"]
        openssl("x509", "-req", *files, *signed)
