"""What failed in a flow is run again, and nothing that was handed over before is lost by it."""

from pathlib import Path

import pytest

from streamq import Client
from tests.conftest import FIRST_KIND
from tests.support.apps import flows
from tests.support.command import Streamq
from tests.support.fleet import APPS, Fleet

pytestmark = [FIRST_KIND, pytest.mark.commands]


@pytest.fixture
def mended(tmp_path: Path) -> Path:
    """A file: once it is there, what failed before goes well."""
    return tmp_path / "mended"


def test_reduce_gets_what_a_part_yielded_before_and_after_a_retry(
    streamq: Streamq, client: Client, fleet: Fleet, queue: str, mended: Path
) -> None:
    file = mended.with_name("words.txt")
    file.write_text(f"a\nb!{mended}\nc\n")
    options = ("--lines", "3", "--queue", queue, "--retries", "0")
    loaded = streamq("load", str(file), "--flow", f"{APPS}/flows.py:picked", *options)
    request = client.get(loaded.stdout.strip())
    fleet.start("-c", "2", target="flows:app")
    assert request.wait(60).state == "failed"

    mended.touch()
    assert request.retry() == 1
    ended = request.wait(60)
    assert ended.state == "done", (request.errors(), ended.stages)

    assert dict(request.results(5)) == {1: "a c b"}


def test_reduce_gets_the_children_of_a_spread_that_was_retried(
    client: Client, fleet: Fleet, queue: str, mended: Path
) -> None:
    flow = flows.app.flow("scattered").spread(flows.scatter).reduce(flows.gather)
    request = client.submit(["ab", f"cd!{mended}", "ef"], flow=flow, queue=queue, retries=0)
    fleet.start("-c", "2", target="flows:app")
    assert request.wait(60).state == "failed"

    mended.touch()
    request.retry()
    assert request.wait(60).state == "done"

    ((_, found),) = [(n, value) for n, value in request.results(5)]
    assert found == "a b c d e f"
