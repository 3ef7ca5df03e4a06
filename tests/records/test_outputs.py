"""Output files: cut to what was committed, safe before anything is forgotten, one writer."""

import gzip
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from streamq import Client, Protocol
from streamq.errors import CollectorLost, InvalidValue
from streamq.records.errors_file import check_errors_file, write_errors
from streamq.records.output import OutputError, OutputExists, Written
from streamq.records.outputs import FileOutput, check_new_output, check_output_name
from streamq.records.ranges import Range
from streamq.runs.collect import Collector
from tests.conftest import ONE_KIND
from tests.support.simulated import Worker


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "out.txt"


@pytest.fixture
def output(path: Path) -> FileOutput:
    return FileOutput(path, "r")


class TestOpening:
    def test_a_file_is_cut_to_what_was_committed(self, path: Path, output: FileOutput) -> None:
        path.write_bytes(b"committed, and half of a li")

        output.open(3, has_begun=True, force=False)
        assert path.read_bytes() == b"committed, and half of a li"
        output.cut(Written(9), has_begun=True)
        output.write(b"!")
        output.close()

        assert path.read_bytes() == b"committed!"

    def test_what_is_cut_off_is_kept_until_it_is_written_again(
        self, path: Path, output: FileOutput
    ) -> None:
        path.write_bytes(b"committed, and half of a li")
        output.open(9, has_begun=True, force=False)

        output.cut(Written(9), has_begun=True)

        (kept,) = path.parent.glob("*.aside-r-9-*")
        assert kept.read_bytes() == b", and half of a li"
        output.write(b", and half of a line")
        output.settle()
        output.close()
        assert not kept.exists()
        assert path.read_bytes() == b"committed, and half of a line"

    def test_what_somebody_added_is_kept_and_told_of(
        self, path: Path, output: FileOutput, caplog: pytest.LogCaptureFixture
    ) -> None:
        path.write_bytes(b"committed, and mine")
        output.open(9, has_begun=True, force=False)
        output.cut(Written(9), has_begun=True)
        output.write(b", and the rest of it")

        output.settle()

        output.close()
        (kept,) = path.parent.glob("*.aside-r-9-*")
        assert kept.read_bytes() == b", and mine"
        assert str(kept) in caplog.text

    def test_another_file_of_the_same_name_is_not_cut(self, path: Path, output: FileOutput) -> None:
        path.write_bytes(b"committed")
        output.open(0, has_begun=False, force=True)
        written = Written(9, output.tail(9), output.inode)
        output.close()
        path.write_bytes(b"precious, and longer than that")
        later = FileOutput(path, "r")

        assert later.lacks(written)
        later.open(9, has_begun=True, force=False)
        with pytest.raises(OutputExists, match="is not the file that was written for request r"):
            later.cut(written, has_begun=True)

        later.close()
        assert path.read_bytes() == b"precious, and longer than that"

    def test_another_file_is_not_cut_where_nothing_was_committed_yet(
        self, path: Path, output: FileOutput
    ) -> None:
        output.open(0, has_begun=False, force=False)
        written = Written(0, output.tail(0), output.inode)
        output.close()
        path.rename(path.with_name("moved"))
        path.write_bytes(b"precious")
        later = FileOutput(path, "r")
        later.open(0, has_begun=True, force=False)

        with pytest.raises(OutputExists, match="is not the file that was written for request r"):
            later.cut(written, has_begun=True)

        later.close()
        assert path.read_bytes() == b"precious"

    def test_file_that_was_copied_away_and_back_is_gone_on_with(
        self, path: Path, output: FileOutput
    ) -> None:
        path.write_bytes(b"committed")
        output.open(0, has_begun=False, force=True)
        written = Written(9, output.tail(9), output.inode)
        output.close()
        path.with_name("copy").write_bytes(path.read_bytes())
        path.unlink()
        path.with_name("copy").rename(path)
        later = FileOutput(path, "r")

        later.open(9, has_begun=True, force=False)
        later.cut(written, has_begun=True)
        later.write(b"!")

        later.close()
        assert path.read_bytes() == b"committed!"

    def test_single_byte_of_somebody_else_is_not_cut_either(
        self, path: Path, output: FileOutput
    ) -> None:
        output.open(0, has_begun=False, force=False)
        written = Written(0, output.tail(0), output.inode)
        output.close()
        path.rename(path.with_name("moved"))
        path.write_bytes(b"1")

        assert FileOutput(path, "r").lacks(written)

    def test_once_it_is_open_the_open_file_is_looked_at(
        self, path: Path, output: FileOutput
    ) -> None:
        path.write_bytes(b"committed")
        output.open(9, has_begun=True, force=False)
        written = Written(9, output.tail(9), output.inode)
        path.rename(path.with_name("moved"))
        path.write_bytes(b"another")

        assert not output.lacks(written)
        assert output.lacks(Written(10, "", output.inode))

        output.close()
        assert FileOutput(path, "r").lacks(written)

    def test_a_file_is_not_cut_to_more_than_it_has(self, path: Path, output: FileOutput) -> None:
        path.write_bytes(b"short")
        output.open(5, has_begun=True, force=False)

        with pytest.raises(OutputExists, match="has 5 bytes, but 9 were written for request r"):
            output.cut(Written(9), has_begun=True)

        output.close()
        assert path.read_bytes() == b"short"

    def test_a_file_that_lacks_some_of_it_is_another(self, path: Path, output: FileOutput) -> None:
        path.write_bytes(b"short")

        with pytest.raises(OutputExists, match="has 5 bytes, but 9 were written for request r"):
            output.open(9, has_begun=True, force=True)

        assert path.read_bytes() == b"short"

    def test_a_file_that_is_gone_is_missed(self, path: Path, output: FileOutput) -> None:
        with pytest.raises(OutputExists, match="is gone, and 9 bytes were written"):
            output.open(9, has_begun=True, force=False)

        assert not path.exists()

    def test_a_file_of_somebody_else_is_kept(self, path: Path, output: FileOutput) -> None:
        path.write_bytes(b"precious")

        with pytest.raises(OutputExists, match="--force"):
            output.open(0, has_begun=False, force=False)
        assert path.read_bytes() == b"precious"

        output.open(0, has_begun=False, force=True)
        output.cut(Written(), has_begun=False)
        output.close()
        assert path.read_bytes() == b""

    def test_there_is_one_writer(self, path: Path, output: FileOutput) -> None:
        output.open(0, has_begun=False, force=False)
        output.write(b"mine\n")
        other = FileOutput(path, "r")

        with pytest.raises(OutputExists, match="being written by somebody else"):
            other.open(5, has_begun=True, force=True)
        output.close()
        other.open(5, has_begun=True, force=False)
        other.close()

        assert path.read_bytes() == b"mine\n"

    def test_a_folder_that_is_not_there_is_named(self, tmp_path: Path) -> None:
        with pytest.raises(InvalidValue, match="there is no folder"):
            FileOutput(tmp_path / "no" / "out.txt", "r").open(0, has_begun=False, force=False)
        with pytest.raises(InvalidValue, match="is a folder"):
            check_new_output(tmp_path, force=True)


class TestWriting:
    def test_a_full_disk_is_named(self, path: Path, output: FileOutput) -> None:
        output.open(0, has_begun=False, force=False)
        path.unlink()
        path.symlink_to("/dev/full")
        full = FileOutput(path, "r")
        full._file = path.open("r+b", buffering=0)

        with pytest.raises(OutputError, match=r"cannot write .*out.txt: No space left"):
            full.write(b"x")
        full.close()
        output.close()

    def test_a_write_that_takes_a_part_goes_on_with_the_rest(
        self, path: Path, output: FileOutput
    ) -> None:
        class Slow:
            """A file that takes three bytes at a time, as one may."""

            def __init__(self, file: Any) -> None:
                self.file = file

            def write(self, data: memoryview) -> int:
                return int(self.file.write(data[:3]))

            def fileno(self) -> int:
                return int(self.file.fileno())

            def close(self) -> None:
                self.file.close()

        output.open(0, has_begun=False, force=False)
        output._file = Slow(output._file)  # type: ignore[assignment]
        output.write(b"one two three")
        output.close()

        assert path.read_bytes() == b"one two three"

    @pytest.mark.parametrize("spoil", [Path.unlink, lambda path: path.rename(f"{path}.moved")])
    def test_a_file_that_was_moved_or_removed_is_missed(
        self, path: Path, output: FileOutput, spoil: Callable[[Path], object]
    ) -> None:
        output.open(0, has_begun=False, force=False)
        output.write(b"x")
        spoil(path)

        for act in (output.look, lambda: output.write(b"y")):
            with pytest.raises(OutputError, match="was moved or removed"):
                act()
        output.close()

    def test_a_file_that_was_replaced_is_missed(self, path: Path, output: FileOutput) -> None:
        output.open(0, has_begun=False, force=False)
        path.rename(f"{path}.moved")
        path.write_bytes(b"another")

        with pytest.raises(OutputError, match="was moved or removed"):
            output.look()
        output.close()


class TestFailuresBeside:
    def test_a_file_of_somebody_else_is_kept(self, path: Path, tmp_path: Path) -> None:
        beside = tmp_path / "out.errors.jsonl"
        check_errors_file(path)
        beside.touch()
        check_errors_file(path)
        beside.write_text("precious")

        with pytest.raises(OutputExists, match=r"out\.errors\.jsonl exists"):
            check_errors_file(path)
        with pytest.raises(OutputExists, match=r"out\.errors\.jsonl exists"):
            check_new_output(path, force=False)
        check_new_output(path, force=True)

    def test_a_link_is_somebody_elses_and_never_followed(self, path: Path, tmp_path: Path) -> None:
        precious, beside = tmp_path / "precious", tmp_path / "out.errors.jsonl"
        precious.touch()
        beside.symlink_to(precious)
        with pytest.raises(OutputExists, match="exists"):
            check_errors_file(path)
        precious.write_text("precious")

        write_errors(path, b"{}\n")
        assert (beside.is_symlink(), beside.read_bytes()) == (False, b"{}\n")
        beside.unlink()
        beside.symlink_to(precious)
        write_errors(path, b"")

        assert precious.read_text() == "precious"
        assert sorted(each.name for each in tmp_path.iterdir()) == ["precious"]

    def test_what_cannot_be_written_is_named_and_leaves_nothing(
        self, path: Path, tmp_path: Path
    ) -> None:
        (tmp_path / "out.errors.jsonl").mkdir()

        with pytest.raises(OutputError, match=r"cannot write .*errors\.jsonl: Is a directory"):
            write_errors(path, b"{}\n")

        assert [each.name for each in tmp_path.iterdir()] == ["out.errors.jsonl"]


@ONE_KIND
class TestBeforeForgetting:
    """What the collector, the file and the server do, one after another."""

    @pytest.fixture
    def done(self, client: Client, protocol: Protocol, queue: str, request_id: str) -> str:
        client.submit([b"a", b"b"], handler="h", queue=queue, id=request_id)
        Worker(protocol, queue).drain()
        return request_id

    @pytest.fixture
    def story(self, monkeypatch: pytest.MonkeyPatch) -> list[str]:
        """What was synced, and what the server was told to forget, in turn."""
        told: list[str] = []
        calls = {name: getattr(os, name) for name in ("fsync", "fdatasync")}

        def synced(name: str) -> Callable[[int], None]:
            def sync(descriptor: int) -> None:
                is_folder = stat.S_ISDIR(os.fstat(descriptor).st_mode)
                size = "" if is_folder else f" of {os.fstat(descriptor).st_size}"
                told.append(f"{'folder' if is_folder else 'file'}{size} synced")
                calls[name](descriptor)

            return sync

        for name in calls:
            monkeypatch.setattr(os, name, synced(name))
        commit = Protocol.commit

        def watched(self: Protocol, *given: Any, forget: Any) -> None:
            told.append(f"{len(forget)} forgotten")
            commit(self, given[0], given[1], given[2], forget=forget)

        monkeypatch.setattr(Protocol, "commit", watched)
        return told

    def run(self, protocol: Protocol, request_id: str, path: Path, **given: Any) -> bool:
        collector = Collector(protocol, request_id, FileOutput(path, request_id), "raw")
        return collector.run(**({"is_ordered": True, "follow": False, "force": False} | given))

    @pytest.mark.parametrize("is_ordered", [True, False])
    def test_the_file_and_its_folder_are_synced(
        self, protocol: Protocol, done: str, path: Path, story: list[str], is_ordered: bool
    ) -> None:
        assert self.run(protocol, done, path, is_ordered=is_ordered)

        assert story[0] == "folder synced"
        forgotten = story.index("2 forgotten")
        assert story[forgotten - 1] == "file of 4 synced"
        assert path.read_bytes() == b"A\nB\n"

    def test_a_folder_that_cannot_be_synced_is_no_hindrance(
        self, protocol: Protocol, done: str, path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def refuse(descriptor: int) -> None:
            raise OSError(22, "Invalid argument")

        monkeypatch.setattr(os, "fsync", refuse)

        assert self.run(protocol, done, path)
        assert path.read_bytes() == b"A\nB\n"

    def test_a_file_that_cannot_be_synced_loses_nothing(
        self, protocol: Protocol, done: str, path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        sync = os.fdatasync
        with monkeypatch.context() as patch:

            def refuse(descriptor: int) -> None:
                if os.fstat(descriptor).st_size:
                    raise OSError(5, "Input/output error")
                sync(descriptor)

            patch.setattr(os, "fdatasync", refuse)
            with pytest.raises(OutputError, match="Input/output error"):
                self.run(protocol, done, path)
        assert protocol.inspect(done).count("results") == 2

        assert self.run(protocol, done, path)
        assert path.read_bytes() == b"A\nB\n"

    def test_another_name_is_refused_and_so_is_another_form(
        self, protocol: Protocol, done: str, path: Path, tmp_path: Path
    ) -> None:
        assert self.run(protocol, done, path)
        other = tmp_path / "other.txt"
        other.write_bytes(b"precious, and longer than what was written")

        with pytest.raises(OutputExists, match=r"are written to .*/out\.txt"):
            self.run(protocol, done, other)

        assert other.read_bytes().startswith(b"precious")

    def test_who_was_overtaken_writes_no_more(
        self, protocol: Protocol, done: str, path: Path, tmp_path: Path
    ) -> None:
        slow = FileOutput(path, done)
        write = slow.write

        def overtaken(data: bytes, *, is_last: bool = False) -> int:
            size = write(data)
            if data:
                slow.write = write  # type: ignore[method-assign]
                path.rename(tmp_path / "moved.txt")
                self.run(protocol, done, tmp_path / "moved.txt", force=True)
            return size

        slow.write = overtaken  # type: ignore[method-assign]
        slow._lock = lambda file: None  # type: ignore[method-assign]
        with pytest.raises((CollectorLost, OutputError)):
            Collector(protocol, done, slow, "raw").run(is_ordered=True, follow=False, force=False)

        assert (tmp_path / "moved.txt").read_bytes() == b"A\nB\n"

    def test_failures_beside_are_replaced_by_the_same_request_only(
        self, protocol: Protocol, done: str, path: Path, tmp_path: Path
    ) -> None:
        beside = tmp_path / "out.errors.jsonl"
        beside.write_text("precious")
        with pytest.raises(OutputExists, match=r"out\.errors\.jsonl exists"):
            self.run(protocol, done, path)
        assert (path.exists(), protocol.inspect(done).count("results")) == (False, 2)
        beside.unlink()
        assert self.run(protocol, done, path)

        beside.write_text("precious, too")

        with pytest.raises(OutputExists, match=r"out\.errors\.jsonl exists"):
            self.run(protocol, done, path)
        assert beside.read_text() == "precious, too"


@pytest.mark.parametrize("ours", [[], [""], ["", "0123"]])
def test_link_beside_is_somebody_elses_also_where_no_file_stood_before(
    tmp_path: Path, ours: list[str]
) -> None:
    (tmp_path / "theirs").write_bytes(b"theirs")
    (tmp_path / "out.errors.jsonl").symlink_to(tmp_path / "theirs")

    with pytest.raises(OutputExists):
        check_errors_file(tmp_path / "out.txt", ours=ours)


class TestAdding:
    @pytest.mark.parametrize("name", ["out.txt", "out.txt.gz"])
    def test_ranges_of_other_files_stand_where_they_were_given(
        self, tmp_path: Path, name: str
    ) -> None:
        path, source = tmp_path / name, tmp_path / "spool"
        source.write_bytes(b"0123456789")
        output = FileOutput(path, "r")
        output.open(0, has_begun=False, force=False)
        with source.open("rb") as spool:
            fd = spool.fileno()
            grown = output.add([b"a", Range(fd, 2, 3), Range(fd, 5, 1), b"bc", Range(fd, 0, 1)])
            grown += output.add([b"d"])
        output.close()

        data = path.read_bytes()
        assert grown == len(data)
        assert (gzip.decompress(data) if name.endswith("gz") else data) == b"a2345bc0d"

    def test_another_version_is_locked_like_the_file_it_replaces(
        self, path: Path, output: FileOutput
    ) -> None:
        path.write_bytes(b"b\n")
        output.open(2, has_begun=True, force=False)
        written = output.draft(lambda file: iter([b"a\n", file.read()]))
        output.replace()
        output.write(b"c\n")

        assert written.offset == 4
        assert path.read_bytes() == b"a\nb\nc\n"
        with pytest.raises(OutputExists, match="just being written by somebody else"):
            FileOutput(path, "r").open(6, has_begun=True, force=False)

        output.close()


def test_zstd_that_cannot_be_written_is_told_before_the_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def missing(name: str) -> Any:
        raise ImportError(name)

    monkeypatch.setattr("importlib.import_module", missing)
    with pytest.raises(InvalidValue, match=r"out\.zst is zstd: pip install"):
        check_output_name("out.zst")


def test_draft_of_failures_that_a_crash_left_goes_with_them(tmp_path: Path) -> None:
    draft = tmp_path / ".out.errors.jsonl.draft"
    draft.write_bytes(b"half of a li")

    write_errors(tmp_path / "out.txt", b"")

    assert list(tmp_path.iterdir()) == []
