"""Experiments by name: every policy runs, sweeps agree with single runs, capacity, results as files, command line."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

import numpy as np
import pyarrow.parquet as parquet
import pytest
from support.traces import write_plain

from pla_sglang import simulate
from pla_sglang.common.errors import ConfigError
from pla_sglang.policy.common.survival import SurvivalPredictor
from pla_sglang.policy.interface.remaining_length import Floats, RunningAnswer, RunningAnswers
from pla_sglang.policy.registry import policy_names
from pla_sglang.profiles.load import FOLDER
from pla_sglang.sim.core import experiment as experiment_module
from pla_sglang.sim.core.experiment import ENGINES, Experiment, capacity_of, length_predictor, run_experiment
from pla_sglang.sim.core.sweep import iterate_capacities, iterate_runs
from pla_sglang.sim.metrics.goodput import Slo
from pla_sglang.sim.workload import Arrivals, Trace, generated_trace, length_model

SLO = Slo(1.0, 0.05)


def workload(count: int = 150, rate: float = 12.0) -> Trace:
    inputs, outputs = length_model("lmsys_first_turn_prompt"), length_model("sharegpt4_output")
    return generated_trace(count, Arrivals(rate, random.Random(3)), inputs, outputs)


@pytest.mark.parametrize("policy", policy_names())
def test_every_policy_serves_everybody(policy: str) -> None:
    outcome = run_experiment(Experiment(policy, SLO, instances=4), workload())
    assert outcome.result.counts["finished"] == 150
    assert outcome.figures.attainment > 0.5
    assert sum(outcome.result.reasons.values()) >= 150


@pytest.mark.parametrize("engine", ENGINES)
def test_every_engine_order_serves_everybody(engine: str) -> None:
    experiment = Experiment("least-requests", SLO, engine=engine, instances=2, chunk_tokens=512)
    assert run_experiment(experiment, workload()).result.counts["finished"] == 150


def test_a_sweep_in_processes_is_the_runs_one_by_one() -> None:
    work = [Experiment(policy, SLO, instances=2, rate_per_s=8.0) for policy in ("arrow", "two-choices")]
    parallel = dict(iterate_runs(work, workload(60), jobs=2))
    ended: list[int] = []
    single = dict(iterate_runs(work, workload(60), progress=lambda done, total: ended.append(done)))
    assert set(parallel) == set(single) == {0, 1}
    for index, run in single.items():
        assert run.experiment == parallel[index].experiment == work[index]
        assert run.result.digest() == parallel[index].result.digest()
    assert 0 < max(ended) <= 60


def test_a_search_tells_the_rates_that_it_tries() -> None:
    told: list[float] = []
    search = {"low_per_s": 1.0, "high_per_s": 400.0, "target": 0.9, "tolerance": 0.5}
    work = [Experiment("round-robin", SLO, instances=2)]
    ((index, capacity),) = iterate_capacities(work, workload(60), search, tell=told.append)
    assert index == 0
    assert told == [rate_per_s for rate_per_s, _ in capacity.tried]


def test_more_instances_hold_a_higher_rate() -> None:
    def held(instances: int) -> float:
        experiment = Experiment("least-requests", Slo(0.2, 0.02), instances=instances)
        found = capacity_of(experiment, workload(400), low_per_s=1, high_per_s=400, tolerance=0.1)
        assert found.held_per_s is not None
        return found.held_per_s

    assert held(2) > 1.5 * held(1)


def test_bad_names_are_answered_with_the_good_ones() -> None:
    with pytest.raises(ConfigError, match="--engine 'x' is not known; allowed: fcfs"):
        Experiment("arrow", SLO, engine="x")
    with pytest.raises(ConfigError, match="--instances 0 is out of range; allowed: at least 1"):
        Experiment("arrow", SLO, instances=0)
    with pytest.raises(ConfigError, match="unknown profile 'x'"):
        run_experiment(Experiment("arrow", SLO, profile="x"), workload(2))


@pytest.fixture
def trace_file(tmp_path: Path) -> Path:
    path = tmp_path / "t.csv"
    write_plain(workload(80), path)
    return path


def cli(path: Path, *flags: str) -> list[str]:
    return ["--trace", str(path), "--slo-ttft-ms", "1000", "--slo-tpot-ms", "50", "--instances", "2", *flags]


def test_the_command_line_writes_page_and_tables(
    trace_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page, out = tmp_path / "r.html", tmp_path / "out"
    flags = ("--compare", "round-robin,arrow", "--rates", "5,10", "--report", str(page), "--out", str(out))
    assert simulate.main(cli(trace_file, *flags)) == 0
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert last["seed"] == 1
    assert last["workload"]["requests"] == 80
    assert [(run["policy"], round(run["rate_per_s"])) for run in last["runs"]] == [
        ("round-robin", 5),
        ("round-robin", 10),
        ("arrow", 5),
        ("arrow", 10),
    ]
    assert page.read_text() == (out / "report.html").read_text()
    table = parquet.read_table(out / "arrow_10.parquet")
    assert table.num_rows == 80
    assert set(table["stage"].to_pylist()) == {"finished"}
    assert json.loads((out / "summary.json").read_text())["runs"] == last["runs"]


def test_find_capacity_on_the_command_line(trace_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--policy", "least-requests", "--low", "1", "--high", "300", "--tolerance", "0.2")
    assert simulate.main(["find-capacity", *cli(trace_file, *flags)]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])["capacity"]["least-requests"]
    assert found["tried"][0][0] == 1.0
    assert found["held_per_s"] is None or found["held_per_s"] >= 1.0


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--policy", "nobody"), "--policy 'nobody' is not known; allowed: round-robin"),
        (("--rates", "fast"), "--rates 'fast' is no number; allowed: above 0 requests/s"),
        (("--slo-ttft", "500", "--headrom=1"), "unknown argument '--headrom'; did you mean '--headroom'?"),
        (
            ("--forecaster", "magic"),
            "forecaster must be one of last, peak, holt_winters, arima, level, judged, got 'magic'",
        ),
        (("--trace-kind", "x"), "--trace-kind 'x' is not known; allowed: plain, azure"),
        (("--rates", "0"), "--rates 0 is out of range; allowed: above 0 requests/s"),
        (("--slo-ttft-ms", "0"), "--slo-ttft-ms 0 is out of range; allowed: above 0 ms"),
        (("--instances", "0"), "--instances 0 is out of range; allowed: at least 1"),
        (("--window", "900,901"), "--window 900,901 is empty; t.csv has 80 requests from "),
        (("--window", "900"), "--window needs two numbers; allowed: START,END"),
        (("--window", "9,3"), "--window 9,3 is not allowed; allowed: 0 <= START < END"),
        (("--jobs", "0"), "--jobs 0 is out of range; allowed: at least 1"),
        (("--slo-tpot-ms", "0"), "--slo-tpot-ms 0 is out of range; allowed: above 0 ms"),
        (
            ("--lengths", "noisy:-1"),
            "--lengths 'noisy:-1' is not known; allowed: oracle, none, survival, binned, noisy:TOKENS",
        ),
        (("--lengths", "noisy"), "--lengths 'noisy' is not known; allowed: oracle"),
        (("--lengths", "binned:5"), "--lengths 'binned:5' is not known; allowed: binned:2, binned:4, binned:6"),
        (("--headroom", "0"), "--headroom 0 is out of range; allowed: above 0"),
        (("--plan-interval-s", "0"), "--plan-interval-s 0 is out of range; allowed: above 0 s"),
        (
            ("--engine", "temporal", "--prefill-decode-interval", "1"),
            "--prefill-decode-interval is 1; allowed with temporal: 0",
        ),
        (("--instances-max", "1"), "--instances-max 1 is out of range; allowed: at least 2"),
    ],
)
def test_bad_flags_are_named_and_end_with_2(
    trace_file: Path, capsys: pytest.CaptureFixture[str], flags: tuple[str, ...], message: str
) -> None:
    assert simulate.main([*cli(trace_file, "--policy", "combined-scaling"), *flags]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ("", "at least one request"),
        ("5,10,10\n4,10,10\n", "line 3"),
        ("-1,10,10\n", "line 2"),
        ("1,0,10\n", "line 2"),
        ("soon,10,10\n", "line 2"),
    ],
    ids=["empty", "unsorted", "negative", "no prompt", "no number"],
)
def test_bad_traces_are_named_and_end_with_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], rows: str, message: str
) -> None:
    path = tmp_path / "bad.csv"
    path.write_text("arrival_s,input_tokens,output_tokens\n" + rows)
    assert simulate.main(cli(path)) == 2
    assert message in capsys.readouterr().err


def test_a_profile_without_decode_is_refused(
    trace_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    values = json.loads((FOLDER / "linear.json").read_text())
    without = {key: one for key, one in values.items() if key != "decode"}
    path = tmp_path / "profile.json"
    for changed, message in (
        (without, "profile: missing decode; needed:"),
        (without | {"decode": {}}, "decode: missing base_s, request_s, read_s"),
    ):
        path.write_text(json.dumps(changed))
        assert simulate.main(cli(trace_file, "--profile", str(path))) == 2
        assert message in capsys.readouterr().err


@pytest.mark.parametrize("lengths", ["survival", "binned", "binned:2", "noisy:500"])
def test_predictors_between_all_and_nothing(lengths: str) -> None:
    outcome = run_experiment(Experiment("star", SLO, instances=4, lengths=lengths), workload())
    assert outcome.result.counts["finished"] == 150


@pytest.mark.parametrize("limit", [None, 100])
def test_ended_answers_are_learned_from(limit: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that met their limit have not ended by themselves; a request that runs is never done."""
    made: list[SurvivalPredictor] = []
    told: list[float] = []

    class Watched(SurvivalPredictor):
        def __init__(self) -> None:
            super().__init__()
            made.append(self)

        def predict(self, answers: RunningAnswers) -> Floats:
            found = super().predict(answers)
            told.extend(found[~np.isnan(found)])
            return found

    monkeypatch.setitem(experiment_module.PLAIN_LENGTHS, "survival", Watched)
    trace = workload()
    experiment = Experiment("star", SLO, instances=4, lengths="survival", output_limit_tokens=limit)
    assert run_experiment(experiment, trace).result.counts["finished"] == 150
    learned = made[-1].to_dict()
    wanted = int((trace.output_tokens < (limit or math.inf)).sum())
    assert (learned["ended"], learned["whole"]) == (150, wanted)
    assert told
    assert min(told) >= 1.0


def test_a_predictor_sees_less_than_the_truth() -> None:
    known = np.array([100.0, 5000.0, 40_000.0])
    answers = RunningAnswers.of(RunningAnswer(rid, 0, left) for rid, left in zip("abc", known, strict=True))
    assert length_predictor("oracle", 1).predict(answers).tolist() == known.tolist()
    assert length_predictor("binned", 1).predict(answers).tolist() == [1024.0, 5120.0, 24_576.0]
    noisy = length_predictor("noisy:300", 1).predict(answers)
    assert noisy.tolist() == length_predictor("noisy:300", 1).predict(answers).tolist()
    assert noisy.tolist() != known.tolist()


def test_flags_that_a_search_does_not_use_are_refused(trace_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert simulate.main(["find-capacity", *cli(trace_file, "--rates", "5")]) == 2
    assert "--rates is for run" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (["--policy", "arrow", "--compare", "dopd,star"], "--policy and --compare contradict each other"),
        (["--low", "5"], "--low is for find-capacity; run takes --rates"),
        (["--polcy", "arrow"], "unknown argument '--polcy'; did you mean '--policy'?"),
        (["--polcy=arrow"], "unknown argument '--polcy'; did you mean '--policy'?"),
        (["--compare", "arrow,stra"], "--policy 'stra' is not known; did you mean 'star'? allowed: round-robin"),
    ],
)
def test_contradictions_and_typing_mistakes_are_refused(
    flags: list[str], line: str, trace_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert simulate.main(cli(trace_file, *flags)) == 2
    assert line in capsys.readouterr().err


def test_a_file_may_name_a_policy_beside_compare(trace_file: Path, tmp_path: Path) -> None:
    """It does when ``--print-config`` has written it."""
    file = tmp_path / "sim.yaml"
    file.write_text("policy: arrow\nlow: 5\n")
    assert simulate.main(cli(trace_file, "--config", str(file), "--compare", "round-robin,least-requests")) == 0


def test_a_single_request_has_no_rate_and_still_a_result(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_plain(workload(1), tmp_path / "one.csv")
    assert simulate.main(cli(tmp_path / "one.csv")) == 0
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert last["workload"]["rate_per_s"] is None
    assert last["runs"][0]["finished"] == 1
