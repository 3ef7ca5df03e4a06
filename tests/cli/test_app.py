"""The command as such: its help, its options, where it finds the server, how it fails."""

import os
import re
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer

from cli import main
from cli.app import COMMANDS, application
from cli.help_text import help_default_of_parameter
from tests.support.command import COMMAND, NOBODY, environment, run
from tests.support.secure import as_role
from tests.support.waiting import allowed_s

pytestmark = pytest.mark.commands


def test_help_is_quick() -> None:
    """Counted in time of the processor: how long it takes also depends on what else runs here."""

    def spent() -> float:
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        return used.ru_utime + used.ru_stime

    before, began = spent(), time.perf_counter()
    subprocess.run([*COMMAND, "--help"], env=environment(), capture_output=True, check=True)

    took = spent() - before
    print(f"streamq --help: {took:.3f} s, {time.perf_counter() - began:.3f} s by the clock")
    assert took < allowed_s(1.5)


@pytest.mark.parametrize("name", COMMANDS)
def test_help_of_a_command_has_an_example(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["streamq", name, "--help"])
    monkeypatch.setenv("COLUMNS", "200")

    with pytest.raises(SystemExit) as ended:
        main()

    usage, *rest = filter(None, map(str.strip, capsys.readouterr().out.splitlines()))
    assert ended.value.code == 0
    assert usage.startswith(f"Usage: streamq {name} ")
    assert rest[rest.index("Example:") + 1].startswith(f"streamq {name}")
    if name not in ("server", "demo", "acl", "config", "completion", "help", "verify"):
        assert any("STREAMQ_URL" in line for line in rest)


def _every_command() -> list[Any]:
    group: Any = typer.main.get_command(application(COMMANDS))
    seconds = [each for one in group.commands.values() for each in _seconds(one)]
    return [group, *group.commands.values(), *seconds]


def _seconds(command: Any) -> list[Any]:
    return list(getattr(command, "commands", {}).values())


def test_every_option_says_what_it_does() -> None:
    """In a sentence, with its default: none for a plain flag, and words where it is no value."""
    wrong = []
    for command in _every_command():
        for each in command.params:
            says = each.help or ""
            has_default = (
                each.param_type_name == "argument" or help_default_of_parameter(each) != "0"
            )
            if not (says[:1].isupper() and says.endswith(".") and len(says) > 15 and has_default):
                wrong.append((command.name, each.name, says))
    assert wrong == []


@pytest.mark.parametrize("name", ["run", "load", "worker"])
def test_many_options_are_in_panels(name: str) -> None:
    ran = run("help", name)

    panels = re.findall(r"^(\w[\w ]*):$", ran.stdout, re.MULTILINE)
    assert {"Example", "What to run", "Speed and limits", "Server"} <= set(panels)
    assert len(panels) == len(set(panels))


def test_help_of_run_does_not_offer_what_run_refuses() -> None:
    offered = run("run", "--help").stdout.partition("--format")[2].partition("[default")[0]

    assert "jsonl" in offered
    assert "requests" not in offered
    assert "--format requests" in run("load", "--help").stdout


@pytest.mark.parametrize("columns", ["40", "80", "300"])
def test_help_fits_the_terminal(columns: str) -> None:
    ran = run("run", "--help", COLUMNS=columns)

    assert max(map(len, ran.stdout.splitlines())) <= max(60, min(int(columns), 100))
    assert "\x1b" not in ran.stdout


def test_help_does_not_import_what_it_does_not_need() -> None:
    """Rich takes as long as all the rest, and redis-py much longer."""
    code = (
        "import sys; from cli import main; sys.argv = ['streamq', 'run', '--help']\n"
        "try: main()\nexcept SystemExit: pass\n"
        "print(*{'rich', 'redis', 'asyncio'} & sys.modules.keys(), file=sys.stderr)"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert ran.stderr.split() == []


def test_help_is_a_command_too() -> None:
    assert run("help").stdout == run("--help").stdout
    assert run("help", "run").stdout == run("run", "--help").stdout
    assert run("help", "cluster", "create").stdout == run("cluster", "create", "--help").stdout
    ran = run("help", "rum")
    assert (ran.returncode, ran.stdout) == (2, "")
    assert "Did you mean 'run'" in ran.stderr


def test_a_typo_in_a_command_is_named() -> None:
    ran = run("stauts")

    assert (ran.returncode, ran.stdout) == (2, "")
    assert "Did you mean 'status'" in ran.stderr


def test_without_a_url_the_three_ways_to_give_one_are_named() -> None:
    ran = run("ls")

    assert (ran.returncode, ran.stdout) == (2, "")
    for way in ("--url", "STREAMQ_URL=", "STREAMQ_URL_FILE="):
        assert way in ran.stderr


def test_nobody_at_the_url() -> None:
    ran = run("status", "--url", NOBODY)

    assert (ran.returncode, ran.stdout) == (3, "")
    assert ran.stderr.startswith(f"streamq: {NOBODY} does not answer")
    assert len(ran.stderr.splitlines()) == 1


def test_a_url_that_cannot_be() -> None:
    ran = run("ls", STREAMQ_URL="http://localhost")

    assert (ran.returncode, ran.stdout) == (2, "")
    assert "no such scheme" in ran.stderr
    assert len(ran.stderr.splitlines()) == 1


def test_a_password_in_the_option_warns_and_is_not_shown() -> None:
    url = "redis://me:hush@127.0.0.1:1"

    ran = run("--url", url, "ls")

    assert ran.returncode == 3
    assert "warning" in ran.stderr
    assert "ps shows it" in ran.stderr
    assert "hush" not in ran.stderr
    assert "warning" not in run("ls", STREAMQ_URL=url).stderr


@pytest.mark.parametrize("name", ["STREAMQ_URL", "STREAMQ_URL_FILE", "REDIS_URL", "toml"])
def test_a_password_from_elsewhere_does_not_warn(name: str, tmp_path: Path) -> None:
    url = NOBODY.replace("//", "//:hushhush@")
    (tmp_path / "url").write_text(url)
    (tmp_path / "streamq.toml").write_text('url_file = "url"')
    found = {"STREAMQ_URL_FILE": tmp_path / "url", "toml": tmp_path / "streamq.toml"}
    variable = "STREAMQ_CONFIG" if name == "toml" else name

    ran = run("ls", **{variable: str(found.get(name, url))})

    assert ran.returncode == 3
    assert len(ran.stderr.splitlines()) == 1


def test_options_stand_before_the_command_or_behind_it(url: str) -> None:
    """And an option counts more than the environment, the nearer one more than the other."""
    assert run("--url", url, "ls", STREAMQ_URL=NOBODY).returncode == 0
    assert run("--url", NOBODY, "ls", "-u", url).returncode == 0
    assert run("ls", STREAMQ_URL=url, STREAMQ_PREFIX="a:b").returncode == 2


def test_the_url_may_be_in_a_file(url: str, tmp_path: Path) -> None:
    (tmp_path / "url").write_text(f"{url}\n")

    assert run("ls", STREAMQ_URL_FILE=str(tmp_path / "url")).returncode == 0
    assert run("ls", STREAMQ_URL_FILE=str(tmp_path / "none")).returncode == 2


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("status a:b", "request id 'a:b'"),
        ("status --queue a:b", "queue 'a:b'"),
        ("status --prefix a:b", "prefix 'a:b'"),
        ("ls --queue a:b", "queue 'a:b'"),
        ("ls --state gone", "'gone'"),
        ("ls -n -1", "-n"),
        ("workers --queue a:b", "queue 'a:b'"),
        ("wait r --timeout 5x", "timeout '5x'"),
        ("set r", "--level, --limit, --rate or --weight"),
        ("set r --level 100", "level 100"),
        ("set r --priority high", "--level"),
        ("set r --limit 0", "limit 0"),
        ("set r --rate 5", "rate '5'"),
        ("pause a:b", "request id 'a:b'"),
        ("janitor --interval 0", "interval '0'"),
        ("janitor --log-level loud", "loud"),
    ],
)
def test_bad_values(
    words: str,
    says: str,
    url: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["streamq", *words.split()])
    monkeypatch.setenv("STREAMQ_URL", as_role(url, words.split()[0]))
    monkeypatch.setenv("COLUMNS", "200")

    with pytest.raises(SystemExit) as ended:
        main()

    out, err = capsys.readouterr()
    assert (ended.value.code, out) == (2, "")
    assert says in err


@pytest.mark.parametrize(
    "words", ["status", "wait", "errors", "set --level 1", "pause", "resume", "cancel", "retry"]
)
def test_an_unknown_request(
    words: str,
    url: str,
    request_id: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    command, *options = words.split()
    monkeypatch.setattr(sys, "argv", ["streamq", command, request_id, *options])
    monkeypatch.setenv("STREAMQ_URL", as_role(url, command))

    with pytest.raises(SystemExit) as ended:
        main()

    out, err = capsys.readouterr()
    assert (ended.value.code, out) == (5, "")
    assert err == f"streamq: {request_id}: no such request, or it was purged\n"


def test_a_reader_that_has_gone_gets_no_traceback(url: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)

    with os.fdopen(writer, "w") as gone:
        ran = subprocess.run(
            [*COMMAND, "ls"],
            env=environment(STREAMQ_URL=as_role(url, "ls")),
            stdout=gone,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
            check=False,
        )

    assert (ran.returncode, ran.stderr) == (141, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_one_line(url: str, running: Callable[..., subprocess.Popen[str]]) -> None:
    with Path("/dev/full").open("w") as full:
        _, err = running("status", stdout=full).communicate(timeout=60)

    assert err.startswith("streamq: ")
    assert "Traceback" not in err
