"""``--json``: which commands have it, and what it tells of those that act."""

import json
from pathlib import Path
from typing import Any

import pytest
import typer

from cli.app import ALONE, COMMANDS, application
from tests.support.by_hand import HANDLER, RequestByHand
from tests.support.command import Streamq

pytestmark = pytest.mark.commands

#: They serve, or tell people a story.
WITHOUT = {"worker", "janitor", "serve", "demo", "completion", "help"}


def test_every_command_but_those_that_serve_has_json() -> None:
    main: Any = typer.main.get_command(application(COMMANDS))

    def has_json(command: Any) -> bool:
        seconds = getattr(command, "commands", None)
        if seconds and command.name not in ALONE:
            return all(map(has_json, seconds.values()))
        return any("--json" in each.opts for each in command.params)

    assert {name for name, command in main.commands.items() if not has_json(command)} == WITHOUT


def told(streamq: Streamq, *words: str, code: int = 0) -> Any:
    ran = streamq(*words, "--json")
    assert ran.returncode == code, ran.stderr
    return json.loads(ran.stdout)


def test_what_steering_did(streamq: Streamq, submitted: RequestByHand) -> None:
    mine = {"id": submitted.id, "ok": True}

    assert told(streamq, "set", submitted.id, "--limit", "2") == [{**mine, "limit": 2}]
    assert told(streamq, "pause", submitted.id) == [{**mine, "paused": True}]
    assert told(streamq, "resume", submitted.id) == [{**mine, "paused": False}]
    assert told(streamq, "cancel", submitted.id) == [{**mine, "unfinished": 3}]
    refused = told(streamq, "pause", submitted.id, "nobody", code=5)
    assert [(each["id"], each["ok"]) for each in refused] == [
        (submitted.id, False),
        ("nobody", False),
    ]
    assert refused[1]["error"] == "nobody: no such request, or it was purged"


def test_what_was_waited_for_and_what_runs_again(streamq: Streamq, failed: RequestByHand) -> None:
    (status,) = told(streamq, "wait", failed.id, code=1)

    assert (status["id"], status["state"], status["parts"]["failed"]) == (failed.id, "done", 2)
    assert told(streamq, "retry", failed.id) == {"id": failed.id, "parts": 2}


def test_what_was_loaded(streamq: Streamq, request_id: str, tmp_path: Path) -> None:
    lines, requests = tmp_path / "lines.txt", tmp_path / "requests.txt"
    lines.write_text("a\nb\n")
    requests.write_text("1:a:b\n2:c\n")
    load = ("--handler", HANDLER, "--label", "user=62", "--label", "env=a")

    loaded = told(streamq, "load", str(lines), "--id", request_id, *load)
    many = told(streamq, "load", str(requests), "--format", "requests", *load)

    assert loaded == {"id": request_id, "parts": 1}
    assert (many["requests"], len(many["ids"])) == (2, 2)
    for each in (request_id, *many["ids"]):
        assert told(streamq, "status", each)["labels"] == {"user": "62", "env": "a"}
    wrong = streamq("load", str(lines), "--handler", HANDLER, "--label", "a b=c")
    assert (wrong.returncode, "the name of a label 'a b'" in wrong.stderr) == (2, True)


def test_which_users_there_are(streamq: Streamq, tmp_path: Path) -> None:
    found = told(streamq, "acl", str(tmp_path))

    assert found["file"] == str(tmp_path / "users.acl")
    assert {"loader", "worker", "reader", "admin"} <= found["users"].keys()
