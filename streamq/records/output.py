"""The operations that a collector needs of every output, be it a file or a stream."""

from typing import NamedTuple, Protocol

from streamq.errors import InvalidValue, StreamqError


class OutputError(StreamqError):
    """The output cannot be written. What was committed stays; the same command can go on."""


class OutputExists(InvalidValue):
    """The output file exists and was not begun for this request."""


class Written(NamedTuple):
    """What a collector knows of the bytes that it has written."""

    offset: int = 0
    #: A digest of the last of these bytes, and which file has them; "" where that is not known.
    tail: str = ""
    inode: str = ""


class Output(Protocol):
    """Where a collector writes results."""

    #: The absolute path of the file, to tell outputs apart; "" for a stream.
    name: str

    def open(self, offset: int, *, has_begun: bool, force: bool) -> None:
        """Get ready to write after that offset, and keep other writers out."""

    #: Which file it is, to tell it from another one of the same name; "" for a stream.
    inode: str
    #: How it is compressed; "" where it is not.
    packing: str

    def recover(self, written: "Written") -> None:
        """Put another version in its place that was committed, after a crash."""

    def lacks(self, written: "Written") -> bool:
        """Return whether the output has less than was written, or is another one."""

    def cut(self, written: "Written", *, has_begun: bool) -> None:
        """Drop everything after what was written: the next write goes there.

        ``has_begun``: what comes after that is not to be replaced, and is kept elsewhere.
        """

    def tail(self, offset: int) -> str:
        """Return a digest of the last bytes before that offset; "" for none."""

    def settle(self) -> None:
        """Look after what was kept elsewhere, now that everything is written."""

    def write(self, data: bytes, *, is_last: bool = False) -> int:
        """Write the data. Return how many bytes that took, when they are stored.

        ``is_last``: no more comes, so an output that needs an end gets it.
        """

    def look(self) -> None:
        """Check that the output is still wanted, while there is nothing to write."""

    def close(self) -> None:
        """Close the output."""
