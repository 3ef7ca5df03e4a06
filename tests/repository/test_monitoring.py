"""What deploy/ has for Grafana and Prometheus names metrics and labels that there are."""

import json
import re
from pathlib import Path
from typing import Any

import yaml

from streamq.telemetry.metrics import METRICS

DEPLOY = Path(__file__).parents[2] / "deploy"
DASHBOARD: dict[str, Any] = json.loads((DEPLOY / "grafana.json").read_text())
(GROUP,) = yaml.safe_load((DEPLOY / "alerts.yaml").read_text())["groups"]
EXPRESSIONS = [
    *(target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]),
    *(rule["expr"] for rule in GROUP["rules"]),
]
_SUFFIXES = ("_bucket", "_sum", "_count")


def metric_of(name: str) -> str:
    for suffix in _SUFFIXES:
        if name.endswith(suffix) and METRICS.get(name.removesuffix(suffix), None):
            return name.removesuffix(suffix)
    return name


def test_every_metric_is_one_of_ours() -> None:
    used = {metric_of(name) for each in EXPRESSIONS for name in re.findall(r"streamq_\w+", each)}
    assert used <= METRICS.keys()
    assert len(used) > 12


def test_every_label_is_one_of_its_metric() -> None:
    for each in EXPRESSIONS:
        names = {metric_of(name) for name in re.findall(r"streamq_\w+", each)}
        known = {label for name in names for label in re.split(r",\s*", METRICS[name].labels)}
        selected = re.findall(r"(\w+)(?:=~|!=|=)\"", each)
        grouped = [
            label for some in re.findall(r"by \(([^)]*)\)", each) for label in some.split(", ")
        ]
        assert {*selected, *grouped} - {"le"} <= known, each


def test_brackets_match_and_panels_do_not_overlap() -> None:
    for each in EXPRESSIONS:
        for first, last in ("()", "{}", "[]"):
            assert each.count(first) == each.count(last), each
    places = [(p["gridPos"]["x"], p["gridPos"]["y"]) for p in DASHBOARD["panels"]]
    assert len(set(places)) == len(places)
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(places)


def test_alerts_say_what_is_wrong_and_for_how_long() -> None:
    for rule in GROUP["rules"]:
        assert rule.keys() == {"alert", "expr", "for", "labels", "annotations"}
        assert re.fullmatch(r"\d+[smh]", rule["for"])
        assert rule["labels"]["severity"] in ("info", "warning", "critical")
        assert rule["annotations"]["summary"].endswith(".")
    assert len({rule["alert"] for rule in GROUP["rules"]}) == len(GROUP["rules"])
