"""Flows by commands: loaded, shown stage by stage, steered; and what is no flow is refused."""

from pathlib import Path

import pytest

from streamq import Protocol
from tests.cli.common import beat, rows
from tests.support.command import Streamq
from tests.support.fleet import APPS
from tests.support.flow_by_hand import FlowByHand

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


@pytest.mark.parametrize(
    "command",
    ["pause", "resume", "cancel", "release", "retry", "wait", "status", "errors", "report",
     "results", "purge --yes"],
)  # fmt: skip
def test_stage_by_itself_is_refused_and_its_flow_is_whole(
    streamq: Streamq, protocol: Protocol, queue: str, request_id: str, command: str
) -> None:
    flow = FlowByHand(protocol, queue, request_id, "map,map").load(1)

    ran = streamq(*command.split(), f"{request_id}/2")

    assert ran.returncode == 2
    assert f"{request_id}/2 is a stage of a flow" in ran.stderr
    assert ran.stderr.rstrip().endswith(f"give the whole flow, {request_id}")
    assert flow.states() == ["open", "open"]
    assert [stage.meta("paused") for stage in flow.stages] == ["", ""]


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


def test_errors_name_the_stage_and_the_item(
    streamq: Streamq, protocol: Protocol, queue: str, request_id: str
) -> None:
    flow = FlowByHand(protocol, queue, request_id, "spread,map,join").load(1)
    flow[1].run(children={1: [b"a", b"b"]})
    flow[2].give_up(1)
    flow[2].run()
    flow[3].give_up(1)

    assert [row[:2] for row in rows(streamq("errors", request_id).stdout)] == [
        ["h", "1/1"],
        ["h", "1"],
    ]
    assert (
        "2x ValueError: no (e.g. item 1/1 in h" in streamq("errors", request_id, "--group").stdout
    )


@pytest.mark.parametrize(
    ("on_failure", "words", "again", "says"),
    [
        ("run", (), "0 parts run", "1 failed part does not: a join or reduce was made without"),
        ("fail", (), "1 part runs", "1 failed part does not: a join or reduce runs again after"),
        ("fail", ("--stage", "3"), "0 parts run", "1 failed part does not: a join or reduce runs"),
        ("fail", ("--stage", "2"), "1 part runs", ""),
    ],
)
def test_retry_says_why_failed_parts_do_not_run_again(
    streamq: Streamq, protocol: Protocol, queue: str, request_id: str,
    on_failure: str, words: tuple[str, ...], again: str, says: str,
) -> None:  # fmt: skip
    stages = {3: {"on_failure": on_failure}}
    flow = FlowByHand(protocol, queue, request_id, "spread,map,join", stages).load(1)
    flow[1].run(children={1: [b"a", b"b"]})
    flow[2].give_up(1)
    flow[2].run()
    if on_failure == "fail":
        flow[3].give_up(1)
    else:
        flow[3].run()

    ran = streamq("retry", request_id, *words)

    assert ran.stdout == f"{again} again\n"
    assert says in ran.stderr
    assert bool(says) == bool(ran.stderr)


def test_stage_that_no_worker_serves_is_named(
    streamq: Streamq, words: str, protocol: Protocol, queue: str, request_id: str, tmp_path: Path
) -> None:
    beat(protocol, queue, handlers=["shout"], protocol=3)
    file = tmp_path / "two.toml"
    file.write_text('[[stage]]\nhandler = "shout"\n[[stage]]\nhandler = "size"\nqueue = "gpu"\n')

    ran = streamq("load", words, "--flow", str(file), "--id", request_id)
    assert "no live worker serves queue gpu, and stage size waits for one" in ran.stderr


def test_status_says_that_a_stage_waits_for_a_worker(
    streamq: Streamq, protocol: Protocol, queue: str, request_id: str
) -> None:
    FlowByHand(protocol, queue, request_id, "map,map").load(1)

    def held() -> list[str]:
        return [line[-14:] for line in streamq("status", request_id).stdout.splitlines()[-2:]]

    assert [each == "no live worker" for each in held()] == [True, False]
    beat(protocol, queue)
    assert "no live worker" not in held()
