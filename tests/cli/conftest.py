"""A server of one kind, the command for it, and requests in the states that commands meet."""

import subprocess
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from streamq import Client
from tests.conftest import KINDS
from tests.support.by_hand import HANDLER, RequestByHand
from tests.support.command import COMMAND, Ran, Streamq, environment, run
from tests.support.secure import as_role


@pytest.fixture(params=KINDS[:1])
def kind(request: pytest.FixtureRequest) -> str:
    """One kind of server is enough for most of what a command does."""
    return str(request.param)


@pytest.fixture
def streamq(url: str, queue: str) -> Streamq:
    """Runs the command with the server and queue of the test in its environment."""

    def streamq(*words: str, **variables: str) -> Ran:
        own = as_role(url, words[0])
        return run(*words, **{"STREAMQ_URL": own, "STREAMQ_QUEUE": queue, **variables})

    return streamq


@pytest.fixture
def running(url: str, queue: str) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts the command and lets it run; what still does at the end is killed."""
    started: list[subprocess.Popen[str]] = []

    def start(*words: str, **options: Any) -> subprocess.Popen[str]:
        env = environment(STREAMQ_URL=as_role(url, words[0]), STREAMQ_QUEUE=queue)
        pipes = {"stdin": subprocess.DEVNULL, "stderr": subprocess.PIPE} | options
        started.append(subprocess.Popen([*COMMAND, *words], env=env, text=True, **pipes))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.fixture
def submitted(client: Client, driver: RequestByHand) -> RequestByHand:
    """A request of three parts that nobody has touched yet."""
    client.submit([b"1", b"2", b"3"], handler=HANDLER, id=driver.id, queue=driver.queue)
    return driver


@pytest.fixture
def done(submitted: RequestByHand) -> RequestByHand:
    """The same, all finished."""
    holder, _ = submitted.claim(3)
    submitted.finish(holder, [1, 2, 3])
    return submitted


@pytest.fixture
def failed(submitted: RequestByHand) -> RequestByHand:
    """The same, with two parts given up."""
    submitted.give_up(1, 2)
    holder, _ = submitted.claim()
    submitted.finish(holder, [3])
    return submitted
