"""Commands at their edges: signals that come early, servers of another kind, strange folders."""

import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from streamq.model import Policy
from streamq.records.sizes import PartSize
from streamq.runs import stored_runs
from streamq.runs.folder import RunFolder
from streamq.runs.plan import Plan
from streamq.servers import launcher, local
from streamq.servers.local import LocalServer
from tests.support.command import environment, python_path, run
from tests.support.waiting import allowed_s, wait_until

COMMAND = [sys.executable, "-m", "streamq.cli"]


def _as_started_with(ignored: signal.Signals | None) -> None:
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN if number == ignored else signal.SIG_DFL)


def _importing(
    tmp_path: Path, *words: str, ignored: signal.Signals | None = None
) -> "subprocess.Popen[str]":
    """The command, amid its imports: one of them never ends."""
    (tmp_path / "typer.py").write_text(
        "import time\nprint('importing', flush=True)\nwhile True: time.sleep(1)\n"
    )
    process = subprocess.Popen(
        [*COMMAND, *words],
        env=environment(PYTHONPATH=python_path(tmp_path)),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: _as_started_with(ignored),
    )
    assert process.stdout
    assert process.stdout.readline() == "importing\n"
    return process


def test_nothing_is_imported_before_a_signal_can_be_answered() -> None:
    code = "import sys; had = set(sys.modules); import streamq.cli; print(*{*sys.modules} - had)"
    # What an editable install imports before it is not ours.
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=30
    )

    assert set(done.stdout.split()) == {"streamq", "streamq.cli"}


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
def test_signal_amid_the_imports_ends_a_command_politely(
    tmp_path: Path, number: signal.Signals, code: int
) -> None:
    process = _importing(tmp_path, "status")

    process.send_signal(number)

    assert process.communicate(timeout=30) == ("", "")
    assert process.returncode == code


@pytest.mark.parametrize(
    ("command", "number", "ignored"),
    [
        ("worker", signal.SIGHUP, None),
        ("status", signal.SIGHUP, signal.SIGHUP),
        ("status", signal.SIGINT, signal.SIGINT),
    ],
)
def test_signal_that_is_not_meant_to_end_it_does_not(
    tmp_path: Path, command: str, number: signal.Signals, ignored: signal.Signals | None
) -> None:
    """A worker that has no processes to restart yet; what nohup or a shell has us ignore."""
    process = _importing(tmp_path, command, ignored=ignored)

    process.send_signal(number)
    process.send_signal(signal.SIGTERM)

    assert process.communicate(timeout=30)[1] == ""
    assert process.returncode == 143


def test_server_that_is_no_sentinel_is_told() -> None:
    with LocalServer.start(port=0) as server:
        ran = run("status", STREAMQ_URL=server.url.replace("redis", "redis+sentinel") + "/main")

    assert ran.returncode == 3
    assert "it is no sentinel" in ran.stderr
    assert "Traceback" not in ran.stderr


def test_server_without_tls_is_told_soon() -> None:
    with LocalServer.start(port=0) as server:
        begun = time.monotonic()
        url = server.url.replace("redis", "rediss")
        ran = run("status", STREAMQ_URL=f"{url}?socket_connect_timeout=1", STREAMQ_INSECURE="1")

    assert ran.returncode == 3
    assert "a server without TLS is redis://" in ran.stderr
    assert time.monotonic() - begun < allowed_s(8)


def test_empty_id_is_none(tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_text("a\n")
    with LocalServer.start() as server:
        ran = run(
            "load", str(tmp_path / "in.txt"), "--handler", "h", "--id", "", STREAMQ_URL=server.url
        )

    assert (ran.returncode, ran.stdout) == (2, "")
    assert "--id" in ran.stderr


def test_password_on_the_command_line_is_warned_of_once() -> None:
    with LocalServer.start(port=0) as server:
        place = server.url.removeprefix("redis://")
        ran = run("worker", "tests.support.apps.broken:app", "--url", f"redis://:secret@{place}")

    assert ran.stderr.count("can see the password") == 1


def _plan() -> Plan:
    return Plan(
        id="a-run",
        target="builtins:str",
        output="/nowhere",
        form="lines",
        policy=Policy(handler="h"),
        size=PartSize(),
        processes=1,
        slots=1,
        window_bytes=2**20,
    )


def test_supervisor_that_stands_still_costs_no_finished_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(launcher, "_ANSWER_TIMEOUT_S", 0.3)
    monkeypatch.setattr(launcher, "_STOP_MARGIN_S", 0.3)
    monkeypatch.setattr(local, "_PERSIST_GRACE_S", 0.3)
    running = RunFolder(_plan())
    with running.held(), running.server("", "sq") as address:
        server_pid = _pid_at(address())
        supervisor = int(Path(f"/proc/{server_pid}/stat").read_text().split()[3])
        os.kill(supervisor, signal.SIGSTOP)
        running.is_kept = False

    wait_until(lambda: _has_ended(server_pid))
    assert not stored_runs.HOME.exists()


def _has_ended(pid: int) -> bool:
    """Whether it runs no more: whoever is to wait for it may be slow."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def _pid_at(url: str) -> int:
    text = launcher.ask_server(url.removeprefix("unix://"), "INFO", "server")
    return int(text.partition("process_id:")[2].partition("\r")[0])


@pytest.mark.parametrize("is_resumed", [True, False])
@pytest.mark.parametrize("below", ["", "a-run"])
@pytest.mark.parametrize("kind", ["link", "file", "for all", "for the group"])
def test_folder_that_others_may_write_to_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, below: str, *, is_resumed: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    place = stored_runs.HOME / below if below else stored_runs.HOME
    place.parent.mkdir(mode=0o700, exist_ok=True)
    if kind == "link":
        (tmp_path / "elsewhere").mkdir(mode=0o700)
        place.symlink_to(tmp_path / "elsewhere")
        says = "is a link"
    elif kind == "file":
        place.write_text("")
        says = "is no folder"
    else:
        place.mkdir()
        place.chmod(0o777 if kind == "for all" else 0o770)
        says = "chmod go-w .streamq"

    ran = run("run", "--resume", "a-run") if is_resumed else None

    if ran:
        assert ran.returncode == 2
        assert says in ran.stderr
        return
    with pytest.raises(ValueError, match=says), RunFolder(_plan()).held():
        pass


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give a folder away")
def test_folder_of_another_user_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    stored_runs.HOME.mkdir(mode=0o700)
    os.chown(stored_runs.HOME, 12345, 12345)

    with pytest.raises(ValueError, match="another user"), RunFolder(_plan()).held():
        pass

    assert stat.S_ISDIR(stored_runs.HOME.lstat().st_mode)
