"""What-if from a recording: what is read, how parity becomes an interval, what is refused."""

from __future__ import annotations

import dataclasses
import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.served_recording import ENGINE, HOST, PROFILE, REQUESTS, load_of, record, serve

from pla_sglang.common.errors import ConfigError
from pla_sglang.fleet.router.control.observability.recorder import DecisionRecorder
from pla_sglang.policy.interface.fleet import FleetView, InstanceKind, InstanceState, InstanceView, RequestView
from pla_sglang.policy.registry import Setup
from pla_sglang.profiles.load import load_profile
from pla_sglang.recording.file import RecordWriter
from pla_sglang.recording.rows import VERSION, RecordError
from pla_sglang.recording.setup import header_of
from pla_sglang.sim.core.experiment import run_experiment
from pla_sglang.sim.metrics.goodput import Served, Slo
from pla_sglang.sim.planning.recorded import BLOCK_TOKENS, is_recording, read_run
from pla_sglang.sim.planning.what_if import (
    check_other,
    correct,
    experiment_of,
    find_fewest_instances,
    fit_host,
    predict,
    replay_recorded,
    widen,
)
from pla_sglang.sim.report.what_if_page import make_what_if_page
from pla_sglang.sim.workload import Trace
from pla_sglang.simulate import main


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Path:
    trace = load_of()
    return record(tmp_path_factory.mktemp("run") / "run.jsonl.gz", trace, serve(trace), stateless=False)


def test_a_recording_is_read_as_it_was_served(recording: Path) -> None:
    run, trace = read_run(recording), load_of()
    assert is_recording(recording)
    assert run.trace.arrival_s == pytest.approx(trace.arrival_s)
    assert run.trace.input_tokens.tolist() == trace.input_tokens.tolist()
    assert run.trace.output_tokens.tolist() == trace.output_tokens.tolist()
    assert run.served.ttft_s() == pytest.approx(serve(trace).ttft_s(), abs=1e-6)
    assert (run.kinds, run.changes, run.unserved) == (("unified", "unified"), (), 0)


def test_the_recorded_fleet_is_the_one_that_is_simulated(recording: Path) -> None:
    base = experiment_of(read_run(recording))
    assert (base.policy, base.instances, base.prefills, base.stateless) == ("round-robin", 2, None, False)
    assert (base.engine, base.chunk_tokens, base.slots, base.slo) == ("fcfs", 8192, 256, Slo(0.3, 0.02))


def test_the_hosts_are_fitted_and_the_replay_comes_near(recording: Path) -> None:
    known = replay_recorded(read_run(recording), experiment_of(read_run(recording)))
    assert known.host.step_s == pytest.approx(HOST.step_s, rel=0.3)
    assert known.replayed["ttft_p50_s"] == pytest.approx(known.recorded["ttft_p50_s"], rel=0.1)
    assert len(known.spans) == 19
    assert known.confidence == pytest.approx((len(known.spans) - 1) / (len(known.spans) + 1))


@pytest.mark.parametrize(
    "changes",
    [{"policy": "least-tokens"}, {"instances": 3}, {"slo": Slo(0.1, 0.012)}],
    ids=["policy", "fleet", "targets"],
)
def test_what_comes_of_a_switch_lies_in_its_interval(recording: Path, changes: dict[str, Any]) -> None:
    run = read_run(recording)
    base = experiment_of(run)
    known = replay_recorded(run, base)
    other = dataclasses.replace(base, **changes)
    answer = predict(known, other)
    live = run_experiment(dataclasses.replace(other, host=HOST), load_of()).figures
    for name in ("attainment", "ttft_p90_s", "tpot_p90_s"):
        assert answer[name].holds(getattr(live, name)), (name, answer[name], getattr(live, name))
        assert answer[name].low <= answer[name].predicted <= answer[name].high


def test_the_error_is_applied_by_rank() -> None:
    """Two requests that changed places are no error; a run twice as slow doubles every time."""
    zero = np.zeros(4)
    tokens = np.full(4, 11)

    def run_of(first: list[float]) -> Served:
        return Served(zero, np.array(first), np.array(first) + 1.0, tokens)

    simulated, swapped, slow = run_of([1, 2, 3, 4]), run_of([2, 1, 4, 3]), run_of([2, 4, 6, 8])
    other = run_of([5, 1, 7, 2])
    assert correct(other, swapped, simulated).ttft_s() == pytest.approx(other.ttft_s())
    assert correct(other, slow, simulated).ttft_s() == pytest.approx(2 * other.ttft_s())
    assert correct(other, slow, simulated).tpot_s() == pytest.approx(other.tpot_s())
    lost = dataclasses.replace(other, finish_s=np.array([np.nan, 2.0, 8.0, 3.0]))
    assert np.isnan(correct(lost, slow, simulated).finish_s).tolist() == [True, False, False, False]


def test_a_share_of_few_requests_is_widened() -> None:
    assert widen(1.0, 100, 0.9, up=True) == 1.0
    assert widen(1.0, 100, 0.9, up=False) == pytest.approx(0.9737, abs=1e-3)  # z = 1.645: 1/(1 + z²/n)
    assert widen(0.5, 10**6, 0.9, up=False) == pytest.approx(0.5, abs=1e-3)


def test_constants_come_from_medians() -> None:
    tokens, zero = np.full(3, 11), np.zeros(3)
    simulated = Served(zero, np.full(3, 0.1), np.full(3, 0.3), tokens)
    live = Served(zero, np.full(3, 0.115), np.full(3, 0.365), tokens)
    host = fit_host(live, simulated, pairs=False)
    assert (host.step_s, host.front_s) == pytest.approx((0.005, 0.010))
    pair = fit_host(live, simulated, pairs=True)
    assert (pair.room_first, pair.front_s, pair.handoff_s) == (True, pytest.approx(0.01 / 3), pytest.approx(0.01 / 3))


def test_prefixes_are_those_that_the_router_knew(tmp_path: Path) -> None:
    """A third turn shares what its instance had of the second, of its own session, not what came last."""
    trace = Trace("t", np.arange(4.0), np.array([640, 640, 900, 700]), np.full(4, 64))
    path = record(
        tmp_path / "run.jsonl",
        trace,
        Served(trace.arrival_s, trace.arrival_s + 0.1, trace.arrival_s + 0.2, trace.output_tokens),
    )
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        if line["type"] == "arrival":
            line["session"] = {"r0": "a", "r1": "b", "r2": "a", "r3": "b"}[line["rid"]]
        if line["type"] == "dispatched":
            line["cached"] = {"r2": {"0": 700}, "r3": {"1": 640}}.get(line["rid"], {})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    ids = read_run(path).trace.hash_ids
    assert ids is not None
    assert ids[2][: 640 // BLOCK_TOKENS] == ids[0]
    assert ids[3][:10] == ids[1]
    assert not set(ids[2]) & set(ids[3])


def change(path: Path, target: Path, **fields: Any) -> Path:
    """The recording with other fields in its header."""
    header, *lines = gzip.decompress(path.read_bytes()).decode().splitlines()
    target.write_text("\n".join([json.dumps(json.loads(header) | fields), *lines]) + "\n")
    return target


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"version": VERSION + 1}, f"version {VERSION + 1}; this program reads"),
        ({"version": VERSION - 1, "engine": None}, f"version {VERSION - 1} of a recording does not say"),
        ({"engine": {"order": "lpm"}}, "--schedule-policy lpm are not simulated"),
    ],
)
def test_recordings_that_cannot_be_answered_from(
    fields: dict[str, Any], message: str, recording: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--trace", str(change(recording, tmp_path / "run.jsonl", **fields)), "--policy", "least-tokens"]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_an_empty_recording_a_short_one_and_a_fleet_that_changed(tmp_path: Path, recording: Path) -> None:
    header = change(recording, tmp_path / "a.jsonl").read_text().splitlines()[0]
    (tmp_path / "b.jsonl").write_text(header + "\n")
    with pytest.raises(RecordError, match="no request was served"):
        read_run(tmp_path / "b.jsonl")
    short = load_of(60)
    run = read_run(record(tmp_path / "c.jsonl", short, serve(short), stateless=False))
    with pytest.raises(RecordError, match="60 served requests say too little"):
        replay_recorded(run, experiment_of(run))
    with pytest.raises(RecordError, match="w1 left"):
        experiment_of(dataclasses.replace(run, changes=("w1 left",)))


def test_requests_count_from_when_all_instances_were_ready(tmp_path: Path) -> None:
    """The first one may come while they start; one that joins later is a change."""
    views = [InstanceView(index, f"w{index}", InstanceKind.UNIFIED, state=InstanceState.STARTING) for index in range(2)]
    steps, fleet = load_profile(PROFILE), FleetView(views)
    setup = Setup(steps, kv_capacity_tokens=1000, ttft_slo_s=1.0, tpot_slo_s=0.1)
    recorder = DecisionRecorder(
        RecordWriter(tmp_path / "run.jsonl"), header_of("round-robin", PROFILE, 1.0, setup, ENGINE), fleet
    )
    for number in range(4):
        request = RequestView(f"r{number}", 100, 5.0 + number)
        recorder.write_arrival(request, 5.0 + number)
        recorder.write_finish(request, 5, 5.5 + number)
        if number < 2:
            fleet.set_state(views[number], InstanceState.READY)
            recorder.write_views(5.7 + number)
    recorder.close_recorder()
    run = read_run(tmp_path / "run.jsonl")
    assert (len(run.trace), run.unserved, run.kinds, run.changes) == (2, 2, ("unified", "unified"), ())


def test_a_loss_while_it_was_recorded_is_seen(tmp_path: Path) -> None:
    views = [InstanceView(index, f"w{index}", InstanceKind.UNIFIED) for index in range(2)]
    steps, fleet = load_profile(PROFILE), FleetView(views)
    setup = Setup(steps, kv_capacity_tokens=1000, ttft_slo_s=1.0, tpot_slo_s=0.1)
    recorder = DecisionRecorder(
        RecordWriter(tmp_path / "run.jsonl"), header_of("round-robin", PROFILE, 1.0, setup, ENGINE), fleet
    )
    for number in range(2):
        request = RequestView(f"r{number}", 100, 5.0 + number)
        recorder.write_arrival(request, 5.0 + number)
        recorder.write_finish(request, 5, 6.0 + number)
        fleet.set_state(views[number], InstanceState.DEAD)
    recorder.close_recorder()
    assert read_run(tmp_path / "run.jsonl").changes == ("w0 left",)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--profile", "h200-qwen2.5-14b-tp1"], "the recording was served on h100-llama3.1-8b-tp1"),
        (["--rates", "50"], "says nothing of another load"),
        (["--instances", "1", "--policy", "least-tokens"], "and more"),
        (["--planner", "dopd"], "grows or shrinks"),
        (["--head", "5"], "--head is not for a recording"),
        (["--report", "/nowhere/x.html"], "--report"),
    ],
)
def test_outside_of_what_was_recorded_one_line_says_so(
    flags: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An even load: nobody has seen an instance with twice of it."""
    rows = np.arange(120)
    trace = Trace("even", (rows * 0.1).astype(np.float64), np.full(120, 1000), np.full(120, 20))
    path = record(tmp_path / "run.jsonl", trace, serve(trace), stateless=False)
    assert main(["--trace", str(path), *flags]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_the_command_answers_for_several_policies(recording: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--trace", str(recording), "--compare", "round-robin,least-tokens,least-requests", "--json"]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])["what_if"]
    assert [other["policy"] for other in result["others"]] == ["least-tokens", "least-requests"]
    assert result["recorded"]["policy"] == "round-robin"
    assert {"predicted", "low", "high"} == set(result["others"][0]["attainment"])


def test_the_page_has_measured_beside_simulated(recording: Path, tmp_path: Path) -> None:
    """With the interval of each answer, the error by span, and what the recording says nothing of."""
    run = read_run(recording)
    known = replay_recorded(run, experiment_of(run))
    others = [
        dataclasses.replace(known.experiment, policy="least-tokens"),
        dataclasses.replace(known.experiment, instances=3, slo=Slo(0.05, 0.02)),
    ]
    answers = [predict(known, other) for other in others]
    page = make_what_if_page(known, others, answers, {"seed": 1})
    sections = {section.heading: section for section in page.sections}

    assert page.verdict[0].startswith(f"{100 * known.recorded['attainment']:.4g} % of the recorded requests kept")
    assert [line[:2] for line in page.verdict[1:]] == ["A,", "B,"]
    assert "by these targets" in page.verdict[2]
    (bars,) = sections["Attainment"].figure["data"]
    assert bars["y"] == ["measured", "simulated", "A", "B"]
    assert bars["x"][2] == pytest.approx(100 * answers[0]["attainment"].predicted, rel=1e-3)
    ends = [value - minus for value, minus in zip(bars["x"], bars["error_x"]["arrayminus"], strict=True)]
    assert ends[3] == pytest.approx(100 * answers[1]["attainment"].low, rel=1e-3)
    names = [line["name"] for line in sections["TTFT, measured beside simulated"].figure["data"]]
    assert names == ["measured", "simulated"]
    assert len(sections["The simulator's error by span"].table.rows) == len(known.spans)
    assert [row[0] for row in sections["Figures"].table.rows][:2] == ["measured", "simulated"]
    limits = [row[0] for row in sections["Outside of what was recorded"].table.rows]
    assert limits[0].startswith(f"Another profile than {PROFILE}")
    busy = dataclasses.replace(known, load_seen=known.load_seen / 4)
    fewest = find_fewest_instances(busy)
    limits = [row[0] for row in make_what_if_page(busy, (), (), {}).sections[-1].table.rows]
    assert limits[0].startswith(f"Fewer than {fewest} instances: each would have more work")
    with pytest.raises(ConfigError, match=f"allowed: {fewest} and more"):
        check_other(busy, dataclasses.replace(known.experiment, instances=fewest - 1))


def test_the_command_writes_page_and_figures(recording: Path, tmp_path: Path) -> None:
    page, folder = tmp_path / "what.html", tmp_path / "out"
    flags = ["--compare", "least-tokens", "--report", str(page), "--out", str(folder)]
    assert main(["--trace", str(recording), *flags]) == 0
    assert page.read_text() == (folder / "report.html").read_text()
    assert "TTFT, measured beside simulated" in page.read_text()
    (other,) = json.loads((folder / "summary.json").read_text())["what_if"]["others"]
    assert other["policy"] == "least-tokens"


def test_a_recording_is_a_trace_for_the_other_commands(recording: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["find-capacity", "--trace", str(recording), "--policy", "round-robin", "--high", "5", "--json"]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["workload"]["requests"] == REQUESTS


def test_the_same_fleet_may_be_asked_for(recording: Path) -> None:
    run = read_run(recording)
    known = replay_recorded(run, experiment_of(run))
    check_other(known, known.experiment)
