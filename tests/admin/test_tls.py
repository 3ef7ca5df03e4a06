"""TLS, servers that anybody could use, and secrets that nobody gets to see."""

from pathlib import Path
from typing import Any

import pytest
from redis import Redis

from cli.app import COMMANDS
from streamq import Client, ServerError, ServerUnreachable, ServerUnsafe
from streamq.driver.url import ServerURL
from streamq.servers.local import LocalServer
from tests.support import warm
from tests.support.command import environment, run
from tests.support.fleet import APPS, Fleet
from tests.support.secure import (
    MISSING,
    SecureServer,
    as_user,
)
from tests.support.waiting import wait_until

SECURE = pytest.mark.skipif(bool(MISSING), reason=f"{MISSING}: no server that speaks TLS")


@SECURE
class TestTls:
    def test_server_is_used_by_whom_it_is_vouched_for(self, secure: SecureServer) -> None:
        for scheme in ("rediss", "valkeys"):
            url = as_user(secure.url, "reader").replace("rediss", scheme)
            with Client(url) as client:
                assert client.list() == []

    def test_server_that_nobody_vouches_for_is_refused(self, secure: SecureServer) -> None:
        url = as_user(secure.url, "reader").partition("?")[0]

        with pytest.raises(ServerUnreachable, match="certificate verify failed"):
            Client(url)

    def test_name_that_the_certificate_does_not_have_is_refused(self, secure: SecureServer) -> None:
        url = as_user(secure.url, "reader").replace("127.0.0.1", "localhost")

        with pytest.raises(ServerUnreachable, match="certificate"):
            Client(url)

    def test_plain_text_gets_nowhere(self, secure: SecureServer) -> None:
        url = as_user(secure.url, "reader").replace("rediss://", "redis://")

        with pytest.raises(ServerError):
            Client(url.partition("?")[0])

    def test_certificate_of_ones_own(self) -> None:
        server = SecureServer(is_asking=True)
        url = as_user(server.url, "reader")
        own = f"ssl_certfile={server.folder}/client.crt&ssl_keyfile={server.folder}/client.key"

        with pytest.raises(ServerUnreachable):
            Client(url)
        with Client(f"{url}&{own}") as client:
            assert client.list() == []

        ran = run(
            "ls",
            STREAMQ_URL=f"rediss://127.0.0.1:{server.port}",
            STREAMQ_USERNAME="reader",
            STREAMQ_PASSWORD_FILE=str(server.folder / "reader.password"),
            STREAMQ_TLS_CA_FILE=str(server.folder / "ca.crt"),
            STREAMQ_TLS_CERT_FILE=str(server.folder / "client.crt"),
            STREAMQ_TLS_KEY_FILE=str(server.folder / "client.key"),
        )
        assert ran.returncode == 0, ran.stderr
        server.stop()


class TestOpenServers:
    @pytest.mark.parametrize(
        ("url", "is_open"),
        [
            ("redis://127.0.0.1:1", False),
            ("redis://[::1]:1", False),
            ("redis://localhost", False),
            ("unix:///tmp/s", False),
            ("local://", False),
            ("redis://:pw@10.0.0.1", False),
            ("rediss://10.0.0.1?ssl_certfile=/c", False),
            ("redis://10.0.0.1", True),
            ("rediss://queue.example", True),
            ("redis://127.0.0.1.example", True),
            ("redis+cluster://127.0.0.1,10.0.0.1", True),
        ],
    )
    def test_who_could_use_it(self, url: str, is_open: bool) -> None:
        assert ServerURL(url).is_open is is_open

    def test_it_is_refused_unless_that_is_fine(self) -> None:
        # Nobody is there: it is refused before anybody is asked.
        url = "redis://192.0.2.1:1?socket_connect_timeout=0.1"

        refused = run("ls", STREAMQ_URL=url)
        with pytest.raises(ServerUnsafe):
            Client(url)

        assert refused.returncode == 3
        assert "--insecure" in refused.stderr
        for words, variables in (
            (["ls", "--insecure"], {}),
            (["--insecure", "ls"], {}),
            (["ls"], {"STREAMQ_INSECURE": "1"}),
        ):
            allowed = run(*words, STREAMQ_URL=url, **variables)
            assert allowed.returncode == 3
            assert "does not answer" in allowed.stderr


class TestSecrets:
    SECRET = "hush/%40-secret-word"

    @pytest.mark.parametrize(
        "words",
        ["ls", "status", "worker tasks:app", "janitor --once", "config show --origin", "doctor"],
    )
    @pytest.mark.parametrize("where", ["away", "refusing"])
    def test_no_output_holds_the_password(self, words: str, where: str, tmp_path: Path) -> None:
        if words.split()[0] not in COMMANDS:
            pytest.skip("there is no such command")
        file = tmp_path / "password"
        file.write_text(f"{self.SECRET}\n")
        server = LocalServer.start(port=0) if where == "refusing" else None
        url = server.url if server else "redis://127.0.0.1:1"
        ran = warm.run_text(
            [*warm.MODULE, *words.split()],
            env=environment(
                STREAMQ_URL=url,
                STREAMQ_USERNAME="me",
                STREAMQ_PASSWORD_FILE=str(file),
                STREAMQ_LOG_LEVEL="debug",
            ),
            cwd=APPS,
        )
        if server:
            server.stop()

        assert ran.returncode == (0 if "config" in words else 3), ran.stderr
        for spelling in ("hush", "secret-word"):
            assert spelling not in ran.stdout + ran.stderr

    def test_neither_ps_nor_the_children_show_it(self, tmp_path: Path, queue: str) -> None:
        server = LocalServer.start(port=0)
        redis: Any = Redis.from_url(server.url)
        redis.execute_command("CONFIG", "SET", "requirepass", "hush-secret-word")
        fleet = Fleet(server.url.replace("//", "//:hush-secret-word@"), queue, tmp_path)

        pool = fleet.ready("--log-level", "debug")
        pids = [pool.pid, *fleet.children(pool)]
        server.kill()
        wait_until(lambda: "waiting for the server" in fleet.errors(pool), 15)

        assert all(b"hush" not in Path(f"/proc/{pid}/cmdline").read_bytes() for pid in pids)
        assert "hush" not in fleet.errors(pool)
        fleet.end()
        redis.close()
        server.stop()


def test_nothing_that_runs_what_it_reads_is_imported() -> None:
    """The linter says so too; this holds also for what it is told to overlook."""
    root = Path(__file__).parents[2]
    words = ("pickle", "marshal", "shelve", "dill", "cloudpickle")
    for folder in ("streamq", "cli", "samples", "bench", "tests"):
        for file in (root / folder).rglob("*.py"):
            imported = [
                line.split()[1].split(".")[0]
                for line in file.read_text().splitlines()
                if line.lstrip().startswith(("import ", "from ")) and len(line.split()) > 1
            ]
            assert not set(imported) & set(words), file
