"""Collecting results: every one is written once, whatever became of the request in between."""

import errno
import json
import random
import secrets
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import pytest

from streamq import Client, Protocol, Request
from streamq.errors import CollectorLost, WaitTimeout
from streamq.model import Part, State
from streamq.protocol.replies import Terms
from streamq.protocol.snapshot import Snapshot
from streamq.queue.results import ResultReader
from streamq.records.encoding import encode_result
from streamq.records.output import OutputError, Written
from streamq.records.outputs import FileOutput
from streamq.runs.collect import Collector, show_results
from tests.conftest import ONE_KIND
from tests.support.by_hand import RequestByHand
from tests.support.simulated import Worker, refuse
from tests.support.waiting import wait_until

Collect = Callable[..., bool]


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "out.txt"


@pytest.fixture
def collect(protocol: Protocol, request_id: str, target: Path) -> Collect:
    """Collects what there is into the target. Returns whether that is said to be all."""

    def collect(*, is_ordered: bool = True, follow: bool = False) -> bool:
        collector = Collector(protocol, request_id, FileOutput(target, request_id), "raw")
        return collector.run(is_ordered=is_ordered, follow=follow, force=False)

    return collect


def submit(client: Client, queue: str, request_id: str, parts: int, **options: object) -> Request:
    payloads = [b"%d" % number for number in range(1, parts + 1)]
    return client.submit(payloads, handler="h", queue=queue, id=request_id, **options)  # type: ignore[arg-type]


def refusing(*numbers: int) -> Callable[[Part], bytes]:
    """A handler that gives the payload back, and fails for some parts."""

    def handle(part: Part) -> bytes:
        return refuse(part) if part.number in numbers else part.payload

    return handle


def lines(*numbers: int) -> list[bytes]:
    return [b"%d" % number for number in numbers]


def finish(driver: RequestByHand, holder: str, *numbers: int, most: int = 0) -> None:
    results = [value for n in numbers for value in (n, encode_result([b"%d" % n]))]
    call = driver.call(holder)
    driver.protocol.finish(driver.id, holder, call, results, len(numbers), Terms(most))


class TestAfterARetry:
    @pytest.mark.parametrize("is_ordered", [True, False])
    def test_parts_that_never_ran_before_are_written_too(
        self,
        client: Client,
        protocol: Protocol,
        queue: str,
        driver: RequestByHand,
        collect: Collect,
        target: Path,
        is_ordered: bool,
    ) -> None:
        request = submit(client, queue, driver.id, 20, max_failures=1)
        Worker(protocol, queue, refusing(2, 4), most=1).drain()
        assert request.status().state is State.FAILED
        assert collect(is_ordered=is_ordered)
        before = target.read_bytes().split()
        assert len(before) == request.status().parts.done < 18

        assert request.retry() == 2
        Worker(protocol, queue, refusing()).drain()
        assert request.status().parts.done == 20
        assert collect(is_ordered=is_ordered)

        after = target.read_bytes().split()
        assert after[: len(before)] == before
        assert sorted(after) == sorted(lines(*range(1, 21)))
        if is_ordered:
            assert after == [
                *before,
                *(each for each in lines(*range(1, 21)) if each not in (*before, b"2", b"4")),
                *lines(2, 4),
            ]
        assert driver.results() == {}

    def test_each_run_comes_after_the_one_before(
        self, client: Client, protocol: Protocol, queue: str, request_id: str, target: Path,
        collect: Collect,
    ) -> None:  # fmt: skip
        request = submit(client, queue, request_id, 12)
        for fail in [(1, 2, 4), (1, 2), *[(1,)] * 10]:
            Worker(protocol, queue, refusing(*fail)).drain()
            request.retry()
        Worker(protocol, queue, refusing()).drain()
        wanted = [3, *range(5, 13), 4, 2, 1]

        shown = b"".join(show_results(protocol, request_id, "raw", follow=False))
        read = [(number, value) for number, value in request.results()]
        assert collect()

        assert shown.split() == target.read_bytes().split() == lines(*wanted)
        assert read == [(number, b"%d" % number) for number in wanted]

    def test_shown_twice_it_is_the_same(
        self, client: Client, protocol: Protocol, queue: str, request_id: str
    ) -> None:
        request = submit(client, queue, request_id, 3)
        Worker(protocol, queue, refusing(1)).drain()
        request.retry()
        Worker(protocol, queue, refusing()).drain()

        shown = [
            b"".join(show_results(protocol, request_id, "raw", follow=bool(n))) for n in range(2)
        ]

        assert shown == [b"2\n3\n1\n"] * 2


class TestRetriedWhileRead:
    """A request that failed is retried when a reader has passed parts that had not run."""

    @pytest.fixture
    def request_(
        self,
        client: Client,
        protocol: Protocol,
        queue: str,
        request_id: str,
        monkeypatch: pytest.MonkeyPatch,
    ) -> Request:
        """Part 1 is done, 2 was given up, the others have not run. Readers take two at a time."""
        monkeypatch.setattr("streamq.queue.results.BATCH", 2)
        request = submit(client, queue, request_id, 8, max_failures=0, limit=1)
        Worker(protocol, queue, refusing(2), most=1).drain()
        assert request.status().state is State.FAILED
        return request

    def retry(self, request: Request, protocol: Protocol, queue: str, *fail: int) -> None:
        assert request.retry() == 1
        Worker(protocol, queue, refusing(*fail), most=1).drain()

    def test_a_reader_gives_what_it_had_passed(
        self, request_: Request, protocol: Protocol, queue: str
    ) -> None:
        reader = ResultReader(protocol, request_.id)
        fields: list[str] = []
        while reader.next < 5:
            fields += [field for field, _ in reader.read() or []]
        self.retry(request_, protocol, queue)
        while not reader.is_over:
            fields += [field for field, _ in reader.read() or []]

        assert fields == ["1", "5", "6", "7", "8", "3", "4", "2.1"]

    def test_so_it_does_after_a_second_failure(
        self, request_: Request, protocol: Protocol, queue: str
    ) -> None:
        """The second comes while it reads once more what it had passed."""
        reader = ResultReader(protocol, request_.id)
        fields: list[str] = []
        while reader.next < 7:
            fields += [field for field, _ in reader.read() or []]
        self.retry(request_, protocol, queue, 4)
        assert request_.status().state is State.FAILED
        while "3" not in fields and not reader.is_over:
            fields += [field for field, _ in reader.read() or []]
        self.retry(request_, protocol, queue)
        while not reader.is_over:
            fields += [field for field, _ in reader.read() or []]

        assert sorted(fields) == ["1", "2.1", "3", "4.1", "5", "6", "7", "8"]

    def test_the_collector_writes_what_it_had_passed(
        self,
        request_: Request,
        protocol: Protocol,
        queue: str,
        driver: RequestByHand,
        collect: Collect,
        target: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        commit = Collector._commit

        def retried(
            self_: Collector, pieces: list[Any], next_number: int, *args: Any, **how: Any
        ) -> None:
            commit(self_, pieces, next_number, *args, **how)
            if next_number == 5 and driver.meta("state") == "failed":
                self.retry(request_, protocol, queue)

        monkeypatch.setattr(Collector, "_commit", retried)

        assert collect(follow=True)

        assert target.read_bytes().split() == lines(1, 5, 6, 7, 8, 3, 4, 2)
        assert driver.results() == {}


class TestFailedWhilePartsRun:
    """What runs when a request fails still counts, so readers wait for it."""

    @pytest.fixture
    def failed(self, client: Client, queue: str, driver: RequestByHand) -> str:
        """A request that has failed while its first part runs. Returns who runs it."""
        submit(client, queue, driver.id, 4, max_failures=0, limit=4)
        holder, _ = driver.claim()
        driver.give_up(2)
        assert driver.meta("state") == "failed"
        return holder

    def test_the_client_waits(self, client: Client, driver: RequestByHand, failed: str) -> None:
        request = client.get(driver.id)
        with pytest.raises(WaitTimeout):
            list(request.results(timeout=0.1))
        found: list[object] = []
        thread = threading.Thread(target=lambda: found.extend(request.results(timeout=20)))
        thread.start()

        finish(driver, failed, 1)
        thread.join()

        assert found == [(1, b"1")]

    @pytest.mark.parametrize("is_ordered", [True, False])
    def test_the_collector_waits(
        self, driver: RequestByHand, failed: str, collect: Collect, target: Path, is_ordered: bool
    ) -> None:
        assert not collect(is_ordered=is_ordered)
        said: list[bool] = []
        thread = threading.Thread(
            target=lambda: said.append(collect(is_ordered=is_ordered, follow=True))
        )
        thread.start()
        finish(driver, failed, 1)
        thread.join()

        assert (said, target.read_bytes()) == ([True], b"1\n")

    @pytest.mark.parametrize(("ago_ms", "is_all"), [(12_000, False), (14_000, True)])
    def test_nobody_waits_for_the_dead(
        self, driver: RequestByHand, failed: str, collect: Collect, ago_ms: int, is_all: bool
    ) -> None:
        """There is no janitor. The longest grace of a lease is 13 s."""
        driver.pass_deadline(failed, ago_ms)

        assert collect() is is_all

    @pytest.mark.parametrize("is_ordered", [True, False])
    def test_who_follows_waits_for_holders_that_an_outage_kept_silent(
        self,
        driver: RequestByHand,
        failed: str,
        collect: Collect,
        target: Path,
        monkeypatch: pytest.MonkeyPatch,
        is_ordered: bool,
    ) -> None:
        """The server was away for an hour. The first look at it comes before the renewals."""
        driver.pass_deadline(failed)
        looks: list[str] = []
        inspect = Protocol.inspect

        def counted(self: Protocol, request_id: str) -> Snapshot:
            looks.append(request_id)
            return inspect(self, request_id)

        monkeypatch.setattr(Protocol, "inspect", counted)
        said: list[bool] = []
        thread = threading.Thread(
            target=lambda: said.append(collect(is_ordered=is_ordered, follow=True))
        )
        thread.start()
        wait_until(lambda: len(looks) > 5 or not thread.is_alive())
        driver.protocol.renew(driver.id, 20_000, {failed: 1})
        finish(driver, failed, 1)
        thread.join()

        assert (said, target.read_bytes()) == ([True], b"1\n")

    def test_who_follows_does_not_wait_for_the_dead_for_ever(
        self, driver: RequestByHand, failed: str, collect: Collect, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("streamq.queue.results.GRACE_S", 0.5)
        driver.pass_deadline(failed)

        began = time.monotonic()

        assert collect(follow=True)
        assert time.monotonic() - began >= 0.5

    def test_collector_that_follows_waits_and_one_that_looks_does_not(
        self, protocol: Protocol, driver: RequestByHand, failed: str
    ) -> None:
        assert b"".join(show_results(protocol, driver.id, "raw", follow=False)) == b""
        shown: list[bytes] = []
        thread = threading.Thread(
            target=lambda: shown.extend(show_results(protocol, driver.id, "raw", follow=True))
        )
        thread.start()
        finish(driver, failed, 1)
        thread.join()

        assert b"".join(shown) == b"1\n"

    def test_what_ends_between_two_looks_is_not_passed_over(
        self,
        protocol: Protocol,
        driver: RequestByHand,
        failed: str,
        collect: Collect,
        target: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """The last lease ends after the results were looked at and before the leases are."""
        inspect = Protocol.inspect
        looks = 0

        def inspect_late(self: Protocol, request_id: str) -> Snapshot:
            nonlocal looks
            looks += 1
            if looks == 4:  # the first two are of the collector's beginning
                finish(driver, failed, 1)
            return inspect(self, request_id)

        monkeypatch.setattr(Protocol, "inspect", inspect_late)

        assert collect(follow=True)
        assert target.read_bytes() == b"1\n"


class TestTwoCollectors:
    """Two at once: what one has committed stays, whatever the other believed before."""

    @pytest.mark.parametrize("has_begun", [True, False])
    @pytest.mark.parametrize("is_forced", [True, False])
    def test_what_is_committed_until_the_file_is_locked_is_not_cut_off(
        self,
        protocol: Protocol,
        client: Client,
        queue: str,
        driver: RequestByHand,
        collect: Collect,
        target: Path,
        has_begun: bool,
        is_forced: bool,
    ) -> None:
        submit(client, queue, driver.id, 3, limit=3)
        holders = [driver.claim()[0] for _ in range(3)]
        finish(driver, holders[0], 1)
        if has_begun:
            assert not collect()
        output = FileOutput(target, driver.id)
        lock = output._lock

        def lock_late(file: BinaryIO) -> None:
            """The other one collects and ends after this one has read what is committed."""
            finish(driver, holders[1], 2)
            assert not collect()
            assert target.read_bytes() == b"1\n2\n"
            lock(file)

        output._lock = lock_late  # type: ignore[method-assign]
        slow = Collector(protocol, driver.id, output, "raw")

        assert not slow.run(is_ordered=True, follow=False, force=is_forced)

        assert target.read_bytes() == b"1\n2\n"
        finish(driver, holders[2], 3)
        assert collect()
        assert target.read_bytes() == b"1\n2\n3\n"

    @pytest.mark.parametrize("is_ordered", [True, False])
    def test_who_writes_what_another_has_committed_is_told(
        self,
        protocol: Protocol,
        client: Client,
        queue: str,
        driver: RequestByHand,
        is_ordered: bool,
    ) -> None:
        """Both write to a stream, and the same number of bytes."""
        submit(client, queue, driver.id, 2)
        holder, _ = driver.claim(1)
        finish(driver, holder, 1)
        first, second = Stream(), Stream()

        def run(stream: Stream) -> None:
            collector = Collector(protocol, driver.id, stream, "raw")
            collector.run(is_ordered=is_ordered, follow=False, force=False)

        first.before_commit = lambda: run(second)

        with pytest.raises(CollectorLost):
            run(first)

        assert first.data == second.data == b"1\n"
        assert driver.results() == {}


class Stream:
    """An output in memory."""

    name = inode = packing = ""

    def __init__(self) -> None:
        self.data = b""
        self.before_commit: Callable[[], object] = lambda: None

    def open(self, offset: int, *, has_begun: bool, force: bool) -> None:
        """It is always ready."""

    def recover(self, written: Written) -> None:
        """There is no other version."""

    def lacks(self, written: Written) -> bool:
        """Nothing of it is ever lost."""
        return False

    def cut(self, written: Written, *, has_begun: bool) -> None:
        """What was written stays."""

    def tail(self, offset: int) -> str:
        """It is never compared."""
        return ""

    def settle(self) -> None:
        """Nothing was kept elsewhere."""

    def write(self, data: bytes, *, is_last: bool = False) -> int:
        """Keep the data; then call what is to happen once, before the first is committed."""
        self.data += data
        if data:
            self.before_commit, call = lambda: None, self.before_commit
            call()
        return len(data)

    def look(self) -> None:
        """It is always wanted."""

    def close(self) -> None:
        """It stays."""


@ONE_KIND
def test_what_collectors_of_other_versions_committed_can_be_read(
    driver: RequestByHand, client: Client, queue: str, collect: Collect, target: Path
) -> None:
    """One that names no collector, and one with a field that is not known yet."""
    submit(client, queue, driver.id, 2, limit=2)
    holders = [driver.claim()[0] for _ in range(2)]
    finish(driver, holders[0], 1)
    assert not collect()
    stands = json.loads(driver.meta("committed"))
    assert stands.pop("collector")
    driver.set_meta(committed=json.dumps(stands | {"later": 1}))
    finish(driver, holders[1], 2)

    assert collect()

    assert target.read_bytes() == b"1\n2\n"


class TestInNoOrder:
    """A hash that shrinks while it is scanned gives fields again."""

    def put(self, driver: RequestByHand, count: int, scale: int, suffix: str = "") -> None:
        """An ended request with so many results of 0.4 to 1.6 MB, each smaller by the scale."""
        driver.load(count)
        for first in range(1, count + 1, 20):
            mapping = {
                f"{number}{suffix}": encode_result(
                    [b"%d " % number + b"x" * (random.randint(400_000, 1_600_000) // scale)]
                )
                for number in range(first, min(count, first + 19) + 1)
            }
            driver.redis.hset(driver.keys.results, mapping=mapping)
        driver.set_meta(state="done")

    def written(self, target: Path) -> list[int]:
        with target.open("rb") as file:
            return sorted(int(line.partition(b" ")[0]) for line in file)

    @pytest.mark.parametrize("suffix", ["", ".1"], ids=["first run", "retry"])
    def test_large_results_are_written_once(
        self,
        protocol: Protocol,
        queue: str,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        suffix: str,
    ) -> None:
        """Sizes of results and of what is written at once are a hundredth: that is quick, and
        the same thing. Where the server hashes to is chance, so it is tried several times.
        """
        monkeypatch.setattr("streamq.runs.collect.BATCH_BYTES", 2**22 // 100)
        for trial in range(4):
            driver = RequestByHand(protocol, queue, f"r{secrets.token_hex(6)}")
            self.put(driver, 700, 100, suffix)
            target = tmp_path / f"{trial}.txt"
            collector = Collector(protocol, driver.id, FileOutput(target, driver.id), "raw")

            assert collector.run(is_ordered=False, follow=False, force=False)

            assert self.written(target) == [*range(1, 701)]

    @pytest.mark.long
    @ONE_KIND
    def test_so_are_really_large_ones(
        self, driver: RequestByHand, collect: Collect, target: Path
    ) -> None:
        self.put(driver, 700, 1)

        assert collect(is_ordered=False)

        assert self.written(target) == [*range(1, 701)]
        target.unlink()


class TestLost:
    """An output that is gone may be begun anew, and by one collector only."""

    @pytest.fixture
    def begun(
        self, driver: RequestByHand, client: Client, queue: str, collect: Collect
    ) -> RequestByHand:
        """Three of ten results are in the target, and the server has the others."""
        submit(client, queue, driver.id, 10)
        holder, _ = driver.claim(3)
        finish(driver, holder, 1, 2, 3)
        assert not collect()
        holder, grant = driver.claim(7)
        finish(driver, holder, *(part.number for part in grant.parts))
        return driver

    def force(self, driver: RequestByHand, output: FileOutput) -> bool:
        return Collector(driver.protocol, driver.id, output, "raw").run(
            is_ordered=True, follow=True, force=True
        )

    @ONE_KIND
    def test_what_another_has_written_meanwhile_stays(
        self, begun: RequestByHand, target: Path
    ) -> None:
        target.unlink()

        class Late(FileOutput):
            def open(inner, *words: Any, **options: Any) -> None:  # noqa: N805
                assert self.force(begun, FileOutput(target, begun.id))
                super().open(*words, **options)

        assert self.force(begun, Late(target, begun.id))

        assert target.read_bytes().split() == lines(*range(4, 11))

    @ONE_KIND
    def test_file_that_was_put_back_meanwhile_is_gone_on_with(
        self, begun: RequestByHand, target: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        away = target.rename(target.with_name("away"))

        class Late(FileOutput):
            def open(self, *words: Any, **options: Any) -> None:
                away.rename(target)
                super().open(*words, **options)

        assert self.force(begun, Late(target, begun.id))

        assert target.read_bytes().split() == lines(*range(1, 11))
        assert "are gone" not in caplog.text

    @ONE_KIND
    def test_it_is_said_once_what_is_lost_with_it(
        self, begun: RequestByHand, target: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        target.unlink()

        assert self.force(begun, FileOutput(target, begun.id))

        assert target.read_bytes().split() == lines(*range(4, 11))
        assert caplog.text.count("parts 1 to 3 are gone") == 1

    @ONE_KIND
    def test_file_that_cannot_be_looked_at_is_not_lost(
        self, begun: RequestByHand, target: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        class Stale(FileOutput):
            def lacks(self, written: Written) -> bool:
                with monkeypatch.context() as patch:
                    patch.setattr(Path, "open", fail)
                    return super().lacks(written)

        def fail(*_: Any) -> None:
            raise OSError(errno.ESTALE, "Stale file handle")

        with pytest.raises(OutputError, match="Stale file handle"):
            self.force(begun, Stale(target, begun.id))

        assert target.read_bytes().split() == lines(1, 2, 3)
