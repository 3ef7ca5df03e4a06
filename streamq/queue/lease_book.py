"""The book in which a host of leases writes down what it holds. Its parent can speak for it."""

from collections.abc import Sequence
from typing import Protocol

from streamq.model import Part
from streamq.queue.outcomes import PartNotDone


class LeaseBook(Protocol):
    """Where a host writes down what one of its places holds. A place has one lease at a time.

    A process of a pool keeps the book where its parent can read it. The parent then speaks for a
    dead process. A note must be in the book when the method returns: ``Taker`` and ``HeldLease``
    rely on the order.
    """

    @property
    def name(self) -> str:
        """The name of the place, unique among those of the host. Names of holders contain it."""

    def hold(self, holder: str, request_id: str) -> None:
        """Note that a claim is about to be sent, under this name. Numbers of calls begin anew."""

    def deal(self, numbers: Sequence[int]) -> None:
        """Note the parts of a batch that is about to be run. No part of it is started."""

    def next_call(self) -> int:
        """Return the number of the next call under the lease.

        The number stays the same until that call is answered. Below it there is room for the calls
        of a parent that speaks for the host.
        """

    def answered(self) -> None:
        """Note that the call with the number of ``next_call`` was answered."""

    def drop(self) -> None:
        """Note that the lease is over."""

    def count_finished(self, handler: str, parts: int, records: int) -> None:
        """Count parts whose results the server has counted."""

    def count_failed(self, handler: str, part: Part, outcome: PartNotDone, word: str) -> None:
        """Count a part that ``fail`` was told of, by the word that it answered."""
