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
from streamq.queue.submission import Submission, is_small_submission, submit_all
from streamq.records.inputs import STDIN, BadInput, open_input
from streamq.records.sizes import PartSize
from streamq.records.splitting import Cursor, split_input

#: Longest line, in bytes.
_MOST_LINE = 2**26
#: The most requests that one round trip submits, and about the most parts.
_MOST_REQUESTS = 200
_MOST_PARTS = 2_000
_LIMIT = re.compile(rb"[1-9][0-9]{0,8}")


class RequestLine(NamedTuple):
    """A request as it is written."""

    place: str
    limit: int
    parts: list[bytes]


def requests_in(names: list[str]) -> Iterator[list[RequestLine]]:
    """Yield the requests of files, as many at once as were read at once; perhaps none.

    Raises:
        BadInput: a file cannot be read, or a line is no request.
    """
    for name in names:
        with closing(open_input(name)) as source:
            size = PartSize(records=1, most=_MOST_LINE)
            number = 0
            source.skip(len(source.mark()))
            for chunk in split_input(source, Spec(), size, Cursor()):
                found = []
                for line in chunk.payloads:
                    number += 1
                    if line.strip() and not line.startswith(b"#"):
                        found.append(
                            _parsed_request_line(line.rstrip(b"\r\n"), f"{name}: line {number}")
                        )
                yield found


def _parsed_request_line(line: bytes, place: str) -> RequestLine:
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
        count = sum(map(len, requests_in(files)))
        units.name(f"{name}-{count}", "--id")
    count = 0
    for lines in requests_in(files):
        numbers = range(count + 1, count + 1 + len(lines))
        ids = [units.name(f"{name}-{number}", "--id") for number in numbers]
        unknown = protocol.unknown(ids) if can_go_on else set(ids)
        submitter = _LineSubmitter(protocol, policy, on_submitted)
        for request_id, line in zip(ids, lines, strict=True):
            submitter.put(request_id, line, is_new=request_id in unknown)
        submitter.flush()
        count += len(lines)
    return count


class _LineSubmitter:
    """Submits requests in their order: those that are new and small many at once."""

    def __init__(
        self, protocol: Protocol, policy: Policy, on_submitted: Callable[[str], None]
    ) -> None:
        self._protocol = protocol
        self._policy = policy
        self._on_submitted = on_submitted
        self._waiting: list[tuple[str, Policy, list[bytes]]] = []
        self._parts = 0

    def put(self, request_id: str, line: RequestLine, *, is_new: bool) -> None:
        """Submit a request, or keep it for ``flush``. ``is_new``: the server has none of the id."""
        own = msgspec.structs.replace(self._policy, limit=line.limit)
        if is_new and is_small_submission(line.parts):
            self._waiting.append((request_id, own, line.parts))
            self._parts += len(line.parts)
            if self._parts >= _MOST_PARTS or len(self._waiting) >= _MOST_REQUESTS:
                self.flush()
            return
        self.flush()
        try:
            Submission(self._protocol, request_id, own, MAX_PART).run(line.parts, can_go_on=True)
        except RequestExists as error:
            raise RequestExists(f"{line.place}: {error}") from None
        self._on_submitted(request_id)

    def flush(self) -> None:
        """Submit what was kept."""
        waiting, self._waiting, self._parts = self._waiting, [], 0
        if waiting:
            submit_all(self._protocol, waiting, MAX_PART)
        for request_id, *_ in waiting:
            self._on_submitted(request_id)
