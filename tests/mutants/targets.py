"""What is mutated, and which tests are about it."""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple


class Target(NamedTuple):
    """Files that belong together, and tests, the quickest first. What is not there is left out."""

    name: str
    patterns: tuple[str, ...]
    #: Words for pytest, one call each. ``{stem}`` is the name of the file that is mutated.
    tests: tuple[str, ...]

    def files(self, root: Path) -> list[Path]:
        """The files that are mutated."""
        return sorted(path for pattern in self.patterns for path in root.glob(pattern))

    def selections(self, root: Path, file: str) -> Iterator[list[str]]:
        """Words for pytest, one call after the other, for a mutant of the file."""
        for text in self.tests:
            words = text.format(stem=Path(file).stem).split()
            paths = [word for word in words if word.startswith("tests/")]
            kept = [word for word in paths if (root / word.partition("::")[0]).exists()]
            if kept:
                yield kept + [word for word in words if word not in paths]


#: Those that start pools come after those of the classes, for what these did not notice. Not those
#: that measure times: on a busy machine they fail without a mutant.
_POOLS = (
    "tests/worker tests/protocol/interleavings --ignore=tests/worker/test_fairness.py"
    " -m not(commands)and(not(long))",
    "tests/worker -m commands",
)
#: Not those after a failover, which start a cluster each.
_FLOWS = "tests/flows --ignore=tests/flows/test_failover.py -m not(commands)"
_QUEUE = "tests/queue tests/protocol --ignore=tests/protocol/test_cost.py -m not(long)"
_NO_POOLS = "not(TestSuspect)and(not(TestStart))and(not(no_part_is_begun))"
_COLLECT = (
    "tests/runs/test_reader.py tests/runs/test_writer.py tests/runs/test_completing.py"
    " tests/runs/test_collect_output.py tests/runs/test_in_place.py"
    " tests/runs/test_parquet_output.py tests/queue/test_result_reader.py"
)
_RUNS = (
    "tests/runs/test_results.py tests/runs/test_functions.py -m not(long)",
    "tests/runs/test_run_outputs.py tests/runs/test_run_spool.py tests/runs/test_run_found.py"
    " -m not(long)",
)

TARGETS = [
    Target("slot_table", ("streamq/worker/slot_table.py",), ("tests/worker/test_slot_table.py",)),
    Target(
        "outputs",
        ("streamq/records/outputs.py",),
        (
            "tests/records -m not(commands)",
            f"{_COLLECT} tests/runs/test_collect.py",
            *_RUNS,
        ),
    ),
    Target(
        "collect",
        ("streamq/runs/collect.py", "streamq/records/writer.py", "streamq/queue/results.py"),
        (
            f"{_COLLECT} tests/records/test_splitting.py tests/records/test_streams.py",
            "tests/runs/test_collect.py",
            *_RUNS,
        ),
    ),
    Target(
        "process",
        (
            "streamq/worker/process.py",
            "streamq/worker/batches.py",
            "streamq/worker/slot_book.py",
            "streamq/worker/slot_watch.py",
            "streamq/queue/taker.py",
            "streamq/queue/held_lease.py",
            "streamq/queue/pace.py",
        ),
        (
            "tests/queue tests/worker/test_process_steps.py tests/worker/test_process.py"
            " tests/worker/test_process_at_work.py"
            f" -k {_NO_POOLS}",
            "tests/worker/test_spans.py tests/worker/test_records_kept.py"
            " tests/worker/test_verdicts.py tests/worker/test_handlers.py -m not(commands)",
            "tests/flows/test_pool.py",
            *_POOLS,
        ),
    ),
    Target(
        "lease_keeper",
        ("streamq/queue/lease_keeper.py", "streamq/queue/renewals.py", "streamq/queue/rounds.py"),
        (f"tests/worker/test_keeper.py tests/worker/test_pool.py -k {_NO_POOLS}", *_POOLS),
    ),
    Target(
        "pool",
        (
            "streamq/worker/pool.py",
            "streamq/worker/pool_work.py",
            "streamq/worker/hand_backs.py",
            "streamq/worker/time_limits.py",
            "streamq/worker/process_handle.py",
        ),
        (f"tests/worker/test_pool_rounds.py tests/worker/test_pool.py -k {_NO_POOLS}", *_POOLS),
    ),
    Target(
        "scripts",
        ("lua/request/*.lua", "lua/queue/*.lua"),
        (
            "tests/scripts/request/test_{stem}.py tests/scripts/queue/test_{stem}.py",
            "tests/scripts",
            _FLOWS,
            _QUEUE,
        ),
    ),
    Target(
        "script-parts",
        ("lua/lib/*.lua",),
        (
            "tests/scripts",
            _FLOWS,
            _QUEUE,
        ),
    ),
    Target(
        "records",
        (
            "streamq/worker/record_by_record.py",
            "streamq/worker/pieces.py",
            "streamq/worker/marks.py",
            "streamq/worker/kept_outcomes.py",
            "streamq/worker/part_watch.py",
            "streamq/worker/verdicts.py",
        ),
        (
            "tests/worker/test_pieces.py tests/worker/test_runner.py tests/worker/test_verdicts.py",
            "tests/worker/test_records_kept.py tests/worker/test_time_limits.py"
            " tests/worker/test_process_steps.py tests/worker/test_process.py",
            *_POOLS,
        ),
    ),
    Target(
        "janitor",
        ("streamq/queue/janitor.py", "streamq/queue/starting_callbacks.py"),
        (
            "tests/queue/test_janitor_counts.py tests/queue/test_janitor.py"
            " tests/queue/test_janitor_lists.py tests/queue/test_janitor_together.py"
            " tests/queue/test_callbacks.py"
            " tests/queue/test_deadline.py",
            _QUEUE,
            _FLOWS,
        ),
    ),
]
