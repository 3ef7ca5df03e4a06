"""The tables of ``docs/faults.md``, made from figures. The words around them are not touched."""

import re
from collections.abc import Iterable

from tests.faults.scenarios import SCENARIOS, Scenario
from tests.faults.verdict import Figures

_TABLE = re.compile(r"(<!-- figures: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
_COUNTS = ("lost", "run again", "counted wrong", "at once / limit")
_OWN = ("runs", "parts", "faults", *_COUNTS, "pops per claim", "silence s", "told after s")
_OLD = tuple(f"old: {word}" for word in (*_COUNTS, "pops per part", "told"))


def renewed(text: str, figures: list[Figures]) -> str:
    """The page with new tables."""

    def table(match: re.Match[str]) -> str:
        servers = {"cluster"} if match[2] == "cluster" else {"valkey", "redis"}
        chosen = [each for each in figures if each.server in servers]
        rows = (_row(scenario, chosen) for scenario in SCENARIOS)
        head = f"| fault | {' | '.join(_OWN + _OLD)} |\n|---{'|--:' * len(_OWN + _OLD)}|\n"
        return match[1] + head + "".join(rows) + match[3]

    return _TABLE.sub(table, text)


def _row(scenario: Scenario, figures: list[Figures]) -> str:
    own = [f for f in figures if f.scenario == scenario.name and f.subject == "streamq"]
    old = [f for f in figures if f.scenario == scenario.name and f.subject == "seed"]
    if not own:
        return ""
    cells = [
        scenario.says,
        f"{len(own)}",
        f"{max(f.parts for f in own):,}",
        _most(f.faults for f in own),
        *_counts(own),
        f"{max(f.silence_s for f in own):.1f}",
        f"{max(f.told_s for f in own):.1f}",
    ]
    if old:
        cells += [*_counts(old), f"{min(f.told for f in old)} of {old[0].waiters}"]
    else:
        cells += [""] * len(_OLD)
    return f"| {' | '.join(cells)} |\n"


def _counts(figures: list[Figures]) -> list[str]:
    stalled = max(f.stalled for f in figures)
    limit = f"{figures[0].limit}" + (f" (+{stalled})" if stalled else "")
    return [
        _most(f.lost for f in figures),
        _most(f.again for f in figures),
        _most(f.wrong for f in figures),
        f"{_most(f.overlap for f in figures)} / {limit}",
        f"{max(f.pops / max(f.claims, 1) for f in figures):,.2f}",
    ]


def _most(numbers: Iterable[int]) -> str:
    """The worst of the runs."""
    return f"{max(numbers):,}"
