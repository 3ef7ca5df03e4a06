"""What deploy/ holds is well formed, safe, and says what our commands understand."""

import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from cli.app import COMMANDS, GROUPS
from streamq import units
from tests.support.command import COMMAND, environment, run
from tests.support.fleet import APPS

DEPLOY = Path(__file__).parents[2] / "deploy"
MANIFESTS = sorted((DEPLOY / "k8s").glob("*.yaml"))
UNITS = sorted((DEPLOY / "systemd").glob("*.service"))
COMPOSITIONS = sorted(DEPLOY.glob("compose*.yaml"))
#: The oldest Kubernetes that is still about, and the newest the schemas know.
VERSIONS = ("1.25", kubernetes_validate.latest_version())
#: What no published schema of Kubernetes itself covers.
FOREIGN = {"Kustomization", "ScaledObject"}


def documents(path: Path) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(path.read_text()))


OBJECTS = {f"{d['kind']}-{path.stem}": d for path in MANIFESTS for d in documents(path)}
PODS = {
    name: d["spec"]["template"] for name, d in OBJECTS.items() if "template" in d.get("spec", {})
}


def words_of_units() -> Iterator[tuple[str, list[str]]]:
    for path in UNITS:
        (line,) = re.findall(r"^ExecStart=\S+ (.*)$", path.read_text(), re.MULTILINE)
        yield path.name, line.split()


def words_of_compositions() -> Iterator[tuple[str, list[str]]]:
    for path in COMPOSITIONS:
        for name, service in documents(path)[0]["services"].items():
            command = service.get("command")
            if "STREAMQ_IMAGE" in service["image"] and command:
                words = shlex.split(command) if isinstance(command, str) else command
                yield f"{path.name}-{name}", words


def words_of_pods() -> Iterator[tuple[str, list[str]]]:
    for name, pod in PODS.items():
        yield name, pod["spec"]["containers"][0]["args"]


TYPED = dict([*words_of_units(), *words_of_compositions(), *words_of_pods()])


@cache
def said_of(*words: str) -> str:
    """What a command says of its options."""
    return run(*words, "--help").stdout


@pytest.mark.parametrize("name", TYPED)
def test_every_option_is_one_of_the_command(name: str) -> None:
    command, *rest = TYPED[name]
    assert command in COMMANDS
    words = [command, *(word for word in rest[:1] if word in GROUPS.get(command, ()))]

    known = said_of(*words)

    for word in rest:
        if word.startswith("-"):
            assert re.search(rf"(?<![\w-]){re.escape(word.partition('=')[0])}(?![\w-])", known)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", [name for name in OBJECTS if name.split("-")[0] not in FOREIGN])
def test_manifests_fit_the_schema(name: str, version: str) -> None:
    kubernetes_validate.validate(OBJECTS[name], version, strict=True)


def test_a_misspelt_field_would_be_seen() -> None:
    deployment = {**OBJECTS["Deployment-worker"], "specs": {}}

    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(deployment, VERSIONS[-1], strict=True)


@pytest.mark.parametrize("name", PODS)
def test_pods_have_no_more_rights_than_they_need(name: str) -> None:
    spec = PODS[name]["spec"]
    (container,) = spec["containers"]

    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["automountServiceAccountToken"] is False
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert container["resources"]["requests"].keys() == {"cpu", "memory"}
    assert "memory" in container["resources"]["limits"]
    environment = {each["name"]: each["value"] for each in container["env"]}
    secret = next(m for m in container["volumeMounts"] if m["name"] == "url")
    assert environment["STREAMQ_URL_FILE"] == f"{secret['mountPath']}/url"
    assert {mount["name"] for mount in container["volumeMounts"]} == {
        volume["name"] for volume in spec["volumes"]
    }


def test_workers_are_probed_at_their_health_port_and_given_time_to_end() -> None:
    spec = PODS["Deployment-worker"]["spec"]
    (container,) = spec["containers"]
    environment = {each["name"]: each["value"] for each in container["env"]}
    (port,) = container["ports"]
    grace = container["args"][container["args"].index("--grace") + 1]

    assert environment["STREAMQ_HEALTH_PORT"] == str(port["containerPort"]) == "9090"
    pages = {
        kind: (container[kind]["httpGet"]["path"], container[kind]["httpGet"]["port"])
        for kind in ("startupProbe", "livenessProbe", "readinessProbe")
    }
    assert pages == {
        "startupProbe": ("/livez", port["name"]),
        "livenessProbe": ("/livez", port["name"]),
        "readinessProbe": ("/readyz", port["name"]),
    }
    assert spec["terminationGracePeriodSeconds"] * 1_000 >= units.duration_ms(grace) + 10_000


def test_selectors_find_their_pods() -> None:
    labels = {name: pod["metadata"]["labels"] for name, pod in PODS.items()}

    for name in ("Deployment-worker", "Deployment-janitor", "Deployment-gateway"):
        assert OBJECTS[name]["spec"]["selector"]["matchLabels"] == labels[name]
    budget = OBJECTS["PodDisruptionBudget-worker"]["spec"]["selector"]["matchLabels"]
    assert budget == labels["Deployment-worker"]
    for name in ("janitor", "gateway"):
        assert OBJECTS[f"Service-{name}"]["spec"]["selector"] == labels[f"Deployment-{name}"]


def test_the_scaler_asks_the_janitor_and_scales_the_workers() -> None:
    scaler, service = OBJECTS["ScaledObject-keda"], OBJECTS["Service-janitor"]
    namespace = OBJECTS["Kustomization-kustomization"]["namespace"]
    (trigger,) = scaler["spec"]["triggers"]
    args = PODS["Deployment-worker"]["spec"]["containers"][0]["args"]
    slots = int(args[args.index("-p") + 1]) * int(args[args.index("-c") + 1])

    assert scaler["apiVersion"] == "keda.sh/v1alpha1"
    assert scaler["metadata"]["namespace"] == namespace
    assert (
        scaler["spec"]["scaleTargetRef"]["name"] == OBJECTS["Deployment-worker"]["metadata"]["name"]
    )
    assert scaler["spec"].keys() == {
        "scaleTargetRef",
        "minReplicaCount",
        "maxReplicaCount",
        "pollingInterval",
        "cooldownPeriod",
        "triggers",
    }
    host = f"{service['metadata']['name']}.{namespace}.svc.cluster.local"
    port = service["spec"]["ports"][0]["port"]
    assert trigger == {
        "type": "metrics-api",
        "metadata": {
            "url": f"http://{host}:{port}/scale",
            "valueLocation": "value",
            "targetValue": str(slots),
        },
    }


def test_the_kustomization_names_files_that_are_there() -> None:
    kustomization = OBJECTS["Kustomization-kustomization"]

    assert all((DEPLOY / "k8s" / name).is_file() for name in kustomization["resources"])


@pytest.mark.parametrize("path", COMPOSITIONS, ids=lambda path: path.name)
def test_compositions_keep_secrets_out_of_the_environment(path: Path) -> None:
    (composition,) = documents(path)

    for service in composition["services"].values():
        if "STREAMQ_IMAGE" in service["image"]:
            assert service["environment"] == {"STREAMQ_URL_FILE": "/run/secrets/url"}
            assert service["read_only"] is True
            assert service["cap_drop"] == ["ALL"]
        for port in service.get("ports", ()):
            assert port.startswith("${STREAMQ_BIND:-127.0.0.1}:")


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd-analyze")
@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.name)
def test_systemd_understands_the_units(path: Path, tmp_path: Path) -> None:
    text = path.read_text().replace("/opt/streamq/bin/streamq", sys.executable)
    unit = tmp_path / path.name.replace("@", "@shop")
    unit.write_text(text)

    verified = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(unit)],
        capture_output=True,
        text=True,
        check=False,
    )

    said = [line for line in verified.stderr.splitlines() if unit.name in line]
    assert (verified.returncode, said) == (0, [])


def test_a_misspelt_setting_of_a_unit_would_be_seen(tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("no systemd-analyze")
    unit = tmp_path / "wrong.service"
    unit.write_text(f"[Service]\nType=notifies\nWatchdogSecs=30\nExecStart={sys.executable}\n")

    verified = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(unit)],
        capture_output=True,
        text=True,
        check=False,
    )

    assert "WatchdogSecs" in verified.stderr


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.name)
def test_units_hear_from_what_they_start(
    path: Path, urls: Callable[[str], str], queue: str, tmp_path: Path
) -> None:
    """Their ExecStart, with a socket as systemd gives one."""
    heard = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    heard.bind(str(tmp_path / "notify"))
    heard.settimeout(30)
    (line,) = re.findall(r"^ExecStart=\S+ (.*)$", path.read_text(), re.MULTILINE)
    words = line.replace("${STREAMQ_APP}", "tasks:app").split()
    url = tmp_path / "url"
    url.write_text(urls("valkey"))
    variables = {
        "STREAMQ_URL_FILE": str(url),
        "STREAMQ_QUEUE": queue,
        "NOTIFY_SOCKET": str(tmp_path / "notify"),
        "WATCHDOG_USEC": "1000000",
    }
    unit = subprocess.Popen([*COMMAND, *words], env=environment(**variables), cwd=APPS)

    def hear(word: bytes) -> None:
        while heard.recv(1_000).partition(b"\n")[0] != word:
            pass

    try:
        hear(b"READY=1")
        hear(b"WATCHDOG=1")
        unit.send_signal(signal.SIGTERM)
        hear(b"STOPPING=1")
        assert unit.wait(30) == 0
    finally:
        unit.kill()
        unit.wait()
        heard.close()
