"""Results of retried parts are put in their place in the output, whatever happens meanwhile."""

import gzip
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from streamq import Protocol, Request
from streamq.model import Failure, Spec
from streamq.protocol.replies import Terms
from streamq.records.encoding import Many, Verbatim, encode_item, encode_result
from streamq.records.gaps import gaps_beside
from streamq.records.outputs import FileOutput
from streamq.runs.collect import Collector
from streamq.runs.in_place import InPlace
from tests.conftest import ONE_KIND
from tests.support.by_hand import RequestByHand, policy

pytestmark = ONE_KIND


class Parts:
    """A request whose parts are run by hand, and the output that its results go to."""

    def __init__(self, driver: RequestByHand, folder: Path) -> None:
        self.driver = driver
        self.protocol: Protocol = driver.protocol
        self.id = driver.id
        self.folder = folder
        self.made: list[Collector] = []

    def load(self, parts: int, records: int, spec: Spec | None = None) -> None:
        """Submit parts of so many records each."""
        own = msgspec.structs.replace(policy(self.driver.queue), spec=spec or Spec(retries=3))
        self.protocol.open(self.id, "d", own)
        self.driver.append(parts, records=records)
        self.protocol.seal(self.id, parts, f"c{parts}")

    def run(self, outcomes: dict[int, list[Any]], *, retry: bool = False) -> None:
        """Run the parts: an item that is an exception is a failure of that record."""
        if retry:
            _retry(self.protocol, self.id)
        for _ in outcomes:
            holder, grant = self.driver.claim(1)
            (part,) = grant.parts
            self._end(holder, part.number, outcomes[part.number])

    def _end(self, holder: str, number: int, items: list[Any]) -> None:
        failed = [n for n, item in enumerate(items, 1) if isinstance(item, Exception)]
        kept = [None if isinstance(item, Exception) else encode_item(item) for item in items]
        if not failed:
            result = encode_result(kept)
            call = self.driver.call(holder)
            self.protocol.finish(self.id, holder, call, [number, result], len(items), Terms(0))
            return
        done = sum(item is not None for item in kept)
        self.protocol.fail(
            self.id,
            holder,
            self.driver.call(holder),
            number,
            [Failure(error="ValueError", part=number, record=n) for n in failed],
            kind="abandon",
            records=(done, len(failed)),
            result=encode_result(kept) if done else b"",
        )
        self.protocol.release(self.id, holder, self.driver.call(holder))

    def collector(self, name: str = "out.txt", form: str = "raw", **options: Any) -> Collector:
        path = self.folder / name
        return Collector(
            self.protocol,
            self.id,
            FileOutput(path, self.id),
            form,
            gaps=gaps_beside(path, self.id),
            **options,
        )

    def collect(self, name: str = "out.txt", form: str = "raw", **options: Any) -> bytes:
        collector = self.collector(name, form, **options)
        assert collector.run(is_ordered=True, follow=False, force=False)
        return (self.folder / name).read_bytes()

    def beside(self) -> list[str]:
        """Names of all files but the output."""
        return sorted(p.name for p in self.folder.iterdir() if not p.name.startswith("out."))


def _retry(protocol: Protocol, request_id: str) -> None:
    Request(protocol, request_id).retry()


@pytest.fixture
def parts(driver: RequestByHand, tmp_path: Path) -> Parts:
    folder = tmp_path / "files"
    folder.mkdir()
    return Parts(driver, folder)


BAD = ValueError("bad")


class TestARetriedPart:
    def test_comes_in_its_place(self, parts: Parts) -> None:
        parts.load(3, 1)
        parts.run({1: [b"one"], 2: [BAD], 3: [b"three"]})
        assert parts.collect() == b"one\nthree\n"

        parts.run({2: [b"two"]}, retry=True)

        assert parts.collect() == b"one\ntwo\nthree\n"
        assert parts.driver.results() == {}
        assert parts.beside() == []

    def test_has_its_records_between_those_that_were_done(self, parts: Parts) -> None:
        parts.load(2, 4)
        parts.run({1: [b"a", BAD, b"c", BAD], 2: [BAD, None, b"g", BAD]})
        assert parts.collect() == b"a\nc\ng\n"

        parts.run({1: [None, b"b", None, b"d"], 2: [b"e", None, None, BAD]}, retry=True)
        assert parts.collect() == b"a\nb\nc\nd\ne\ng\n"
        parts.run({2: [None, None, None, b"h"]}, retry=True)

        assert parts.collect() == b"a\nb\nc\nd\ne\ng\nh\n"
        assert parts.beside() == []

    def test_that_failed_as_a_whole_may_fail_in_part(self, parts: Parts) -> None:
        parts.load(2, 3)
        parts.run({1: [BAD, BAD, BAD], 2: [b"x", b"y", b"z"]})
        assert parts.collect() == b"x\ny\nz\n"

        parts.run({1: [b"a", BAD, b"c"]}, retry=True)
        assert parts.collect() == b"a\nc\nx\ny\nz\n"
        parts.run({1: [None, b"b", None]}, retry=True)

        assert parts.collect() == b"a\nb\nc\nx\ny\nz\n"

    def test_several_times_before_it_is_collected(self, parts: Parts) -> None:
        parts.load(2, 2)
        parts.run({1: [BAD, BAD], 2: [b"c", b"d"]})
        parts.run({1: [b"a", BAD]}, retry=True)
        parts.run({1: [None, b"b"]}, retry=True)

        assert parts.collect() == b"a\nb\nc\nd\n"

    def test_of_a_csv_comes_behind_the_header(self, parts: Parts) -> None:
        parts.load(3, 1)
        parts.run({1: [BAD], 2: [{"n": 2}], 3: [BAD]})
        assert parts.collect("out.csv", "csv") == b"n\n2\n"

        parts.run({1: [{"n": 1}], 3: [{"n": 3}]}, retry=True)

        assert parts.collect("out.csv", "csv") == b"n\n1\n2\n3\n"

    def test_of_a_csv_without_a_row_brings_the_header(self, parts: Parts) -> None:
        parts.load(2, 2)
        parts.run({1: [BAD, BAD], 2: [BAD, BAD]})
        assert parts.collect("out.csv", "csv") == b""

        parts.run({1: [BAD, {"n": 2}], 2: [{"n": 3}, BAD]}, retry=True)
        assert parts.collect("out.csv", "csv") == b"n\n2\n3\n"
        parts.run({1: [{"n": 1}, None], 2: [None, {"n": 4}]}, retry=True)

        assert parts.collect("out.csv", "csv") == b"n\n1\n2\n3\n4\n"

    def test_comes_behind_the_header_that_the_input_had(self, parts: Parts) -> None:
        parts.load(2, 1, Spec(format="csv", header="a,b\n", files=("in.csv",)))
        parts.run({1: [BAD], 2: [b"3,4"]})
        assert parts.collect() == b"a,b\n3,4\n"

        parts.run({1: [b"1,2"]}, retry=True)

        assert parts.collect() == b"a,b\n1,2\n3,4\n"

    def test_of_a_program_is_put_there_as_it_is(self, parts: Parts) -> None:
        parts.load(3, 1)
        parts.run({1: [Verbatim(b"1")], 2: [BAD], 3: [Verbatim(b"3")]})
        assert parts.collect() == b"13"

        parts.run({2: [Verbatim(b"2")]}, retry=True)

        assert parts.collect() == b"123"

    @pytest.mark.parametrize("name", ["out.txt.gz", "out.txt.zst"])
    def test_in_a_compressed_output(self, parts: Parts, name: str) -> None:
        parts.load(3, 1)
        parts.run({1: [b"one"], 2: [BAD], 3: [b"three"]})
        assert _unpacked(parts.collect(name)) == b"one\nthree\n"

        parts.run({2: [b"two"]}, retry=True)

        assert _unpacked(parts.collect(name)) == b"one\ntwo\nthree\n"

    def test_has_keys_where_they_are_asked_for(self, parts: Parts) -> None:
        parts.load(2, 2)
        parts.run({1: [b"a", BAD], 2: [{"n": 1}, None]})

        first = parts.collect("out.jsonl", "jsonl", has_keys=True)
        parts.run({1: [None, "b"]}, retry=True)

        one, two, three = (
            b'{"part":1,"record":1,"result":"a"}\n',
            b'{"part":1,"record":2,"result":"b"}\n',
            b'{"part":2,"record":1,"result":{"n":1}}\n',
        )
        assert first == one + three
        assert parts.collect("out.jsonl", "jsonl", has_keys=True) == one + two + three

    def test_comes_last_where_nobody_knows_its_place(self, parts: Parts) -> None:
        parts.load(3, 1)
        parts.run({1: [b"one"], 2: [BAD], 3: [b"three"]})
        parts.collect()
        for path in parts.folder.glob(".*gaps*"):
            path.unlink()

        parts.run({2: [b"two"]}, retry=True)

        assert parts.collect() == b"one\nthree\ntwo\n"


class _Crash(BaseException):
    pass


class TestACrash:
    """At each step of a filling: the next collector finds what it needs, and nothing is lost."""

    @pytest.mark.parametrize("name", ["out.txt", "out.txt.gz"])
    @pytest.mark.parametrize("step", ["draft", "prepare", "_store", "replace", "filled"])
    @pytest.mark.parametrize("is_after", [False, True])
    def test_leaves_all_results(
        self,
        parts: Parts,
        monkeypatch: pytest.MonkeyPatch,
        step: str,
        is_after: bool,
        name: str,
    ) -> None:
        parts.load(4, 2)
        parts.run({1: [b"a", BAD], 2: [BAD, BAD], 3: [b"e", b"f"], 4: [b"g", BAD]})
        parts.collect(name)
        parts.run({1: [None, b"b"], 2: [b"c", BAD], 4: [None, BAD]}, retry=True)
        dying = parts.collector(name)
        _die_at(dying, step, is_after, monkeypatch)
        with pytest.raises(_Crash):
            dying.run(is_ordered=True, follow=False, force=False)
        monkeypatch.undo()

        after = parts.collect(name)
        assert _unpacked(after) == b"a\nb\nc\ne\nf\ng\n"
        parts.run({2: [None, b"d"], 4: [None, b"h"]}, retry=True)

        assert _unpacked(parts.collect(name)) == b"a\nb\nc\nd\ne\nf\ng\nh\n"
        assert parts.beside() == []


def _die_at(
    collector: Collector, step: str, is_after: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Have a collector die before or after a step of its next filling."""
    fill = Collector._fill

    def dying(do: Callable[..., Any]) -> Callable[..., Any]:
        def die(*args: Any, **options: Any) -> Any:
            if is_after:
                do(*args, **options)
            raise _Crash

        return die

    def filling(self: Collector) -> None:
        if self._late:
            place: Any = {"_store": Collector, "draft": FileOutput, "replace": FileOutput}.get(
                step, InPlace
            )
            monkeypatch.setattr(place, step, dying(getattr(place, step)))
        fill(self)

    monkeypatch.setattr(Collector, "_fill", filling)


def test_any_failures_and_retries_give_the_input_in_order(parts: Parts) -> None:
    """As a model: whatever fails and is retried, the lines come in order, each once."""
    rnd = random.Random(7)
    total, size = 40, 5
    values = {n: [b"%d-%d" % (n, r) for r in range(size)] for n in range(1, total + 1)}
    done: dict[int, set[int]] = {n: set() for n in values}
    parts.load(total, size)
    todo, chance, is_retry = set(values), 0.5, False
    while todo:
        outcomes = {}
        for n in todo:
            fails = {r for r in range(size) if rnd.random() < chance} - done[n]
            outcomes[n] = [
                BAD if r in fails else None if r in done[n] else values[n][r] for r in range(size)
            ]
            done[n] |= set(range(size)) - fails
        parts.run(outcomes, retry=is_retry)
        todo = {n for n in todo if len(done[n]) < size}
        chance, is_retry = chance / 2 if chance > 0.05 else 0, True
        found = parts.collect()
        assert found == b"".join(values[n][r] + b"\n" for n in values for r in sorted(done[n]))
    assert parts.beside() == []


def _unpacked(data: bytes) -> bytes:
    if data.startswith(b"\x1f\x8b"):
        return gzip.decompress(data)
    if data.startswith(b"\x28\xb5\x2f\xfd"):
        from backports import zstd

        return bytes(zstd.decompress(data))
    return data


def test_lines_that_a_record_yielded_come_in_its_place(parts: Parts) -> None:
    parts.load(2, 3)
    parts.run({1: [Many(["a", "b"]), BAD, Many()], 2: [BAD, Many(["g"]), BAD]})
    assert parts.collect() == b"a\nb\ng\n"

    parts.run({1: [None, Many(["c", "d"]), None], 2: [Many(["e", "f"]), None, b"h"]}, retry=True)

    assert parts.collect() == b"a\nb\nc\nd\ne\nf\ng\nh\n"
    assert parts.beside() == []
