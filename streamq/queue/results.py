"""Reading the results of a request: everybody gets them in the same order.

First by part number. Then, once the request has ended and nobody runs a part of it any more, what
is left: results of parts that somebody who read earlier had passed over, because they had not run
when the request failed, by part number; and what failed parts yielded when they were run again,
retry after retry.
"""

from typing import Any

from streamq.protocol.protocol import Protocol

#: So many results are read at once, and about so many bytes of them.
BATCH = 500
BATCH_BYTES = 2**22

#: The field of a result in the server, and the result. The field begins with the part's number.
Found = list[tuple[str, bytes]]


def part_of(field: str) -> int:
    """The number of the part whose result has that field."""
    return int(field.partition(".")[0])


def is_settled(found: dict[str, Any]) -> bool:
    """Whether nobody runs a part any more, by what ``inspect`` found: what runs when a request
    fails still counts.
    """
    return bool(found["leases"] == "0")


class ResultReader:
    """Reads the results of one request, some at a time. It never sleeps: who calls it does."""

    def __init__(
        self,
        protocol: Protocol,
        request_id: str,
        *,
        first: int = 1,
        is_forgetting: bool = False,
        is_patient: bool = True,
    ) -> None:
        """Begin at the part ``first``.

        ``is_forgetting``: the caller has the server forget what it was given before it reads on.
        ``is_patient``: parts that still run when the request has failed are waited for.
        """
        #: The number of the first part that was not passed yet.
        self.next = first
        #: Whether the request has ended and every result of it was given.
        self.is_over = False
        self._protocol = protocol
        self._id = request_id
        self._is_forgetting = is_forgetting
        self._is_patient = is_patient
        self._at = self._first = first
        self._kept = 0
        self._is_settled = False
        self._late: list[tuple[int, int, int]] | None = None

    def read(self) -> Found | None:
        """Return the next results; perhaps none, where it only went on.

        None says that there is nothing to read now: either it is over, or the request runs.
        """
        if self._late is not None:
            return self._read_late(self._late)
        found = self._protocol.collect(
            self._id, next_number=self._at, most=BATCH, max_bytes=BATCH_BYTES
        )
        if found.state.is_live:
            self._is_settled = False
        elif not self._is_settled:
            # Only what is read after the last lease has ended is all there will be.
            self._is_settled = not self._is_patient or is_settled(self._protocol.inspect(self._id))
            return [] if self._is_settled else None
        if found.next > self._at:
            self._at = found.next
            self.next = max(self.next, self._at)
            self._kept += 0 if self._is_forgetting else len(found.results)
            return [(str(number), result) for number, result in found.results]
        if self._is_settled:
            self._go_back(found.left)
            return None if self.is_over else []
        return None

    def _go_back(self, left: int) -> None:
        """Look for what is left, after all part numbers were passed."""
        if left <= self._kept:
            self.is_over = True
        elif self._first > 1:
            # Those before the first were passed by somebody else: some may have run since.
            self._first = self._at = 1
        else:
            self._late = self._find_late()

    def _find_late(self) -> list[tuple[int, int, int]]:
        """Retry, part and size of each result of a part that was run again, in order."""
        sizes = {}
        for field, result in self._protocol.leftovers(self._id, BATCH_BYTES):
            number, dot, run = field.partition(".")
            if dot:
                sizes[int(run), int(number)] = len(result)
        return sorted((*key, size) for key, size in sizes.items())

    def _read_late(self, late: list[tuple[int, int, int]]) -> Found | None:
        count, size = 0, 0
        while count < min(BATCH, len(late)) and size < BATCH_BYTES:
            size += late[count][2]
            count += 1
        fields = [f"{number}.{run}" for run, number, _ in late[:count]]
        found = self._protocol.results_of(self._id, fields) if fields else []
        del late[:count]
        self.is_over = not late
        return found or None
