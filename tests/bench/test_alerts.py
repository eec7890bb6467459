"""Dashboard and alert rules of examples/ against a real Prometheus that scrapes a live router; the bench ``alerts``."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from fake_sglang import FakeSglang
from support.router_process import RouterProcess, fake_instances, router_process
from support.serving import until

from bench.check.alerts import bench as alerts
from bench.harness.prometheus import (
    DASHBOARD,
    RULES,
    Prometheus,
    Query,
    list_conditions,
    list_queries,
    read_rules,
    running_prometheus,
    shorten_rules,
    shorten_span,
    shorten_windows,
    show_values,
    split_conditions,
)
from pla_sglang.common.errors import ConfigError

needs_prometheus = pytest.mark.skipif(
    shutil.which("prometheus") is None or shutil.which("promtool") is None,
    reason="Prometheus is not installed (Debian: apt install prometheus)",
)
FACTOR, WINDOW = 60.0, "15s"
LATE = {"x-slo-ttft-ms": "1", "x-slo-tpot-ms": "1"}
# Panels that a router before two stock instances has nothing for; the bench asks all of them.
FAKES = {
    "Engines (--enable-metrics)": "fakes have no metrics of ours",
    "Moves of running requests (--migration on)": "stock instances cannot move requests",
    "Planner (--planner)": "it has none",
}
NOTHING = {
    "Retries": "no request is tried again",
    "Prompt tokens that were cached": "fakes do not say it",
    "PrefixHitsWrong": "fakes do not say it",
    "LengthsPredictedBadly": "lengths are not predicted",
    "MigrationsFail": "stock instances cannot move requests",
    "TransfersFail": "stock instances have none",
    **alerts.EMPTY,
}


def list_panels(*rows: str) -> set[str]:
    """Titles of the panels below these rows of the dashboard."""
    found, row = set(), ""
    for panel in json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]:
        if panel["type"] == "row":
            row = panel["title"]
        elif row in rows:
            found.add(panel["title"])
    return found


# -- without a server --------------------------------------------------------------------------------------------------


def test_spans_and_windows() -> None:
    assert [shorten_span(text, 60.0) for text in ("5m", "30s", "6h", "0s")] == ["5000ms", "500ms", "360000ms", "0ms"]
    assert shorten_windows("rate(a[5m]) / rate(b{c=~'[x]'}[1h:1m])", 60.0) == (
        "rate(a[5000ms]) / rate(b{c=~'[x]'}[60000ms:1000ms])"
    )
    assert show_values('sum(a{b="c"}) / d > 0.5 and e == 0') == 'sum(a{b="c"}) / d > bool 0.5 and e == bool 0'
    with pytest.raises(ValueError, match="soon"):
        shorten_span("soon", 60.0)


def test_each_condition_begins_a_line_with_or() -> None:
    assert split_conditions('a{b="x or y"} or c > 1') == ['a{b="x or y"} or c > 1']
    assert split_conditions("(a or b) > 1\n  or order\nor (\n  c and d\n)\nor absent(order)") == [
        "(a or b) > 1 or order",
        "( c and d )",
        "absent(order)",
    ]
    found = {one["alert"]: one["expr"] for one in list_conditions()}
    assert found["RouterAway.2"] == "absent(pla_router_open_requests)"
    assert all(expression.count("(") == expression.count(")") for expression in found.values())
    assert "NoInstanceReady.1" not in found


def test_each_rule_and_condition_has_a_scene_or_a_reason() -> None:
    conditions = [one["alert"] for one in list_conditions()]
    alone = {rule["alert"] for rule in read_rules()} - {name.partition(".")[0] for name in conditions}
    played = [alert for scene in alerts.SCENES for alert in scene.alerts]
    assert sorted([*played, *alerts.NOT_PROVOKED]) == sorted([*alone, *conditions])


def test_figures_of_the_bench() -> None:
    alert = {"scene": "s", "fired_s": 2.0, "cleared_s": 3.0}
    rules, conditions = ([one["alert"] for one in rows] for rows in (read_rules(), list_conditions()))
    found = {name: alert for name in [*rules, *conditions] if name not in alerts.NOT_PROVOKED}
    right = alerts.sum_up(found, 90, ["Prefill batches by graph: {{reason}}"]) | {"broken_rules": []}
    assert (right["fired"], right["cleared"], right["empty"]) == (len(rules), len(rules), 0)
    assert (right["conditions"], right["met"]) == (len(conditions), len(conditions) - len(alerts.NOT_PROVOKED))
    assert alerts.is_right(right)
    one_less = alerts.sum_up(found | {"RouterAway.1": alert | {"fired_s": None}}, 90, []) | {"broken_rules": []}
    assert not alerts.is_right(one_less)
    for change in ({"fired_s": None}, {"cleared_s": None}):
        wrong = alerts.sum_up(found | {"InstanceDown": alert | change}, 90, []) | {"broken_rules": []}
        assert not alerts.is_right(wrong)
    assert not alerts.is_right(alerts.sum_up(found, 90, ["Requests/s: Requests/s"]) | {"broken_rules": []})
    settings = {"instances": 3, "policy": "p", "factor": 60.0, "profile": "x", "time_scale": 4.0, "seed": 0}
    page = alerts.page(right | settings | {"environment": {"hardware": "a cpu", "plugin_commit": "c"}})
    assert "2 to 2 s after a scene began its alerts fired" in page
    assert "| `InstanceDown`" not in page
    silent = alerts.sum_up(found | {"InstanceDown": alert | {"cleared_s": None}}, 90, []) | settings
    assert "| `InstanceDown` | s | 2 | - |" in alerts.page(
        silent | {"environment": {"hardware": "a", "plugin_commit": ""}}
    )


# -- by Prometheus' own tool -------------------------------------------------------------------------------------------


@needs_prometheus
def test_promtool_takes_the_rules() -> None:
    done = subprocess.run(["promtool", "check", "rules", RULES], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert f"{len(read_rules())} rules found" in done.stdout


def series(name: str, values: str, **labels: str) -> dict[str, str]:
    labels = {"job": "router", "instance": "r:1", **labels}
    text = ", ".join(f'{label}="{value}"' for label, value in labels.items())
    return {"series": f"{name}{{{text}}}", "values": values}


def targets(target: str, met: int, missed: int) -> list[dict[str, str]]:
    """So many a minute, for seven hours."""
    return [
        series("pla_router_targets_total", f"0+{count}x420", target=target, met=is_met, model="m", tenant="t")
        for is_met, count in (("true", met), ("false", missed))
    ]


# By their true spans: what is given, the alert, the minute, whether it fires then.
CASES: dict[str, tuple[list[dict[str, str]], str, str, bool]] = {
    "one in ten late": (targets("ttft", 90, 10), "TtftTargetsMissed", "7h", True),
    "one in fifty late": (targets("ttft", 98, 2), "TtftTargetsMissed", "7h", False),
    "one in five slow": (targets("tpot", 80, 20), "TpotTargetsMissed", "2h", True),
    "one of three down for six minutes": (
        [series("pla_router_worker_role", "0x4 1x20", worker="w", role="mixed", pool="both", state="starting")],
        "InstanceDown",
        "11m",
        True,
    ),
    "an instance that starts for two": (
        [series("pla_router_worker_role", "1x2", worker="w", role="mixed", pool="both", state="starting")],
        "InstanceDown",
        "20m",
        False,
    ),
    "a loss": ([series("pla_router_worker_losses", "0x10 1x50", worker="w")], "InstanceLostAgain", "15m", False),
    "two": ([series("pla_router_worker_losses", "0x10 1x5 2x50", worker="w")], "InstanceLostAgain", "20m", True),
    "KV is stuck": ([series("pla_router_worker_transfer_ready", "1x3 0x9", worker="w")], "TransfersFail", "8m", True),
}


@needs_prometheus
@pytest.mark.parametrize(("rows", "alert", "at", "fires"), CASES.values(), ids=CASES)
def test_a_rule_fires_when_it_should(
    rows: list[dict[str, str]], alert: str, at: str, fires: bool, tmp_path: Path
) -> None:
    counted = f'count(ALERTS{{alertname="{alert}", alertstate="firing"}}) or vector(0)'
    asked = {"expr": counted, "eval_time": at, "exp_samples": [{"labels": "{}", "value": int(fires)}]}
    case = {"interval": "1m", "input_series": rows, "promql_expr_test": [asked]}
    file = tmp_path / "case.yaml"
    file.write_text(yaml.safe_dump({"rule_files": [str(RULES)], "evaluation_interval": "1m", "tests": [case]}))
    done = subprocess.run(["promtool", "test", "rules", file], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


# -- a live router -----------------------------------------------------------------------------------------------------


class Scraped:
    """A router before two instances and an address at which nobody listens yet; a Prometheus that scrapes it."""

    def __init__(self, router: RouterProcess, late: FakeSglang, prometheus: Prometheus) -> None:
        self.router, self.late, self.prometheus = router, late, prometheus

    def send(self, count: int, **headers: str) -> None:
        body = json.dumps({"input_ids": [5] * 40, "sampling_params": {"max_new_tokens": 3}, "stream": True})
        for _ in range(count):
            self.router.ask("/generate", body.encode(), headers)

    def fires(self, alert: str) -> bool:
        return alert in self.prometheus.list_firing()


@pytest.fixture(scope="module")
def scraped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scraped]:
    folder = tmp_path_factory.mktemp("alerts")
    with fake_instances(["null"]) as (late,):
        pass
    with router_process(["null", "null"], ["--policy", "combined", "--worker", late.url], folder) as router:
        for one in router.fakes:
            one.script.first_s = one.script.gap_s = 0.01
        jobs = {"router": [f"127.0.0.1:{router.port}"]}
        with running_prometheus("prometheus", jobs, shorten_rules(FACTOR), folder) as prometheus:
            yield Scraped(router, late, prometheus)


@needs_prometheus
def test_every_query_has_an_answer(scraped: Scraped) -> None:
    """Whatever is not listed with a reason. A query that Prometheus cannot read raises."""
    listed = list_panels(*FAKES) | NOTHING.keys()
    queries = list_queries(WINDOW, FACTOR)
    asked = [query for query in queries if query.where.partition(":")[0] not in listed]
    assert len(asked) > 50

    def none_is_empty() -> bool:
        scraped.router.fakes[0].script.statuses.append(500)
        scraped.send(4)
        return not scraped.prometheus.list_empty(asked)

    try:
        until(none_is_empty, what="answers to all queries", patience_s=20)
    except AssertionError:
        pytest.fail(f"no answer: {[query.where for query in scraped.prometheus.list_empty(asked)]}")
    assert scraped.prometheus.list_empty(queries) is not None, "the others can be read, too"
    assert scraped.prometheus.list_broken_rules() == []


@needs_prometheus
def test_an_alert_fires_and_clears(scraped: Scraped) -> None:
    until(lambda: scraped.fires("InstanceDown"), what="nobody listens at one address", patience_s=20)
    with fake_instances([scraped.late]):
        until(lambda: not scraped.fires("InstanceDown"), what="somebody does", patience_s=20)


@needs_prometheus
def test_missed_targets_fire(scraped: Scraped) -> None:
    def fires() -> bool:
        scraped.send(5, **LATE)
        return scraped.fires("TtftTargetsMissed") and scraped.fires("TpotTargetsMissed")

    until(fires, what="late answers", patience_s=20)


@needs_prometheus
def test_instances_that_cannot_transfer_fire(tmp_path: Path) -> None:
    """They say so: nothing from outside makes a live engine like that, so the bench has no scene for it."""
    fakes = [FakeSglang("stateless") for _ in range(2)]
    nothing = {"legs": {}, "requests": 0, "kv_tokens": 0}
    says = {"sending": nothing, "receiving": nothing, "quarantine": nothing, "refused": 0, "faults": 0}
    for one in fakes:
        one.transfers = says

    with router_process(fakes, [], tmp_path) as router:
        jobs = {"router": [f"127.0.0.1:{router.port}"]}
        with running_prometheus("prometheus", jobs, shorten_rules(FACTOR), tmp_path) as prometheus:
            asked = Query("scraped", "pla_router_worker_transfer_faults")
            until(lambda: not prometheus.list_empty([asked]), what="a scrape", patience_s=20)
            assert "TransfersFail" not in prometheus.list_firing()
            fakes[0].transfers = says | {"ready": False}
            until(lambda: "TransfersFail.1" in prometheus.list_firing(), what="it is not ready", patience_s=20)
            fakes[0].transfers = says | {"faults": 1}
            until(lambda: "TransfersFail.2" in prometheus.list_firing(), what="a fault", patience_s=20)
            until(lambda: "TransfersFail" not in prometheus.list_firing(), what="it is mended", patience_s=40)


@needs_prometheus
def test_a_prometheus_that_does_not_start_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    false = shutil.which("false")
    assert false is not None
    with pytest.raises(ConfigError, match=re.escape(false)), running_prometheus(false, {}, {"groups": []}, tmp_path):
        pass


# -- what the rules say ------------------------------------------------------------------------------------------------


def test_each_alert_says_what_it_means_and_what_to_do() -> None:
    for rule in read_rules():
        assert rule["annotations"]["summary"], rule["alert"]
        assert rule["annotations"]["runbook"], rule["alert"]
