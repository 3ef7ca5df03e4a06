"""``streamq run --partition-by``: a folder of Parquet files by the values of columns."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest

from streamq.errors import InvalidValue
from streamq.records import partitions
from streamq.records.output import OutputError, OutputExists
from tests.runs.running import EMBEDDED, Streamq
from tests.support.web import Login, serve

CODE = """
import pathlib
LANDS = ("DE", "FR", "a b/c", None)
def row(line: str) -> dict:
    if line == "7" and not pathlib.Path("mended").exists():
        raise ValueError("seven")
    number = int(line)
    return {"id": number, "land": LANDS[number % 4], "year": 2020 + number % 3}
"""
RUN = ("run", "in.txt", "--map", "rows.py:row", "-p", "2", "--retries", "0")
BY = ("--partition-by", "land", "--partition-by", "year")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    (tmp_path / "rows.py").write_text(CODE)
    path = tmp_path / "in.txt"
    path.write_text("".join(f"{n}\n" for n in range(1_000)))
    return path


def ids(folder: Path) -> list[int]:
    """The ids of all rows, in order; those of each folder stand there in input order."""
    for path in folder.rglob("*.parquet"):
        found = pq.ParquetFile(path).read()["id"].to_pylist()
        assert found == sorted(found)
    table = ds.dataset(folder, partitioning="hive").to_table()
    for each in table.to_pylist():
        assert each["land"] == ("DE", "FR", "a b/c", None)[each["id"] % 4]
        assert each["year"] == 2020 + each["id"] % 3
    return sorted(table["id"].to_pylist())


@pytest.mark.commands
@EMBEDDED
class TestRun:
    def test_rows_are_in_folders_by_their_values_also_those_of_a_retry(
        self, streamq: Streamq, source: Path, tmp_path: Path
    ) -> None:
        done = streamq(*RUN, "-o", "out/", *BY)

        assert done.returncode == 1, done.stderr
        assert f"results in {tmp_path / 'out'}" in done.stderr
        assert ids(tmp_path / "out") == [n for n in range(1_000) if n != 7]
        assert (tmp_path / "out/land=DE/year=2020/part-0.parquet").is_file()
        assert (tmp_path / "out.errors.jsonl").is_file()
        source.with_name("mended").touch()

        again = streamq("run", "--retry-failed")

        assert again.returncode == 0, again.stderr
        found = ds.dataset(tmp_path / "out", partitioning="hive").to_table()["id"].to_pylist()
        assert sorted(found) == list(range(1_000))
        left = {path.name for path in tmp_path.iterdir()}
        assert left - {".streamq"} == {
            "in.txt",
            "rows.py",
            "job.py",
            "mended",
            "out",
            "__pycache__",
        }

    def test_a_folder_that_is_there_is_replaced_only_by_force_and_only_one_like_it(
        self, streamq: Streamq, source: Path, tmp_path: Path
    ) -> None:
        source.with_name("mended").touch()
        words = (*RUN, "-o", "out", *BY)
        assert streamq(*words).returncode == 0
        source.write_text("1\n2\n")

        refused = streamq(*words)

        assert refused.returncode == 2
        assert "out exists: remove it, or say --force" in refused.stderr
        assert len(ids(tmp_path / "out")) == 1_000
        assert streamq(*words, "--force").returncode == 0
        assert ids(tmp_path / "out") == [1, 2]
        (tmp_path / "out/precious.txt").write_text("mine")
        refused = streamq(*words, "--force")
        assert refused.returncode == 2
        assert "has other files, such as" in refused.stderr
        assert (tmp_path / "out/precious.txt").read_text() == "mine"

    def test_without_the_column_nothing_is_lost(
        self, streamq: Streamq, source: Path, tmp_path: Path
    ) -> None:
        source.with_name("mended").touch()

        done = streamq(*RUN, "-o", "out", "--partition-by", "country")

        assert done.returncode == 1, done.stderr
        assert "no column 'country' to make folders by, only id, land, year" in done.stderr
        assert pq.ParquetFile(tmp_path / "out.parquet").metadata.num_rows == 1_000
        assert not (tmp_path / "out").exists()

    def test_what_makes_no_folder_is_refused(self, streamq: Streamq, source: Path) -> None:
        for words, why in (
            (("-o", "out.parquet"), "its name has no dot"),
            (("-o", "-"), "standard output has none"),
            (("-o", "out", "--manifest"), "--manifest has none"),
            (("-o", "out", "--output-format", "jsonl"), "promises a table"),
        ):
            refused = streamq(*RUN, *words, *BY)
            assert refused.returncode == 2, words
            assert why in refused.stderr

    def test_it_is_uploaded_file_by_file(
        self, streamq: Streamq, source: Path, tmp_path: Path, objects: dict[str, bytes]
    ) -> None:
        source.with_name("mended").touch()
        objects["stock/out/land=XX/part-0.parquet"] = objects["stock/other"] = b"before"
        words = (*RUN, "-o", "s3://stock/out/", "--partition-by", "year")

        refused = streamq(*words)

        assert refused.returncode == 2
        assert "s3://stock/out exists" in refused.stderr
        done = streamq(*words, "--force")
        assert done.returncode == 0, done.stderr
        names = [f"stock/out/year={year}/part-0.parquet" for year in (2020, 2021, 2022)]
        assert sorted(objects) == ["stock/other", *names]
        tables = [pq.read_table(pa.BufferReader(objects[name])) for name in names]
        assert sum(table.num_rows for table in tables) == 1_000
        assert not (tmp_path / "out").exists()
        assert not (tmp_path / "out.parquet").exists()

    @pytest.fixture
    def objects(self, environment: dict[str, str]) -> Iterator[dict[str, bytes]]:
        found: dict[str, bytes] = {}
        login = Login("key", "secret")
        with serve(found, login) as url:
            environment |= {
                "AWS_ACCESS_KEY_ID": login.key,
                "AWS_SECRET_ACCESS_KEY": login.secret,
                "AWS_REGION": "us-east-1",
                "AWS_ENDPOINT_URL": url,
                "AWS_ALLOW_HTTP": "true",
                "AWS_METADATA_ENDPOINT": "http://127.0.0.1:1",
            }
            yield found


class TestFolders:
    @pytest.fixture
    def output(self, tmp_path: Path) -> Path:
        path = tmp_path / "out.parquet"
        pq.write_table(pa.table({"id": range(10), "kind": [n % 2 for n in range(10)]}), path)
        return path

    def test_a_crash_at_any_moment_leaves_the_whole_file_and_the_next_attempt_is_whole(
        self, output: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        rename, crashes = Path.rename, 0

        def dies(path: Path, target: Path) -> Path:
            raise KeyboardInterrupt

        for die in (1, 2, 1, 2):
            left = [die]

            def sometimes(path: Path, target: Path, left: list[int] = left) -> Path:
                left[0] -= 1
                return dies(path, target) if not left[0] else rename(path, target)

            monkeypatch.setattr(Path, "rename", sometimes)
            try:
                partitions.write_partitions(output, ["kind"], "run")
            except KeyboardInterrupt:
                crashes += 1
            monkeypatch.setattr(Path, "rename", rename)
            assert pq.ParquetFile(output).metadata.num_rows == 10
            files = partitions.write_partitions(output, ["kind"], "run")
            assert sum(pq.ParquetFile(each).metadata.num_rows for each in files) == 10
            assert sorted(each.name for each in output.parent.iterdir()) == ["out", "out.parquet"]
        assert crashes >= 3

    def test_too_many_folders_are_refused(
        self, output: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(partitions, "MOST_FOLDERS", 5)

        with pytest.raises(OutputError, match="no folders can be made of"):
            partitions.write_partitions(output, ["id"], "run")

        assert [path.name for path in output.parent.iterdir()] == ["out.parquet"]

    def test_more_folders_than_files_may_be_open(self, output: Path) -> None:
        """pyarrow waits for ever where it cannot open another, and heeds no signal."""
        pq.write_table(pa.table({"id": range(1_300), "value": range(1_300)}), output)
        made = (
            "from pathlib import Path; from streamq.records.partitions import write_partitions as w"
        )
        made += "; "
        made += f"print(len(w(Path({str(output)!r}), ['id'], 'run')))"
        few = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (1_024, {})); "
        for hard, code in ((4_096, 0), (1_024, 1)):
            done = subprocess.run(
                [sys.executable, "-c", few.format(hard) + made],
                capture_output=True,
                text=True,
                timeout=60,
            )
            assert done.returncode == code, done.stderr
            if code:
                assert "no folders can be made of" in done.stderr
            else:
                assert done.stdout == "1300\n"

    def test_no_rows_make_an_empty_folder(self, output: Path) -> None:
        pq.write_table(pa.table({}), output)

        assert partitions.write_partitions(output, ["kind"], "run") == []

        assert list((output.parent / "out").iterdir()) == []

    def test_links_are_not_followed(self, tmp_path: Path) -> None:
        (tmp_path / "far").mkdir()
        (tmp_path / "out").symlink_to(tmp_path / "far")
        with pytest.raises(InvalidValue, match="is no folder"):
            partitions.check_partitions(tmp_path / "out", force=True)
        (tmp_path / "own").mkdir()
        (tmp_path / "own/part-0.parquet").symlink_to(tmp_path / "far")
        with pytest.raises(InvalidValue, match="has other files"):
            partitions.check_partitions(tmp_path / "own", force=True)
        with pytest.raises(OutputExists):
            partitions.check_partitions(tmp_path / "own", force=False)
