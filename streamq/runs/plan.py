"""What a job is, before anything of it is done. No driver is needed to say it."""

from pathlib import Path

import msgspec

from streamq.model import Policy
from streamq.records.outputs import is_stream
from streamq.records.splitting import PartSize

#: The output that is standard output.
STANDARD = "-"


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that makes a job what it is."""

    id: str
    #: Where the function is; "" with a program.
    target: str
    argv: tuple[str, ...] = ()
    output: str
    form: str
    policy: Policy
    size: PartSize
    processes: int
    slots: int
    window_bytes: int
    is_ordered: bool = True
    #: It was said when the run began that files which exist may be written over.
    force: bool = False

    @property
    def is_piped(self) -> bool:
        """Whether results go where nothing can be taken back."""
        return self.output == STANDARD or is_stream(Path(self.output))

    @property
    def can_go_on(self) -> bool:
        """Whether it can be gone on with after a stop: what went into a pipe is gone."""
        return not self.is_piped
