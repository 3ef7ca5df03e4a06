"""The tables of the pages, made from figures. The words around them are not touched."""

from collections.abc import Iterable

from tests.faults.episodes import EPISODES, EVERYWHERE, Episode
from tests.faults.scenarios import SCENARIOS, Scenario
from tests.faults.verdict import Figures

_COUNTS = ("lost", "run again", "counted wrong", "at once / limit")
_TIMES = ("pops per claim", "silence s", "told after s", "charged / died")
_OWN = ("runs", "parts", "faults", *_COUNTS, *_TIMES)
_STORY = (
    "runs",
    "parts",
    "faults",
    "lost",
    "run again",
    "lines wrong",
    "charged",
    "longest wait s",
)
_OLD = tuple(f"old: {word}" for word in (*_COUNTS, "pops per part", "told"))


def replaced(text: str, name: str, figures: str) -> str:
    """The page with new figures between the marks of this name."""
    first, last = f"<!-- figures: {name} -->\n", "<!-- end -->"
    if first not in text:
        raise ValueError(f"the page has no {first.strip()}")
    before, _, rest = text.partition(first)
    return before + first + figures + last + rest.partition(last)[2]


def renewed(text: str, figures: list[Figures]) -> str:
    """The page with new tables. A table stays as it is when there are no figures for it."""
    for name, servers in (("single", {"valkey", "redis"}), ("cluster", {"cluster"})):
        rows = [
            _row(each, [f for f in figures if f.server in servers], _old_cells(text, name, each))
            for each in SCENARIOS
        ]
        head = f"| fault | {' | '.join(_OWN + _OLD)} |\n|---{'|--:' * len(_OWN + _OLD)}|\n"
        if any(rows):
            own = {each.name for each in SCENARIOS}
            kept = [f for f in figures if f.scenario in own]
            text = replaced(text, name, head + "".join(rows) + _promises(kept, servers))
    for name, is_of_flows in (("stories", False), ("flows", True)):
        episodes = [each for each in EPISODES if each.name.startswith("flow-") is is_of_flows]
        told = [_story(each, figures) for each in episodes]
        if any(told):
            own = {each.name for each in episodes}
            head = f"| story | {' | '.join(_STORY)} |\n|---{'|--:' * len(_STORY)}|\n"
            kept = [f for f in figures if f.scenario in own]
            text = replaced(text, name, head + "".join(told) + _promises(kept, set(EVERYWHERE)))
    return text


def _story(episode: Episode, figures: list[Figures]) -> str:
    made = [f for f in figures if f.scenario == episode.name and f.parts]
    if not made:
        return ""
    is_flow = episode.name.startswith("flow-")
    cells = [
        episode.says,
        f"{len(made)}",
        _most(f.parts for f in made),
        _most(f.faults for f in made),
        # Of flows only what came to their ends is looked at: what is lost counts as wrong.
        "" if is_flow else _most(f.lost for f in made),
        "" if is_flow else _most(f.again for f in made),
        _most(f.wrong for f in made),
        "" if episode.is_large else _most(f.charged for f in made),
        f"{max(f.start_s for f in made):.1f}" if any(f.start_s for f in made) else "",
    ]
    return f"| {' | '.join(cells)} |\n"


def _promises(figures: list[Figures], servers: set[str]) -> str:
    """How many runs kept every promise, and what the others did not keep."""
    own = [f for f in figures if f.server in servers and f.subject == "streamq"]
    broken = [
        f"* {f.scenario} on {f.server}, seed {f.seed}: {each}\n" for f in own for each in f.broken
    ]
    kept = sum(not f.broken for f in own)
    return f"\nOf {len(own)} runs of streamq {kept} kept every promise.\n" + "".join(broken)


def _old_cells(text: str, name: str, scenario: Scenario) -> list[str]:
    """What the page's table says of the old design in this scenario: it was not run again."""
    table = text.partition(f"<!-- figures: {name} -->\n")[2].partition("<!-- end -->")[0]
    for line in table.splitlines():
        cells = line.removeprefix("| ").removesuffix(" |").split(" | ")
        if cells[0] == scenario.says and len(cells) == len(_OWN + _OLD) + 1:
            return [cell.strip() for cell in cells[-len(_OLD) :]]
    return [""] * len(_OLD)


def _row(scenario: Scenario, figures: list[Figures], before: list[str]) -> str:
    made = [f for f in figures if f.scenario == scenario.name and f.parts]
    own = [f for f in made if f.subject == "streamq"]
    old = [f for f in made if f.subject == "seed"]
    if not own:
        return ""
    cells = [
        scenario.says,
        f"{len(own)}",
        f"{max(f.parts for f in own):,}",
        _most(f.faults for f in own),
        *_counts(own),
        f"{max(f.silence_s for f in own):.1f}",
        f"{max(0.0, *(f.told_s for f in own)):.1f}",
        f"{_most(f.charged for f in own)} / {_most(f.died for f in own)}",
    ]
    if old:
        cells += [*_counts(old), f"{min(f.told for f in old)} of {old[0].waiters}"]
    else:
        cells += before
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
