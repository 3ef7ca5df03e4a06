"""How long ``streamq run`` takes to start: ten lines, two processes.

    python bench/start.py [--rounds 9] [--against /path/of/another/checkout]

It shows, in seconds, the median and the range of: when the function is called with the first
record; when the whole command has ended; its CPU time, with all that it starts; and how long
``streamq --help`` takes. The first round, which fills the caches of bytecode, does not count. With
``--against`` each round measures both checkouts, one after the other; the other needs a ``.venv``.
"""

import argparse
import os
import resource
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

CODE = """
import time
def stamp(line: bytes) -> bytes:
    return b"%.6f" % time.time()
"""
COLUMNS = ("first record", "whole", "CPU", "--help")


def measure(checkout: Path, folder: Path) -> tuple[float, ...]:
    """Run ten lines, and ask for help."""
    command, output = str(checkout / ".venv" / "bin" / "streamq"), folder / "out"
    words = [command, "run", "in.txt", "--map", "job.py:stamp", "-o", "out", "-p", "2"]
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    output.unlink(missing_ok=True)
    before, begun = resource.getrusage(resource.RUSAGE_CHILDREN), time.time()
    subprocess.run(words, cwd=folder, env=environment, check=True, capture_output=True)
    whole, after = time.time() - begun, resource.getrusage(resource.RUSAGE_CHILDREN)
    first = min(map(float, output.read_text().split())) - begun
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    begun = time.time()
    subprocess.run([command, "--help"], env=environment, check=True, capture_output=True)
    return first, whole, cpu, time.time() - begun


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--against", type=Path, help="another checkout")
    args = parser.parse_args()
    checkouts = {"now": Path(__file__).resolve().parents[1]}
    if args.against:
        checkouts = {"before": args.against.resolve(), **checkouts}
    found: dict[str, list[tuple[float, ...]]] = {name: [] for name in checkouts}
    with tempfile.TemporaryDirectory(prefix="streamq-bench-", dir=Path.cwd()) as name:
        folder = Path(name)
        (folder / "job.py").write_text(CODE)
        (folder / "in.txt").write_text("".join(f"{n}\n" for n in range(10)))
        for number in range(args.rounds + 1):
            for which, checkout in checkouts.items():
                figures = measure(checkout, folder)
                found[which] += [figures] if number else []
    print(f"load average {os.getloadavg()[0]:.2f}, {os.cpu_count()} CPUs")
    for which, rounds in found.items():
        for column, each in zip(COLUMNS, zip(*rounds, strict=True), strict=True):
            told = f"{statistics.median(each):.3f} s ({min(each):.3f} - {max(each):.3f})"
            print(f"{which:<7} {column:<13} {told}")


if __name__ == "__main__":
    main()
