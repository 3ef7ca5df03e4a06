"""The file beside an output that failures are written to: one JSON object a line."""

import hashlib
import stat
from collections.abc import Collection, Iterable
from contextlib import suppress
from pathlib import Path

import msgspec

from streamq.errors import StreamqError
from streamq.model import Failure
from streamq.records.output import OutputError, OutputExists
from streamq.records.packing import name_without_compression


def errors_beside(path: Path) -> Path:
    """Return the file that the failures of an output are written to."""
    return path.with_name(f"{name_without_compression(path).stem}.errors.jsonl")


def check_errors_file(
    path: Path, error: type[StreamqError] = OutputExists, ours: Collection[str] = ()
) -> None:
    """Raise an error if another program's file stands where the failures are to be written.

    A link counts as another program's, wherever it leads. An empty file does not, and neither does
    one whose digest is among ``ours``.
    """
    place = errors_beside(path)
    with suppress(FileNotFoundError):
        found = place.lstat()
        if stat.S_ISDIR(found.st_mode) or (stat.S_ISREG(found.st_mode) and not found.st_size):
            return
        # "" is the digest of no regular file: a link has it, and is not ours.
        if digest_of_errors_file(path) not in {each for each in ours if each}:
            raise error(
                f"{place} exists, and failures are to be written there: remove it, or say --force"
            )


def digest_of_errors_file(path: Path) -> str:
    """Return a digest of the failures beside an output; "" where there is no regular file."""
    place = errors_beside(path)
    try:
        is_file = stat.S_ISREG(place.lstat().st_mode)
        return digest_of_failures(place.read_bytes()) if is_file else ""
    except OSError:
        return ""


def digest_of_failures(lines: bytes) -> str:
    """Return a digest of failures, to compare them with others; "" where there are none."""
    return hashlib.blake2b(lines, digest_size=16).hexdigest() if lines else ""


def error_lines(failures: Iterable[Failure]) -> bytes:
    """Return failures as they are written beside an output, one JSON object a line."""
    return b"".join(msgspec.json.encode(each) + b"\n" for each in failures)


def write_errors(path: Path, lines: bytes) -> Path:
    """Write failures beside an output and return the file's path; without any, remove the file.

    The file is replaced in one step. A link is replaced, not followed.

    Raises:
        OutputError: the file cannot be written.
    """
    place = errors_beside(path)
    # One name, so that what a crash leaves is overwritten and goes away the next time.
    draft = place.with_name(f".{place.name}.draft")
    try:
        if lines:
            draft.write_bytes(lines)
            draft.replace(place)
        else:
            # The file of an earlier run would tell of failures that do not exist any more.
            place.unlink(missing_ok=True)
            draft.unlink(missing_ok=True)
    except OSError as error:
        draft.unlink(missing_ok=True)
        raise OutputError(f"cannot write {place}: {error.strerror}") from None
    return place
