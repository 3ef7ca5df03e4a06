"""Wrong targets, killed processes, servers that go away and come back."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from streamq import Client
from streamq.servers.local import LocalServer
from tests.conftest import ANY_KIND, ONE_KIND
from tests.support.fleet import APPS, Fleet
from tests.support.waiting import wait_until
from tests.worker.common import TWO_KINDS, values

pytestmark = pytest.mark.commands


class TestTrouble:
    @ANY_KIND
    @pytest.mark.parametrize(
        ("target", "code", "says"),
        [
            ("nowhere:app", 4, "there is no module 'nowhere'"),
            ("tasks:nothing", 4, "it has the app 'app'"),
            ("tasks:shout", 4, "not a streamq.App"),
            ("tasks", 4, "names no app"),
            ("nowhere.py:app", 4, "there is no file"),
            ("broken:app", 4, "broken on purpose"),
        ],
    )
    def test_wrong_target(self, fleet: Fleet, target: str, code: int, says: str) -> None:
        pool = fleet.start(target=target)

        assert pool.wait(15) == code
        assert says in fleet.errors(pool)
        assert "child.py" not in fleet.errors(pool), "no traceback of ours"

    @ANY_KIND
    def test_file_as_target(self, fleet: Fleet, submit: Any) -> None:
        fleet.ready(target=str(APPS / "tasks.py") + ":app")

        assert values(submit(["a"], "shout")) == ["A"]

    def test_no_url_and_wrong_url(self) -> None:
        environment = {k: v for k, v in os.environ.items() if not k.endswith(("_URL", "URL_FILE"))}
        command = [sys.executable, "-m", "streamq.cli", "worker", "tasks:app"]

        without = subprocess.run(command, env=environment, cwd=APPS, capture_output=True)
        wrong = subprocess.run(
            [*command, "--url", "redis://127.0.0.1:1"],
            env=environment,
            cwd=APPS,
            capture_output=True,
        )

        assert without.returncode == 2
        assert b"STREAMQ_URL" in without.stderr
        assert wrong.returncode == 3
        assert b"Traceback" not in without.stderr + wrong.stderr

    @TWO_KINDS
    def test_killed_process_is_replaced_and_its_parts_run_at_once(
        self, fleet: Fleet, submit: Any
    ) -> None:
        pool = fleet.ready("--lease", "60s")
        request = submit([1.0], "nap")
        (note,) = wait_until(lambda: fleet.notes("S"))

        os.kill(note.pid, signal.SIGKILL)

        assert request.wait(8).parts.done == 1, "it did not wait for the lease"
        assert "killed by SIGKILL" in fleet.errors(pool)

    @ONE_KIND
    def test_process_killed_again_and_again_while_it_starts_is_started_again(
        self, fleet: Fleet, submit: Any, tmp_path: Path
    ) -> None:
        gate = tmp_path / "gate"
        module = f"import pathlib, time\nwhile not pathlib.Path({str(gate)!r}).exists():\n"
        module += "    time.sleep(0.01)\nfrom tasks import app\n"
        (tmp_path / "gated.py").write_text(module)
        pool = fleet.start(target=f"{tmp_path / 'gated.py'}:app")
        killed: set[int] = set()

        for _ in range(4):
            (pid,) = wait_until(lambda: set(fleet.children(pool)) - killed, 15)
            os.kill(pid, signal.SIGKILL)
            killed.add(pid)
        gate.touch()

        assert values(submit(["a"], "shout")) == ["A"]
        assert fleet.errors(pool).count("was killed by SIGKILL; it is replaced") == 4

    @ONE_KIND
    @pytest.mark.parametrize("end", ["os._exit(3)", "os.kill(os.getpid(), signal.SIGSEGV)"])
    def test_module_that_ends_its_process_ends_the_pool(
        self, fleet: Fleet, tmp_path: Path, end: str
    ) -> None:
        (tmp_path / "deadly.py").write_text(f"import os, signal\n{end}\n")

        pool = fleet.start(target=f"{tmp_path / 'deadly.py'}:app")

        assert pool.wait(30) == 4
        assert "when loading it" in fleet.errors(pool)

    def test_server_goes_away_comes_back_and_comes_back_empty(
        self, tmp_path: Any, queue: str
    ) -> None:
        home = tmp_path / "data"
        server = LocalServer.start(home, persist=True, port=0)
        port = int(server.url.rpartition(":")[2])
        client = Client(server.url)
        fleet = Fleet(server.url, queue, tmp_path)
        pool = fleet.ready("-p", "2", "--lease", "2s")
        request = client.submit([0.05] * 100, handler="nap", queue=queue)
        wait_until(lambda: request.status().parts.done > 10)
        server.kill()
        server.stop()
        wait_until(lambda: "waiting for the server" in fleet.errors(pool), 15)

        server = LocalServer.start(home, persist=True, port=port)

        assert request.wait(30).parts.done == 100
        server.kill()
        server.stop()
        server = LocalServer.start(port=port)
        again = client.submit([0.0] * 10, handler="nap", queue=queue)
        assert again.wait(30).parts.done == 10
        assert pool.poll() is None
        fleet.end()
        client.close()
        server.stop()

    def test_outage_longer_than_the_time_limit_fails_nothing(
        self, tmp_path: Any, queue: str
    ) -> None:
        server = LocalServer.start(tmp_path / "data", persist=True, port=0)
        client = Client(server.url)
        fleet = Fleet(server.url, queue, tmp_path)
        pool = fleet.ready("--lease", "20s")
        request = client.submit([1], handler="half_a_second", queue=queue)
        wait_until(lambda: request.status().parts.running == 1)

        os.kill(server.pid, signal.SIGSTOP)
        time.sleep(2.5)
        os.kill(server.pid, signal.SIGCONT)

        assert request.wait(30).parts.done == 1
        assert "took longer" not in fleet.errors(pool)
        fleet.end()
        client.close()
        server.stop()

    @ONE_KIND
    def test_request_whose_handler_nobody_has_waits_without_spin(
        self, fleet: Fleet, submit: Any, client: Client
    ) -> None:
        fleet.ready("-p", "2")
        redis = client._protocol.connection.redis
        request = submit(["x"] * 10, "unheard_of")
        before = redis.info("commandstats").get("cmdstat_brpop", {"calls": 0})["calls"]

        time.sleep(2)

        after = redis.info("commandstats")["cmdstat_brpop"]["calls"]
        assert after - before < 80
        assert request.status().parts.waiting == 10
