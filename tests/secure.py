"""A server that speaks TLS and knows only the users of ``streamq acl``."""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

from redis import Redis

from streamq.launcher import on_free_port
from streamq.server import LocalServer

#: Why there is none, or nothing.
MISSING = ", ".join(
    f"no {program}" for program in ("redis-server", "openssl") if not shutil.which(program)
)
_ROLES = {"worker": "worker", "janitor": "janitor", "run": "runner"}
_ROLES |= dict.fromkeys(("status", "ls", "workers", "wait", "errors", "doctor"), "reader")


def as_role(url: str, command: str) -> str:
    """The URL by which the command's own user comes to a secure server; others stay as they are."""
    if "://admin:" not in url:
        return url
    folder = Path(parse_qs(urlsplit(url).query)["ssl_ca_certs"][0]).parent
    return url_of(folder, _ROLES.get(command, "loader"), urlsplit(url).port or 0)


def url_of(folder: Path, user: str, port: int) -> str:
    password = (folder / f"{user}.password").read_text().strip()
    return f"rediss://{user}:{password}@127.0.0.1:{port}?ssl_ca_certs={folder / 'ca.crt'}"


class SecureServer:
    """A Redis with a TLS port; the plain way in is a socket that only its owner may use."""

    def __init__(self, *, is_asking: bool = False, binary: str = "redis-server") -> None:
        """With ``is_asking`` it wants a client certificate."""
        self.folder = Path(tempfile.mkdtemp(prefix="streamq-secure-"))
        make_certificates(self.folder)
        acl = self.folder / "users.acl"
        acl.write_text("user default on nopass ~* &* +@all\n")

        def run(port: int) -> LocalServer:
            options = [
                ("tls-port", str(port)),
                ("tls-ca-cert-file", str(self.folder / "ca.crt")),
                ("tls-cert-file", str(self.folder / "server.crt")),
                ("tls-key-file", str(self.folder / "server.key")),
                ("tls-auth-clients", "yes" if is_asking else "no"),
                ("aclfile", str(acl)),
            ]
            self.port = port
            return LocalServer.start(binary=shutil.which(binary), options=options)

        self._server = on_free_port(run)
        self.load_acl()
        self.url = url_of(self.folder, "admin", self.port)

    def load_acl(self, *options: str) -> None:
        """Let the users in that ``streamq acl`` writes."""
        command = [sys.executable, "-m", "streamq.cli", "acl", str(self.folder), *options]
        subprocess.run(command, check=True, capture_output=True)
        with Redis.from_url(self._server.url) as redis:
            redis.execute_command("ACL", "LOAD")

    def stop(self) -> None:
        self._server.stop()
        shutil.rmtree(self.folder)


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
