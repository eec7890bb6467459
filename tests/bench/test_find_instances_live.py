"""``find_instances_live``: what is named, what runs live, what counts. Engines and the router's process are stand-ins;
their flags, the cluster's description, the router's command and the devices' figures are the real ones.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as parquet
import pytest
from support.live_stand_ins import LiveStandIns

from bench.check import find_instances_live as bench
from bench.check.consistency import AGAIN
from bench.check.fidelity import start_engines
from bench.check.live_case import ENGINE_FLAGS, LiveCase
from bench.harness import fidelity, live_fleet
from bench.harness.catalogue import BENCHES
from bench.harness.cli import slo_of
from bench.harness.replay import Planned
from bench.harness.steps import Steps
from pla_sglang.sim.metrics.goodput import goodput

ROUND_ROBIN, SPLIT = "round-robin@azure_conv@4", "minimal-load@azure_conv@5.5@5"
ROWS, INPUT_TOKENS, OUTPUT_TOKENS = 60, 1500, 40
PROFILE, SCALE = "h100-llama70b-fp8-dopd", 2.0


def serve_as_simulated(stand_ins: LiveStandIns, planned: Sequence[Planned]) -> Sequence[tuple[float, float]]:
    """What the simulator says of the engines behind the latest router."""
    [engine] = [name for name, flags in ENGINE_FLAGS.items() if list(flags) == own_flags(stand_ins.clusters[-1])]
    kinds, policy = stand_ins.kinds, stand_ins.routed[-1][0].policy
    unified = kinds.count("unified")
    layout = f"unified-{unified}" if unified else f"{kinds.count('prefill')}+{kinds.count('decode')}"
    case = LiveCase.parse(f"{layout}/{engine}/{policy}/azure_conv/1")
    slo = slo_of("azure_conv")
    points = fidelity.simulate_points(
        case.experiment(profile=PROFILE, slo=slo, kv_gbps=400.0, slots=live_fleet.SLOTS),
        {
            "row": [request.index for request in planned],
            "sent_s": [request.at_s / SCALE for request in planned],
            "input_tokens": [len(request.own_ids) for request in planned],
            "output_tokens": [request.output_tokens for request in planned],
        },
    )
    return list(zip(points["sim_first_s"], points["sim_finish_s"], strict=True))


def own_flags(flags: Sequence[str]) -> list[str]:
    own = {flag for flags_of_engine in ENGINE_FLAGS.values() for flag in flags_of_engine}
    return [flag for flag in flags if flag in own]


@pytest.fixture
def live(monkeypatch: pytest.MonkeyPatch) -> LiveStandIns:
    return LiveStandIns(serve_as_simulated, time_scale=SCALE, profile=PROFILE).install(monkeypatch)


@pytest.fixture
def arguments(tmp_path: Path) -> list[str]:
    lines = [f"{at * 0.2:.1f},{INPUT_TOKENS},{OUTPUT_TOKENS}" for at in range(ROWS)]
    text = "\n".join(["arrival_s,input_tokens,output_tokens", *lines])
    (tmp_path / "trace.csv").write_text(text + "\n", encoding="utf-8")
    traces = ["--traces", f"azure_conv={tmp_path / 'trace.csv'}"]
    return [*traces, "--out", str(tmp_path), "--duration-s", "10", "--cases", ROUND_ROBIN]


def run(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, Any]]:
    status = BENCHES["find_instances_live"].main([*arguments, "--json"])
    return status, json.loads(capsys.readouterr().out.splitlines()[-1])


def test_so_many_keep_the_target_and_one_fewer_do_not(
    live: LiveStandIns, arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, result = run([*arguments[:-1], f"{ROUND_ROBIN},{SPLIT}"], capsys)
    assert status == 0
    assert (result["cases"], result["confirmed"], result["cases_open"], result["valid"]) == (2, 2, 0, True)
    assert live.engines == [["unified-0", "unified-1"], ["prefill-0", "prefill-1", "decode-0"]], "engines are shared"
    assert [(router.policy, list(engines)) for router, engines in live.routed] == [
        ("round-robin", ["unified-0", "unified-1"]),
        ("round-robin", ["unified-0"]),
        ("minimal-load", ["prefill-0", "prefill-1", "decode-0"]),
        ("minimal-load", ["prefill-0", "decode-0"]),
    ]
    for text, sizes in ((ROUND_ROBIN, ("2", "1")), (SPLIT, ("2+1", "1+1"))):
        rows = [result["by_case"][text][name] for name in ("named", "one_fewer")]
        assert tuple(row["size"] for row in rows) == sizes
        assert [row["live"] for row in rows] == pytest.approx([row["simulated"] for row in rows], abs=0.05)
        assert rows[0]["live"] >= bench.TARGET > rows[1]["live"]
        assert [row["host_overhead_share"] for row in rows] == pytest.approx([0.02, 0.02])
    assert result == result | dict(AGAIN["find_instances_live"](result))
    kept = parquet.read_table(tmp_path / "find_instances_live.parquet").to_pydict()
    for text, of_case in result["by_case"].items():
        for row in (of_case["named"], of_case["one_fewer"]):
            places = [at for at, name in enumerate(kept["case"]) if name == f"{text} {row['size']}"]
            points = {name: list(np.array(values)[places]) for name, values in kept.items() if name != "case"}
            assert goodput(fidelity.served_of(points, "live"), slo_of("azure_conv")).attainment == row["live"]
    page = bench.page(result)
    assert "2 of 2 cases confirmed, 0 not valid." in page
    assert ROUND_ROBIN in page


def test_finished_runs_are_kept(live: LiveStandIns, arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    first = run(arguments, capsys)
    assert run(arguments, capsys) == first
    assert len(live.clusters) == 1


def test_a_number_that_misses_the_target_live_is_counted(
    live: LiveStandIns, arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    live.late_s = 2.0  # all of what TTFT may be
    status, result = run(arguments, capsys)
    assert (status, result["cases"], result["confirmed"], result["valid"]) == (0, 1, 0, True)


@pytest.mark.parametrize(
    ("field", "value"), [("host_overhead_share", 0.051), ("client_lag_p99_ms", 51.0), ("tokens_wrong", 1)]
)
def test_an_invalid_run_confirms_nothing(
    live: LiveStandIns,
    arguments: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    field: str,
    value: float,
) -> None:
    run(arguments, capsys)
    options = BENCHES["find_instances_live"].parse(*arguments)
    steps = Steps(tmp_path / "find_instances_live.steps.jsonl")
    key = bench.key_of(options) | {"case": ROUND_ROBIN, "size": "1"}
    row = steps.get(key)
    assert row is not None
    steps.add(key, row | {field: value})
    status, result = run(arguments, capsys)
    assert (status, result["cases"], result["confirmed"], result["cases_invalid"]) == (1, 1, 0, 1)


def test_one_fewer_that_keeps_the_target_too_confirms_nothing() -> None:
    row = {"live": 1.0, "valid": True}
    assert not bench.judge_case(row, row)["confirmed"]
    assert bench.judge_case(row, {"live": 0.98, "valid": True})["confirmed"]


def test_more_engines_than_run_cannot_be_chosen(live: LiveStandIns, arguments: list[str]) -> None:
    options = BENCHES["find_instances_live"].parse(*arguments)
    case = bench.live_case("unified-1", "fcfs", "round-robin", "azure_conv")
    with start_engines(case, options) as fleet:
        assert fleet.choose_engines({"unified": 1}) == fleet
        with pytest.raises(AssertionError, match="1 unified engines run, not 2"):
            fleet.choose_engines({"unified": 2})


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("round-robin", "'round-robin' is not FORM@WORKLOAD@RATE or FORM@WORKLOAD@RATE@ROW"),
        ("round-robin@azure_conv@fast", "is not FORM@WORKLOAD@RATE"),
        ("round-robin@mooncake@4", "needs --traces mooncake=FILE; given: azure_conv"),
        ("arrow@azure_conv@4", "cannot run live"),
        ("round-robin/hrrn@azure_conv@4", "cannot run live; allowed: engines fcfs, temporal, mixed"),
        ("round-robin/4096@azure_conv@4", "live engines are as they start; allowed: temporal, mixed, split"),
        ("round-robin@azure_conv@0.5", "one instance is enough, and there is none fewer; allowed: 2 to 3 instances"),
        ("round-robin@azure_conv@50", "3 instances keep 0."),
    ],
)
def test_bad_cases_are_refused(
    live: LiveStandIns, arguments: list[str], case: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert BENCHES["find_instances_live"].main([*arguments[:-1], case]) == 2
    assert message in capsys.readouterr().err
    assert live.clusters == []
