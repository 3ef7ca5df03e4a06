"""A file of requests, one a line: ``limit:part:part:...``.

Lines that begin with ``#`` and blank lines are passed over, and so are empty parts. The
requests have numbered ids, so that the same file submitted again under the same name
makes no request twice.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import NamedTuple

import msgspec

from streamq import units
from streamq.errors import RequestExists
from streamq.model import MAX_PART, Policy, Spec
from streamq.protocol.protocol import Protocol
from streamq.queue.submission import Submission
from streamq.records.inputs import STDIN, BadInput, open_input
from streamq.records.splitting import Cursor, PartSize, split

#: Longest line, in bytes.
_MOST_LINE = 2**26
_LIMIT = re.compile(rb"[1-9][0-9]{0,8}")


class RequestLine(NamedTuple):
    """A request as it is written."""

    place: str
    limit: int
    parts: list[bytes]


def requests_in(names: list[str]) -> Iterator[RequestLine]:
    """The requests of files, one after another.

    Raises:
        BadInput: a file cannot be read, or a line is no request.
    """
    for name in names:
        with closing(open_input(name)) as source:
            size = PartSize(records=1, most=_MOST_LINE)
            number = 0
            for chunk in split(source, Spec(), size, Cursor()):
                for line in chunk.payloads:
                    number += 1
                    if line.strip() and not line.startswith(b"#"):
                        yield _parsed(line.rstrip(b"\r\n"), f"{name}: line {number}")


def _parsed(line: bytes, place: str) -> RequestLine:
    limit, *rest = line.split(b":")
    parts = [part for part in rest if part.strip()]
    if not _LIMIT.fullmatch(limit.strip()):
        found = limit[:20].decode(errors="replace")
        raise BadInput(f"{place}: {found!r} is no limit: write limit:part:part:...")
    if not parts:
        raise BadInput(f"{place}: a request without a part: write limit:part:part:...")
    if max(map(len, parts)) > MAX_PART:
        raise BadInput(f"{place}: a part is longer than the {MAX_PART} bytes it may have")
    return RequestLine(place, int(limit), parts)


def submit_lines(
    protocol: Protocol,
    name: str,
    policy: Policy,
    files: list[str],
    on_submitted: Callable[[str], None],
    *,
    can_go_on: bool,
) -> int:
    """Submit each line as a request; ``name-1``, ``name-2``, ... are their ids. Returns how many.

    Files are read to the end first, so that of one with a bad line nothing is submitted.

    Raises:
        BadInput: a file cannot be read, or a line is no request.
        RequestExists: a line was submitted under its id before, and was another one then.
    """
    if STDIN not in files:
        count = sum(1 for _ in requests_in(files))
        units.name(f"{name}-{count}", "--id")
    number = 0
    for number, line in enumerate(requests_in(files), 1):
        request_id = units.name(f"{name}-{number}", "--id")
        own = msgspec.structs.replace(policy, limit=line.limit)
        try:
            Submission(protocol, request_id, own, MAX_PART).run(line.parts, can_go_on=can_go_on)
        except RequestExists as error:
            raise RequestExists(f"{line.place}: {error}") from None
        on_submitted(request_id)
    return number
