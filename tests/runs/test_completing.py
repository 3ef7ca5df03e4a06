"""The end of a collection: headers without a result, and which file of failures is replaced."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from streamq.model import Policy, Spec
from streamq.protocol.replies import Terms
from streamq.records.encoding import encode_result
from streamq.records.errors_file import error_lines, errors_beside, write_errors
from streamq.records.output import OutputError, OutputExists
from streamq.records.outputs import FileOutput
from streamq.runs.collect import Collector
from streamq.runs.committed import Committed
from tests.conftest import ONE_KIND
from tests.support.by_hand import HANDLER, RequestByHand

pytestmark = ONE_KIND


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "out.txt"


def collect(driver: RequestByHand, path: Path, *, force: bool = False) -> bool:
    collector = Collector(driver.protocol, driver.id, FileOutput(path, driver.id), "raw")
    return collector.run(is_ordered=True, follow=False, force=force)


def committed(driver: RequestByHand) -> Committed:
    return msgspec.json.decode(driver.meta("committed"), type=Committed)


def end_without_a_result(driver: RequestByHand, header: str) -> None:
    """A request of no parts whose input had a header."""
    policy = Policy(handler=HANDLER, queue=driver.queue, spec=Spec(header=header))
    driver.protocol.open(driver.id, "d", policy)
    driver.protocol.seal(driver.id, 0, "")


def test_header_is_written_without_a_result_too(driver: RequestByHand, target: Path) -> None:
    end_without_a_result(driver, "a,b\n")

    assert collect(driver, target)
    assert target.read_bytes() == b"a,b\n"
    assert committed(driver).offset == 4
    assert collect(driver, target), "it may be collected again"
    assert target.read_bytes() == b"a,b\n"


def test_failures_beside_are_ours_as_long_as_they_are_what_we_wrote(
    driver: RequestByHand, target: Path
) -> None:
    driver.load(1)
    driver.give_up(1)
    collector = Collector(driver.protocol, driver.id, FileOutput(target, driver.id), "raw")

    assert collector.run(is_ordered=True, follow=False, force=False)

    assert [failure.part for failure in collector.failures] == [1]
    assert committed(driver).owns_errors
    place = write_errors(target, error_lines(collector.failures))
    assert collect(driver, target), "they may be there"
    times = committed(driver).times
    assert collect(driver, target)
    assert committed(driver).times == times, "nothing is left to say"
    place.write_bytes(b"somebody's\n")
    with pytest.raises(OutputExists):
        collect(driver, target)


def test_failures_of_somebody_else_are_refused_before(driver: RequestByHand, target: Path) -> None:
    end_without_a_result(driver, "")
    errors_beside(target).write_bytes(b"somebody's\n")

    with pytest.raises(OutputExists):
        collect(driver, target)
    assert not target.exists()
    assert collect(driver, target, force=True)


def test_failures_of_somebody_else_that_came_meanwhile_are_refused_at_the_end(
    driver: RequestByHand, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    end_without_a_result(driver, "")
    collecting = Collector._collect

    def collect_slowly(self: Collector, *words: Any) -> bool:
        errors_beside(target).write_bytes(b"somebody's\n")
        return collecting(self, *words)

    monkeypatch.setattr(Collector, "_collect", collect_slowly)

    with pytest.raises(OutputError):
        collect(driver, target)
    assert not committed(driver).owns_errors
    assert collect(driver, target, force=True)
    assert committed(driver).owns_errors


def test_force_leaves_a_file_that_is_whole_as_it_is(driver: RequestByHand, target: Path) -> None:
    """The server has forgotten its lines: to begin it anew would lose them."""
    driver.load(1)
    holder, _ = driver.claim(1)
    driver.protocol.finish(
        driver.id, holder, driver.call(holder), [1, encode_result([b"line"])], 1, Terms(0)
    )
    assert collect(driver, target)

    assert collect(driver, target, force=True)

    assert target.read_bytes() == b"line\n"
    assert committed(driver).offset == 5
