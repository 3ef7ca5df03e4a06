"""The commit of a collector: how far the results of a request are written, and where."""

import msgspec

from streamq.errors import damaged_if_unreadable
from streamq.protocol.protocol import Protocol
from streamq.records.output import Written


class Committed(msgspec.Struct, frozen=True):
    """How far a file has been written."""

    offset: int = 0
    next: int = 1
    #: Column names of a CSV.
    header: list[str] = []
    #: The file, and the form of its lines.
    file: str = ""
    form: str = ""
    #: The last line has no newline, as in the input: what follows has to begin with one.
    is_open: bool = False
    #: Counts the commits, so that no two commits of a collector are equal.
    times: int = 0
    #: The file of failures beside the output belongs to this request and may be replaced.
    owns_errors: bool = False
    #: A random name of this run of the collector, so that no two collectors commit the same text.
    collector: str = ""
    #: Digests of what the file of failures may hold: its old content, and the new one.
    errors: list[str] = []
    #: A digest of the last bytes that were written, and which file has them.
    tail: str = ""
    inode: str = ""
    #: How the file is compressed, and how many bytes it has before that.
    packing: str = ""
    unpacked: int = 0
    #: How many bytes of a header it begins with, and which file of gaps counts; 0 for none.
    head: int = 0
    gaps: int = 0
    #: Of a flow: the child of the part ``next`` to go on with.
    within: str = ""
    #: Of a Parquet output: how many bytes of it are Parquet. Frames come behind them.
    sealed: int = 0

    @property
    def anew(self) -> "Committed":
        """The same with nothing written: the file is lost."""
        return msgspec.structs.replace(
            self,
            offset=0,
            header=[],
            is_open=False,
            tail="",
            inode="",
            unpacked=0,
            head=0,
            gaps=0,
            sealed=0,
        )

    @property
    def written(self) -> Written:
        """What is known of the bytes in the file."""
        return Written(self.offset, self.tail, self.inode)

    @property
    def length(self) -> int:
        """How many bytes are written, before compression."""
        return self.unpacked if self.packing else self.offset


def file_of_committed(protocol: Protocol, request_id: str) -> str:
    """Return the file to which results were moved from the server; "" if none were."""
    told = protocol.inspect(request_id).optional_text("committed")
    with damaged_if_unreadable("how far results are written"):
        done = msgspec.json.decode(told, type=Committed) if told else Committed()
    return done.file if done.offset else ""
