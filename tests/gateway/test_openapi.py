"""The OpenAPI document: what it says is what the gateway does."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from streamq.gateway import openapi
from streamq.gateway.routes import ROUTES
from tests.conftest import ONE_KIND
from tests.gateway.common import Gate

COPY = Path(__file__).parents[2] / "proto" / "openapi.json"
#: All but one: a schema cannot say all that is checked, such as what a rate may be.
EXCLUDED = "positive_data_acceptance"


@ONE_KIND
def test_gateway_serves_it(gate: Gate) -> None:
    served = gate.get("/v1/openapi.json").json
    assert {(method.upper(), path) for path, of in served["paths"].items() for method in of} == {
        (route.method, route.path) for route in ROUTES
    }


def test_copy_in_the_checkout_is_the_same() -> None:
    assert json.loads(COPY.read_bytes()) == openapi.openapi_document(ROUTES, "1"), "run make docs"


def explore(gate: Gate, folder: Path, seconds: int, examples: int) -> None:
    """Have schemathesis try every route with what the document allows, and what it does not."""
    gate.submit(["a", "b"], id=f"known-{gate.queue}")
    words = ["--max-examples", str(examples), "--max-time", str(seconds), "--checks", "all"]
    words += ["--exclude-checks", EXCLUDED, "--phases", "coverage,fuzzing", "--warnings", "off"]
    program = str(Path(sys.executable).with_name("st"))
    ran = subprocess.run(
        [program, "run", f"{gate.url}/v1/openapi.json", *words, "--no-color"],
        capture_output=True,
        text=True,
        cwd=folder,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout[-5_000:]
    assert gate.get("/readyz").status == 200


@ONE_KIND
def test_schemathesis_finds_nothing_in_a_few_seconds(gate: Gate, tmp_path: Path) -> None:
    pytest.importorskip("schemathesis")
    explore(gate, tmp_path, 8, 2)


@ONE_KIND
@pytest.mark.long
def test_schemathesis_finds_nothing_in_two_minutes(gate: Gate, tmp_path: Path) -> None:
    pytest.importorskip("schemathesis")
    explore(gate, tmp_path, 100, 50)
