"""A user for each role: what each may do, and that a whole job needs no more."""

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from redis import Redis, exceptions

from streamq import Client, ServerRefused
from streamq.admin import acl
from streamq.driver.connection import Connection
from streamq.protocol import lua
from streamq.protocol.keys import QueueKeys
from streamq.servers.local import LocalServer
from tests.support.command import run
from tests.support.fleet import APPS, Fleet
from tests.support.secure import (
    MISSING,
    SecureCluster,
    Secured,
    SecureSentinel,
    SecureServer,
    as_role,
    as_user,
)

SECURE = pytest.mark.skipif(bool(MISSING), reason=f"{MISSING}: no server that speaks TLS")


#: What nobody may do but admin.
NEVER: list[tuple[Any, ...]] = [
    ("EVAL", "return 1", 0),
    ("SCRIPT", "FLUSH"),
    ("FUNCTION", "LOAD", "#!lua name=x\nredis.register_function('f', function() end)"),
    ("KEYS", "*"),
    ("FLUSHALL",),
    ("CONFIG", "GET", "*"),
    ("CONFIG", "SET", "maxmemory-policy", "allkeys-lru"),
    ("ACL", "LIST"),
    ("ACL", "SETUSER", "reader", "+@all"),
    ("MONITOR",),
    ("SLOWLOG", "GET"),
    ("SHUTDOWN",),
    ("DEL", "sq:{r:a}:meta"),
    ("GET", "another"),
    ("SET", "another", "1"),
    ("HGETALL", "other:{r:a}:meta"),
    ("XADD", "another", "*", "a", "b"),
    ("SPUBLISH", "another", "x"),
    ("SUBSCRIBE", "another"),
    ("CLIENT", "KILL", "ID", "1"),
    ("MIGRATE", "127.0.0.1", "1", "sq:{r:a}:meta", "0", "1"),
    ("REPLICAOF", "NO", "ONE"),
]


#: And what each role may not.
FORBIDDEN: dict[str, list[tuple[Any, ...]]] = {
    "reader": [
        ("HSET", "sq:{r:a}:meta", "state", "done"),
        ("SET", "sq:{r:a}:left", "0"),
        ("XACK", "sq:{r:a}:parts", "w", "1-0"),
        ("BRPOP", "sq:{q:default}:tokens:00", "1"),
        ("ZADD", "sq:{q:default}:open", "1", "a"),
        ("UNLINK", "sq:{r:a}:meta"),
        ("SPUBLISH", "sq:{r:a}:events", "x"),
    ],
    # It may deliver and acknowledge entries: `refuse` does so with those before a part that failed.
    "loader": [
        ("BRPOP", "sq:{q:default}:tokens:00", "1"),
        ("RPOP", "sq:{q:default}:tokens:00"),
        ("XAUTOCLAIM", "sq:{r:a}:parts", "w", "me", "0", "0"),
    ],
    "worker": [
        ("SSUBSCRIBE", "sq:{r:a}:events"),
    ],
    "janitor": [
        ("BRPOP", "sq:{q:default}:tokens:00", "1"),
        ("XREADGROUP", "GROUP", "w", "me", "STREAMS", "sq:{r:a}:parts", ">"),
        ("SSUBSCRIBE", "sq:{r:a}:events"),
    ],
    "gateway": [],
    "runner": [],
}


@SECURE
class TestRoles:
    # What a sentinel watches is a plain server, and ``make test-secure`` has commands on another.
    @pytest.mark.parametrize(
        "kind", [pytest.param(SecureCluster, marks=pytest.mark.long), SecureSentinel]
    )
    def test_whole_job_with_each_command_as_its_own_user(
        self,
        kind: type[Secured],
        queue: str,
        tmp_path: Path,
        request: pytest.FixtureRequest,
    ) -> None:
        server: Any = kind()
        request.addfinalizer(server.stop)
        source, output = tmp_path / "in.txt", tmp_path / "out.txt"
        source.write_text("".join(f"line {n}\n" for n in range(2_000)))
        fleet = Fleet(server.url, queue, tmp_path)
        request.addfinalizer(fleet.end)
        pool = fleet.ready("-p", "2")

        def streamq(*words: str) -> str:
            url = as_role(server.url, words[0])
            ran = run(*words, STREAMQ_URL=url, STREAMQ_QUEUE=queue)
            assert ran.returncode == 0, ran.stderr
            return ran.stdout.strip()

        def job() -> None:
            request_id = streamq("load", str(source), "--handler", "shout", "--lines", "50")
            streamq("results", request_id, "-o", str(output), "--follow")
            streamq("wait", request_id)
            assert output.read_text() == source.read_text().upper()
            output.unlink()

        job()
        streamq("ls", "--all")
        streamq("janitor", "--once", "--queue", queue)
        waiting = streamq("load", str(source), "--handler", "unheard_of")
        streamq("set", waiting, "--level", "7")
        streamq("cancel", waiting)
        streamq("run", str(source), "--map", f"{APPS}/tasks.py:shout", "-o", str(tmp_path / "two"))
        if kind is SecureSentinel:
            server.kill(server.primary)
            job()

        assert (tmp_path / "two").read_text() == source.read_text().upper()
        assert "let us" not in fleet.errors(pool)

    @pytest.mark.parametrize("user", acl.ROLES)
    def test_what_a_role_must_not_do(self, secure: SecureServer, user: str) -> None:
        connection = Connection(as_user(secure.url, user)).redis
        foreign = set(acl.ROLES["runner"].scripts) - set(acl.ROLES[user].scripts)
        calls = [("EVALSHA", lua.script_digest(name), 0) for name in foreign]

        for words in [*NEVER, *FORBIDDEN[user], *calls]:
            with pytest.raises(exceptions.NoPermissionError):
                connection.execute_command(*words)
        connection.close()

    def test_janitor_may_put_aside_what_is_of_another_type(
        self, secure: SecureServer, queue: str
    ) -> None:
        keys, admin = QueueKeys(queue), Connection(secure.url)
        admin.redis.set(keys.open, "not ours")

        ran = run("janitor", "--once", "--queue", queue, STREAMQ_URL=as_role(secure.url, "janitor"))

        assert ran.returncode == 0, ran.stderr
        assert admin.redis.get(f"{keys.aside}open") == b"not ours"
        admin.close()

    def test_no_password_no_entry(self, secure: SecureServer) -> None:
        url = as_user(secure.url, "reader")
        _, _, rest = url.partition("@")

        for login in ("", "reader:wrong@", "default:@"):
            with pytest.raises(ServerRefused):
                Client(f"rediss://{login}{rest}")

    def test_scripts_come_back_when_the_server_has_forgotten_them(
        self, secure: SecureServer, queue: str
    ) -> None:
        with Client(as_role(secure.url, "load")) as client:
            client.submit([1], handler="h", queue=queue)
            Connection(secure.url).redis.execute_command("SCRIPT", "FLUSH")

            assert client.submit([1], handler="h", queue=queue).status().parts.total == 1


def test_scripts_come_back_on_every_server(client: Client, queue: str) -> None:
    redis = client._protocol.connection.redis
    client.submit([1], handler="h", queue=queue)

    redis.script_flush()

    request = client.submit([1] * 3, handler="h", queue=queue)
    assert request.status().parts.total == 3


def test_acl_file_of_an_upgrade_keeps_what_it_allowed(tmp_path: Path) -> None:
    old = "0" * 40
    assert run("acl", str(tmp_path), "--keep").returncode == 2
    assert run("acl", str(tmp_path)).returncode == 0
    first = (tmp_path / "users.acl").read_text()
    (tmp_path / "users.acl").write_text(first.replace("+ping", f"+evalsha|{old} +ping", 1))

    assert run("acl", str(tmp_path), "--keep").returncode == 0
    kept = (tmp_path / "users.acl").read_text()
    assert run("acl", str(tmp_path)).returncode == 0

    assert kept.count(old) == 1
    assert (tmp_path / "users.acl").read_text() == first, "the passwords stay, too"
    modes = {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()}
    assert modes == {0o600}


@pytest.mark.parametrize("binary", [None, "redis-server"])
def test_every_server_reads_the_acl_file(binary: str | None, tmp_path: Path) -> None:
    if binary and not shutil.which(binary):
        pytest.skip(f"no {binary}")
    (tmp_path / "users.acl").write_text("user default on nopass ~* &* +@all\n")
    options = [("aclfile", str(tmp_path / "users.acl"))]
    with LocalServer.start(binary=binary, options=options) as server:
        assert run("acl", str(tmp_path), "--queue", "a", "--queue", "b").returncode == 0
        redis: Any = Redis.from_url(server.url)

        assert redis.execute_command("ACL", "LOAD")
        redis.close()


def test_readers_that_may_not_load_scripts_use_those_that_are_loaded(tmp_path: Path) -> None:
    (tmp_path / "users.acl").write_text("user default on nopass ~* &* +@all\n")
    options = [("aclfile", str(tmp_path / "users.acl"))]
    with LocalServer.start(port=0, options=options) as server:
        with Client(server.url) as client:
            client.submit([], handler="h", id="there")
            assert run("acl", str(tmp_path), "--readers-never-load").returncode == 0
            client._protocol.connection.redis.acl_load()

        def streamq(user: str, *words: str, **more: str) -> "subprocess.CompletedProcess[str]":
            password = str(tmp_path / f"{user}.password")
            login = {"STREAMQ_USERNAME": user, "STREAMQ_PASSWORD_FILE": password}
            return run(*words, STREAMQ_URL=server.url, **login, **more)

        assert streamq("admin", "doctor").returncode == 0
        with Client(_url_of(server.url, tmp_path, "admin")) as admin:
            redis = admin._protocol.connection.redis
            redis.script_flush()
            refused = streamq("reader", "status", "there", STREAMQ_PATIENCE_MS="100")
            looked = streamq("reader", "doctor", "--json")
            mended = streamq("admin", "doctor", "--fix")
            found = streamq("reader", "status", "there")
            reader: Any = Redis.from_url(_url_of(server.url, tmp_path, "reader"))
            with pytest.raises(exceptions.NoPermissionError, match=r"script\|load"):
                reader.script_load("return 1")
            reader.close()

    assert refused.returncode == 3
    assert "this user may not load scripts" in refused.stderr
    assert '"verdict":"fail"' not in looked.stdout.replace(" ", ""), looked.stdout
    assert mended.returncode == 0, mended.stdout
    assert found.returncode == 0, found.stderr


def _url_of(url: str, folder: Path, user: str) -> str:
    password = (folder / f"{user}.password").read_text().strip()
    return url.replace("redis://", f"redis://{user}:{password}@")
