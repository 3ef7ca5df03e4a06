"""Writes the measurements as a document: tables, plots, and each aim beside its result."""

import json
import statistics
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import svg

DOCS = Path(__file__).parent.parent / "docs"
OURS, BARE, NODE = "streamq", "bare loop", "BullMQ (node)"
#: How each contestant was set up: the best documented configuration for empty jobs we found.
SETTINGS = {
    OURS: "one request, `-p 1 -c 2`: one slot runs while the other asks (latency: `-c 1`)",
    BARE: "pipelines of 512, one connection",
    NODE: "`addBulk` by 1,000, concurrency 200, completed jobs removed",
    "BullMQ (Python)": "`addBulk` by 1,000, concurrency 50, uvloop, completed jobs removed",
    "dramatiq": "8 threads, no results",
    "huey": "1 thread, no results (batch: with results)",
    "SAQ": "100 at once, uvloop, no results kept",
    "taskiq": "Redis Streams, 100 coroutines, prefetch 100, `--no-parse`",
    "arq": "1,000 at once, uvloop, no results",
    "streaq": "`enqueue_many` by 1,000, 256 at once, uvloop, no results kept",
    "Celery": "solo pool, prefetch 128, no results (batch: with results), no gossip or mingle",
    "RQ": "`SimpleWorker`, `enqueue_many` by 1,000, no results kept",
}


class Figure(NamedTuple):
    """The median over the rounds, with the lowest and the highest."""

    median: float
    low: float
    high: float


class Found(NamedTuple):
    """Everything that was measured."""

    rounds: list[dict[str, Any]]
    figures: dict[str, dict[str, Figure]]
    scaling: dict[str, Any]


class Aim(NamedTuple):
    """An aim, what was measured for it, and whether it is met."""

    what: str
    wanted: str
    measured: str
    is_met: bool


def read(folder: Path) -> Found:
    """Read what the pieces have measured."""
    rounds = [json.loads(path.read_text()) for path in sorted(folder.glob("round-*.json"))]
    if not rounds:
        raise SystemExit(f"no round was measured yet: nothing under {folder}")
    scaling = folder / "scaling.json"
    found = json.loads(scaling.read_text()) if scaling.exists() else {}
    return Found(rounds, _figures(rounds), found)


def _figures(rounds: list[dict[str, Any]]) -> dict[str, dict[str, Figure]]:
    figures: dict[str, dict[str, Figure]] = {}
    for name in SETTINGS:
        seen = [each["contestants"][name] for each in rounds if name in each["contestants"]]
        if seen:
            metrics = {metric for each in seen for metric in each}
            values = {m: [each[m] for each in seen if m in each] for m in metrics}
            figures[name] = {
                metric: Figure(statistics.median(all_), min(all_), max(all_))
                for metric, all_ in values.items()
            }
    return figures


def ratios(found: Found, metric: str, other: str) -> Figure:
    """Return our figure over another's for each round: both were measured within minutes."""
    pairs = [
        (each["contestants"][OURS][metric], each["contestants"][other][metric])
        for each in found.rounds
        if OURS in each["contestants"] and metric in each["contestants"].get(other, {})
    ]
    seen = [ours / theirs for ours, theirs in pairs]
    return Figure(statistics.median(seen), min(seen), max(seen))


def best(found: Found, metric: str, choose: Callable[..., str], *, python: bool) -> str:
    """Return the peer with the highest or lowest median."""
    others = [
        name
        for name, figures in found.figures.items()
        if name not in (OURS, BARE) and metric in figures and not (python and name == NODE)
    ]
    return choose(others, key=lambda name: found.figures[name][metric].median)


def aims(found: Found) -> list[Aim]:
    """Return every aim with its figure."""
    ours = found.figures[OURS]

    def times(what: str, metric: str, other: str, least: float) -> Aim:
        if metric not in found.figures.get(other, {}):
            return Aim(what, f"≥ {least:g} ×", "not measured", False)
        ratio = ratios(found, metric, other)
        digits = ".2f" if least < 2 else ".1f"
        text = f"{ratio.median:{digits}} ({ratio.low:{digits}} – {ratio.high:{digits}})"
        return Aim(what, f"≥ {least:g} ×", text, ratio.median >= least)

    def below(what: str, metric: str, unit: str) -> Aim:
        other = best(found, metric, min, python=False)
        limit = found.figures[other][metric].median
        mine = ours[metric]
        text = f"{mine.median:,.3g} {unit} ({mine.low:,.3g} – {mine.high:,.3g})"
        return Aim(f"{what}, against {other}", f"< {limit:,.3g} {unit}", text, mine.median < limit)

    drained = best(found, "drain1_per_s", max, python=True)
    enqueued = best(found, "enqueue_per_s", max, python=False)
    batched = best(found, "batch_per_s", max, python=True)
    listed = [
        times(f"drain, against {drained}, the fastest in Python", "drain1_per_s", drained, 40),
        times(f"drain, against {NODE}", "drain1_per_s", NODE, 8),
        times("drain, against the bare loop", "drain1_per_s", BARE, 0.6),
        times(f"enqueue, against {enqueued}, the fastest", "enqueue_per_s", enqueued, 10),
        times(f"batch of 5,000 with one callback, against {batched}", "batch_per_s", batched, 20),
        below("latency of one part, p50", "latency_p50_ms", "ms"),
        below("memory of a waiting part of 100 bytes", "bytes", "bytes"),
    ]
    return listed + (_other_aims(found.scaling) if found.scaling else [])


def _other_aims(scaling: dict[str, Any]) -> list[Aim]:
    server = scaling["server"]
    more = _more(server["limit of 2"], server["limit that cannot bind"])
    start = scaling["start_up"]
    shares = scaling["cluster"]["3 primaries"]["node_shares"]
    return [
        Aim(
            "cost of a limit of 2 with 2 slots, CPU",
            "< 5 %",
            _percent(more),
            # If the rounds differ by more than the aim, their median would show nothing.
            statistics.quantiles(more, n=4)[2] < 5,
        ),
        Aim("`streamq --help`", "< 0.5 s", f"{start['help_s']:.2f} s", start["help_s"] < 0.5),
        Aim("a worker is ready", "< 1 s", f"{start['worker_s']:.2f} s", start["worker_s"] < 1),
        Aim(
            "a node's share of the CPU of 3, 300 requests",
            "25 – 42 %",
            ", ".join(f"{share:.0%}" for share in shares),
            all(0.25 <= share <= 0.42 for share in shares),
        ),
    ]


def _more(costs: dict[str, Any], reference: dict[str, Any]) -> list[float]:
    """Return how much more CPU a part costs, in per cent, in each of the rounds that both have."""
    rounds = zip(costs["costs_us"], reference["costs_us"], strict=False)
    return [(own / other - 1) * 100 for own, other in rounds]


def _percent(more: list[float]) -> str:
    return f"{statistics.median(more):+.1f} % ({min(more):+.0f} – {max(more):+.0f})"


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Return a table in Markdown."""
    titles = list(head)
    lines = [titles, ["---"] * len(titles), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def _cell(figures: dict[str, Figure], metric: str, digits: int = 0) -> str:
    if metric not in figures:
        return "–"
    median, low, high = figures[metric]
    if low == high:
        return f"{median:,.{digits}f}"
    return f"{median:,.{digits}f} <sub>{low:,.{digits}f}–{high:,.{digits}f}</sub>"


def _contest_tables(found: Found) -> str:
    speed = [
        [
            name,
            *(_cell(f, m) for m in ("enqueue_per_s", "drain1_per_s", "drain2_per_s")),
            _cell(f, "latency_p50_ms", 2),
            _cell(f, "latency_p99_ms", 1),
            _cell(f, "batch_per_s"),
        ]
        for name, f in found.figures.items()
    ]
    cost = [
        [
            name,
            *(_cell(f, f"{m}_server_us", 1) for m in ("enqueue", "drain1")),
            *(_cell(f, f"{m}_client_us", 1) for m in ("enqueue", "drain1")),
            _cell(f, "bytes"),
            _cell(f, "idle_server_ms_per_s", 1),
            _cell(f, "idle_client_ms_per_s", 1),
        ]
        for name, f in found.figures.items()
    ]
    return "\n".join(
        (
            table(
                (
                    "",
                    "enqueue/s",
                    "drain/s, 1 process",
                    "drain/s, 2",
                    "latency p50 ms",
                    "p99 ms",
                    "batch of 5,000, jobs/s",
                ),
                speed,
            ),
            "Milliseconds of CPU for 1,000 jobs (that is, microseconds for one), bytes of a waiting"
            " job,\nand milliseconds of CPU that a second of idleness costs:\n",
            table(
                (
                    "",
                    "server, enqueue",
                    "server, drain",
                    "client, enqueue",
                    "client, drain",
                    "bytes",
                    "idle server",
                    "idle worker",
                ),
                cost,
            ),
        )
    )


def _scaling_table(costs: dict[str, Any], names: Iterable[str], against: str) -> str:
    rows = []
    for name in names:
        each = costs[name]
        more = "" if name == against else _percent(_more(each, costs[against]))
        rows.append(
            [
                name,
                f"{each['per_s']:,.0f}",
                f"{each['server_us']:.1f}",
                f"{each['client_us']:.1f}",
                f"{min(each['costs_us']):.1f} – {max(each['costs_us']):.1f}",
                more,
            ]
        )
    head = ("", "parts/s", "server µs/part", "client µs/part", "sum, lowest – highest", "CPU")
    return table(head, rows)


def _scaling_text(scaling: dict[str, Any]) -> str:
    server, cluster = scaling["server"], scaling["cluster"]
    shares = ", ".join(f"{share:.0%}" for share in cluster["3 primaries"]["node_shares"])
    processes = ("1 process", "2 processes", "4 processes")
    requests = (
        "alone",
        "beside 100 requests",
        "beside 10,000 requests",
        "of a million waiting",
        "spread over 100 requests",
        "spread over 10,000 requests",
    )
    limits = ("limit that cannot bind", "limit of 2", "limit of 1")
    levels = ("100 requests, one level", "100 requests, 80 levels")
    return f"""## Scaling

One request of 200,000 parts. With two cores, the server has one of them for itself only while there is
one process:

{_scaling_table(server, processes, "1 process")}
100,000 parts, one process. *Beside*: one request runs, the others wait at a worse level. *Spread*: the
parts belong to so many requests that take turns; at 10,000 requests each has ten parts, so a claim, a
token and an end are paid for every ten:

{_scaling_table(server, requests, "alone")}
Limits and levels, 100,000 parts. The process has two slots: a limit of 2 is reached all the time, and with
a limit of 1 one of them has nothing to do while the other waits for the server. In brackets
the lowest and the highest of the rounds: what is less than they differ by cannot be told:

{_scaling_table(server, limits, limits[0])}
{_scaling_table(server, levels, levels[0])}
60,000 parts of 300 requests on a cluster. Of the CPU that three primaries spend, each has {shares}; the
one with more than its third also has the queue's own slot:

{_scaling_table(cluster, cluster, "1 primary")}
"""


def _why(aim: Aim, found: Found) -> str:
    """Return the likely reason why an aim is not met, as far as the figures tell."""
    ours, bare = found.figures[OURS], found.figures[BARE]
    if aim.what.startswith("drain"):
        return (
            f"a part costs {ours['drain1_client_us'].median:.1f} µs in the worker and "
            f"{ours['drain1_server_us'].median:.1f} µs in the server, against "
            f"{bare['drain1_client_us'].median:.1f} and {bare['drain1_server_us'].median:.1f} µs "
            "of the bare loop: rules cost what is not a write"
        )
    if aim.what.startswith(("enqueue", "batch")):
        return (
            f"a part costs {ours['enqueue_client_us'].median:.1f} µs in the client and "
            f"{ours['enqueue_server_us'].median:.1f} µs in the server to submit, and the two take "
            "turns"
        )
    if aim.what.startswith("latency"):
        return (
            "a submission registers, creates and pushes a token in one round trip, and "
            "the worker that takes the token claims in another: three scripts in all"
        )
    if aim.what.startswith("a node"):
        return (
            "the queue's own slot is on one of the nodes, and the tokens of short requests are a "
            "large part of what they cost"
        )
    if aim.what.startswith(("`streamq", "a worker")):
        return "most of it is the import of the driver, twice for a worker: parent and process"
    return "see the tables: rounds that differ by more than what is asked cannot show it"


def _aims_text(found: Found) -> str:
    listed = aims(found)
    rows = [[a.what, a.wanted, a.measured, "met" if a.is_met else "**not met**"] for a in listed]
    missed: dict[str, list[str]] = {}
    for aim in listed:
        if not aim.is_met:
            is_there = aim.measured != "not measured"
            why = _why(aim, found) if is_there else "it is not installed here, or did not run"
            missed.setdefault(why, []).append(aim.what)
    lines = [f"* {'; '.join(what)}: {why}." for why, what in missed.items()]
    reasons = "\n".join(["Why, where it is not met:\n", *lines, ""]) if missed else ""
    return table(("what", "aim", "measured", ""), rows) + "\n" + reasons


def _plots(found: Found) -> str:
    shown = []
    for metric, title, unit in (
        ("drain1_per_s", "Empty jobs run a second, one worker process", "/s"),
        ("enqueue_per_s", "Jobs enqueued a second", "/s"),
        ("batch_per_s", "A batch of 5,000 with one callback, jobs a second", "/s"),
        ("latency_p50_ms", "From the call to the handler, median", "ms"),
        ("bytes", "Memory of a waiting job of 100 bytes", "bytes"),
    ):
        rows = [(n, f[metric].median) for n, f in found.figures.items() if metric in f]
        rows.sort(key=lambda row: row[1], reverse=metric.endswith("per_s"))
        name = f"performance-{metric.removesuffix('_per_s').replace('_', '-')}.svg"
        (DOCS / name).write_text(svg.bars(f"{title} (logarithmic)", rows, unit, limit=BARE))
        shown.append(f"![{title}]({name})")
    return "\n\n".join(shown)


def _intro(found: Found) -> str:
    first, machine = found.rounds[0], found.rounds[0]["machine"]
    loads = ", ".join(f"{each['machine']['load'][0]:.1f}" for each in found.rounds)
    known = ", ".join(f"{name} {text}" for name, text in first["versions"].items())
    own = [f"{name} {rate:,.0f}/s" for name, rate in first.get("benchmark", {}).items()]
    bench = (
        f"The server's own benchmark, two connections in pipelines of 100: {', '.join(own)}.\n"
        if own
        else ""
    )
    failed = {name: why for each in found.rounds for name, why in each["failed"].items()}
    # The log of the run has what a contestant printed before it failed.
    missing = "".join(
        f"\nNot measured: {name}: {why.strip().splitlines()[-1]}\n" for name, why in failed.items()
    )
    return f"""# Performance

Written by `make bench`: do not edit it. `make bench-quick` prints a short form in three minutes.

{machine["when"]}, {machine["cores"]} virtual cores ({machine["cpu"]}), Linux {machine["kernel"]}, Python
{machine["python"]}, load average at the start of each round: {loads}. {known}.

Every contestant runs empty jobs with a payload of 100 bytes on the same server (embedded, loopback, no
persistence), one after the other, in {len(found.rounds)} rounds; a figure is the median of the rounds, with the
lowest and highest beside it. The two cores are shared with other programs, so the rounds differ; ratios are
taken within a round. Jobs are filled in first, then the workers start; the rate is that of the last nine
tenths, seen from the handlers. Client time is CPU time of all processes of the worker, user and system.
streamq keeps a result for every part; peers keep none, but where a batch needs them.
{bench}{missing}"""


def write(found: Found) -> None:
    """Write ``docs/performance.md`` and its plots."""
    settings = table(
        ("", "configuration"), [[n, SETTINGS[n]] for n in found.figures if n in SETTINGS]
    )
    pieces = [
        _intro(found),
        "## What was aimed at\n",
        _aims_text(found),
        "## Side by side\n",
        _contest_tables(found),
        _plots(found),
        "\nThe *bare loop* is one Python client that reads a batch of a stream as a consumer of a group,"
        " acknowledges\nand deletes it, keeps a result for each part and counts down, in one pipeline:"
        " the same writes, and none of the\nrules. It has no request, lease, limit, level, retry or"
        " handler.\n",
        settings,
    ]
    if found.scaling:
        pieces.append(_scaling_text(found.scaling))
    (DOCS / "performance.md").write_text("\n".join(pieces))


def quick(found: dict[str, Any]) -> str:
    """Return a short round as text."""
    lines = [f"{'':18}{'enqueue/s':>11}{'drain/s':>10}{'2 proc.':>10}{'p50 ms':>9}{'bytes':>7}"]
    for name, f in found["contestants"].items():
        lines.append(
            f"{name:18}{f['enqueue_per_s']:11,.0f}{f['drain1_per_s']:10,.0f}"
            f"{f.get('drain2_per_s', 0):10,.0f}{f.get('latency_p50_ms', 0):9.2f}{f['bytes']:7.0f}"
        )
    return "\n".join(lines + [f"{name}: FAILED: {why}" for name, why in found["failed"].items()])
