"""Users of a team: what they may touch, and scripts that only janitors may load."""

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from redis import Redis, exceptions
from redis.backoff import NoBackoff
from redis.retry import Retry

from streamq import Client, InvalidValue, Protocol, ServerBusy, State
from streamq.admin import acl
from streamq.driver.connection import Connection
from streamq.protocol import lua
from streamq.protocol.keys import RequestKeys, token_list_of
from streamq.protocol.replies import Tokens
from streamq.protocol.script_cache import ScriptCache
from tests.support.command import Ran, run
from tests.support.fleet import Fleet
from tests.support.secure import MISSING, Secured, as_user, password_of, streamq
from tests.support.waiting import wait_until

pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"{MISSING}: no server that speaks TLS")

TEAM, OTHER = "team-a", "team-b"
SECRET = b"a secret of the other team"
_ROLE = {"load": "loader", "results": "loader", "status": "reader", "wait": "reader"}


class ServerOfTeams(Secured):
    """A server for two teams, whose scripts only janitors may load. It keeps its data."""

    def __init__(self) -> None:
        super().__init__()
        streamq("acl", str(self.folder), "--only-janitors-load")
        streamq("acl", str(self.folder), "--only-janitors-load", "--team", TEAM)
        streamq("acl", str(self.folder), "--only-janitors-load", "--team", OTHER)
        port = self.start(("appendonly", "yes"), ("enable-debug-command", "yes"))
        self.lock()
        self.url = self.url_of("rediss", [port])

    def restart(self) -> None:
        """Replace the process by a new one, which has the data and no script."""
        way, password = str(self.folder / "node0" / "s"), password_of(self.folder, "admin")
        never = Retry(NoBackoff(), 0)
        admin: Any = Redis(unix_socket_path=way, username="admin", password=password, retry=never)
        before = admin.info("server")["run_id"]
        with suppress(exceptions.ConnectionError):
            admin.execute_command("DEBUG", "RESTART")

        def is_back() -> bool:
            with suppress(exceptions.ConnectionError, exceptions.BusyLoadingError):
                return bool(admin.info("server")["run_id"] != before)
            return False

        wait_until(is_back, 20.0)
        admin.close()


@pytest.fixture(scope="module")
def server() -> Iterator[ServerOfTeams]:
    server = ServerOfTeams()
    yield server
    server.stop()


@pytest.fixture(scope="module")
def theirs(server: ServerOfTeams) -> str:
    """The id of a request of the other team, with a part and a result."""
    connection = Connection(server.url)
    ScriptCache(connection).fill()
    connection.close()
    with Client(as_user(server.url, f"{OTHER}-loader")) as client:
        request = client.submit([SECRET], handler="h", queue=OTHER, id=f"{OTHER}-secret")
        return request.id


@pytest.fixture
def janitor(server: ServerOfTeams, tmp_path: Path) -> Iterator[Callable[[], None]]:
    """Start the janitor of all teams when called."""
    begun: list[subprocess.Popen[bytes]] = []

    def start() -> None:
        own = {"STREAMQ_URL": as_user(server.url, "janitor")}
        words = [sys.executable, "-m", "streamq.cli", "janitor", "--queue", TEAM, "--queue", OTHER]
        with (tmp_path / "janitor.err").open("wb") as errors:
            begun.append(subprocess.Popen(words, env=os.environ | own, stderr=errors))

    yield start
    for each in begun:
        each.terminate()
        each.wait()


class TestOtherTeams:
    @pytest.mark.parametrize("role", acl.ROLES)
    def test_no_role_touches_a_request_of_another_team(
        self, server: ServerOfTeams, theirs: str, role: str
    ) -> None:
        connection = Connection(as_user(server.url, f"{TEAM}-{role}")).redis
        keys = RequestKeys(theirs)
        calls: list[tuple[Any, ...]] = [
            ("HGET", keys.meta, "state"),
            ("HSET", keys.meta, "state", "done"),
            ("XRANGE", keys.parts, "-", "+"),
            ("XADD", keys.parts, "9-0", "1", "x"),
            ("HSCAN", keys.results, "0"),
            ("UNLINK", keys.meta),
            ("SSUBSCRIBE", keys.events),
            ("BRPOP", f"sq:{{q:{OTHER}}}:tokens:h:50", "1"),
            ("ZRANGE", f"sq:{{q:{OTHER}}}:open", "0", "-1"),
            ("SCAN", "0"),
        ]
        for script in lua.script_names():
            names, _, _ = lua.script_signature(script)
            own = [getattr(keys, name) for name in names if hasattr(keys, name)]
            if own:
                calls.append(("EVALSHA", lua.script_digest(script), len(own), *own))

        for words in calls:
            with pytest.raises(exceptions.NoPermissionError):
                connection.execute_command(*words)
        connection.close()

    @pytest.mark.parametrize("role", acl.ROLES)
    def test_only_janitors_load_scripts_and_nobody_runs_any_other(
        self, server: ServerOfTeams, role: str
    ) -> None:
        for user in (role, f"{TEAM}-{role}"):
            connection = Connection(as_user(server.url, user)).redis
            with pytest.raises(exceptions.NoPermissionError):
                connection.execute_command("EVAL", "return 1", 0)
            if role == "janitor":
                loaded = connection.execute_command("SCRIPT LOAD", "return 1")
                with pytest.raises(exceptions.NoPermissionError):
                    connection.execute_command("EVALSHA", loaded, 0)
            else:
                with pytest.raises(exceptions.NoPermissionError, match=r"script\|load"):
                    connection.execute_command("SCRIPT LOAD", "return 1")
            connection.close()

    def test_token_of_another_team_keeps_no_worker_from_its_own_work(
        self,
        server: ServerOfTeams,
        theirs: str,
        tmp_path: Path,
        request: pytest.FixtureRequest,
    ) -> None:
        connection = Connection(server.url)
        ScriptCache(connection).fill()
        tokens = Tokens(1, token_list_of("shout", 50))
        Protocol(connection).mint(TEAM, theirs, tokens, register="yes")
        fleet = Fleet(as_user(server.url, f"{TEAM}-worker"), TEAM, tmp_path)
        request.addfinalizer(fleet.end)
        pool = fleet.start("-p", "1")
        wait_until(lambda: "is left alone" in fleet.errors(pool), 15.0)
        wait_until(lambda: "is not looked at" in fleet.errors(pool), 15.0)

        with Client(as_user(server.url, f"{TEAM}-loader")) as client:
            own = client.submit(["x"], handler="shout", queue=TEAM, id=f"{TEAM}-own")
            assert own.wait(15.0).state is State.DONE
        connection.close()

    def test_commands_say_that_the_server_refuses(self, server: ServerOfTeams, theirs: str) -> None:
        url = as_user(server.url, f"{TEAM}-reader")
        seen = run("status", theirs, STREAMQ_URL=url)
        url = as_user(server.url, f"{TEAM}-loader")
        cancelled = run("cancel", theirs, STREAMQ_URL=url)

        for ran in (seen, cancelled):
            assert ran.returncode == 3
            assert "does not let us do this" in ran.stderr
        with Client(as_user(server.url, f"{OTHER}-loader")) as client:
            assert client.get(theirs).status().state.is_live

    def test_doctor_finds_the_rights_of_a_team_whole(
        self, server: ServerOfTeams, theirs: str
    ) -> None:
        for role in ("reader", "janitor"):
            url = as_user(server.url, f"{TEAM}-{role}")
            ran = run("doctor", "--queue", TEAM, STREAMQ_URL=url)

            assert f"user {TEAM}-{role} may be {role}" in ran.stdout, ran.stdout


class TestIds:
    @pytest.fixture(autouse=True)
    def _team(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("STREAMQ_TEAM", TEAM)

    def test_ids_that_are_made_up_begin_with_the_team(self, url: str, queue: str) -> None:
        with Client(url) as client:
            request = client.submit([1], handler="h", queue=queue)
            named = client.submit([1], handler="h", queue=queue, id=f"{TEAM}-x{queue}")

            assert request.id.startswith(f"{TEAM}-")
            assert named.id == f"{TEAM}-x{queue}"
            with pytest.raises(InvalidValue, match="ids of the team team-a begin with team-a-"):
                client.submit([1], handler="h", queue=queue, id="team-ab")

    def test_commands_take_ids_of_the_team(self, url: str, queue: str, tmp_path: Path) -> None:
        source = tmp_path / "in.txt"
        source.write_text("a\nb\n")

        def load(*words: str) -> Ran:
            own = {"STREAMQ_URL": url, "STREAMQ_QUEUE": queue, "STREAMQ_TEAM": TEAM}
            return run("load", str(source), "--handler", "h", *words, **own)

        assert load().stdout.startswith(f"{TEAM}-")
        refused = load("--id", "nightly")
        assert refused.returncode == 2
        assert "--id 'nightly': ids of the team team-a begin with team-a-" in refused.stderr

    def test_run_with_the_longest_name_of_a_team(self, tmp_path: Path) -> None:
        (tmp_path / "in.txt").write_text("a\n")
        team = "t" * 32
        words = ("run", str(tmp_path / "in.txt"), "--map", f"{'f' * 60}:upper")
        (tmp_path / f"{'f' * 60}.py").write_text("def upper(line):\n    return line.upper()\n")
        ran = run(*words, STREAMQ_TEAM=team, PYTHONPATH=str(tmp_path))

        assert ran.stdout == "A\n", ran.stderr
        assert run("ls", STREAMQ_TEAM="t" * 33).returncode == 2


class TestScripts:
    def test_job_waits_for_the_janitor_and_heals_after_a_restart(
        self,
        server: ServerOfTeams,
        janitor: Callable[[], None],
        tmp_path: Path,
        request: pytest.FixtureRequest,
    ) -> None:
        source, output = tmp_path / "in.txt", tmp_path / "out.txt"
        source.write_text("".join(f"line {n}\n" for n in range(500)))
        admin = Connection(server.url)
        admin.redis.script_flush()
        fleet = Fleet(as_user(server.url, f"{TEAM}-worker"), TEAM, tmp_path)
        request.addfinalizer(fleet.end)
        pool = fleet.start("-p", "2")

        def command(*words: str, **more: str) -> Ran:
            url = as_user(server.url, f"{TEAM}-{_ROLE[words[0]]}")
            return run(*words, STREAMQ_URL=url, STREAMQ_QUEUE=TEAM, STREAMQ_TEAM=TEAM, **more)

        def job() -> None:
            loaded = command("load", str(source), "--handler", "shout", "--lines", "5")
            assert loaded.returncode == 0, loaded.stderr
            request_id = loaded.stdout.strip()
            done = command("results", request_id, "-o", str(output), "--follow")
            assert done.returncode == 0, done.stderr
            assert command("wait", request_id).returncode == 0
            assert output.read_text() == source.read_text().upper()
            output.unlink()

        early = command("load", str(source), "--handler", "shout", STREAMQ_PATIENCE_MS="1500")
        assert early.returncode == 3
        assert "this user may not load scripts. A janitor" in early.stderr
        assert "waiting for it" in early.stderr
        with Client(as_user(server.url, f"{TEAM}-loader")) as client, pytest.raises(ServerBusy):
            client.submit([1], handler="h", queue=TEAM, id=f"{TEAM}-early")
        starts = threading.Timer(0.5, janitor)
        starts.start()
        job()
        starts.join()
        server.restart()
        job()
        admin.redis.script_flush()
        job()

        assert fleet.is_running(), fleet.errors(pool)
        # Requests of another team, which other tests leave here, are not for this one.
        ours = [line for line in fleet.errors(pool).splitlines() if f"{OTHER}-" not in line]
        assert not any("does not let us" in line for line in ours)
        said = (tmp_path / "janitor.err").read_text()
        wait_until(lambda: (tmp_path / "janitor.err").read_text().count("loaded") >= 3, 10)
        assert "cannot load" not in said
        admin.close()

    def test_calls_of_many_requests_wait_too(self, server: ServerOfTeams, theirs: str) -> None:
        admin = Connection(server.url)
        with Client(as_user(server.url, f"{OTHER}-reader")) as client:
            protocol = client.protocol
            admin.redis.script_flush()
            with pytest.raises(ServerBusy, match="A janitor"):
                protocol.inspect_all([theirs, f"{OTHER}-unknown"])
            filled = threading.Timer(0.5, ScriptCache(admin).fill)
            filled.start()
            said: list[str] = []
            with protocol.connection.patience(20.0, said.append):
                found, unknown = protocol.inspect_all([theirs, f"{OTHER}-unknown"])

            assert not isinstance(found, Exception)
            assert isinstance(unknown, Exception)
        filled.join()
        admin.close()


class TestFile:
    def test_teams_are_added_and_the_others_stay(self, tmp_path: Path) -> None:
        file = tmp_path / "users.acl"
        early = run("acl", str(tmp_path), "--team", "shop")
        assert early.returncode == 2
        assert "first, for admin" in early.stderr
        assert not file.exists()
        assert run("acl", str(tmp_path)).returncode == 0
        first = file.read_text()

        added = run("acl", str(tmp_path), "--team", "shop", "--queue", "fast")
        assert added.returncode == 0, added.stderr
        assert "STREAMQ_TEAM=shop STREAMQ_QUEUE=fast" in added.stderr
        whole = file.read_text()
        assert run("acl", str(tmp_path), "--team", "shop", "--queue", "fast").returncode == 0
        assert sorted(file.read_text().splitlines()) == sorted(whole.splitlines())
        assert run("acl", str(tmp_path)).returncode == 0
        assert sorted(file.read_text().splitlines()) == sorted(whole.splitlines())

        assert set(first.splitlines()) < set(whole.splitlines())
        team = [line for line in whole.splitlines() if line.startswith("user shop-")]
        assert len(team) == len(acl.ROLES)
        assert all("{r:shop-*}" in line and "{q:fast}" in line for line in team)
        assert not any("{r:*}" in line or "{q:*}" in line for line in team)

    @pytest.mark.parametrize(("first", "second"), [("shop", "shop-eu"), ("shop-eu", "shop")])
    def test_ids_of_one_team_are_not_those_of_another(
        self, first: str, second: str, tmp_path: Path
    ) -> None:
        assert run("acl", str(tmp_path)).returncode == 0
        assert run("acl", str(tmp_path), "--team", first).returncode == 0
        before = (tmp_path / "users.acl").read_text()

        ran = run("acl", str(tmp_path), "--team", second)

        assert ran.returncode == 2
        assert "ids of shop-eu begin with shop-" in ran.stderr
        assert (tmp_path / "users.acl").read_text() == before
        assert run("acl", str(tmp_path), "--team", "shop2").returncode == 0
