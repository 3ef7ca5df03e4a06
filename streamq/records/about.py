"""What a part says of itself besides its bytes: the name of its field in the stream.

``b"1"``            one payload of a submission that was bytes
``b"1j"``           one that was another value: the payload is JSON made from it
``b"R F L"``        R records of file F (by its place in ``Spec.files``), from line L on
``b"R F L N"``      the same where blank lines are no records: N lines in all

An ``about`` always begins with the number of records, which ``lua/lib/hand.lua`` and ``model.Part``
read. How the lines of records ended is part of a result, with one letter for each record.
"""

import msgspec

from streamq.model import Part, Spec

#: One payload of a submission.
ONE_PAYLOAD = b"1"
_IS_JSON = b"j"
ONE_JSON = ONE_PAYLOAD + _IS_JSON

#: The letter for each line ending: a newline, a carriage return and a newline, none.
NEWLINE, RETURN, NOTHING = b"n", b"r", b"0"
ENDINGS = {NEWLINE[0]: b"\n", RETURN[0]: b"\r\n", NOTHING[0]: b""}
ENDING_LETTERS = NEWLINE + RETURN + NOTHING


def of_lines(records: int, file: int, line: int, lines: int | None = None) -> bytes:
    """Return the ``about`` of a part from a file; ``lines`` where some lines are no records."""
    if lines is None:
        return b"%d %d %d" % (records, file, line)
    return b"%d %d %d %d" % (records, file, line, lines)


def of_whole_file(file: int) -> bytes:
    """Return the ``about`` of a part that is all of a file."""
    return of_lines(1, file, 1)


def is_json(part: Part) -> bool:
    """Return whether the payload is JSON that ``submit`` made from a value that was no bytes."""
    return part.about.endswith(_IS_JSON)


def is_one_payload(part: Part) -> bool:
    """Return whether the part is one payload that was given as bytes."""
    return part.about == ONE_PAYLOAD


class Place(msgspec.Struct, frozen=True):
    """Where a part came from: a file, its first and its last line there, and its records."""

    source: str
    line: int
    last_line: int
    records: int

    @classmethod
    def of(cls, about: bytes, spec: Spec) -> "Place | None":
        """Read an ``about``; None where the part was not loaded from a file."""
        try:
            records, file, line, *lines = map(int, about.split())
            count = lines[0] if lines else records
            return cls(spec.files[file], line, line + max(1, count) - 1, records)
        except (ValueError, IndexError):
            return None
