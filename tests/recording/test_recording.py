"""Recordings: what is written is what is read, views survive as differences, and a replay that differs is found out."""

from __future__ import annotations

import json
import re
from pathlib import Path
from random import Random

import pytest

from pla_sglang.fleet.router.control.observability.recorder import DecisionRecorder
from pla_sglang.fleet.router.control.policy_setup import RouterEffects
from pla_sglang.parity import main, replay_file
from pla_sglang.policy.common.step_model import GPU_START
from pla_sglang.policy.interface.decisions import MeasuredPass, PrefillSample
from pla_sglang.policy.interface.fleet import FleetView, InstanceState, InstanceView, RequestView, Role
from pla_sglang.policy.interface.prefill import PrefillClass
from pla_sglang.policy.measured_steps import MeasuredSteps
from pla_sglang.policy.pairs import PairRunner
from pla_sglang.policy.registry import Setup, build
from pla_sglang.policy.slo.mixed_batches import START
from pla_sglang.profiles.load import load_profile
from pla_sglang.profiles.scaled import load_scaled
from pla_sglang.recording.file import RecordWriter, read
from pla_sglang.recording.rows import VERSION, RecordError
from pla_sglang.recording.setup import header_of, setup_of
from pla_sglang.recording.views import Differ, restore
from pla_sglang.sim.core.parity import Parity

PROFILE = "linear"


def setup(**fields: object) -> Setup:
    values = {"kv_capacity_tokens": 10_000, "ttft_slo_s": 0.5, "tpot_slo_s": 0.1, "instances": 4} | fields
    return Setup(**({"steps": load_profile(PROFILE)} | values))  # type: ignore[arg-type]


def pass_of(new: int, history: int) -> MeasuredPass:
    """On a device whose boundary lies at 1,000 tokens without history."""
    attention = new * (new + 2 * history)
    return MeasuredPass(new, attention, history, max(0.05, 0.01 + 4e-5 * new + 2e-9 * attention))


def record(path: Path, policy: str, *, requests: int = 120, **fields: object) -> None:
    """A made-up life of four instances, driven as the router drives them."""
    made = setup(**fields)
    rng = Random(5)
    fleet = FleetView([InstanceView(index, f"i{index}") for index in range(4)])
    for index, role in enumerate((Role.PREFILL, Role.PREFILL, Role.DECODE, Role.DECODE)):
        fleet.set_role(fleet.instances[index], role, 0.0)
    recorder = DecisionRecorder(RecordWriter(path), header_of(policy, PROFILE, 2.0, made), fleet)
    effects = RouterEffects(fleet, lambda view: None)
    driver = PairRunner(build(policy, made), fleet, effects, recording=recorder)
    for number in range(requests):
        now_s = number * 0.1
        request = RequestView(f"r{number}", rng.randrange(1, 2000), now_s, {rng.randrange(4): rng.randrange(500)})
        driver.arrive(request, now_s)
        driver.choose(request, now_s)
        for view in fleet.instances:
            view.queued_prefills = rng.randrange(4)
            view.queued_tokens = view.queued_prefills * rng.randrange(1, 900)
            view.queued_attention = view.queued_tokens**2
            view.utilisation = rng.random()
            view.kv_used_tokens, view.kv_cached_tokens = rng.randrange(5000), rng.randrange(5000)
            view.evicted_next_s = rng.choice([None, now_s - rng.uniform(0, 200)])
        view = rng.choice(fleet.instances)
        steps = tuple(pass_of(int(2 ** rng.uniform(4, 12)), rng.randrange(8000)) for _ in range(3))
        driver.prefilled(PrefillSample(view, 100, 10_000, 0, 1, rng.uniform(0.05, 0.6), steps), now_s)
        driver.first_token(request, view, now_s + 0.01)
        driver.token_interval(view, rng.random(), now_s + 0.02)
        if number == 40:
            fleet.set_state(fleet.instances[0], InstanceState.DRAINING)
            driver.record_views(now_s + 0.03)
        if number == 60:
            fleet.set_state(fleet.instances[0], InstanceState.READY)
            driver.record_views(now_s + 0.03)
        for place in range(len(driver.policy.controllers)):
            driver.tick(place, now_s + 0.04)
        driver.finish(request, 5, now_s + 0.05)
    recorder.close_recorder()


@pytest.mark.parametrize("policy", ["round-robin", "two-choices", "cache-aware", "minimal-load", "pla", "arrow"])
def test_a_replay_decides_the_same(policy: str, tmp_path: Path) -> None:
    check_replay(tmp_path / "run.jsonl", policy)


@pytest.mark.parametrize("policy", ["dopd", "combined", "combined-roles"])
def test_a_replay_flips_the_same_stateless_instances(policy: str, tmp_path: Path) -> None:
    fields = {"migrates": False, "scales": False, "plan_interval_s": 1.0}
    result = check_replay(tmp_path / "run.jsonl", policy, **fields)
    assert policy != "dopd" or result.reasons["dopd.ratio"] > 0, result.reasons
    assert result.flips_identical == result.flips > 0


def test_a_recording_from_before_caches_were_known_can_be_read(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    record(path, "least-tokens")
    text = re.sub(r',?"(kv_cached_tokens|evicted_next_s)":(null|[-0-9.e]+)', "", path.read_text(encoding="utf-8"))
    path.write_text(text.replace("{,", "{").replace(f'"version":{VERSION}', '"version":4'), encoding="utf-8")
    _, result = replay_file(path)
    assert result.identical_share == 1.0, result.differences


def test_a_flip_that_comes_out_otherwise_is_counted(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    record(path, "arrow")
    text = path.read_text(encoding="utf-8")
    path.write_text(re.sub(r'(\["set_role","[^"]*",\d,")[a-z_]+"', r'\1mixed"', text, count=1), encoding="utf-8")
    _, result = replay_file(path)
    assert result.flips - result.flips_identical == len(result.differences) == 1


def check_replay(path: Path, policy: str, **fields: object) -> Parity:
    record(path, policy, **fields)
    header, result = replay_file(path)
    assert setup_of(header) == setup(**fields)
    assert result.decisions["dispatched"] == 120
    assert result.identical_share == 1.0, result.differences
    return result


def test_a_recording_from_before_device_time_replays_as_it_was(tmp_path: Path) -> None:
    """Its policies ran on wall time, with the steps of a slowed device."""
    path = tmp_path / "run.jsonl"
    record(path, "minimal-load", steps=load_scaled(PROFILE, 2.0))
    rewritten(path, ',"device_time":true', "")
    header, result = replay_file(path)
    assert (header.device_time, header.time_scale) == (False, 2.0)
    assert setup_of(header).steps == load_scaled(PROFILE, 2.0)
    assert result.identical_share == 1.0, result.differences


def rewritten(path: Path, old: str, new: str, *, count: int = -1) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, count))


def test_another_seed_is_found_out(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    record(path, "two-choices")
    rewritten(path, '"seed":1', '"seed":2')
    _, result = replay_file(path)
    assert 0.5 < result.identical_share < 0.99  # of two members, both are drawn
    assert result.count - sum(result.identical.values()) == len(result.differences)
    assert main([str(path), "--require", "0.99"]) == 1


def test_a_boundary_that_learned_nothing_is_found_out(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    record(path, "pla")
    path.write_text(re.sub(r',"steps":\[\[.*?\]\]', "", path.read_text()))
    assert replay_file(path)[1].identical_share < 1.0


def test_lost_history_is_found_out(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    record(path, "minimal-load")
    lines = path.read_text().splitlines()
    path.write_text("\n".join(line for line in lines if '"prefilled"' not in line) + "\n")
    assert replay_file(path)[1].identical_share < 0.8  # the predictor was never corrected


def test_a_page_of_a_recording(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, page = tmp_path / "run.jsonl", tmp_path / "run.html"
    record(path, "arrow")
    assert main([str(path), "--report", str(page)]) == 0
    assert capsys.readouterr().out.splitlines()[-2] == f"report: {page}"
    html = page.read_text()
    assert "100 % of " in html
    assert "decisions came out as they did live." in html
    assert "The prefill instance with the least predicted delay keeps the TTFT target" in html
    assert "First differences" not in html
    record(path, "two-choices")
    rewritten(path, '"seed":1', '"seed":2')
    main([str(path), "--report", str(page)])
    assert "First differences" in page.read_text()
    assert main([str(path), "--report", str(tmp_path / "no" / "x.html")]) == 2


def test_the_last_line_is_the_result(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.jsonl"
    record(path, "round-robin", requests=10)
    assert main([str(path), "--require", "1"]) == 0
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (figures["decisions"], figures["identical_share"], figures["policy"]) == (20, 1.0, "round-robin")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"type":"header"', '"type":"views"', "line 1"),
        (f'"version":{VERSION}', '"version":9', "version 9"),
        ('"type":"dispatched"', '"type":"nothing"', "line"),
        ('"rid":"r3"', '"rid":"r9999"', "does not fit"),
        ('"queued_tokens"', '"queued_tonkes"', "does not fit"),
        ('"tpot_slo_s"', '"tpot"', "unknown fields"),
    ],
)
def test_damaged_recordings(old: str, new: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    record(path, "minimal-load", requests=10)
    rewritten(path, old, new, count=1)
    with pytest.raises((RecordError, ValueError), match=message):
        replay_file(path)


def test_files_that_are_none(tmp_path: Path) -> None:
    assert main([str(tmp_path / "nowhere")]) == 2
    empty = tmp_path / "empty"
    empty.write_text("")
    assert main([str(empty)]) == 2
    header = tmp_path / "header.jsonl"
    record(header, "round-robin", requests=0)
    assert main([str(header)]) == 2  # nothing to decide: no share


def test_views_come_back_as_they_were() -> None:
    rng = Random(2)
    fleet, copy, differ = FleetView(), FleetView(), Differ()
    for step in range(300):
        if step % 60 == 0:
            fleet.add(InstanceView(len(fleet.instances), f"i{step}", state=InstanceState.STARTING))
        view = rng.choice(fleet.instances)
        view.running, view.token_interval_s = rng.randrange(9), rng.choice([None, 0.5])
        view.kv_cached_tokens, view.evicted_next_s = rng.randrange(9), rng.choice([None, step - 0.5])
        view.length_class = rng.choice([None, *PrefillClass])
        if step % 3 == 0:
            fleet.set_role(view, rng.choice(list(Role)), float(step))
        elif step % 3 == 1 and view.state is InstanceState.STARTING:
            fleet.set_state(view, InstanceState.READY)
        elif step % 3 == 2 and view.state is InstanceState.READY:
            fleet.set_state(view, InstanceState.DRAINING)
        elif view.state is InstanceState.DRAINING:
            fleet.set_state(view, InstanceState.READY)
        restore(copy, differ.changes(fleet))
        assert differ.changes(fleet) == {}
        assert [str(one) for one in copy.ready] == [str(one) for one in fleet.ready]
        for role in Role:
            assert [one.name for one in copy.by_role[role]] == [one.name for one in fleet.by_role[role]]
        for field in ("running", "kv_cached_tokens", "evicted_next_s"):
            assert [getattr(one, field) for one in copy.instances] == [getattr(one, field) for one in fleet.instances]
    copy.check_integrity()


def test_step_times_come_back_as_they_were() -> None:
    linear, h100 = load_profile(PROFILE), load_profile("h100-llama3.1-8b-tp1")
    fleet, copy, differ = FleetView([InstanceView(index, f"i{index}") for index in range(4)]), FleetView(), Differ()
    told, measured, other, both = fleet.instances
    measured.steps = MeasuredSteps(linear, GPU_START, None)
    other.profile, other.steps = h100.name, h100
    both.profile, both.steps = h100.name, MeasuredSteps(h100, GPU_START, START)
    changes = json.loads(json.dumps(differ.changes(fleet)))
    restore(copy, {int(index): fields for index, fields in changes.items()}, linear)
    assert [one.steps for one in copy.instances] == [None, measured.steps, h100, both.steps]
    told.steps = MeasuredSteps(linear, None, START)
    both.steps = MeasuredSteps(h100, None, START)
    restore(copy, differ.changes(fleet), linear)
    assert [one.steps for one in copy.instances] == [one.steps for one in fleet.instances]


def test_a_second_header_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    record(path, "round-robin", requests=1)
    text = path.read_text()
    path.write_text(text + text.splitlines()[0] + "\n")
    with pytest.raises(RecordError, match="begins with its header"):
        list(read(path))


def test_a_file_that_is_no_recording_is_called_so(tmp_path: Path) -> None:
    file = tmp_path / "trace.csv"
    file.write_text("arrival_s,input_tokens,output_tokens\n0,1,1\n")
    with pytest.raises(RecordError, match=r"trace.csv is no recording of the router \(--record\)"):
        list(read(file))
