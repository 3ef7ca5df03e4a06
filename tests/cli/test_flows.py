"""Flows by commands: loaded, shown stage by stage, steered; and what is no flow is refused."""

from pathlib import Path

import pytest

from tests.support.command import Streamq
from tests.support.fleet import APPS

pytestmark = pytest.mark.commands
FLOWS = f"{APPS}/flows.py"


@pytest.fixture
def words(tmp_path: Path) -> str:
    file = tmp_path / "words.txt"
    file.write_text("ab\nc!d\n")
    return str(file)


def test_load_status_and_set_of_one_stage(streamq: Streamq, words: str, request_id: str) -> None:
    ran = streamq("load", words, "--flow", f"{FLOWS}:strict", "--id", request_id)
    assert ran.stdout == f"{request_id}\n"
    assert "2 parts" in ran.stderr  # a join waits for the children of a part: one record in each

    ran = streamq("set", f"{request_id}/code", "--limit", "3")
    assert ran.stderr == f"{request_id}: limit 3\n"
    shown = streamq("status", request_id).stdout
    lines = [line.split()[:5] for line in shown.splitlines() if line[:1].isdigit()]
    assert [(line[1], line[2], line[4]) for line in lines] == [
        ("letters", "spread", "0/8"),
        ("code", "map", "0/3"),
        ("merge", "join", "0/8"),
    ]
    ran = streamq("set", f"{request_id}/nowhere", "--limit", "3")
    assert (ran.returncode, ran.stderr) == (
        2,
        f"streamq: request {request_id} has no stage 'nowhere': letters, code, merge\n",
    )
    assert streamq("retry", request_id, "--stage", "code").stdout == "0 parts run again\n"


def test_flow_as_a_file(streamq: Streamq, words: str, tmp_path: Path) -> None:
    file = tmp_path / "two.toml"
    file.write_text('[[stage]]\nhandler = "shout"\n\n[[stage]]\nhandler = "size"\nlimit = 2\n')

    request_id = streamq("load", words, "--flow", str(file)).stdout.strip()

    assert "flow       two" in streamq("status", request_id).stdout


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "flow f: a flow needs a stage: add one with .map(...)"),
        ('[[stage]]\nkind = "join"\nhandler = "h"', "flow f: a flow cannot begin with a join"),
        ('[[stage]]\nkind = "sort"\nhandler = "h"', "a stage is no 'sort'; there are map, spread"),
        ("[[stage]]\nlimit = 3", "a stage of kind map names no handler"),
        ('[[stage]]\nhandler = "h"\nlimitt = 3', "stage h: a stage has no option limitt"),
        ("stage = 3", "write each stage as a table"),
        ("[[stage", "f.toml: "),
    ],
)
def test_file_that_is_no_flow_is_refused(
    streamq: Streamq, words: str, tmp_path: Path, text: str, says: str
) -> None:
    file = tmp_path / "f.toml"
    file.write_text(text)

    ran = streamq("load", words, "--flow", str(file))

    assert (ran.returncode, ran.stdout) == (2, "")
    assert says in ran.stderr


def test_load_needs_a_handler_or_a_flow(streamq: Streamq, words: str) -> None:
    ran = streamq("load", words)
    assert (ran.returncode, ran.stderr) == (2, "streamq: give either --handler or --flow\n")

    ran = streamq("load", words, "--flow", f"{FLOWS}:app")
    assert (ran.returncode, ran.stdout) == (4, "")
    assert "is a App, not a streamq.Flow" in ran.stderr
