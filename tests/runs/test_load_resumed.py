"""``streamq load`` that is killed, held back or refused, and goes on; standard input."""

import gzip
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from streamq import Client, Protocol
from streamq.errors import RequestEnded, StreamqError
from streamq.model import Policy
from streamq.protocol.replies import Terms
from streamq.servers.local import LocalServer
from tests.conftest import FIRST_KIND, ONE_KIND
from tests.runs.loads import Load, lines_of, total_of
from tests.support import warm
from tests.support.fleet import Fleet
from tests.support.waiting import kill_on_the_way, wait_until

pytestmark = pytest.mark.commands


class TestGoingOn:
    @FIRST_KIND
    def test_killed_at_random_moments_every_record_is_there_once(
        self,
        command: tuple[list[str], dict[str, str]],
        load: Load,
        client: Client,
        fleet: Fleet,
        tmp_path: Path,
        request_id: str,
    ) -> None:
        data = b"".join(b"%d\n" % n for n in range(30_000))
        (tmp_path / "in.txt").write_bytes(data)
        words = (tmp_path / "in.txt", "--handler", "echo", "--id", request_id, "--lines", "3")

        kills = kill_on_the_way(
            [*command[0], *map(str, words)],
            command[1],
            lambda: total_of(client, request_id),
            10_000,
        )

        done = load(*words)

        assert done.returncode == 0, done.stderr
        assert kills > 0
        fleet.ready("-p", "2")
        request = client.get(request_id)
        assert request.wait(60).records.total == 30_000
        assert lines_of(request) == data

    @ONE_KIND
    def test_same_again_changes_nothing_and_a_changed_input_is_refused(
        self, load: Load, client: Client, tmp_path: Path, request_id: str
    ) -> None:
        file = tmp_path / "in.txt"
        file.write_text("a\nb\n")
        words = (file, "--handler", "echo", "--id", request_id)
        load(*words)

        again = load(*words)
        file.write_text("a\nb\nc\n")
        changed = load(*words)
        other = load(*words, "--limit", "3")
        (tmp_path / "other.txt").write_text("a\nb\n")
        another = load(tmp_path / "other.txt", *words[1:], "--queue", "elsewhere")

        assert another.returncode == 1
        assert "other.txt" in another.stderr
        assert client.list("elsewhere") == []
        assert (again.returncode, again.stdout) == (0, f"{request_id}\n")
        assert changed.returncode == 1
        assert "had 4 bytes, and has 6" in changed.stderr
        assert other.returncode == 1
        assert client.get(request_id).status().records.total == 2

    @ONE_KIND
    def test_window_holds_the_load_back(
        self,
        command: tuple[list[str], dict[str, str]],
        client: Client,
        fleet: Fleet,
        tmp_path: Path,
        request_id: str,
    ) -> None:
        (tmp_path / "in.txt").write_bytes((b"x" * 99 + b"\n") * 100_000)
        words = [tmp_path / "in.txt", "--handler", "echo", "--id", request_id]
        running = subprocess.Popen(
            [*command[0], *map(str, words), "--window", "2MiB", "--bytes", "64KiB"], env=command[1]
        )
        wait_until(lambda: total_of(client, request_id) * 64 >= 2 * 1024, 30)
        fleet.ready("-p", "2")
        waiting = client.get(request_id).status().parts.waiting

        assert running.wait(60) == 0
        # The window, a call that began below it, and one that was on its way.
        assert waiting * 64 <= 4 * 1024
        assert client.get(request_id).wait(60).records.done == 100_000


class TestStdin:
    @ONE_KIND
    @pytest.mark.parametrize("pack", [bytes, gzip.compress])
    def test_is_loaded_as_a_file_is(
        self, fleet: Fleet, load: Load, client: Client, pack: Callable[[bytes], bytes]
    ) -> None:
        data = b"item,count\n" + b"".join(b"a,%d\n" % n for n in range(20_000))
        fleet.ready()

        done = load("-", "--handler", "priced", "--format", "csv", stdin=pack(data))

        request = client.get(done.stdout.strip())
        assert request.wait(20).records.done == 20_000
        # The first parts have one record each: their result is no list.
        found = [
            item
            for _, result in request.results()
            for item in (result if isinstance(result, list) else [result])
        ]
        assert found == [{"a": 3 * n} for n in range(20_000)]

    @ONE_KIND
    def test_what_came_is_not_kept_waiting_for_more(
        self,
        fleet: Fleet,
        client: Client,
        command: tuple[list[str], dict[str, str]],
        request_id: str,
    ) -> None:
        fleet.ready()
        line = [*command[0], "-", "--handler", "shout", "--lines", "1", "--id", request_id]
        loading = subprocess.Popen(line, env=command[1], stdin=subprocess.PIPE)
        assert loading.stdin

        loading.stdin.write(b"one\ntwo\n")
        loading.stdin.flush()
        wait_until(lambda: done_of(client, request_id) == 2, 20)
        loading.stdin.write(b"three\n")
        loading.stdin.close()

        assert loading.wait(20) == 0
        request = client.get(request_id)
        request.wait(20)
        assert [item for _, item in request.results()] == ["ONE", "TWO", "THREE"]

    @ONE_KIND
    def test_killed_and_given_the_same_again_it_goes_on(
        self,
        fleet: Fleet,
        load: Load,
        client: Client,
        command: tuple[list[str], dict[str, str]],
        request_id: str,
    ) -> None:
        data = b"".join(b"%d\n" % n for n in range(50_000))
        words = ["-", "--handler", "echo", "--lines", "10", "--id", request_id]
        loading = subprocess.Popen([*command[0], *words], env=command[1], stdin=subprocess.PIPE)
        assert loading.stdin
        loading.stdin.write(data[:100_000])
        loading.stdin.flush()
        wait_until(lambda: total_of(client, request_id) > 1_000, 20)
        loading.kill()
        loading.wait()
        loading.stdin.close()

        short = load(*words, stdin=data[:500])
        other = load(*words, stdin=data.replace(b"7", b"8"))
        same = load(*words, stdin=data)
        again = load(*words, stdin=data)
        longer = load(*words, stdin=data + b"more\n")

        assert (short.returncode, other.returncode, longer.returncode) == (1, 1, 1)
        assert "ends after 500 bytes" in short.stderr
        assert "are not what they were" in other.stderr
        assert "and has more" in longer.stderr
        assert (same.returncode, again.returncode) == (0, 0), same.stderr + again.stderr
        fleet.ready("-p", "2")
        request = client.get(request_id)
        assert request.wait(30).records.total == 50_000
        assert lines_of(request) == data

    @ONE_KIND
    def test_closed_is_said(self, command: tuple[list[str], dict[str, str]]) -> None:
        line = " ".join([*command[0], "- --handler echo <&-"])

        done = subprocess.run(["sh", "-c", line], env=command[1], capture_output=True, text=True)

        assert (done.returncode, done.stdout) == (2, "")
        assert "standard input is closed" in done.stderr

    @ONE_KIND
    @pytest.mark.parametrize(
        ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
    )
    def test_stopped_it_says_how_to_go_on(
        self,
        client: Client,
        command: tuple[list[str], dict[str, str]],
        request_id: str,
        number: int,
        code: int,
    ) -> None:
        line = [*command[0], "-", "--handler", "shout", "--lines", "1", "--id", request_id]
        pipe = subprocess.PIPE
        loading = subprocess.Popen(line, env=command[1], stdin=pipe, stderr=pipe, text=True)
        assert loading.stdin
        loading.stdin.write("one\n")
        loading.stdin.flush()
        wait_until(lambda: total_of(client, request_id) == 1, 30)

        loading.send_signal(number)

        assert loading.wait(20) == code
        _, errors = loading.communicate()
        assert errors == f"stopped; the same command goes on with --id {request_id}\n"

    @ONE_KIND
    def test_goes_alone(self, load: Load, tmp_path: Path) -> None:
        (tmp_path / "in.txt").write_text("a\n")

        done = load("-", tmp_path / "in.txt", "--handler", "echo")

        assert done.returncode == 2
        assert "cannot be combined with files" in done.stderr


def done_of(client: Client, request_id: str) -> int:
    """Parts done, 0 while the request is not there."""
    try:
        return client.get(request_id).status().parts.done
    except StreamqError:
        return 0


def test_full_server_keeps_what_it_has_and_the_same_command_goes_on(tmp_path: Path) -> None:
    source = tmp_path / "in.txt"
    source.write_bytes(b"x" * 999 + b"\n")
    source.write_bytes(source.read_bytes() * 20_000)
    words = [sys.executable, "-m", "streamq.cli", "load", str(source), "--handler", "h"]
    with LocalServer.start() as server, Client(server.url) as client:
        redis = client._protocol.connection.redis
        redis.config_set("maxmemory", redis.info("memory")["used_memory"] + 8 * 2**20)

        def load() -> "subprocess.CompletedProcess[bytes]":
            env = os.environ | {"STREAMQ_URL": server.url}
            return warm.run([*words, "--id", "big"], env=env)

        full = load()
        kept = client.get("big").status().records.total
        redis.config_set("maxmemory", 0)
        again = load()

        assert b"out of memory" in full.stderr
        assert 0 < kept < 20_000
        assert again.returncode == 0, again.stderr
        assert client.get("big").status().records.total == 20_000


class TestAppendingAhead:
    """Parts are sent before those before them are answered: whatever breaks, each is there once."""

    @ONE_KIND
    @pytest.mark.parametrize("trouble", ["SCRIPT FLUSH", "CLIENT KILL TYPE normal", ""])
    def test_every_part_is_there_once(
        self, protocol: Protocol, queue: str, request_id: str, trouble: str
    ) -> None:
        protocol.open(request_id, "digest", Policy(handler="echo", queue=queue))
        with closing(protocol.appending(request_id)) as appending:
            for first in range(1, 100, 10):
                entries = [word for n in range(10) for word in (b"%d" % (first + n), b"1")]
                after = f"{first - 10}" if first > 1 else ""
                appending.send(first, after, f"{first}", 10, entries)
                if trouble and first % 30 == 1:
                    protocol.connection.redis.execute_command(*trouble.split())
            appending.wait()

        protocol.seal(request_id, 100, "91")
        grant = protocol.claim(request_id, "holder", Terms(200), ["parts echo 3"])
        assert [part.payload for part in grant.parts] == [b"%d" % n for n in range(1, 101)]

    @ONE_KIND
    def test_refusal_is_what_append_says(
        self, protocol: Protocol, queue: str, request_id: str
    ) -> None:
        protocol.open(request_id, "digest", Policy(handler="echo", queue=queue))
        with closing(protocol.appending(request_id)) as appending:
            appending.send(1, "", "1", 1, [b"a", b"1"])
            protocol.cancel(request_id)
            appending.send(2, "1", "2", 1, [b"b", b"1"])

            with pytest.raises(RequestEnded):
                appending.wait()
