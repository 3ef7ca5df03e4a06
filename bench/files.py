"""Files in, files out: ``streamq run`` beside the alternatives, on the same file.

    python bench/files.py [--lines 2000000] [--rounds 3] [--processes 2] [--json]     speed
    python bench/files.py --sizes "by time"                   the same with parts sized by time
    python bench/files.py --memory [--lines 1000000 5000000]             memory, and the round trip

Speed: the same function on the same lines in the same parts and processes, results in input order
into a file, by ``streamq run``, by the same with ``--no-spool``, by ``multiprocessing.Pool.imap``
and, where they are installed, by GNU parallel ``--pipepart`` and by Dask. Every output is compared
with that of a plain loop. Times are from start to end of the whole command, with everything it
starts. The ways take turns, round by round. The tables show the median, the quickest and the
slowest round of each way, and the median of its time in a round divided by that of Pool.imap.

Memory: the highest resident memory of the run's parent (loader and collector), of a worker process
and of the server, and the most that the server had on disk, for an identity map in input order
whose output is compared with the input byte for byte.
"""

import argparse
import csv
import filecmp
import importlib
import importlib.util
import io
import json
import os
import random
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from multiprocessing import Pool
from pathlib import Path
from typing import Any

WORDS = b"stream queue token lease part record worker janitor limit level handler pool".split()
HERE = Path(__file__).resolve()
WAYS = ("streamq", "no spool", "Pool.imap", "parallel", "dask")
FUNCTIONS = ("same", "count_words", "parse_json", "csv_row")
#: What each function is given: lines of text, JSON, or rows.
INPUTS = {
    "same": "in.txt",
    "count_words": "in.txt",
    "parse_json": "in.jsonl",
    "csv_row": "in.csv",
}
COLUMNS = ["id", "text", "is_new"]
#: ``by time`` says no size to streamq, which sizes parts by time then; the others get 1 MiB.
SIZES = ("1MiB", "100 lines", "by time")


def same(line: bytes) -> bytes:
    """Return the line as it is: the least that a function can do."""
    return line


def count_words(line: str) -> str:
    """Return how often each word stands in a line: a little work."""
    counts: dict[str, int] = {}
    for word in line.split():
        counts[word] = counts.get(word, 0) + 1
    return json.dumps(counts)


def parse_json(record: dict[str, Any]) -> str:
    """Return a text out of a record."""
    return str(record["text"])


def csv_row(row: dict[str, str]) -> str:
    """Return a text out of the fields of a row."""
    return row["text"]


def run_chunk(name: str, chunk: bytes) -> bytes:
    """Put a chunk of lines through the function, as a user would write it by hand."""
    if name == "same":
        return b"".join(same(line) + b"\n" for line in chunk.splitlines())
    if name == "parse_json":
        lines = (parse_json(json.loads(line)) for line in chunk.splitlines())
        return "".join(line + "\n" for line in lines).encode()
    if name == "csv_row":
        rows = csv.DictReader(io.StringIO(chunk.decode()), COLUMNS)
        return "".join(csv_row(row) + "\n" for row in rows).encode()
    return "".join(count_words(line) + "\n" for line in chunk.decode().splitlines()).encode()


def same_chunk(chunk: bytes) -> bytes:
    """Run ``same`` on a chunk: a pool takes a function of one argument."""
    return run_chunk("same", chunk)


def count_words_chunk(chunk: bytes) -> bytes:
    """Run ``count_words`` on a chunk: a pool takes a function of one argument."""
    return run_chunk("count_words", chunk)


def parse_json_chunk(chunk: bytes) -> bytes:
    """Run ``parse_json`` on a chunk: a pool takes a function of one argument."""
    return run_chunk("parse_json", chunk)


def csv_row_chunk(chunk: bytes) -> bytes:
    """Run ``csv_row`` on a chunk: a pool takes a function of one argument."""
    return run_chunk("csv_row", chunk)


WORK = {
    "same": same_chunk,
    "count_words": count_words_chunk,
    "parse_json": parse_json_chunk,
    "csv_row": csv_row_chunk,
}


def make_input(path: Path, lines: int) -> None:
    """Write lines of words, the same in every run: as text, or as JSON."""
    chance = random.Random(7)
    forms = {".jsonl": b'{"id": %d, "text": "%b", "is_new": true}\n', ".csv": b"%d,%b,true\n"}
    form = forms.get(path.suffix, b"%d %b\n")
    with path.open("wb") as file:
        for number in range(lines):
            file.write(form % (number, b" ".join(chance.choices(WORDS, k=5))))


def chunks(path: Path, size: str) -> Iterator[bytes]:
    """Yield a file in whole lines: so many bytes, or so many lines, in each."""
    with path.open("rb") as file:
        if size != "100 lines":
            while chunk := file.read(2**20 - 100):
                yield chunk + file.readline()
        else:
            while lines := [line for _, line in zip(range(100), file, strict=False)]:
                yield b"".join(lines)


def by_pool(source: Path, target: Path, function: str, size: str, processes: int) -> None:
    """Run ``Pool.imap`` with a task for each chunk."""
    with Pool(processes) as pool, target.open("wb") as out:
        for result in pool.imap(WORK[function], chunks(source, size)):
            out.write(result)


def by_dask(source: Path, target: Path, function: str, size: str, processes: int) -> None:
    """Run Dask's bag of parts in processes, each written to a file, and put the files together."""
    dask, bags = (importlib.import_module(name) for name in ("dask", "dask.bag"))
    read_bytes = importlib.import_module("dask.bytes").read_bytes
    _, blocks = read_bytes(str(source), delimiter=b"\n", blocksize=2**20, sample=False)
    parts = bags.from_delayed([dask.delayed(_listed)(function, each) for each in blocks[0]])
    with tempfile.TemporaryDirectory(dir=target.parent) as folder, target.open("wb") as out:
        names = parts.to_textfiles(f"{folder}/*.txt", compute=False)
        dask.compute(*names, scheduler="processes", num_workers=processes)
        for path in sorted(Path(folder).iterdir(), key=lambda path: int(path.stem)):
            with path.open("rb") as file:
                shutil.copyfileobj(file, out, 2**20)


def _listed(function: str, chunk: bytes) -> list[str]:
    """Return a part as the one text that its file has; ``to_textfiles`` adds the last newline."""
    return [run_chunk(function, chunk).decode()[:-1] + "\n"]


def command_of(
    way: str, source: Path, target: Path, function: str, size: str, processes: int
) -> list[str] | None:
    """Return the command for one of the ways; None where it is not installed or not possible."""
    if way in ("streamq", "no spool"):
        words = [sys.executable, "-m", "streamq.cli", "run", str(source), "-p", str(processes)]
        words += ["--map", f"{HERE}:{function}", "-o", str(target), "--output-format", "raw"]
        words += ["--no-spool"] if way == "no spool" else []
        words += ["--header", ",".join(COLUMNS)] if function == "csv_row" else []
        options = {"1MiB": ["--bytes", "1MiB"], "100 lines": ["--lines", "100"], "by time": []}
        return [*words, *options[size]]
    if way in ("Pool.imap", "dask"):
        if way == "dask" and (importlib.util.find_spec("dask") is None or size == "100 lines"):
            return None
        option = "--dask" if way == "dask" else "--pool"
        words = [sys.executable, str(HERE), option, str(source), str(target)]
        return [*words, function, size, str(processes)]
    found = shutil.which("parallel")
    if found is None or size == "100 lines":
        return None
    words = [found, "--will-cite", "--pipepart", "-a", str(source), "--block", "1M", "-k"]
    return [*words, "-j", str(processes), sys.executable, str(HERE), "--filter", function]


class Watch:
    """Watches a process and its descendants: memory of each kind, and bytes on disk."""

    def __init__(self, pid: int, folder: Path) -> None:
        self._pid = pid
        self._folder = folder
        self.peaks: dict[str, int] = defaultdict(int)
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def end(self) -> dict[str, int]:
        """Return the peaks in bytes."""
        self._is_over.set()
        self._thread.join()
        return dict(self.peaks)

    def _run(self) -> None:
        while not self._is_over.wait(0.05):
            try:
                for pid in descendants(self._pid):
                    self._look(pid)
            except OSError:
                continue
            files = [*self._folder.rglob("appendonlydir/*"), *self._folder.rglob("spool/*")]
            size = sum(_size(file) for file in files)
            self.peaks["disk"] = max(self.peaks["disk"], size)

    def _look(self, pid: int) -> None:
        status = Path(f"/proc/{pid}/status").read_text()
        words = Path(f"/proc/{pid}/cmdline").read_text()
        kind = "parent" if pid == self._pid else "other"
        # Processes of a run are forked from it, so they have its command line.
        kind = "worker" if kind == "other" and "streamq.cli" in words else kind
        kind = "server" if "valkey-server" in words or "redis-server" in words else kind
        peak = next((line for line in status.splitlines() if line.startswith("VmHWM")), "0 0")
        self.peaks[kind] = max(self.peaks[kind], int(peak.split()[1]) * 1024)


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError:
        return 0


def descendants(pid: int) -> list[int]:
    """Return a process and all its descendants."""
    below = [pid]
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            below += descendants(int(child))
    return below


def measure(
    command: list[str], folder: Path, target: Path | None, *, is_watched: bool = False
) -> dict[str, float]:
    """Run a command to its end: wall seconds, CPU seconds, and peaks if it is watched."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    begun = time.perf_counter()
    with (target or Path(os.devnull)).open("wb") as out:
        running = subprocess.Popen(command, cwd=folder, stdout=out, stderr=subprocess.PIPE)
        # Watching costs time itself, the more the more processes there are.
        watch = Watch(running.pid, folder) if is_watched else None
        _, said = running.communicate()
    seconds = time.perf_counter() - begun
    peaks = watch.end() if watch else {}
    if running.returncode:
        raise SystemExit(f"{command[:6]} ended with {running.returncode}:\n{said.decode()}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"seconds": seconds, "cpu_s": cpu, **peaks}


def compare_speed(folder: Path, lines: int, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure every way with each function and size that is asked for."""
    expected = folder / "expected"
    for name in {INPUTS[function] for function in args.functions}:
        make_input(folder / name, lines)
    found: list[dict[str, Any]] = []
    for function in args.functions:
        source = folder / INPUTS[function]
        with expected.open("wb") as out:
            for chunk in chunks(source, "1MiB"):
                out.write(run_chunk(function, chunk))
        for size in args.sizes:
            tries = take_turns(folder, function, size, args)
            for row in summed_up(tries):
                found.append({"lines": lines, "function": function, "size": size, **row})
                print(
                    f"{lines:>9,}  {function:<12} {size:<10} {row['way']:<10} "
                    f"{row['seconds']:6.2f} s ({row['least']:.2f} - {row['most']:.2f})   "
                    f"CPU {row['cpu_s']:6.2f} s   {lines / row['seconds']:>10,.0f} lines/s   "
                    f"{row['ratio']:.2f} x Pool.imap",
                    flush=True,
                )
            why = "is not installed" if size != "100 lines" else "is not for parts that small"
            for way in (way for way in args.ways if way not in tries):
                print(f"{lines:>9,}  {function:<12} {size:<10} {way:<10} not run: it {why}")
    return found


def take_turns(
    folder: Path, function: str, size: str, args: argparse.Namespace
) -> dict[str, list[dict[str, float]]]:
    """Measure each way in each round; within a round the ways come one after another."""
    source, expected, target = folder / INPUTS[function], folder / "expected", folder / "out"
    tries: dict[str, list[dict[str, float]]] = {}
    for _ in range(args.rounds):
        for way in args.ways:
            command = command_of(way, source, target, function, size, args.processes)
            if command is None:
                continue
            target.unlink(missing_ok=True)
            stdout = target if way == "parallel" else None
            tries.setdefault(way, []).append(measure(command, folder, stdout))
            if not filecmp.cmp(target, expected, shallow=False):
                raise SystemExit(f"{way} made something else of it")
    return tries


def summed_up(tries: dict[str, list[dict[str, float]]]) -> list[dict[str, Any]]:
    """Return for each way the median, quickest and slowest round, and its ratio to Pool.imap."""
    base = [each["seconds"] for each in tries["Pool.imap"]]
    rows = []
    for way, rounds in tries.items():
        seconds = [each["seconds"] for each in rounds]
        rows.append(
            {
                "way": way,
                "seconds": statistics.median(seconds),
                "least": min(seconds),
                "most": max(seconds),
                "cpu_s": statistics.median(each["cpu_s"] for each in rounds),
                "ratio": statistics.median(a / b for a, b in zip(seconds, base, strict=True)),
            }
        )
    return rows


def measure_memory(folder: Path, counts: list[int], processes: int) -> list[dict[str, Any]]:
    """Run an identity map on inputs of different lengths, with a small window."""
    found: list[dict[str, Any]] = []
    for lines in counts:
        source, target = folder / "in.txt", folder / "out"
        make_input(source, lines)
        target.unlink(missing_ok=True)
        command = command_of("streamq", source, target, "same", "1MiB", processes)
        assert command is not None
        command = [*command[:-2], "--bytes", "64KiB", "--window", "16MiB"]
        peaks = measure(command, folder, None, is_watched=True)
        if not filecmp.cmp(source, target, shallow=False):
            raise SystemExit("the output is not the input")
        found.append({"lines": lines, "bytes": source.stat().st_size, **peaks})
        kinds = ("parent", "worker", "server", "disk")
        told = ", ".join(f"{kind} {peaks.get(kind, 0) / 2**20:.0f} MiB" for kind in kinds)
        print(
            f"{lines:>10,} lines, {source.stat().st_size / 1e6:.0f} MB, {peaks['seconds']:.1f} s: "
            f"{told}; output identical",
            flush=True,
        )
    return found


def main() -> None:
    """Measure and print."""
    if sys.argv[1:2] in (["--pool"], ["--dask"]):
        source, target, function, size, processes = sys.argv[2:]
        by = by_pool if sys.argv[1] == "--pool" else by_dask
        by(Path(source), Path(target), function, size, int(processes))
        return
    if sys.argv[1:2] == ["--filter"]:
        sys.stdout.buffer.write(run_chunk(sys.argv[2], sys.stdin.buffer.read()))
        return
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--lines", type=int, nargs="+")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--functions", nargs="+", choices=FUNCTIONS, default=FUNCTIONS)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS, help="with Pool.imap")
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=SIZES[:2])
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    print(f"load average {os.getloadavg()[0]:.2f}, {os.cpu_count()} CPUs", flush=True)
    with tempfile.TemporaryDirectory(prefix="streamq-bench-", dir=Path.cwd()) as folder:
        if args.memory:
            counts = args.lines or [1_000_000, 5_000_000]
            found = measure_memory(Path(folder), counts, args.processes)
        else:
            found = [
                row
                for lines in args.lines or [2_000_000]
                for row in compare_speed(Path(folder), lines, args)
            ]
    if args.json:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
