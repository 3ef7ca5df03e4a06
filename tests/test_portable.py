"""Systems that lack something which Linux has: streamq does without it."""

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from streamq.records.outputs import FileOutput
from streamq.servers.local import LocalServer
from streamq.telemetry.systemd import Notifier
from streamq.worker import process_handle
from streamq.worker.process_handle import ProcessHandle
from streamq.worker.slot_table import SlotTable
from tests.support.command import python_path
from tests.support.waiting import wait_until


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
        env=environment | {"PYTHONPATH": python_path(tmp_path)},
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
