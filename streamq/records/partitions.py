"""Folders of Parquet files by the values of columns: ``clean/country=DE/part-0.parquet``.

A run writes one Parquet file first. The folder is made of it when all results are there, as a draft
that takes the place of the folder in one step.
"""

import os
import re
import resource
import shutil
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from streamq.errors import InvalidValue
from streamq.records.arrow_tables import pyarrow
from streamq.records.drafts import sync_folder, sync_to_disk
from streamq.records.output import OutputError, OutputExists

#: More folders are a mistake: the column of an id, or a time to the second.
MOST_FOLDERS = 10_000
_ROWS = 2**16
#: Open files besides those of the folders. pyarrow keeps one open for each folder, and waits for
#: ever when the system allows no more.
_OTHER_FILES = 200
_PART = re.compile(r"part-\d+\.parquet")


def folder_of_partitions(output: Path) -> Path:
    """Return the folder that is made of a Parquet file."""
    return output.with_suffix("")


def file_of_partitions(name: str) -> str:
    """Return the Parquet file that is written before a folder is made of it.

    Raises:
        InvalidValue: the name is one of a file.
    """
    if Path(name).suffix:
        raise InvalidValue(f"{name}: a folder is made of it, so its name has no dot: name it out/")
    return f"{name.rstrip('/')}.parquet"


def is_part_name(name: str) -> bool:
    """Return whether files in such folders have names like this one."""
    return _PART.fullmatch(name) is not None


def check_partitions(folder: Path, *, force: bool) -> None:
    """Check that a folder may be made there. With ``force`` one that was made so may be replaced.

    Raises:
        OutputExists: there is a folder with files in it.
        InvalidValue: there is a file, or a folder that has other files than those of a run.
    """
    if not os.path.lexists(folder):
        return
    if folder.is_symlink() or not folder.is_dir():
        raise InvalidValue(f"{folder} is no folder: remove it, or name another one")
    files = [each for each in folder.rglob("*") if each.is_symlink() or not each.is_dir()]
    if files and not force:
        raise OutputExists(f"{folder} exists: remove it, or say --force")
    for each in files:
        if each.is_symlink() or not is_part_name(each.name):
            raise InvalidValue(f"{folder} has other files, such as {each}: name another folder")


def write_partitions(output: Path, columns: Sequence[str], run_id: str) -> list[Path]:
    """Make the folder of a Parquet file. Return its files.

    Raises:
        OutputError: the table has no such column, or the folder cannot be written.
        InvalidValue: another folder is there.
    """
    folder = folder_of_partitions(output)
    check_partitions(folder, force=True)
    draft, before = (folder.with_name(f".{folder.name}.{run_id}.{x}") for x in ("draft", "before"))
    try:
        for each in (draft, before):
            shutil.rmtree(each, ignore_errors=True)
        draft.mkdir()
        _write_dataset(output, draft, columns)
        _sync_below(draft)
        if folder.exists():
            folder.rename(before)
        draft.rename(folder)
        sync_folder(folder.parent)
    except OSError as error:
        raise OutputError(f"cannot write {folder}: {error.strerror or error}") from None
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    shutil.rmtree(before, ignore_errors=True)
    return sorted(each for each in folder.rglob("*") if each.is_file())


def _write_dataset(output: Path, folder: Path, columns: Sequence[str]) -> None:
    pa, dataset = pyarrow(), pyarrow("dataset")
    with closing(pyarrow("parquet").ParquetFile(output)) as file:
        schema = file.schema_arrow
        if not file.metadata.num_rows:
            return
        for name in columns:
            if name not in schema.names:
                raise OutputError(
                    f"the results have no column {name!r} to make folders by, only "
                    f"{', '.join(schema.names) or 'none'}. They are in {output}"
                )
        if len(columns) == len(schema.names):
            raise OutputError(f"no column is left for the files: all rows are in {output}")
        try:
            dataset.write_dataset(
                file.iter_batches(_ROWS),
                folder,
                schema=schema,
                format="parquet",
                partitioning=list(columns),
                partitioning_flavor="hive",
                basename_template="part-{i}.parquet",
                max_partitions=_most_folders(),
                use_threads=False,
            )
        except pa.ArrowException as error:
            raise OutputError(
                f"all rows are in {output}, and no folders can be made of them: {error}"
            ) from None


def _most_folders() -> int:
    """Return how many folders can be written at once, having asked the system for as many files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_FOLDERS + _OTHER_FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return (
        MOST_FOLDERS if soft == resource.RLIM_INFINITY else min(MOST_FOLDERS, soft - _OTHER_FILES)
    )


def _sync_below(folder: Path) -> None:
    for each in (folder, *folder.rglob("*")):
        if each.is_dir():
            sync_folder(each)
        else:
            with each.open("rb") as file:
                sync_to_disk(file.fileno())
