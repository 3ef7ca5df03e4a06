"""Streams that results go to, and what is asked of a place before anything is written there."""

import json
import os
import re
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from streamq.errors import InvalidValue
from streamq.model import Failure
from streamq.records.errors_file import error_lines, errors_beside, write_errors
from streamq.records.output import OutputError, OutputExists, Written
from streamq.records.outputs import (
    FileOutput,
    check_new_output,
    check_output_name,
    form_by_output_name,
    is_stream_output,
    refuse_inputs_as_output,
)
from streamq.records.stream_output import Stopped, StreamOutput


class Pipe:
    """A pipe with nobody at its end yet."""

    def __init__(self) -> None:
        self.reader, self.writer = os.pipe()
        self.asked = 0
        #: So often nobody is told to stop.
        self.patience = 0

    def should_stop(self) -> bool:
        self.asked += 1
        return self.asked > self.patience

    def output(self) -> StreamOutput:
        return StreamOutput(self.writer, "standard output", self.should_stop)

    def close_reader(self) -> None:
        os.close(self.reader)
        self.reader = -1

    def close(self) -> None:
        for fd in (self.reader, self.writer):
            if fd >= 0:
                os.close(fd)


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    pipe = Pipe()
    yield pipe
    pipe.close()


class TestPipe:
    def test_what_fits_is_written_at_once(self, pipe: Pipe) -> None:
        output = pipe.output()
        output.open(0, has_begun=False, force=False)
        output.cut(Written(), has_begun=False)

        output.write(b"some lines\n")
        output.look()
        output.close()

        assert os.read(pipe.reader, 100) == b"some lines\n"
        assert (pipe.asked, output.name) == (0, "")

    def test_all_of_much_arrives_as_fast_as_somebody_reads(self, pipe: Pipe) -> None:
        pipe.patience = 1_000
        data = os.urandom(2**20)
        read = bytearray()

        def read_all() -> None:
            while len(read) < len(data):
                read.extend(os.read(pipe.reader, 70_001))

        thread = threading.Thread(target=read_all, daemon=True)
        thread.start()
        pipe.output().write(data)
        thread.join(20)

        assert bytes(read) == data

    def test_who_is_to_stop_does_not_wait_for_a_reader(self, pipe: Pipe) -> None:
        pipe.patience = 2

        with pytest.raises(Stopped):
            pipe.output().write(bytes(2**20))

        assert pipe.asked == 3, "it waits until it is told"

    def test_reader_that_is_gone_is_missed(self, pipe: Pipe) -> None:
        output = pipe.output()
        output.look()
        pipe.close_reader()

        with pytest.raises(BrokenPipeError):
            output.look()
        with pytest.raises(BrokenPipeError):
            output.write(b"some lines\n")

    def test_pipe_that_is_full_is_still_wanted(self, pipe: Pipe) -> None:
        output = pipe.output()
        with pytest.raises(Stopped):
            output.write(bytes(2**20))

        output.look()


class TestDevice:
    def test_device_that_is_full_is_named(self) -> None:
        fd = os.open("/dev/full", os.O_WRONLY)
        output = StreamOutput(fd, "/dev/full", lambda: True)
        try:
            output.look()
            with pytest.raises(OutputError, match="cannot write /dev/full: No space left"):
                output.write(b"x")
        finally:
            os.close(fd)

    def test_device_is_written_to_without_a_question(self) -> None:
        fd = os.open("/dev/null", os.O_WRONLY)
        try:
            StreamOutput(fd, "/dev/null", lambda: True).write(bytes(2**20))
        finally:
            os.close(fd)

    def test_streams_are_known(self, tmp_path: Path) -> None:
        file, fifo = tmp_path / "file", tmp_path / "fifo"
        file.touch()
        os.mkfifo(fifo)

        assert is_stream_output(fifo) is True
        assert is_stream_output(Path("/dev/null")) is True
        assert [is_stream_output(path) for path in (file, tmp_path, tmp_path / "none")] == [
            False
        ] * 3


class TestFile:
    def test_what_cannot_be_opened_is_named(self, tmp_path: Path) -> None:
        with pytest.raises(OutputError, match="Is a directory"):
            FileOutput(tmp_path, "r").open(0, has_begun=True, force=False)

    def test_what_cannot_be_cut_is_named(self, tmp_path: Path) -> None:
        output = FileOutput(tmp_path / "out", "r")
        output.open(0, has_begun=False, force=False)
        assert output._file is not None
        only_read = os.open(tmp_path / "out", os.O_RDONLY)
        os.dup2(only_read, output._file.fileno())
        os.close(only_read)

        with pytest.raises(OutputError, match="cannot write"):
            output.cut(Written(), has_begun=False)
        output.close()

    @pytest.mark.parametrize("has_file", [True, False])
    def test_single_byte_that_was_written_is_missed(self, tmp_path: Path, has_file: bool) -> None:
        path = tmp_path / "out"
        if has_file:
            path.touch()
        output = FileOutput(path, "r")

        assert [output.lacks(Written(offset)) for offset in (0, 1)] == [False, True]
        with pytest.raises(OutputExists, match="has 0 bytes" if has_file else "is gone"):
            output.open(1, has_begun=True, force=False)
        output.open(0, has_begun=True, force=False)
        output.close()

    def test_nothing_stays_open(self, tmp_path: Path) -> None:
        before = len(list(Path("/dev/fd").iterdir()))
        output = FileOutput(tmp_path / "out", "r")
        output.open(0, has_begun=False, force=False)
        assert len(list(Path("/dev/fd").iterdir())) == before + 1

        output.close()

        assert len(list(Path("/dev/fd").iterdir())) == before

    def test_only_what_was_begun_is_removed(self, tmp_path: Path) -> None:
        path = tmp_path / "out"
        path.write_bytes(b"somebody's")
        FileOutput(path, "r").remove()
        assert path.exists()
        output = FileOutput(path, "r")
        output.open(0, has_begun=False, force=True)

        output.remove()

        assert not path.exists()
        output.remove()
        output.close()

    def test_empty_file_is_as_good_as_none(self, tmp_path: Path) -> None:
        path = tmp_path / "out"
        path.touch()
        output = FileOutput(path, "r")

        output.open(0, has_begun=False, force=False)
        output.cut(Written(), has_begun=False)
        output.write(b"line\n")
        output.close()

        assert path.read_bytes() == b"line\n"


class TestPlace:
    def test_form_goes_by_the_name(self) -> None:
        names = ("a.jsonl", "a.CSV", "a.tsv", "a.txt", "a", "a.jsonl.gz", "a.tsv.ZST", "a.gz")
        forms = ["jsonl", "csv", "tsv", "raw", "raw", "jsonl", "tsv", "raw"]
        assert [form_by_output_name(name) for name in names] == forms
        assert errors_beside(Path("a.jsonl.gz")) == Path("a.errors.jsonl")

    @pytest.mark.parametrize(
        "name",
        [
            "a.parquet.gz",
            "a.feather",
            "a.jsonl.bz2",
            "a.XZ",
            "a.zip",
            "a.json",
            "a.tar.gz",
            "a.tgz",
            "a.avro",
            "a.sqlite",
            "s3://b/a.txt",
        ],
    )
    def test_name_that_promises_what_is_not_written_is_refused(self, name: str) -> None:
        with pytest.raises(InvalidValue, match=re.escape(name)):
            check_output_name(name)

    def test_name_of_json_may_hold_lines_if_that_is_asked_for(self) -> None:
        check_output_name("a.json", "jsonl")
        for name in ("a.jsonl", "a.gz", "a.csv.zst", "a.tsv", "a"):
            check_output_name(name)

    def test_file_that_must_not_be_written_is_named(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        asked: list[Path] = []

        def access(path: Path, _: int) -> bool:
            asked.append(path)
            return False

        monkeypatch.setattr(os, "access", access)
        for name in ("new", "old"):
            with pytest.raises(InvalidValue, match="Permission denied"):
                check_new_output(tmp_path / name, force=False)
            (tmp_path / "old").touch()

        assert asked == [tmp_path, tmp_path / "old"]

    def test_input_is_never_written_over(self, tmp_path: Path) -> None:
        path, link = tmp_path / "data.jsonl", tmp_path / "link"
        refuse_inputs_as_output(path, ["data.jsonl", str(path)])  # there is none yet
        path.touch()
        link.symlink_to(path)
        (tmp_path / "other").touch()

        refuse_inputs_as_output(path, [str(tmp_path / "other"), str(tmp_path / "gone")])
        for inputs in ([str(path)], [str(tmp_path / "gone"), str(link)]):
            with pytest.raises(InvalidValue, match="is one of the inputs"):
                refuse_inputs_as_output(path, inputs)

    def test_failures_beside_are_never_written_over_an_input(self, tmp_path: Path) -> None:
        failures = errors_beside(tmp_path / "data.txt")
        failures.touch()

        with pytest.raises(InvalidValue, match=r"data\.errors\.jsonl is one of the inputs"):
            refuse_inputs_as_output(tmp_path / "data.txt", [str(failures)])

    def test_failures_of_before_go_with_the_last_of_them(self, tmp_path: Path) -> None:
        path = tmp_path / "data.txt"
        place = write_errors(path, b"")
        assert place == tmp_path / "data.errors.jsonl"
        assert write_errors(path, b"failure\n") == place
        assert place.read_bytes() == b"failure\n"

        assert write_errors(path, b"") == place

        assert list(tmp_path.iterdir()) == []

    def test_failures_are_a_line_each(self) -> None:
        lines = error_lines([Failure(error="E", message=text) for text in ("a", "b")])

        assert [json.loads(line)["message"] for line in lines.splitlines()] == ["a", "b"]
        assert lines.endswith(b"\n")
        assert error_lines([]) == b""

    def test_failures_that_find_no_folder_are_named(self, tmp_path: Path) -> None:
        with pytest.raises(OutputError, match="cannot write"):
            write_errors(tmp_path / "gone" / "data.txt", b"failure\n")

    def test_file_with_something_in_it_is_kept_unless_told_otherwise(self, tmp_path: Path) -> None:
        path = tmp_path / "out"
        path.write_bytes(b"x")
        with pytest.raises(OutputExists):
            check_new_output(path, force=False)

        check_new_output(path, force=True)
