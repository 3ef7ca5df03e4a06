"""Reads the results of a request. Every reader gets them in the same order.

First come results by part number. The rest comes when the request has ended and no part of it runs
any more. That is, by part number, the parts which this reader or an earlier one passed over because
they had not run when the request failed; and then, retry after retry, the results of failed parts
that were run again.
"""

import time

from streamq.model import State
from streamq.protocol.protocol import Protocol
from streamq.protocol.replies import Collected
from streamq.protocol.snapshot import Snapshot

#: A reading returns up to 500 results, and about 4 MiB of them.
BATCH = 500
BATCH_BYTES = 2**22

#: A reader that follows a request believes that all holders are dead when it found no lease of a
#: live one for 13 s, at looks no more than 2 s apart. That is the longest grace of a lease
#: (``lua/README.md``, rule 7). After an outage all leases are past their deadline, and live holders
#: renew them within that time.
GRACE_S = 13.0
MOST_BETWEEN_S = 2.0

#: The field of a result in the server, and the result. The field begins with the part's number.
Found = list[tuple[str, bytes]]


class ResultMarks:
    """A set of part numbers.

    Each number up to the highest takes a byte, so ten million parts take 10 MB, whichever of them
    are marked. As ranges they would take 60 times that where every second part was given up.
    """

    def __init__(self) -> None:
        self._marks = bytearray()

    def __bool__(self) -> bool:
        return bool(self._marks)

    def add(self, first: int, end: int) -> None:
        """Mark the numbers from ``first`` to ``end - 1``."""
        if first < end:
            self._marks.extend(bytes(max(0, end - len(self._marks))))
            self._marks[first:end] = b"\1" * (end - first)

    def next_range(self, at: int) -> tuple[int, int] | None:
        """Return the first range of marked numbers from ``at`` on: its first number and its end."""
        first = self._marks.find(1, at)
        if first < 0:
            return None
        end = self._marks.find(0, first)
        return first, end if end > 0 else len(self._marks)


class ResultReader:
    """Reads the results of one request, some at a time.

    It never sleeps: that is left to callers.
    """

    def __init__(
        self,
        protocol: Protocol,
        request_id: str,
        *,
        first: int = 1,
        within: str = "",
        is_forgetting: bool = False,
        is_patient: bool = True,
        goes_back: bool = True,
    ) -> None:
        """Begin at the part ``first``, or at its child ``within``.

        ``is_forgetting``: the caller deletes the results it was given from the server before it
        reads on. ``is_patient``: wait for parts that still run when the request has failed.
        ``goes_back``: read parts before ``first``, too, after all others.
        """
        #: The number of the first part that was not passed yet.
        self.next = first
        #: Of a flow: the child of that part which comes next, such as ``17/3``; "" for none.
        self.within = within
        #: Whether the request has ended and the reader has returned all of its results.
        self.is_over = False
        #: Whether the caller reads on until ``is_over``. One that looks once does not wait 13 s.
        self.is_following = True
        #: Since when no lease of a live holder was found, and when that was last checked.
        self._silent_since = self._silent_at = 0.0
        self._protocol = protocol
        self._id = request_id
        self._is_forgetting = is_forgetting
        self._is_patient = is_patient
        #: Numbers that were passed without a result and may get one under the plain number if the
        #: request is retried. A reader that begins at a later part cannot know which ones an
        #: earlier reader passed, so it marks all before its first.
        self._passed = ResultMarks()
        if goes_back:
            self._passed.add(1, first)
        #: Passed numbers that are read again now, and the range of them that is read next: its
        #: first number, and its end.
        self._passed_before = ResultMarks()
        self._again: tuple[int, int] | None = None
        self._is_fruitless = False
        self._kept = 0
        self._is_settled = False
        self._late: list[tuple[str, int]] | None = None

    def read(self) -> Found | None:
        """Return the next results. The list may be empty, if the reader only moved on.

        None means that there is nothing to read now: the request runs, or everything was read.
        """
        if self._late is not None:
            return self._read_late(self._late)
        at, end = self._again or (self.next, self.next + BATCH)
        within = "" if self._again else self.within
        found = self._protocol.collect(
            self._id,
            next_number=at,
            most=min(BATCH, end - at),
            max_bytes=BATCH_BYTES,
            within=within,
        )
        if found.state.is_live:
            self._is_settled = self._is_fruitless = False
        elif not self._is_settled:
            # Results that are read after the last lease has ended are all there will be.
            self._is_settled = not self._is_patient or self.is_settled(
                self._protocol.inspect(self._id)
            )
            return [] if self._is_settled else None
        if found.next > at or found.within != within:
            self._go_on(at, found)
            if found.fields:
                values = (result for _, result in found.results)
                return list(zip(found.fields, values, strict=True))
            return [(str(number), result) for number, result in found.results]
        if self._is_settled:
            self._go_back(found.left)
            return None if self.is_over else []
        return None

    def is_settled(self, found: Snapshot) -> bool:
        """Return whether nobody runs a part any more, by what ``inspect`` found.

        Parts that run when a request fails still count. Leases of dead holders do not: there may be
        no janitor to end them.
        """
        now = time.monotonic()
        is_silent = found.count("alive") == 0
        if not is_silent or now - self._silent_at > MOST_BETWEEN_S:
            self._silent_since = now
        self._silent_at = now
        if found.count("leases") == 0:
            return True
        return is_silent and (not self.is_following or now - self._silent_since >= GRACE_S)

    def _go_on(self, at: int, found: Collected) -> None:
        """Note what was read from the number ``at`` on."""
        if not self._again:
            self.next, self.within = found.next, found.within
        elif found.next < self._again[1]:
            self._again = (found.next, self._again[1])
        else:
            self._again = self._passed_before.next_range(found.next)
        if found.results:
            self._is_fruitless = False
        self._kept += 0 if self._is_forgetting else len(found.results)
        if found.state is State.FAILED:
            # Parts of a failed request that have not run yet will run if it is retried. In a
            # request that lives or is done only given-up parts have no result; a retry puts theirs
            # under another field.
            for number, _ in found.results:
                self._passed.add(at, number)
                at = number + 1
            self._passed.add(at, found.next)

    def _go_back(self, left: int) -> None:
        """Look for the remaining results, after all part numbers were passed."""
        if left <= self._kept:
            self.is_over = True
        elif self._passed and not self._is_fruitless:
            # Read all passed numbers again, until a whole round finds nothing.
            self._is_fruitless = True
            self._passed_before, self._passed = self._passed, ResultMarks()
            self._again = self._passed_before.next_range(1)
        else:
            self._late = self._find_late()

    def _find_late(self) -> list[tuple[str, int]]:
        """Return field and size of each result of a part that was run again, in order.

        First comes the retry, then the part: ``17.1`` before ``3.2``.
        """
        sizes = {
            field: len(result)
            for field, result in self._protocol.leftovers(self._id, BATCH_BYTES)
            if "." in field
        }
        return sorted(sizes.items(), key=lambda each: _order_of_late_results(each[0]))

    def _read_late(self, late: list[tuple[str, int]]) -> Found | None:
        count, size = 0, 0
        while count < min(BATCH, len(late)) and size < BATCH_BYTES:
            size += late[count][1]
            count += 1
        fields = [field for field, _ in late[:count]]
        found = self._protocol.results_of(self._id, fields) if fields else []
        del late[:count]
        self.is_over = not late
        return found or None


def _order_of_late_results(field: str) -> tuple[int, list[int]]:
    """Return what results of retries are ordered by: the retry, then the item."""
    head, _, rest = field.rpartition(".")
    run, *below = map(int, rest.split("/"))
    path = [int(number) for number in head.replace(".", "/").split("/")]
    return run, path + below
