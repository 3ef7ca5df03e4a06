"""Gateways with keys that come and go on one port, and workers of each language."""

import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.gateway.common import Gate
from tests.support.command import environment, run

CLIENTS = Path(__file__).parents[2] / "clients"
HERE = Path(__file__).parent
KINDS = ("node", "go", "bash")
_NEEDED = {"node": ["node"], "go": ["go"], "bash": ["curl", "jq"]}


#: Clients whose tests may not be skipped: if they lack something, they fail.
WANTED = os.environ.get("STREAMQ_TEST_CLIENTS", "").split(",")


def missing(*kinds: str) -> str:
    """Return why these clients cannot be tested here; "" if they can, or must."""
    needed = [program for kind in kinds if kind not in WANTED for program in _NEEDED[kind]]
    lacking = [program for program in needed if not shutil.which(program)]
    return f"{' and '.join(lacking)} not installed" if lacking else ""


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Path], str]:
    """Build programs in Go, each once."""
    folder = tmp_path_factory.mktemp("go")
    done: dict[Path, str] = {}

    def built(source: Path) -> str:
        if source not in done:
            program = str(folder / f"{len(done)}-{source.name}")
            subprocess.run(["go", "build", "-o", program, "."], cwd=source, check=True, timeout=300)
            done[source] = program
        return done[source]

    return built


class Site:
    """A gateway with a key of one caller, which can be killed and started again."""

    def __init__(self, url: str, queue: str, folder: Path) -> None:
        self._url = url
        self.queue = queue
        self._folder = folder
        keys = str(folder / "keys")
        made = run("serve", "key", "mill", "--role", "operator", "--keys", keys)
        self.key = made.stdout.strip()
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.address = f"127.0.0.1:{free.getsockname()[1]}"
        self._words = ("--keys", keys, "--listen", self.address)
        self._workers: list[subprocess.Popen[str]] = []
        self.gate: Gate
        self.start()

    def start(self) -> None:
        """Start the gateway, on the port that it had."""
        self.gate = Gate(self._url, self.queue, *self._words)

    def kill(self) -> None:
        """Kill the gateway with -9."""
        self.gate.end()

    def run(self, command: list[str], **variables: str) -> "subprocess.Popen[str]":
        """Start a program that knows the gateway, as the leader of a group of processes."""
        known = {
            "STREAMQ_GATEWAY": f"http://{self.address}",
            "STREAMQ_KEY": self.key,
            "STREAMQ_QUEUE": self.queue,
        }
        started = subprocess.Popen(
            command,
            env=environment(**known, **variables),
            cwd=self._folder,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self._workers.append(started)
        return started

    def end(self) -> None:
        """Kill all."""
        for worker in self._workers:
            kill_group(worker)
            worker.communicate()
        self.gate.end()


def kill_group(process: "subprocess.Popen[str]") -> None:
    """Kill a program and all that it started."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.fixture
def site(url: str, queue: str, tmp_path: Path) -> Iterator[Site]:
    site = Site(url, queue, tmp_path)
    yield site
    site.end()


@pytest.fixture
def worker_of(built: Callable[[Path], str]) -> Callable[[str], list[str]]:
    """The command of a test's worker."""

    def worker_of(kind: str) -> list[str]:
        if kind == "node":
            return ["node", str(HERE / "worker.mjs")]
        if kind == "go":
            return [built(HERE / "goworker")]
        return [str(CLIENTS / "bash" / "worker.sh"), "-m", "10", "shout", str(HERE / "shout.sh")]

    return worker_of


@pytest.fixture
def examples_of(built: Callable[[Path], str]) -> Callable[[str], tuple[list[str], list[str]]]:
    """The commands of the worker and of the loader that a README shows."""

    def examples_of(kind: str) -> tuple[list[str], list[str]]:
        if kind == "bash":
            bash = CLIENTS / "bash"
            return [str(bash / "worker.sh"), "-n", "2", "shout", "tr", "a-z", "A-Z"], [
                str(bash / "load.sh")
            ]
        folder = CLIENTS / kind / "examples"
        if kind == "go":
            return [built(folder / "shout")], [built(folder / "load")]
        return ["node", str(folder / "shout.js")], ["node", str(folder / "load.js")]

    return examples_of
