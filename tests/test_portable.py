"""Systems that lack something Linux has, and containers that may use only some of it."""

import os
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from streamq import cpus
from streamq.errors import InvalidValue
from streamq.records.outputs import FileOutput
from streamq.servers.local import LocalServer
from streamq.telemetry.health import HealthServer, HealthSource
from streamq.telemetry.systemd import Notifier
from streamq.worker import process_handle
from streamq.worker.process_handle import ProcessHandle
from streamq.worker.slot_table import SlotTable
from tests.waiting import wait_until


def test_run_without_what_only_linux_has(tmp_path: Path) -> None:
    """A whole run where the system lacks all of it, in the command and in its processes."""
    (tmp_path / "sitecustomize.py").write_text(
        "import os, socket\n"
        "for name in ('fdatasync', 'waitid', 'memfd_create', 'sched_getaffinity', 'pidfd_open',\n"
        "             'process_cpu_count', 'O_PATH', 'eventfd', 'posix_fadvise'):\n"
        "    if hasattr(os, name):\n"
        "        delattr(os, name)\n"
        "for name in ('SOCK_CLOEXEC', 'SOCK_NONBLOCK'):\n"
        "    delattr(socket, name)\n"
        "import fcntl\n"
        "del fcntl.F_SETPIPE_SZ\n"
    )
    (tmp_path / "in.txt").write_text("".join(f"{n}\n" for n in range(1000)))
    (tmp_path / "job.py").write_text("def same(line: str) -> str:\n    return line\n")
    words = ("run", "in.txt", "-p", "2", "--lines", "50", "--by-reference", "--map", "job:same")
    environment = {k: v for k, v in os.environ.items() if not k.startswith("STREAMQ")}

    ran = subprocess.run(
        [sys.executable, "-m", "streamq.cli", *words, "-o", "out.txt"],
        env=environment | {"PYTHONPATH": str(tmp_path)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )

    assert ran.returncode == 0, ran.stderr
    assert (tmp_path / "out.txt").read_text() == (tmp_path / "in.txt").read_text()


def test_output_without_fdatasync(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "fdatasync")
    output = FileOutput(tmp_path / "out.txt", "id")
    output.open(0, force=False, has_begun=False)

    output.write(b"content")
    output.close()

    assert b"content" in b"".join(path.read_bytes() for path in tmp_path.iterdir())


@pytest.mark.parametrize("has_waitid", [True, False])
def test_programs_of_a_process_that_ended_are_ended(
    monkeypatch: pytest.MonkeyPatch, *, has_waitid: bool
) -> None:
    if not has_waitid:
        monkeypatch.delattr(os, "waitid")
    # A process that leaves a program behind, in its own group.
    words = [sys.executable, "-c", "import os, time\nif os.fork(): os._exit(7)\ntime.sleep(60)"]
    reader, writer = os.pipe()
    with subprocess.Popen(words, start_new_session=True, pass_fds=(writer,)) as popen:
        os.close(writer)
        handle: Any = ProcessHandle.__new__(ProcessHandle)
        handle.popen = popen

        wait_until(handle.has_ended)

        # Nobody has the pipe's other end any more.
        assert os.read(reader, 1) == b""
        assert popen.returncode == 7
    os.close(reader)


def test_memory_of_a_process_without_proc(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: object, **__: object) -> str:
        raise FileNotFoundError

    monkeypatch.setattr(Path, "read_text", missing)
    assert process_handle._rss_by_ps(os.getpid()) > 2**20
    monkeypatch.setenv("PATH", "/nowhere")
    assert process_handle._rss_by_ps(os.getpid()) == 0


def test_table_without_memfd(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create", raising=False)

    table, fd = SlotTable.create(2)
    again = SlotTable(fd, 2)
    table.hold(0, "holder", "request")

    assert again.read(0, is_dead=True) == table.read(0, is_dead=True)
    again.close()
    table.close()
    os.close(fd)


def test_systemd_is_told_without_flags_of_linux(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(socket, "SOCK_CLOEXEC")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(tmp_path / "notify"))
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))

        Notifier()._send("READY=1")

        assert systemd.recv(100) == b"READY=1"


def test_server_in_a_folder_whose_name_is_too_long_for_a_socket(tmp_path: Path) -> None:
    with LocalServer.start(tmp_path / ("long" * 40), persist=True) as server:
        assert len(server.url) < 107


class TestCpus:
    """How many processes a run has by default."""

    @pytest.fixture(autouse=True)
    def machine(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """64 CPUs, and groups as the test writes them."""
        monkeypatch.setattr(cpus, "GROUPS", tmp_path)
        monkeypatch.setattr(cpus, "OWN_GROUPS", tmp_path / "own")
        monkeypatch.setattr(os, "cpu_count", lambda: 64)
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(48)), raising=False)
        monkeypatch.setattr(os, "process_cpu_count", lambda: 40, raising=False)

    def test_those_that_we_may_run_on_count(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert cpus.usable() == 40
        monkeypatch.delattr(os, "process_cpu_count")
        assert cpus.usable() == 48
        monkeypatch.delattr(os, "sched_getaffinity")
        assert cpus.usable() == 64
        monkeypatch.setattr(os, "cpu_count", lambda: None)
        assert cpus.usable() == 1

    @pytest.mark.parametrize(
        ("own", "said", "expected"),
        [
            ("0::/", {"cpu.max": "200000 100000"}, 2),
            ("0::/", {"cpu.max": "150000 100000"}, 2),
            ("0::/", {"cpu.max": "1000 100000"}, 1),
            ("0::/", {"cpu.max": "max 100000"}, 40),
            ("0::/", {"cpu.max": "nonsense"}, 40),
            ("0::/", {"cpu.max": "100000 0"}, 40),
            ("0::/", {}, 40),
            ("0::/a/b", {"a/b/cpu.max": "800000 100000", "a/cpu.max": "300000 100000"}, 3),
            ("0::/host/path", {"cpu.max": "200000 100000"}, 2),
            (
                "3:cpu,cpuacct:/",
                {
                    "cpu,cpuacct/cpu.cfs_quota_us": "250000",
                    "cpu,cpuacct/cpu.cfs_period_us": "100000",
                },
                3,
            ),
            ("3:cpu:/x", {"cpu/x/cpu.cfs_quota_us": "-1", "cpu/x/cpu.cfs_period_us": "1000"}, 40),
            ("3:memory:/\n4:cpuset:/", {"cpu.max": "100000 100000"}, 40),
        ],
    )
    def test_what_a_container_may_use_counts(
        self, tmp_path: Path, own: str, said: dict[str, str], expected: int
    ) -> None:
        (tmp_path / "own").write_text(own + "\n")
        for name, text in said.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text + "\n")

        assert cpus.usable() == expected


def _subject() -> HealthSource:
    return HealthSource(
        ticked_at=time.monotonic, unready=lambda: "", samples=dict, wanted=lambda: 0
    )


def _has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


@pytest.mark.parametrize(
    ("address", "asked"),
    [
        ("0", ["127.0.0.1", "[::1]"]),
        (":0", ["127.0.0.1", "[::1]"]),
        ("127.0.0.1:0", ["127.0.0.1"]),
        ("localhost:0", ["127.0.0.1"]),
        ("[::1]:0", ["[::1]"]),
        ("[::]:0", ["[::1]", "127.0.0.1"]),
    ],
)
def test_health_is_answered_over_both_protocols(address: str, asked: list[str]) -> None:
    if "[::1]" in asked and not _has_ipv6():
        pytest.skip("no IPv6 here")
    server = HealthServer(address, _subject())
    try:
        for host in asked:
            with urllib.request.urlopen(f"http://{host}:{server.port}/livez", timeout=5) as got:
                assert got.status == 200
    finally:
        server.close()


def test_health_without_ipv6(monkeypatch: pytest.MonkeyPatch) -> None:
    make = socket.socket.__init__

    def without(self: socket.socket, family: int = -1, *rest: Any, **more: Any) -> None:
        if family == socket.AF_INET6:
            raise OSError(97, "Address family not supported by protocol")
        make(self, family, *rest, **more)

    monkeypatch.setattr(socket.socket, "__init__", without)
    server = HealthServer("0", _subject())
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/livez", timeout=5) as got:
            assert got.status == 200
    finally:
        server.close()


@pytest.mark.parametrize("address", ["::1:0", "[::1]", "[::1:0", "::", "x", "[127.0.0.1]:0"])
def test_address_that_cannot_be_is_refused(address: str) -> None:
    with pytest.raises(InvalidValue, match=r"\[::1\]:8080"):
        HealthServer(address, _subject())
