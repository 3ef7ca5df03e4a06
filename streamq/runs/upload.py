"""Outputs behind URLs: a run writes a file first, and uploads it when all results are in it.

The file has the name of the object, and is in the folder in which the run was begun. So a stop or a
crash at any moment loses nothing: the same command goes on with the file, or with the upload. An
object is there when all of it is there.
"""

import shutil
from pathlib import Path

from streamq.errors import InvalidValue
from streamq.records.errors_file import errors_beside
from streamq.records.manifest import manifest_beside
from streamq.records.output import OutputExists
from streamq.records.partitions import folder_of_partitions, is_part_name
from streamq.records.remote import (
    RemoteMissing,
    delete_object,
    is_object,
    is_web_url,
    locate_url,
    matching_objects,
    upload_object,
)


def file_of_upload(url: str) -> str:
    """Return the file that is written before it is uploaded.

    Raises:
        InvalidValue: the URL is of a web server, or names no object.
    """
    if is_web_url(url):
        raise InvalidValue(f"{url}: nothing can be written to a web server: name a file")
    location = locate_url(url)
    if not location.segments or url.endswith("/"):
        raise InvalidValue(f"{url} is a folder: name the object")
    return str(Path.cwd() / location.segments[-1])


def check_upload(url: str, *, force: bool, is_folder: bool = False) -> None:
    """Check that no object is there yet; in a folder, that none is below it.

    Raises:
        OutputExists: one is.
        RemoteUnreachable: the object's server does not answer.
    """
    if not force and (_objects_below(url) if is_folder else is_object(url)):
        raise OutputExists(f"{url} exists: remove it, or say --force")


def upload_output(output: Path, url: str, *, is_kept: bool, is_again: bool) -> None:
    """Upload an output, and what stands beside it; then delete the file, unless it is kept.

    ``is_again``: it was uploaded before, perhaps with failures that there are no more.

    Raises:
        RemoteMissing: the account may not write there.
        RemoteUnreachable: the object's server does not answer.
    """
    folder = url.rpartition("/")[0]
    for path in (errors_beside(output), manifest_beside(output)):
        if path.is_file():
            upload_object(path, f"{folder}/{path.name}")
        elif is_again:
            delete_object(f"{folder}/{path.name}")
    upload_object(output, url)
    if not is_kept:
        output.unlink()


def upload_partitions(output: Path, url: str) -> None:
    """Upload the folder that was made of an output, file by file; then delete it here.

    Files of an earlier folder there, which this one does not have, are deleted.

    Raises:
        RemoteMissing: the account may not write there.
        RemoteUnreachable: the object's server does not answer.
    """
    folder = folder_of_partitions(output)
    before, written = set(_objects_below(url)), set()
    if (errors := errors_beside(output)).is_file():
        upload_object(errors, f"{url.rpartition('/')[0]}/{errors.name}")
    for path in sorted(folder.rglob("*.parquet")):
        place = f"{url}/{path.relative_to(folder).as_posix()}"
        upload_object(path, place)
        written.add(place)
    for place in before - written:
        if is_part_name(place.rpartition("/")[2]):
            delete_object(place)
    shutil.rmtree(folder)


def _objects_below(url: str) -> list[str]:
    try:
        return matching_objects(f"{url}/")
    except RemoteMissing:
        return []
