"""Tables in, tables out: ``streamq run`` on a Parquet file, beside polars and pyarrow by hand.

    python bench/tables.py [--rows 10000000] [--rounds 1] [--processes 2] [--json]

The same work on the same file, into a Parquet file whose content is compared with that of the
others: a column is worked out of two others, and rows are left out. Once a function is given tables
and once rows. By hand that is polars (``scan_parquet`` to ``sink_parquet``), pyarrow (row group
after row group), and for rows a ``multiprocessing.Pool`` that is given a row group at a time. Times
are from start to end of each command.
"""

import argparse
import importlib
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from multiprocessing import Pool
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

HERE = Path(__file__).resolve()
GROUP = 100_000
WAYS = ("streamq tables", "streamq rows", "polars", "pyarrow", "Pool rows")


class Row(msgspec.Struct):
    """A row of the input."""

    id: int
    name: str
    price: float
    count: int


def table(rows: pa.Table) -> pa.Table:
    """Return the rows with a count, and what they cost together."""
    kept = rows.filter(pc.greater(rows["count"], 0))
    cost = pc.multiply(kept["price"], pc.cast(kept["count"], pa.float64()))
    return pa.table({"id": kept["id"], "name": kept["name"], "cost": cost})


def row(one: Row) -> dict[str, Any] | None:
    """Do the same with a row."""
    if one.count <= 0:
        return None
    return {"id": one.id, "name": one.name, "cost": one.price * one.count}


def make_input(path: Path, rows: int) -> None:
    """Write rows, the same in every run."""
    schema = pa.schema(
        [("id", pa.int64()), ("name", pa.string()), ("price", pa.float64()), ("count", pa.int64())]
    )
    with pq.ParquetWriter(path, schema) as writer:
        for first in range(0, rows, GROUP):
            numbers = range(first, min(rows, first + GROUP))
            columns = [
                pa.array(numbers),
                pa.array([f"thing {n % 977}" for n in numbers]),
                pa.array([n % 1000 / 8 for n in numbers]),
                pa.array([n % 5 for n in numbers]),
            ]
            writer.write_table(pa.table(columns, schema=schema), row_group_size=GROUP)


def by_polars(source: str, target: str) -> None:
    """Let polars do it, with all its threads."""
    pl = importlib.import_module("polars")
    found = pl.scan_parquet(source).filter(pl.col("count") > 0)
    found.select("id", "name", (pl.col("price") * pl.col("count")).alias("cost")).sink_parquet(
        target
    )


def by_pyarrow(source: str, target: str) -> None:
    """Go through the row groups one after another."""
    file = pq.ParquetFile(source)
    writer = None
    for number in range(file.num_row_groups):
        done = table(file.read_row_group(number))
        writer = writer or pq.ParquetWriter(target, done.schema)
        writer.write_table(done)
    if writer:
        writer.close()


def _rows_of_group(task: tuple[str, int]) -> list[dict[str, Any]]:
    source, number = task
    rows = pq.ParquetFile(source).read_row_group(number).to_pylist()
    return [done for each in rows if (done := row(Row(**each))) is not None]


def by_pool(source: str, target: str, processes: int) -> None:
    """Give each row group to a process of a pool."""
    groups = range(pq.ParquetFile(source).num_row_groups)
    writer = None
    with Pool(processes) as pool:
        for rows in pool.imap(_rows_of_group, [(source, number) for number in groups]):
            done = pa.Table.from_pylist(rows)
            writer = writer or pq.ParquetWriter(target, done.schema)
            writer.write_table(done)
    if writer:
        writer.close()


def command_of(way: str, source: Path, target: Path, processes: int) -> list[str]:
    """Return the command for one of the ways."""
    if way.startswith("streamq"):
        function = "table" if way == "streamq tables" else "row"
        words = [sys.executable, "-m", "streamq.cli", "run", str(source), "-p", str(processes)]
        return [*words, "--map", f"{HERE}:{function}", "-o", str(target)]
    return [sys.executable, str(HERE), "--by", way, str(source), str(target), str(processes)]


def measure(command: list[str], folder: Path) -> tuple[float, float]:
    """Run a command to its end. Return wall seconds and CPU seconds."""
    before, begun = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run(command, cwd=folder, capture_output=True, check=False)
    if done.returncode:
        raise SystemExit(f"{command[:6]} ended with {done.returncode}:\n{done.stderr.decode()}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return time.perf_counter() - begun, cpu


def compare_ways(folder: Path, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure each way in each round, and print what they took."""
    source, target = folder / "in.parquet", folder / "out.parquet"
    make_input(source, args.rows)
    expected = table(pq.read_table(source))
    tries: dict[str, list[tuple[float, float]]] = {}
    for _ in range(args.rounds):
        for way in WAYS:
            target.unlink(missing_ok=True)
            command = command_of(way, source, target, args.processes)
            tries.setdefault(way, []).append(measure(command, folder))
            found = pq.read_table(target)
            if not found.cast(expected.schema).equals(expected):
                raise SystemExit(f"{way} made something else of it")
    rows = []
    for way, each in tries.items():
        seconds, cpu = (statistics.median(one) for one in zip(*each, strict=True))
        rows.append({"way": way, "rows": args.rows, "seconds": seconds, "cpu_s": cpu})
        print(
            f"{args.rows:>11,} rows  {way:<15} {seconds:7.2f} s   CPU {cpu:7.2f} s   "
            f"{args.rows / seconds:>12,.0f} rows/s",
            flush=True,
        )
    return rows


def main() -> None:
    """Measure and print."""
    if sys.argv[1:2] == ["--by"]:
        way, source, target, processes = sys.argv[2:]
        if way == "Pool rows":
            by_pool(source, target, int(processes))
        else:
            {"polars": by_polars, "pyarrow": by_pyarrow}[way](source, target)
        return
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    print(f"load average {os.getloadavg()[0]:.2f}, {os.cpu_count()} CPUs", flush=True)
    with tempfile.TemporaryDirectory(prefix="streamq-bench-", dir=Path.cwd()) as folder:
        found = compare_ways(Path(folder), args)
    if args.json:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
