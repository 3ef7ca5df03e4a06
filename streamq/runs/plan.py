"""The plan of a run: everything that is decided before the run begins. Needs no redis-py."""

from pathlib import Path

import msgspec

from streamq.model import Policy
from streamq.records.outputs import is_stream
from streamq.records.sizes import PartSize

#: This name stands for standard output.
STANDARD = "-"


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """All that defines a run. It is stored, so that the run can be resumed."""

    id: str
    #: The function, ``module:function`` or ``file.py:function``, or the flow; "" for a program.
    target: str
    #: Of a flow: the names that its handlers have in this run, and by them their own.
    serves: dict[str, str] = {}
    argv: tuple[str, ...] = ()
    output: str
    form: str
    policy: Policy
    size: PartSize
    processes: int
    slots: int
    window_bytes: int
    is_ordered: bool = True
    #: The run was started with ``--force``: existing files may be replaced.
    force: bool = False
    #: A manifest is written beside the output, to verify it by.
    has_manifest: bool = False
    #: The file that has the function, and a digest of its content; "" where that is not known.
    code: tuple[str, str] = ("", "")
    #: The server that was named, without passwords; "" for one of the run's own.
    server: str = ""
    #: How long a run that is done with failures is kept, so that they can be retried; 0 for not.
    keep_ms: int = 0
    #: Processes write results to files of their own in the run's folder, not to the server.
    spools: bool = False
    #: Runs that were stopped and wrote the same output. They are removed when this one is done.
    replaces: tuple[str, ...] = ()

    @property
    def places(self) -> tuple[str, ...]:
        """How the server calls the request, and the later stages if it is a flow."""
        stages = len(self.policy.flow.stages) if self.policy.flow else 1
        return (self.id, *(f"{self.id}/{stage}" for stage in range(2, stages + 1)))

    @property
    def is_piped(self) -> bool:
        """Whether results go to a pipe or a device, where nothing can be taken back."""
        return self.output == STANDARD or is_stream(Path(self.output))

    @property
    def can_go_on(self) -> bool:
        """Whether the run can be resumed. Into a pipe it cannot: written results are gone."""
        return not self.is_piped
