"""``streamq load --canary``, ``wait --canary`` and ``release``."""

from pathlib import Path

import pytest

from tests.cli.common import rows
from tests.support.by_hand import HANDLER, RequestByHand
from tests.support.command import Streamq

pytestmark = pytest.mark.commands


@pytest.mark.parametrize("size", ["", "--lines=50", "--bytes=1KiB"])
def test_canary_is_so_many_records_each_a_part(
    streamq: Streamq, driver: RequestByHand, tmp_path: Path, size: str
) -> None:
    (tmp_path / "in.txt").write_text("a line\n" * 1_000)
    load = ["load", f"{tmp_path}/in.txt", "--handler", HANDLER, "--id", driver.id, "--canary", "10"]
    load += [size] if size else []
    assert streamq(*load).returncode == 0
    assert streamq(*load).returncode == 0, "the same command again finds it"
    assert "canary: only the first 10 run" in streamq("status", driver.id).stdout

    holder, grant = driver.claim(100)
    assert [part.records for part in grant.parts] == [1] * 10
    driver.finish(holder, [part.number for part in grant.parts])

    assert [row[2] for row in rows(streamq("ls").stdout)] == ["canary"]
    assert f"wait for `streamq release {driver.id}`" in streamq("status", driver.id).stdout
    waited = streamq("wait", driver.id, "--canary", "-q")
    assert waited.returncode == 0, waited.stderr
    assert driver.claim(100)[1].word == "empty"
    assert streamq("release", driver.id).stderr == f"{driver.id}: released\n"
    _, grant = driver.claim(100)
    wanted = {"": 990, "--lines=50": 50, "--bytes=1KiB": 146}[size]
    assert grant.parts[0].records == wanted


def test_it_makes_no_sense_for_many_requests(streamq: Streamq, tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_text("1:a\n")
    words = ("load", f"{tmp_path}/in.txt", "--handler", HANDLER, "--format", "requests")

    ran = streamq(*words, "--canary", "10")

    assert ran.returncode == 2
    assert "--canary, --finish-by, --spool and callbacks are for one request" in ran.stderr
