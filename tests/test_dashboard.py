"""The dashboard and the alert rules of examples/: Grafana and Prometheus can read them.

The names of the series that they ask for are checked by ``test_metric_names``, their answers by ``bench/test_alerts``.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import yaml
from test_metric_names import queries

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "examples/grafana"


def panels() -> list[dict[str, Any]]:
    return [panel for panel in json.loads((FOLDER / "dashboard.json").read_text())["panels"] if panel["type"] != "row"]


def test_every_panel_asks_for_something_and_none_covers_another() -> None:
    assert len(panels()) > 15
    cells: set[tuple[int, int]] = set()
    for panel in panels():
        assert panel["targets"], panel["title"]
        assert all(target["expr"] and target["legendFormat"] for target in panel["targets"])
        place = panel["gridPos"]
        own = {
            (column, line)
            for column in range(place["x"], place["x"] + place["w"])
            for line in range(place["y"], place["y"] + place["h"])
        }
        assert place["x"] + place["w"] <= 24
        assert not own & cells, panel["title"]
        cells |= own
    assert len({panel["id"] for panel in panels()}) == len(panels())


def test_every_expression_of_the_dashboard_is_checked_against_the_series() -> None:
    """Those that the check of names would not find are in no file."""
    asked = sum(len(panel["targets"]) for panel in panels())
    assert asked == sum(where == "dashboard.json" for where, _ in queries())


def test_panels_ask_for_the_variables_that_there_are() -> None:
    """What Grafana does not know it leaves as it stands, and the query finds nothing."""
    document = json.loads((FOLDER / "dashboard.json").read_text())
    known = {variable["name"] for variable in document["templating"]["list"]} | {"__rate_interval"}
    asked = {
        name for panel in panels() for target in panel["targets"] for name in re.findall(r"\$(\w+)", target["expr"])
    }
    assert asked == known - {"source"}
    assert {panel["datasource"]["uid"] for panel in panels()} == {"${source}"}


def test_alert_rules_have_what_prometheus_wants() -> None:
    rules = [
        rule for group in yaml.safe_load((FOLDER / "alerts.yaml").read_text())["groups"] for rule in group["rules"]
    ]
    assert len({rule["alert"] for rule in rules}) == len(rules) >= 12
    for rule in rules:
        assert set(rule) == {"alert", "expr", "for", "labels", "annotations"}
        assert rule["labels"]["severity"] in ("critical", "warning")
        for name in ("summary", "runbook"):
            assert len(rule["annotations"][name].splitlines()) == 1, (rule["alert"], name)
    assert len(rules) == sum(where == "alerts.yaml" for where, _ in queries())
