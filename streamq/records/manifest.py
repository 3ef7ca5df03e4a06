"""The manifest of an output: what it was made of, what came of it, and digests to verify that.

It is a file beside the output, ``out.manifest.json`` for ``out.jsonl``. Needs no server.
"""

import hashlib
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from pathlib import Path

import msgspec

from streamq.errors import InvalidValue
from streamq.model import Status
from streamq.records.errors_file import errors_beside
from streamq.records.inputs import STDIN, open_input
from streamq.records.output import OutputError, OutputExists
from streamq.records.packing import name_without_compression
from streamq.records.remote import is_remote

_VERSION = 1
_BLOCK = 2**20


class FileNote(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What is noted of a file. Nothing but its name, where it cannot be read again."""

    name: str
    bytes: int = -1
    #: SHA-256 of its bytes, as hexadecimal digits.
    sha256: str = ""
    #: Lines, after decompression; only of an output and of failures.
    lines: int = -1


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """What an output was made of, and what came of it."""

    #: Of the form of this file.
    manifest: int
    request: str
    flow: str | None
    state: str
    #: When it was written, in UTC.
    written: str
    inputs: list[FileNote]
    parts: int
    records: int
    #: Of a flow: those that are through the first stage, and the failures of all stages.
    done: int
    failed: int
    #: Records for which the function returned nothing; null where lines are no results.
    dropped: int | None
    output: FileNote
    #: The file of failures; null where nothing failed.
    errors: FileNote | None


class Finding(msgspec.Struct, frozen=True):
    """One thing that was compared: whether it is as it was, and that in words."""

    is_good: bool
    says: str


def manifest_beside(output: Path) -> Path:
    """Return the file that the manifest of an output is written to."""
    return output.with_name(f"{name_without_compression(output).stem}.manifest.json")


def check_manifest(output: Path, *, force: bool) -> None:
    """Raise OutputExists if a file stands there that is no manifest."""
    place = manifest_beside(output)
    if not force and (place.exists() or place.is_symlink()) and _read_manifest(place) is None:
        raise OutputExists(f"{place} exists and is no manifest: remove it, or say --force")


def write_manifest(output: Path, status: Status, inputs: Sequence[str], form: str) -> Path:
    """Write the manifest of an output that is complete. Return its path.

    Raises:
        OutputError: it cannot be written.
    """
    place = manifest_beside(output)
    draft = place.with_name(f".{place.name}.draft")
    try:
        manifest = _manifest_of_output(output, status, inputs, form)
        draft.write_bytes(msgspec.json.format(msgspec.json.encode(manifest), indent=2) + b"\n")
        draft.replace(place)
    except OSError as error:
        raise OutputError(f"{place} cannot be written: {error.strerror}") from None
    return place


def _manifest_of_output(output: Path, status: Status, inputs: Sequence[str], form: str) -> Manifest:
    first = status.stages[0].records if status.stages else status.records
    failures, note = (
        errors_beside(output),
        _manifest_note_of_file(output, has_lines=form != "parquet"),
    )
    is_counted = form == "jsonl" and not status.stages
    return Manifest(
        manifest=_VERSION,
        request=status.id,
        flow=status.flow or None,
        state=status.state,
        written=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        inputs=[_manifest_note_of_input(name) for name in inputs],
        parts=status.parts.total,
        records=first.total,
        done=first.done,
        failed=status.records.failed,
        dropped=first.done - note.lines if is_counted else None,
        output=note,
        errors=_manifest_note_of_file(failures, has_lines=True) if failures.exists() else None,
    )


def _manifest_note_of_input(name: str) -> FileNote:
    if name == STDIN or is_remote(name):
        return FileNote(name=name)
    with suppress(OSError):
        return msgspec.structs.replace(_manifest_note_of_file(Path(name)), name=name)
    return FileNote(name=name)


def _manifest_note_of_file(path: Path, *, has_lines: bool = False) -> FileNote:
    digest, size, lines = hashlib.sha256(), 0, 0
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
            size += len(block)
    if has_lines:
        lines = _count_lines_for_manifest(path)
    return FileNote(
        name=path.name, bytes=size, sha256=digest.hexdigest(), lines=lines if has_lines else -1
    )


def _count_lines_for_manifest(path: Path) -> int:
    count, last = 0, b""
    if not path.stat().st_size:
        return 0
    with closing(open_input(str(path))) as source:
        while block := source.read(_BLOCK):
            count += block.count(b"\n")
            last = block[-1:]
    return count + (last not in (b"", b"\n"))


def _read_manifest(place: Path) -> Manifest | None:
    try:
        return msgspec.json.decode(place.read_bytes(), type=Manifest)
    except (OSError, msgspec.DecodeError):
        return None


def verify_output(output: Path) -> Iterator[Finding]:
    """Compare an output, its failures and its inputs with the manifest beside it.

    Raises:
        InvalidValue: there is no manifest.
    """
    place = manifest_beside(output)
    told = _read_manifest(place)
    if told is None:
        missing = "there is none" if not place.exists() else "it cannot be read"
        raise InvalidValue(f"{output} has no manifest to verify it by: {place}: {missing}")
    if told.manifest > _VERSION:
        raise InvalidValue(f"{place} was written by a later version of streamq")
    yield _compared_with_manifest_note("output", output, told.output)
    if told.errors:
        yield _compared_with_manifest_note("failures", errors_beside(output), told.errors)
    elif errors_beside(output).exists():
        yield Finding(False, f"failures {errors_beside(output)}: there were none")
    for each in told.inputs:
        path = Path(each.name)
        near = place.parent / each.name
        yield _compared_with_manifest_note(
            "input", path if path.exists() or not near.exists() else near, each
        )
    yield from _manifest_counts_agree(told)


def _compared_with_manifest_note(what: str, path: Path, told: FileNote) -> Finding:
    if not told.sha256:
        return Finding(True, f"{what} {told.name}: cannot be read again, so it is not compared")
    try:
        found = _manifest_note_of_file(path)
    except OSError as error:
        return Finding(False, f"{what} {path}: {error.strerror}")
    if found.bytes != told.bytes:
        return Finding(False, f"{what} {path}: has {found.bytes:,} bytes, and had {told.bytes:,}")
    if found.sha256 != told.sha256:
        return Finding(False, f"{what} {path}: has other bytes than it had")
    lines = f", {told.lines:,} lines" if told.lines >= 0 else ""
    return Finding(True, f"{what} {path}: {told.bytes:,} bytes{lines}")


def _manifest_counts_agree(told: Manifest) -> Iterator[Finding]:
    """Yield whether the counts agree with each other."""
    whole = f"records: {told.records:,} in all, {told.done:,}"
    if told.flow:
        words = (
            f"through the first stage of flow {told.flow}, {told.failed:,} failures in all stages"
        )
        yield Finding(told.done <= told.records, f"{whole} {words}")
        return
    counts = f"{whole} done, {told.failed:,} failed"
    is_whole = told.done + told.failed == told.records or told.state != "done"
    dropped = "" if told.dropped is None else f", {told.dropped:,} without a result"
    is_written = told.dropped is None or told.dropped >= 0
    yield Finding(is_whole and is_written, f"{counts}{dropped}")
