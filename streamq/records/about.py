"""The *about* of a part, which it carries besides its bytes: the name of its field in the stream.

``b"1"``            one payload of a submission that was bytes
``b"1j"``           one that was another value: the payload is JSON made from it
``b"R F L"``        R records of file F (by its place in ``Spec.files``), from line L on
``b"R F L N"``      the same where lines are no records or rows have several: N lines in all
``b"R F L N@17/3"`` a part of a later stage of a flow, and the item that it is: child 3 of input 17.
                    R of its records came so far; file and lines are those of the input

An ``about`` always begins with the number of records, which ``lua/lib/hand.lua`` and ``model.Part``
read. How the lines of records ended is part of a result, with one letter for each record.
"""

import msgspec

from streamq.model import Part, Spec

#: One payload of a submission.
ONE_PAYLOAD = b"1"
_IS_JSON = b"j"
ONE_JSON = ONE_PAYLOAD + _IS_JSON

#: Words of an ``about`` that tell of a file: the records, the file, and the first line.
_FILE_AND_LINE = 3

#: The letter for each line ending: a newline, a carriage return and a newline, none.
NEWLINE, RETURN, NOTHING = b"n", b"r", b"0"
ENDINGS = {NEWLINE[0]: b"\n", RETURN[0]: b"\r\n", NOTHING[0]: b""}
ENDING_LETTERS = NEWLINE + RETURN + NOTHING


def about_of_lines(records: int, file: int, line: int, lines: int | None = None) -> bytes:
    """Return the ``about`` of a part from a file; ``lines`` where they are not as many."""
    if lines is None or lines == records:
        return b"%d %d %d" % (records, file, line)
    return b"%d %d %d %d" % (records, file, line, lines)


def about_of_whole_file(file: int) -> bytes:
    """Return the ``about`` of a part that is all of a file."""
    return about_of_lines(1, file, 1)


def item_of_about(part: Part) -> str:
    """Return the item that a part of a flow is: the number of an input, or of a child of it."""
    _, at, origin = part.about.partition(b"@")
    return origin.decode() if at else str(part.number)


def about_of_child(part: Part, records: int, origin: str) -> str:
    """Return the ``about`` of what a part of a flow hands over to the next stage."""
    words = part.about.partition(b"@")[0].decode().split()
    if len(words) < _FILE_AND_LINE:
        return f"{records}@{origin}"
    lines = words[_FILE_AND_LINE] if len(words) > _FILE_AND_LINE else words[0]
    return f"{records} {words[1]} {words[2]} {lines}@{origin}"


def is_json_payload(part: Part) -> bool:
    """Return whether the payload is JSON that ``submit`` made from a value that was no bytes."""
    return part.about.endswith(_IS_JSON)


def is_one_payload(part: Part) -> bool:
    """Return whether the part is one payload that was given as bytes."""
    return part.about == ONE_PAYLOAD


def about_has_other_lines(part: Part) -> bool:
    """Return whether the part has more or fewer lines than records."""
    return part.about.count(b" ") == _FILE_AND_LINE and b"@" not in part.about


class AboutPlace(msgspec.Struct, frozen=True):
    """Where a part came from: a file, its first and its last line there, and its records."""

    source: str
    line: int
    last_line: int
    records: int

    @classmethod
    def of(cls, about: bytes, spec: Spec) -> "AboutPlace | None":
        """Read an ``about``; None where the part was not loaded from a file."""
        try:
            records, file, line, *lines = map(int, about.partition(b"@")[0].split())
            count = lines[0] if lines else records
            return cls(spec.files[file], line, line + max(1, count) - 1, records)
        except (ValueError, IndexError):
            return None
