"""What the commands do, from Python: a worker, a load, a collection, a run; no command is imported.

The functions are called as a program would call them, on real servers.
"""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import streamq
from streamq import (
    AppLoadError,
    Client,
    FleetTooOld,
    Flow,
    InvalidValue,
    Protocol,
    SettingsError,
    State,
    Worker,
)
from streamq.worker import service
from streamq.worker.channel import ProcessConfig
from streamq.worker.pool import Pool
from tests.conftest import FIRST_KIND, ONE_KIND
from tests.support.apps import flows
from tests.support.fleet import APPS
from tests.support.waiting import wait_until

TASKS = """
import time
from streamq import App

app = App()

@app.map
def shout(line: str) -> str:
    if line == "bad":
        raise ValueError("no")
    return line.upper()

@app.map
def nap(line: str) -> str:
    time.sleep(60)
    return line
"""


@pytest.fixture
def tasks(tmp_path: Path) -> str:
    """A file with an app, which processes can import."""
    path = tmp_path / "tasks.py"
    path.write_text(TASKS)
    return str(path)


@pytest.fixture
def worker(tasks: str, url: str, queue: str) -> Iterator[Worker]:
    """A worker that runs in a thread of this process."""
    worker = Worker(f"{tasks}:app", url, queue=queue, concurrency=4, grace="1s")
    thread = threading.Thread(target=worker.run)
    thread.start()
    yield worker
    worker.stop()
    thread.join(60)
    assert not thread.is_alive()


def test_a_file_is_loaded_run_and_collected(
    worker: Worker, client: Client, queue: str, tmp_path: Path
) -> None:
    source, target = tmp_path / "in.txt", tmp_path / "out.txt"
    source.write_text("".join(f"line {n}\n" for n in range(1_000)) + "bad\n")

    request = streamq.load(
        client, str(source), handler="shout", queue=queue, lines=100, retries=0, id=f"{queue}-id"
    )
    is_complete = streamq.collect(request, target)

    assert is_complete
    assert target.read_text() == "".join(f"LINE {n}\n" for n in range(1_000))
    (failure,) = map(json.loads, (tmp_path / "out.errors.jsonl").read_text().splitlines())
    assert (failure["error"], failure["line"]) == ("ValueError", 1_001)
    assert request.id == f"{queue}-id"
    assert request.status().parts.total == 11


@ONE_KIND
@pytest.mark.parametrize("flow", [flows.tolerant, f"{APPS}/flows.py:tolerant"])
def test_file_goes_through_a_flow(
    flow: Flow | str, client: Client, url: str, queue: str, tmp_path: Path
) -> None:
    source, target = tmp_path / "in.csv", tmp_path / "out.jsonl"
    source.write_text("word\nab\nc!d\n")

    request = streamq.load(client, source_name := str(source), flow=flow, queue=queue, key="word")
    again = streamq.load(client, source_name, flow=flow, queue=queue, key="word", id=request.id)
    assert again.status().parts.total == 2
    assert Worker(f"{APPS}/flows.py:app", url, queue=queue, burst=True).run() == 0
    assert streamq.collect(request, target)

    assert [json.loads(line)["failed"] for line in target.read_text().splitlines()] == [0, 1]
    found = request.find("c!d")
    assert found is not None
    assert found.item == "2"


@ONE_KIND
def test_load_of_a_flow_leaves_nothing_where_it_is_refused(
    client: Client, protocol: Protocol, queue: str, tmp_path: Path
) -> None:
    (tmp_path / "in.txt").write_text("line\n")
    file = str(tmp_path / "in.txt")

    with pytest.raises(InvalidValue, match="either a handler or a flow"):
        streamq.load(client, file, queue=queue)
    with pytest.raises(InvalidValue, match="either a handler or a flow"):
        streamq.load(client, file, handler="h", flow=flows.maps, queue=queue)
    with pytest.raises(InvalidValue, match="a flow needs a stage"):
        streamq.load(client, file, flow=Flow("f"), queue=queue)
    protocol.beat(queue, "old", 60_000, b'{"name":"old","version":"0.9"}')
    with pytest.raises(FleetTooOld, match=r"streamq 0\.9"):
        streamq.load(client, file, flow=flows.maps, queue=queue)
    assert protocol.places(queue) == []


@ONE_KIND
def test_a_collection_goes_on_where_it_stood(
    client: Client, tasks: str, url: str, queue: str, tmp_path: Path
) -> None:
    source, target = tmp_path / "in.csv", tmp_path / "out.jsonl"
    source.write_text("a;b\n1;2\n3;4\n")
    request = streamq.load(
        client, [str(source)], handler="shout", queue=queue, delimiter=";", lines=1
    )

    assert not streamq.collect(request, target, follow=False)
    assert Worker(f"{tasks}:app", url, queue=queue, burst=True).run() == 0
    assert streamq.collect(request, target)
    assert streamq.collect(request, target)
    assert request.status().parts.total == 2


@ONE_KIND
def test_a_load_checks_its_options_by_their_names_in_python(client: Client, tmp_path: Path) -> None:
    source = tmp_path / "in.txt"
    source.write_text("line\n")

    for options, says in [
        ({"format": "xml"}, "^format 'xml' is none of"),
        ({"bytes": "1GiB"}, "^bytes 1GiB is more than a part may have"),
        ({"level": 100}, "^level 100 is out of range"),
        ({"format": "csv", "delimiter": "ab"}, "^delimiter 'ab' is not one character"),
        ({"format": "requests"}, "^format requests makes many requests"),
    ]:
        with pytest.raises(InvalidValue, match=says):
            streamq.load(client, str(source), handler="shout", **options)  # type: ignore[arg-type]
    with pytest.raises(InvalidValue, match="output_format 'xml' is none of"):
        streamq.collect(streamq.Request(client.protocol, "x"), "out", output_format="xml")


def test_a_burst_ends_when_nothing_is_left(
    client: Client, tasks: str, url: str, queue: str
) -> None:
    request = client.submit(["a", "b"], handler="shout", queue=queue)

    code = Worker(f"{tasks}:app", url, queue=queue, processes=2, burst=True).run()

    assert code == 0
    assert [result for _, result in request.results("5s")] == ["A", "B"]


@ONE_KIND
def test_a_program_can_be_the_handler(client: Client, url: str, queue: str) -> None:
    request = client.submit([b"a\n"], handler="upper", queue=queue)

    Worker(exec="tr a-z A-Z", handler="upper", url=url, queue=queue, burst=True).run()

    assert [result for _, result in request.results("5s")] == [b"A\n"]


@ONE_KIND
def test_a_worker_that_is_stopped_hands_back_what_it_runs(
    client: Client, tasks: str, url: str, queue: str
) -> None:
    worker = Worker(f"{tasks}:app", url, queue=queue, grace="0.2s", cancel_grace="0.2s")
    thread = threading.Thread(target=worker.run)
    request = client.submit(["a"], handler="nap", queue=queue)
    thread.start()
    wait_until(lambda: request.status().parts.running == 1, 30)

    worker.stop()
    thread.join(30)

    assert not thread.is_alive()
    parts = request.status().parts
    assert (parts.running, parts.waiting + parts.retry) == (0, 1)


@ONE_KIND
def test_a_worker_stopped_before_it_runs_ends_at_once(tasks: str, url: str, queue: str) -> None:
    worker = Worker(f"{tasks}:app", url, queue=queue)
    worker.stop()

    assert worker.run() == 0


@ONE_KIND
def test_an_app_that_is_not_there_is_an_error(tmp_path: Path, url: str, queue: str) -> None:
    with pytest.raises(AppLoadError, match="there is no file"):
        Worker(f"{tmp_path}/none.py:app", url, queue=queue).run()


def test_a_worker_refuses_what_the_command_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("STREAMQ_URL", raising=False)
    monkeypatch.chdir("/")
    with pytest.raises(SettingsError, match="which server"):
        Worker("tasks:app")
    for options, says in [
        ({"lease": "100ms"}, "^lease '100ms' is too short: 500ms or more"),
        ({"levels": "5-"}, "^levels '5-': write 0-19"),
        ({"processes": 0}, "^processes 0 is out of range"),
        ({"concurrency": 0}, "^concurrency 0 is out of range"),
        ({"exec": "cat"}, "give an app, or exec and handler"),
        ({"allow_read": ["/none"]}, "^allow_read /none: there is no such folder"),
    ]:
        with pytest.raises(InvalidValue, match=says):
            Worker("tasks:app", "redis://127.0.0.1:1", **options)  # type: ignore[arg-type]


@ONE_KIND
def test_a_worker_has_the_settings_of_the_command(
    client: Client, tasks: str, url: str, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STREAMQ_URL", url)
    monkeypatch.setenv("STREAMQ_QUEUE", queue)
    monkeypatch.setenv("STREAMQ_CONCURRENCY", "3")
    request = client.submit(["a"], handler="shout", queue=queue)

    Worker(f"{tasks}:app", burst=True).run()

    assert request.status().state is State.DONE


def test_a_run_puts_files_through_a_function(
    tasks: str, url: str, queue: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    source, target = tmp_path / "in.txt", tmp_path / "out.txt"
    source.write_text("a\nbad\nb\n")

    status = streamq.run(
        str(source), f"{tasks}:shout", target, processes=1, url=url, queue=queue, retries=0, keep=0
    )

    assert target.read_text() == "A\nB\n"
    assert (status.state, status.records.done, status.records.failed) == (State.DONE, 2, 1)
    assert len((tmp_path / "out.errors.jsonl").read_text().splitlines()) == 1
    assert not (tmp_path / ".streamq").exists()
    with pytest.raises(InvalidValue, match="exists"):
        streamq.run(str(source), f"{tasks}:shout", target, processes=1, url=url, queue=queue)


def test_a_run_starts_a_server_of_its_own(
    tasks: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("STREAMQ_URL", raising=False)
    (tmp_path / "in.txt").write_text("a\n")

    streamq.run(["in.txt"], exec="tr a-z A-Z", output="out.txt", processes=1)

    assert (tmp_path / "out.txt").read_text() == "A\n"
    assert not (tmp_path / ".streamq").exists()


def test_a_run_that_is_stopped_goes_on(tasks: str, tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_text("".join(f"{n}\n" for n in range(300)))
    (tmp_path / "slow.py").write_text(
        "import os, time\n"
        "def each(line: str) -> str:\n"
        "    time.sleep(0 if os.path.exists('go') else 0.05)\n"
        "    open('begun', 'a').close()\n"
        "    return line\n"
    )
    program = (
        "import streamq, sys\n"
        "words = {'resume': sys.argv[1]} if sys.argv[1:] else {}\n"
        "if not words:\n"
        "    words = {'files': 'in.txt', 'map': 'slow.py:each', 'output': 'out.txt', 'lines': 10}\n"
        "try:\n"
        "    print(streamq.run(processes=1, **words).state)\n"
        "except KeyboardInterrupt as error:\n"
        "    print(error)\n"
    )
    environment = {name: value for name, value in os.environ.items() if "STREAMQ_URL" not in name}
    command = [sys.executable, "-c", program]
    first = subprocess.Popen(
        command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True
    )
    wait_until((tmp_path / "begun").exists, 60)
    first.send_signal(signal.SIGTERM)
    said = first.communicate(timeout=60)[0]
    (run_id,) = [path.name for path in (tmp_path / ".streamq").iterdir()]
    (tmp_path / "go").touch()

    second = subprocess.run(
        [*command, run_id],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=90,
    )

    assert said == f"the run was stopped; go on with resume={run_id!r}\n"
    assert second.stdout == "done\n", second.stderr
    assert (tmp_path / "out.txt").read_text() == (tmp_path / "in.txt").read_text()
    assert not (tmp_path / ".streamq").exists()


def test_the_commands_are_not_imported() -> None:
    program = (
        "import sys, streamq\n"
        "streamq.Worker, streamq.load, streamq.collect, streamq.run\n"
        "print([name for name in sys.modules if name.startswith(('streamq.cli', 'typer'))])\n"
    )

    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )

    assert done.stdout == "[]\n"


@FIRST_KIND
def test_worker_that_is_run_again_is_another_pool(
    tasks: str, url: str, queue: str, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the heartbeats of one speak for the dead of another, and no crash is charged."""
    words = []
    served = Pool

    def serve(config: ProcessConfig, options: Any, keeper: Any, **others: Any) -> Any:
        assert keeper._pool == config.pool
        words.append(config.pool)
        return served(config, options, keeper, **others)

    monkeypatch.setattr(service, "Pool", serve)
    worker = Worker(f"{tasks}:app", url, queue=queue, burst=True)

    assert [worker.run() for _ in range(2)] == [0, 0]

    assert len(set(words)) == 2
