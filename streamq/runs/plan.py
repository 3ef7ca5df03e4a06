"""The plan of a run: everything that is decided before the run begins. Needs no redis-py."""

from pathlib import Path
from typing import Self

import msgspec

from streamq.model import Policy
from streamq.records.outputs import is_stream_output
from streamq.records.partitions import folder_of_partitions
from streamq.records.sizes import PartSize

#: This name stands for standard output.
STANDARD = "-"


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """All that defines a run. It is stored, so that the run can be resumed."""

    id: str
    #: The function, ``module:function`` or ``file.py:function``, or the flow; "" for a program.
    target: str
    #: Of a flow: the names that its handlers have in this run, each with the handler's own name.
    serves: dict[str, str] = {}
    argv: tuple[str, ...] = ()
    output: str
    #: The URL that the output is uploaded to when it is complete; "" for none.
    upload: str = ""
    #: The columns by whose values a folder of Parquet files is made of the output, if any.
    partition_by: tuple[str, ...] = ()
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
    #: The folder in which the run was begun, and names that its output had: the folder was moved.
    folder: str = ""
    moved_from: tuple[str, ...] = ()
    #: Processes write results to files of their own in the run's folder, not to the server.
    spools: bool = False
    #: Runs that were stopped and wrote the same output. They are removed when this one is done.
    replaces: tuple[str, ...] = ()

    def found_in(self, folder: Path) -> Self:
        """Return the plan as it is where its folder is now: that may have been moved or copied."""
        then, output = self.folder, Path(self.output)
        if not then or then == str(folder) or not output.is_relative_to(then):
            return self
        return msgspec.structs.replace(
            self,
            output=str(folder / output.relative_to(then)),
            folder=str(folder),
            moved_from=(*self.moved_from, str(output.resolve())),
        )

    @property
    def places(self) -> tuple[str, ...]:
        """How the server calls the request, and the later stages if it is a flow."""
        stages = len(self.policy.flow.stages) if self.policy.flow else 1
        return (self.id, *(f"{self.id}/{stage}" for stage in range(2, stages + 1)))

    @property
    def product(self) -> str:
        """What there is when the run is done: a file, a folder or a URL."""
        folder = str(folder_of_partitions(Path(self.output))) if self.partition_by else ""
        return self.upload or folder or self.output

    @property
    def is_piped(self) -> bool:
        """Whether results go to a pipe or a device, where nothing can be taken back."""
        return self.output == STANDARD or is_stream_output(Path(self.output))

    @property
    def can_go_on(self) -> bool:
        """Whether the run can be resumed. Into a pipe it cannot: written results are gone."""
        return not self.is_piped
