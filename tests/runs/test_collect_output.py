"""What a collector writes of each kind of result, and how it goes on, waits, stops and refuses."""

import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from streamq import Protocol
from streamq.errors import CollectorLost, Damaged
from streamq.protocol.replies import Terms
from streamq.records.encoding import Verbatim, encode_item, encode_result
from streamq.records.output import OutputError, OutputExists
from streamq.records.outputs import FileOutput
from streamq.records.stream_output import Stopped
from streamq.records.writer import Writer
from streamq.runs.collect import Collector, show_results
from tests.conftest import ONE_KIND
from tests.support.by_hand import RequestByHand
from tests.support.waiting import wait_until


def result(*values: Any, endings: bytes = b"") -> bytes:
    return encode_result([encode_item(value) for value in values], endings)


class TestLines:
    @pytest.mark.parametrize(
        ("values", "raw", "jsonl"),
        [
            ((), b"", b""),
            ((b"a",), b"a\n", b'"a"\n'),
            (("a", "b"), b"a\nb\n", b'"a"\n"b"\n'),
            ((b"a\nb", b"c"), b"a\nb\nc\n", b'"a\\nb"\n"c"\n'),
            (("a", b"b"), b"a\nb\n", b'"a"\n"b"\n'),
            ((None, "a", None), b"a\n", b'"a"\n'),
            ((None,), b"", b""),
            (({"n": 1}, 2), b'{"n":1}\n2\n', b'{"n":1}\n2\n'),
            ((b"", ""), b"\n\n", b'""\n""\n'),
            ((Verbatim(b"x,y\nz"),), b"x,y\nz", b"x,y\nz"),
        ],
    )
    def test_of_every_kind_of_value(
        self, values: tuple[Any, ...], raw: bytes, jsonl: bytes
    ) -> None:
        assert Writer("raw", []).lines(result(*values)) == raw
        assert Writer("jsonl", []).lines(result(*values)) == jsonl

    def test_end_as_the_lines_of_the_input_did(self) -> None:
        writer = Writer("raw", [])

        assert writer.lines(result(b"a", b"b", b"c", endings=b"nr0")) == b"a\nb\r\nc"
        assert writer.is_open

    def test_begin_anew_after_one_that_had_no_end(self) -> None:
        writer = Writer("raw", [], is_open=True)

        assert writer.lines(result(None)) == b""
        assert writer.is_open
        assert writer.lines(result(b"a")) == b"\na\n"
        assert not writer.is_open
        assert writer.lines(result(b"b")) == b"b\n"

    def test_of_a_csv_have_the_columns_of_the_first(self, caplog: pytest.LogCaptureFixture) -> None:
        writer = Writer("csv", [])

        assert writer.lines(result({"a": 1, "b": "x,y"})) == b'a,b\n1,"x,y"\n'
        assert writer.header == ["a", "b"]
        assert writer.lines(result({"b": None, "c": 3}, {"a": [1], "c": 4})) == b",\n[1],\n"
        assert caplog.text.count("c of a later one is left out") == 1

    def test_of_a_csv_that_was_begun_have_no_second_header(self) -> None:
        assert Writer("csv", ["a"]).lines(result({"a": 1})) == b"1\n"

    def test_of_a_csv_of_values_that_are_no_rows_have_one_column(self) -> None:
        writer = Writer("csv", [])

        assert writer.lines(result(b"x", None, 2.5, True)) == b"result\nx\n2.5\nTrue\n"
        assert writer.lines(result("a\rb")) == b'"a\rb"\n'

    def test_of_garbage_are_none(self) -> None:
        for form in ("raw", "jsonl", "csv"):
            with pytest.raises(Damaged):
                Writer(form, []).lines(b"\xc1")


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "out.txt"


def collector(driver: RequestByHand, path: Path, form: str = "raw", **options: Any) -> Collector:
    return Collector(driver.protocol, driver.id, FileOutput(path, driver.id), form, **options)


def run(driver: RequestByHand, path: Path, form: str = "raw", **options: Any) -> bool:
    wishes = {"is_ordered": True, "follow": False, "force": False} | options
    return collector(driver, path, form).run(**wishes)


def begin(driver: RequestByHand, count: int, **options: Any) -> list[str]:
    """A request whose parts are all at work. Returns the holder of each."""
    driver.load(count, limit=max(count, 1), **options)
    return [driver.claim()[0] for _ in range(count)]


def finish(driver: RequestByHand, holders: list[str], number: int, value: bytes = b"") -> None:
    """Record the result of a part: its number, if no other is given."""
    holder = holders[number - 1]
    results: list[bytes | int] = [number, value or result(b"%d" % number)]
    driver.protocol.finish(driver.id, holder, driver.call(holder), results, 1, Terms(0))


def left(driver: RequestByHand) -> list[str]:
    """Results that the server still has."""
    return sorted(field for field, _ in driver.protocol.leftovers(driver.id))


@ONE_KIND
class TestFile:
    def test_is_ours_before_the_first_result(self, driver: RequestByHand, target: Path) -> None:
        holders = begin(driver, 2)

        assert run(driver, target) is False
        assert target.read_bytes() == b""
        for number in (1, 2):
            finish(driver, holders, number)
        assert run(driver, target) is True
        assert target.read_bytes() == b"1\n2\n"

    @pytest.mark.parametrize("is_ordered", [True, False])
    def test_what_is_written_is_forgotten(
        self, driver: RequestByHand, target: Path, is_ordered: bool
    ) -> None:
        holders = begin(driver, 3)
        finish(driver, holders, 1)
        finish(driver, holders, 3)

        assert run(driver, target, is_ordered=is_ordered) is False
        written = sorted(target.read_bytes().split())
        assert (written, left(driver)) == (([b"1"], ["3"]) if is_ordered else ([b"1", b"3"], []))

    def test_is_cut_to_what_was_committed(self, driver: RequestByHand, target: Path) -> None:
        holders = begin(driver, 2)
        finish(driver, holders, 1)
        run(driver, target)
        with target.open("ab") as file:
            file.write(b"half a li")
        finish(driver, holders, 2)

        assert run(driver, target) is True
        assert target.read_bytes() == b"1\n2\n"

    def test_of_another_name_or_form_is_refused(self, driver: RequestByHand, target: Path) -> None:
        driver.load(0)
        run(driver, target)

        with pytest.raises(OutputExists, match="say --force"):
            run(driver, target.with_name("other.txt"))
        with pytest.raises(OutputExists, match="not as jsonl"):
            run(driver, target, "jsonl")
        with pytest.raises(OutputExists, match="not as jsonl"):
            run(driver, target, "jsonl", force=True)
        target.rename(target.with_name("other.txt"))
        assert run(driver, target.with_name("other.txt"), force=True) is True

    def test_csv_goes_on_with_its_columns(self, driver: RequestByHand, target: Path) -> None:
        holders = begin(driver, 2)
        for number in (1, 2):
            finish(driver, holders, number, result({"a": number}))
            run(driver, target, "csv")

        assert target.read_bytes() == b"a\n1\n2\n"

    def test_last_line_without_its_end_is_known_to_the_next_run(
        self, driver: RequestByHand, target: Path
    ) -> None:
        holders = begin(driver, 2)
        for number in (1, 2):
            finish(driver, holders, number, result(b"%d" % number, endings=b"0"))
            run(driver, target)

        assert target.read_bytes() == b"1\n2"

    def test_one_collector_fences_off_another(
        self, driver: RequestByHand, target: Path, tmp_path: Path
    ) -> None:
        driver.load(1)
        slow = collector(driver, target)
        write = slow._output.write

        def overtaken(data: bytes, *, is_last: bool = False) -> int:
            size = write(data)
            found = msgspec.json.encode({"file": "elsewhere"}).decode()
            driver.set_meta(committed=found)
            return size

        slow._output.write = overtaken  # type: ignore[method-assign]

        with pytest.raises(CollectorLost):
            slow.run(is_ordered=True, follow=False, force=False)

    def test_that_is_moved_away_while_nothing_comes_is_missed(
        self, driver: RequestByHand, target: Path
    ) -> None:
        driver.load(1)
        failed: list[Exception] = []

        def follow() -> None:
            try:
                run(driver, target, follow=True)
            except OutputError as error:
                failed.append(error)

        thread = threading.Thread(target=follow)
        thread.start()
        wait_until(lambda: driver.protocol.inspect(driver.id).optional_text("committed"))
        target.rename(target.with_name("moved"))
        thread.join(10)

        assert "moved or removed" in str(failed[0])


@ONE_KIND
class TestFollowing:
    @pytest.mark.parametrize("is_ordered", [True, False])
    def test_goes_on_until_the_end(
        self, driver: RequestByHand, target: Path, is_ordered: bool
    ) -> None:
        holders = begin(driver, 3)
        ended: list[bool] = []

        def follow() -> None:
            ended.append(run(driver, target, follow=True, is_ordered=is_ordered))

        thread = threading.Thread(target=follow)
        thread.start()
        for number in (1, 2, 3):
            finish(driver, holders, number)
            wait_until(lambda n=number: target.exists() and b"%d\n" % n in target.read_bytes())  # type: ignore[misc]
        thread.join(10)

        assert ended == [True]
        assert target.read_bytes() == b"1\n2\n3\n"

    def test_stops_when_it_is_told(self, driver: RequestByHand, target: Path) -> None:
        driver.load(1)
        told = threading.Event()
        told.set()
        followed = collector(driver, target, should_stop=told.is_set)

        assert followed.run(is_ordered=True, follow=True, force=False) is False

    def test_stops_when_its_output_does(self, driver: RequestByHand, target: Path) -> None:
        holders = begin(driver, 1)
        finish(driver, holders, 1)
        stopped = collector(driver, target)

        def stop(data: bytes, *, is_last: bool = False) -> int:
            raise Stopped

        stopped._output.write = stop  # type: ignore[method-assign]

        assert stopped.run(is_ordered=True, follow=True, force=False) is False
        assert left(driver) == ["1"]

    @pytest.mark.parametrize("is_ordered", [True, False])
    def test_what_a_retry_yields_comes_after_the_rest(
        self, driver: RequestByHand, target: Path, is_ordered: bool
    ) -> None:
        holders = begin(driver, 2)
        driver.fail(holders[0], 1, kind="abandon")
        finish(driver, holders, 2)
        assert run(driver, target, is_ordered=is_ordered) is True
        driver.redrive(1)
        again, _ = driver.claim()
        finish(driver, [again], 1)

        assert run(driver, target, is_ordered=is_ordered) is True
        assert target.read_bytes() == b"2\n1\n"
        assert left(driver) == []

    def test_what_still_runs_when_a_request_fails_is_waited_for(
        self, driver: RequestByHand, target: Path
    ) -> None:
        driver.load(3, max_failures=0, limit=2)
        slow, _ = driver.claim()
        failing, _ = driver.claim()
        driver.fail(failing, 2, kind="abandon")
        driver.release(failing)
        assert driver.protocol.inspect(driver.id).state == "failed"

        assert run(driver, target) is False
        finish(driver, [slow], 1)
        assert run(driver, target) is True
        assert target.read_bytes() == b"1\n"

    def test_rests_while_nothing_comes(
        self, driver: RequestByHand, target: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        driver.load(1)
        pauses: list[float] = []
        monkeypatch.setattr(time, "sleep", pauses.append)
        followed = collector(driver, target, should_stop=lambda: len(pauses) > 8)

        followed.run(is_ordered=True, follow=True, force=False)

        assert pauses[0] < 0.01
        assert pauses == sorted(pauses)
        assert pauses[-1] == pytest.approx(0.05, abs=0.02)


@ONE_KIND
class TestBatches:
    @pytest.mark.parametrize("is_ordered", [True, False])
    @pytest.mark.parametrize("size", [10, 20_000])
    def test_every_result_is_written_once(
        self, driver: RequestByHand, target: Path, is_ordered: bool, size: int
    ) -> None:
        count = 1_200 if size < 100 else 500
        driver.load(count)
        holder, grant = driver.claim(500)
        while grant.parts:
            numbers = [part.number for part in grant.parts]
            values = [v for n in numbers for v in (n, result(b"%0*d" % (size, n)))]
            call = driver.call(holder)
            grant = driver.protocol.finish(
                driver.id, holder, call, values, len(numbers), Terms(200)
            )

        assert run(driver, target, is_ordered=is_ordered) is True

        lines = target.read_bytes().splitlines()
        numbers = [int(line[-9:]) for line in lines]
        assert (numbers if is_ordered else sorted(numbers)) == list(range(1, count + 1))
        assert left(driver) == []

    def test_are_committed_one_by_one(self, driver: RequestByHand, target: Path) -> None:
        driver.load(501)
        holder, grant = driver.claim(500)
        while grant.parts:
            numbers = [part.number for part in grant.parts]
            values = [v for n in numbers for v in (n, result(b"%d" % n))]
            call = driver.call(holder)
            grant = driver.protocol.finish(
                driver.id, holder, call, values, len(numbers), Terms(500)
            )

        run(driver, target, is_ordered=False)

        committed = msgspec.json.decode(driver.protocol.inspect(driver.id).text("committed"))
        assert committed["times"] >= 3
        assert committed["offset"] == target.stat().st_size


@ONE_KIND
class TestShow:
    def test_who_only_looks_takes_nothing_away(
        self, driver: RequestByHand, protocol: Protocol
    ) -> None:
        holders = begin(driver, 3)
        for number in (1, 2):
            finish(driver, holders, number)

        for _ in range(2):
            assert b"".join(show_results(protocol, driver.id, "raw", follow=False)) == b"1\n2\n"
        finish(driver, holders, 3)
        assert (
            b"".join(show_results(protocol, driver.id, "jsonl", follow=True)) == b'"1"\n"2"\n"3"\n'
        )

    def test_who_follows_sees_what_comes_later(
        self, driver: RequestByHand, protocol: Protocol
    ) -> None:
        holders = begin(driver, 2)
        finish(driver, holders, 1)
        seen: list[bytes] = []

        def follow() -> None:
            seen.extend(show_results(protocol, driver.id, "raw", follow=True))

        thread = threading.Thread(target=follow)
        thread.start()
        wait_until(lambda: b"1\n" in seen)
        finish(driver, holders, 2)
        thread.join(10)

        assert b"".join(seen) == b"1\n2\n"
