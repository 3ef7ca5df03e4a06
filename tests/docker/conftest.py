"""An engine, the images, and a composition as a user starts it. ``make test-docker`` runs these.

``STREAMQ_TEST_BASE`` is the base image. ``STREAMQ_SERVER_IMAGE`` is the server's; without
it one is built on the base.
"""

import gc
import json
import os
import secrets
import shutil
import subprocess
import warnings
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import docker
import pytest
from docker.errors import DockerException, NotFound
from docker.models.containers import Container

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
LINES = 12_000


@pytest.fixture(scope="session")
def engine() -> Iterator[docker.DockerClient]:
    reason = ""
    try:
        client = docker.from_env(timeout=300)
    except DockerException as error:
        reason = f"no container engine answers: {error}"
    if reason:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)
            gc.collect()  # What tried to connect was not closed by its owner.
        pytest.skip(reason)
    yield client
    client.close()


@pytest.fixture(scope="session")
def compose() -> list[str]:
    """The words of the command."""
    plugin = subprocess.run(["docker", "compose", "version"], capture_output=True, check=False)
    if plugin.returncode == 0:
        return ["docker", "compose"]
    if shutil.which("docker-compose"):
        return ["docker-compose"]
    pytest.skip("neither docker compose nor docker-compose is installed")


def build(engine: docker.DockerClient, file: str, tag: str, base: str) -> str:
    engine.images.build(
        path=str(ROOT),
        dockerfile=file,
        tag=tag,
        buildargs={"BASE": base},
        network_mode="host",
        rm=True,
    )
    return tag


@pytest.fixture(scope="session")
def images(engine: docker.DockerClient) -> dict[str, str]:
    """The variables that name the images, after both have been built."""
    base = os.environ.get("STREAMQ_TEST_BASE", "python:3.13-slim-bookworm")
    server = os.environ.get("STREAMQ_SERVER_IMAGE") or build(
        engine, "tests/docker/server.Dockerfile", "streamq-test-server", base
    )
    image = build(engine, "deploy/Dockerfile", "streamq-test", base)
    size = engine.images.get(image).attrs["Size"] - engine.images.get(base).attrs["Size"]
    print(f"image: {size / 1e6:.0f} MB more than its base")
    return {"STREAMQ_IMAGE": image, "STREAMQ_SERVER_IMAGE": server}


class Composition:
    """What one compose file describes, with a name, secrets and data of its own."""

    def __init__(
        self,
        engine: docker.DockerClient,
        command: list[str],
        file: str,
        folder: Path,
        variables: dict[str, str],
    ) -> None:
        self.engine = engine
        self.name = f"sq{secrets.token_hex(4)}"
        self.folder = folder
        self._command = [*command, "-p", self.name, "-f", str(ROOT / "deploy" / file)]
        self._variables = variables | {
            "STREAMQ_LOAD": "--lines 50 --limit 100",
            "STREAMQ_APP": str(HERE / "app"),
            "STREAMQ_DATA": str(folder / "data"),
            "STREAMQ_SECRETS": str(folder / "secrets"),
        }
        (folder / "data").mkdir()
        (folder / "secrets").mkdir(mode=0o700)

    def secret(self, name: str, text: str) -> None:
        (self.folder / "secrets" / name).write_text(text)

    def run(self, *words: str) -> str:
        """What the compose command says on stdout."""
        with self.start(*words) as running:
            output, errors = running.communicate()
        assert running.returncode == 0, f"{words}: {output}{errors}{self.logs()}"
        return output

    def start(self, *words: str) -> "subprocess.Popen[str]":
        """The compose command, running."""
        return subprocess.Popen(
            [*self._command, *words],
            env=os.environ | self._variables,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def streamq(self, *words: str) -> str:
        """What a command of ours says, run inside the composition's network."""
        return self.run("run", "--rm", "-T", "streamq", *words)

    def status(self, request: str) -> Any:
        return json.loads(self.streamq("status", request, "--json"))

    def containers(self, service: str = "") -> list[Container]:
        labels = [f"com.docker.compose.project={self.name}"]
        labels += [f"com.docker.compose.service={service}"] if service else []
        return self.engine.containers.list(all=True, filters={"label": labels})

    def logs(self) -> str:
        """The end of what every container said."""
        found = ""
        for container in self.containers():
            with suppress(NotFound):
                found += f"\n== {container.name}\n{container.logs(tail=15).decode()}"
        return found

    def end(self) -> None:
        self.run("down", "--volumes", "--timeout", "5", "--remove-orphans")


@pytest.fixture
def lines(tmp_path: Path) -> list[str]:
    """The input, which a composition has as /data/input.txt."""
    return [f"line {number} of {tmp_path.name}" for number in range(LINES)]


@pytest.fixture
def composition(
    request: pytest.FixtureRequest,
    engine: docker.DockerClient,
    compose: list[str],
    images: dict[str, str],
    tmp_path: Path,
    lines: list[str],
) -> Iterator[Composition]:
    """The composition of the file that the test names, not yet started."""
    made = Composition(engine, compose, request.param, tmp_path, images)
    (tmp_path / "data/input.txt").write_text("".join(f"{line}\n" for line in lines))
    yield made
    made.end()
