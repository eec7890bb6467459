"""``what_if``: what a case is, what is judged, what counts. Recordings are of simulated fleets: no engine runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.served_recording import load_of, record, serve
from support.traces import write_plain

from bench.check import what_if as bench
from bench.harness.catalogue import BENCHES
from bench.harness.steps import Steps
from pla_sglang.common.errors import ConfigError
from pla_sglang.sim.metrics.goodput import Slo
from pla_sglang.sim.workload import load_trace

CASE = "unified-2/fcfs/round-robin>unified-2/fcfs/least-tokens/300/20@azure_conv@10"


def options_of(tmp_path: Path, cases: str = CASE) -> Any:
    write_plain(load_of(400), tmp_path / "t.csv")
    arguments = ["--traces", f"azure_conv={tmp_path / 't.csv'}", "--cases", cases, "--out", str(tmp_path)]
    return BENCHES["what_if"].parse(*arguments)


def row_of(name: str, **changes: Any) -> dict[str, Any]:
    row = {"recording": name, "client_lag_p99_ms": 1.0, "host_overhead_share": 0.01, "tokens_wrong": 0}
    return row | {"plugin_commit": "abc"} | changes


def test_a_case_is_two_settings_of_one_load(tmp_path: Path) -> None:
    options = options_of(tmp_path)
    switch = bench.parse_case(CASE, {"azure_conv": load_trace(tmp_path / "t.csv")}, options)
    assert (switch.before.cluster.policy, switch.after.cluster.policy) == ("round-robin", "least-tokens")
    assert (switch.before.slo, switch.after.slo) == (Slo(2.0, 0.15), Slo(0.3, 0.02))
    assert len(switch.trace) == round(10 * options.duration_s)
    assert switch.trace.rate_per_s == pytest.approx(10)
    assert switch.key(switch.before, options) != switch.key(switch.after, options)


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("unified-2/fcfs/round-robin@azure_conv@10", "is not FROM>TO@WORKLOAD@RATE"),
        ("unified-2/fcfs/round-robin>unified-2/fcfs/round-robin@azure_conv@fast", "is not FROM>TO@WORKLOAD@RATE"),
        ("unified-2/fcfs/round-robin>unified-2/fcfs@azure_conv@10", "is not LAYOUT/ENGINE/POLICY"),
        ("unified-2/fcfs/round-robin/5>unified-2/fcfs/round-robin@azure_conv@10", "is not LAYOUT/ENGINE/POLICY"),
        ("unified-2/fcfs/round-robin>unified-2/fcfs/least-tokens@mooncake@10", "needs --traces mooncake=FILE"),
    ],
)
def test_cases_that_are_none(case: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        bench.parse_case(case, {"azure_conv": load_of()}, options_of(tmp_path, case))


def test_every_case_counts_whatever_came_of_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A prediction that holds, one that is refused, and one of a run that cannot be trusted."""
    fewer = "unified-2/fcfs/round-robin>unified-1/fcfs/round-robin/300/20@azure_conv@10"
    untrusted = "unified-2/fcfs/round-robin>unified-2/fcfs/least-requests/300/20@azure_conv@10"
    options = options_of(tmp_path, f"{CASE},{fewer},{untrusted}")
    trace = load_trace(tmp_path / "t.csv")
    load = load_of(gap_s=0.1, rush=1.0)
    steps = Steps(tmp_path / "what_if.steps.jsonl")
    switches = [bench.parse_case(text, {"azure_conv": trace}, options) for text in options.cases.split(",")]
    settings: dict[str, dict[str, Any]] = {
        "before.gz": {},
        "a.gz": {"policy": "least-tokens"},
        "b.gz": {"instances": 1},
    }
    for name, changes in settings.items():
        record(tmp_path / name, load, serve(load, **changes), stateless=False)
    names = {"round-robin": "before.gz", "least-tokens": "a.gz", "least-requests": "a.gz"}
    for switch in switches:
        steps.add(switch.key(switch.before, options), row_of("before.gz"))
        after = "b.gz" if switch.after.cluster.prefill == 1 else names[switch.after.cluster.policy]
        wrong = {"tokens_wrong": 3} if switch.text == untrusted else {}
        steps.add(switch.key(switch.after, options), row_of(after, **wrong))
    assert bench.summarise(switches, steps, options) == 1
    result = json.loads((tmp_path / "what_if.json").read_text())
    assert (result["cases"], result["inside"], result["refused"], result["cases_invalid"]) == (3, 2, 1, 1)
    assert "and more" in result["by_case"][fewer]["refused"]
    assert not result["valid"]
    assert "2 of 3 cases inside, 1 refused" in bench.page(result)
