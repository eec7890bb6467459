"""The lower bound by hand, against the best of all schedules on small cases, and against simulated fleets."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import random
from pathlib import Path

import numpy as np
import pytest
from scipy.optimize import linprog
from support.traces import steady_trace, write_plain

from pla_sglang import simulate
from pla_sglang.common.errors import ConfigError
from pla_sglang.profiles import StepProfile, load_profile
from pla_sglang.sim.core.experiment import Experiment, run_experiment
from pla_sglang.sim.core.lower_bound import (
    Demands,
    charge_requests,
    choose_windows,
    count_overlaps,
    find_demands,
)
from pla_sglang.sim.core.paid_starts import Bins, Prices, find_path, least_with_starts
from pla_sglang.sim.core.upper_bound import LeastWork
from pla_sglang.sim.metrics.goodput import Slo
from pla_sglang.sim.planning.lower_bound import BoundResult, BoundTask, find_lower_bound, join_parts
from pla_sglang.sim.workload import Trace

PROFILE = "h100-llama3.1-8b-tp1"
SLO = Slo(2.0, 0.1)
DAY_S = 86400.0


def make_trace(seed: int, count: int = 60) -> Trace:
    """Bursts of requests of all sizes."""
    rng = random.Random(seed)
    rate_per_s = rng.choice((0.05, 0.5, 5.0, 40.0))
    gaps = [rng.expovariate(rate_per_s) * rng.choice((0.01, 1.0, 1.0)) for _ in range(count)]
    inputs = [round(math.exp(rng.uniform(3.0, 8.5))) for _ in range(count)]
    outputs = [rng.choice((1, 2, rng.randint(3, 40), rng.randint(40, 400))) for _ in range(count)]
    return Trace(f"random {seed}", np.cumsum(gaps) - gaps[0], np.array(inputs), np.array(outputs))


def bound_of(
    trace: Trace, slo: Slo = SLO, *, target: float = 1.0, startup_s: float = 0.0, floor: int = 0, profile: str = PROFILE
) -> BoundResult:
    return find_lower_bound(Experiment("arrow", slo, profile=profile), trace, BoundTask(target, startup_s, floor))


def make_demands(windows: list[tuple[float, float]], alone_s: list[float]) -> Demands:
    """Requests that bear nothing but what they take alone."""
    count = len(windows)
    start_s, end_s = (np.array(column) for column in zip(*windows, strict=True))
    zeros, never = np.zeros(count), np.zeros(count, np.bool_)
    work = LeastWork(zeros, zeros, end_s - start_s, 0.0)
    return Demands(start_s, work, np.array(alone_s), zeros, zeros, zeros, zeros, never, never, never)


# -- by hand -----------------------------------------------------------------------------------------------------------


def test_two_requests_by_hand(linear: StepProfile) -> None:
    """Step times: 20 ms and 1 ms a token; they come 100 s apart, so neither shares a pass with anybody."""
    assert (linear.prefill.floor_s, linear.prefill.base_s, linear.prefill.token_s) == (0.02, 0.02, 0.001)
    assert (linear.decode.base_s, linear.decode.request_s, linear.decode.read_s) == (0.02, 0.001, 0.0)
    trace = Trace("two", np.array([0.0, 100.0]), np.array([100, 50]), np.array([11, 1]))
    first_s = (0.02 + 100 * 0.001) + 10 * (0.02 + 0.001)  # a prefill, and ten steps of a batch of one
    second_s = 0.02 + 50 * 0.001
    bound = bound_of(trace, Slo(1.0, 0.1), profile="linear")
    assert 3600 * bound.lower_bound_gpu_hours == pytest.approx(first_s + second_s)
    assert 3600 * bound.work_gpu_hours == pytest.approx(0.15 + 10 * 0.001 + 0.02 * sum(range(100, 110)) / 64000)
    assert (bound.peak_replicas, bound.infeasible, bound.attainment) == (1, 0, 1.0)
    assert 3600 * bound.fixed_gpu_hours == pytest.approx(100.0 + second_s)
    half = bound_of(trace, Slo(1.0, 0.1), profile="linear", target=0.5)
    assert 3600 * half.lower_bound_gpu_hours == pytest.approx(second_s), "the dearer one is given up"
    started = bound_of(trace, Slo(1.0, 0.1), profile="linear", startup_s=5.0)
    assert 3600 * started.lower_bound_gpu_hours == pytest.approx(first_s + second_s + 5.0), "the first is there already"
    assert started.starts == 1
    kept_on = bound_of(trace, Slo(1.0, 0.1), profile="linear", startup_s=500.0)
    assert 97.0 < 3600 * kept_on.lower_bound_gpu_hours <= 100.0 + second_s, "to stay is cheaper than to start again"


@pytest.fixture
def linear() -> StepProfile:
    return load_profile("linear")


def test_a_gap_of_days_costs_nothing_unless_a_floor_says_so() -> None:
    burst = steady_trace(50)
    later = dataclasses.replace(burst, arrival_s=burst.arrival_s + 40 * DAY_S)
    both = Trace(
        "gap",
        np.concatenate([burst.arrival_s, later.arrival_s]),
        np.tile(burst.input_tokens, 2),
        np.tile(burst.output_tokens, 2),
    )
    for startup_s in (0.0, 30.0):
        once, twice = bound_of(burst, startup_s=startup_s), bound_of(both, startup_s=startup_s)
        most = 2 * once.lower_bound_gpu_hours + startup_s / 3600
        assert once.lower_bound_gpu_hours < twice.lower_bound_gpu_hours <= most + 1e-9
        assert any(mean == 0.0 for _, mean in twice.curve())
        kept = bound_of(both, startup_s=startup_s, floor=2)
        assert 2 * 40 * 24 < kept.lower_bound_gpu_hours < 2 * 40 * 24 + 1


def test_the_curve_has_the_area_of_the_bound() -> None:
    bound = bound_of(make_trace(3, 400), target=0.9)
    assert sum(length_s * mean for _, length_s, mean in bound.parts) == pytest.approx(
        3600 * bound.lower_bound_gpu_hours
    )
    points = bound.curve()
    steps = sum((after - at) * mean for (at, mean), (after, _) in itertools.pairwise(points))
    assert steps == pytest.approx(3600 * bound.lower_bound_gpu_hours)
    assert points[-1][1] == 0.0
    parts = [(0.0, 1.0, 2.0), (5.0, 1.0, 4.0), (6.0, 2.0, 1.0)]
    assert join_parts(parts, 2) == [(0.0, 6.0, 1.0), (6.0, 2.0, 1.0)]


# -- against the best of all -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(20))
def test_chosen_windows_are_the_best_that_do_not_overlap(seed: int) -> None:
    rng = random.Random(seed)
    starts = np.sort([rng.randint(0, 12) for _ in range(8)]).astype(float)
    ends = starts + [rng.choice((0, 1, 2, 5)) for _ in range(8)]
    worth = np.array([rng.uniform(0.1, 2.0) for _ in range(8)])

    def apart(rows: tuple[int, ...]) -> bool:
        return all(ends[one] <= starts[two] or ends[two] <= starts[one] for one, two in itertools.combinations(rows, 2))

    best = max(
        worth[list(rows)].sum() for size in range(9) for rows in itertools.combinations(range(8), size) if apart(rows)
    )
    chosen = choose_windows(starts, ends, worth)
    assert apart(tuple(np.flatnonzero(chosen)))
    assert worth[chosen].sum() == pytest.approx(best)


@pytest.mark.parametrize("seed", range(20))
def test_overlaps_are_counted_at_their_most(seed: int) -> None:
    rng = random.Random(seed)
    starts = np.sort([rng.randint(0, 12) for _ in range(9)]).astype(float)
    ends = starts + [rng.choice((1, 2, 5, math.inf)) for _ in range(9)]
    for row, most in enumerate(count_overlaps(starts, ends).tolist()):
        times = [at for at in range(20) if starts[row] <= at <= ends[row]]
        assert most == max(((starts <= at) & (at <= ends)).sum() for at in times)


@pytest.mark.parametrize("seed", range(20))
def test_less_than_any_time_that_serves_all_windows(seed: int) -> None:
    """The least time, by a linear program, in which one instance could give every window what it takes alone."""
    rng = random.Random(seed)
    windows = sorted(
        (float(start), float(start + rng.randint(2, 8))) for start in (rng.randint(0, 20) for _ in range(7))
    )
    alone_s = [rng.uniform(0.1, 1.0) * (end - start) for start, end in windows]
    edges = sorted({edge for window in windows for edge in window})
    cells = list(itertools.pairwise(edges))
    inside = [[-1.0 if start <= left and right <= end else 0.0 for left, right in cells] for start, end in windows]
    sizes = [(0.0, right - left) for left, right in cells]
    least = linprog(np.ones(len(cells)), A_ub=inside, b_ub=[-alone for alone in alone_s], bounds=sizes)
    charged_s = charge_requests(make_demands(windows, alone_s)).sum_s.sum()
    assert 0 < charged_s <= least.fun + 1e-9


@pytest.mark.parametrize("seed", range(30))
def test_starts_cost_no_more_than_the_best_fleet_in_whole_seconds(seed: int) -> None:
    """By brute force over fleets that change at whole seconds: each bin's charges fit what the fleet has in it."""
    rng = random.Random(seed)
    startup_s, least, may_miss = rng.choice((0.5, 1.5, 4.0)), rng.choice((0, 0, 1)), rng.choice((0, 1))
    lengths = [rng.choice((1, 2)) for _ in range(4)]
    charges = [sorted((rng.uniform(0.1, 1.5) for _ in range(rng.randint(0, 3))), reverse=True) for _ in lengths]
    starts = np.concatenate([[0], np.cumsum(lengths)[:-1]])
    first = np.cumsum([0, *(len(values) + 1 for values in charges)])[:-1]
    dearest_s = np.concatenate([[*values, 0.0] for values in charges])
    left_s = np.concatenate([[*np.cumsum(values[::-1])[::-1], 0.0] for values in charges])
    bins = Bins(starts.astype(float), np.array(lengths, float), first, left_s, dearest_s)
    seconds, best = sum(lengths), math.inf
    for fleet in itertools.product(range(least, 4), repeat=seconds):
        cost = sum(fleet) + startup_s * sum(max(0, after - before) for before, after in itertools.pairwise(fleet))
        if cost < best and missed(fleet, starts, lengths, charges) <= may_miss:
            best = cost
    for price_s in (0.3, 1.0, 3.0, 100.0):
        prices = Prices(startup_s, price_s, least, 5)
        found_s, path = least_with_starts(bins, prices, may_miss), find_path(bins, prices, may_miss)
        assert found_s <= best + 1e-9
        assert path.instance_s == pytest.approx(found_s)
    if may_miss == 0:
        assert found_s == pytest.approx(sum(end * mean for _, end, mean in path.parts) + startup_s * path.starts)
        assert found_s >= sum(map(sum, charges)) - 1e-9


def missed(fleet: tuple[int, ...], starts: np.ndarray, lengths: list[int], charges: list[list[float]]) -> int:
    """The fewest that must be given up: in each bin the dearest, until the others fit."""
    count = 0
    for start, length, values in zip(starts, lengths, charges, strict=True):
        room = sum(fleet[start : start + length])
        count += next(given for given in range(len(values) + 1) if sum(values[given:]) <= room + 1e-12)
    return count


# -- against simulated fleets ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(12))
def test_no_simulated_fleet_that_keeps_the_targets_pays_less(seed: int) -> None:
    trace, rng = make_trace(seed), random.Random(seed)
    policy = rng.choice(("least-tokens", "combined", "static-pd", "arrow"))
    engine = rng.choice(("fcfs", "temporal"))
    slo = rng.choice((SLO, Slo(1.0, 0.03), Slo(30.0, 0.2)))
    profile = rng.choice((PROFILE, "linear", "h100-llama70b-fp8-dopd"))
    mixed = rng.random() < 0.5
    kept = 0
    for instances in (2, 3, 5, 8):
        experiment = Experiment(policy, slo, engine=engine, profile=profile, mixed=mixed, instances=instances)
        result = run_experiment(experiment, trace)
        if not result.figures.attainment:
            continue
        kept += 1
        for startup_s in (0.0, 7.0, 60.0):
            bound = bound_of(trace, slo, target=result.figures.attainment, startup_s=startup_s, profile=profile)
            assert bound.lower_bound_gpu_hours <= result.result.gpu_hours + 1e-9
            assert bound.fixed_gpu_hours <= result.result.gpu_hours + 1e-9
            assert bound.peak_replicas <= instances
    assert kept


@pytest.mark.parametrize("policy", ["threshold-scaler", "sla-scaler"])
def test_no_autoscaler_pays_less(policy: str) -> None:
    """Load that rises and falls, so that they start and stop instances."""
    rng = np.random.default_rng(1)
    rate_per_s = np.where(np.arange(600) // 150 % 2, 20.0, 1.0)
    at_s = np.repeat(np.arange(600), rng.poisson(rate_per_s)).astype(float)
    trace = Trace("waves", at_s - at_s[0], rng.integers(50, 3000, len(at_s)), rng.integers(1, 100, len(at_s)))
    for startup_s in (0.0, 20.0):
        experiment = Experiment(policy, SLO, instances=2, startup_s=startup_s, plan_interval_s=30.0)
        result = run_experiment(experiment, trace)
        bound = bound_of(trace, target=result.figures.attainment, startup_s=startup_s)
        assert 0 < bound.lower_bound_gpu_hours <= result.result.gpu_hours


def test_prefixes_that_others_have_are_not_charged_twice() -> None:
    """Prompts that share nearly all of what they hold: one instance keeps more of them than its KV tokens say."""
    count = 300
    ids = tuple((*range(40), 1000 + row) for row in range(count))
    sizes = np.full(count, 41 * 64), np.full(count, 60)
    trace = Trace("shared", np.arange(count) / 50.0, *sizes, hash_ids=ids, block_tokens=64)
    result = run_experiment(Experiment("least-tokens", Slo(2.0, 0.05), instances=1, mixed=True), trace)
    bound = bound_of(trace, Slo(2.0, 0.05), target=result.figures.attainment)
    assert 0 < bound.lower_bound_gpu_hours <= result.result.gpu_hours
    demands = find_demands(trace, SLO, dataclasses.replace(load_profile(PROFILE), kv_capacity_tokens=3000))
    private = find_demands(
        dataclasses.replace(trace, hash_ids=None),
        SLO,
        dataclasses.replace(load_profile(PROFILE), kv_capacity_tokens=3000),
    )
    assert (demands.memory_s < private.memory_s).all()


# -- how it moves ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("startup_s", [0.0, 20.0])
def test_less_is_asked_for_and_the_bound_is_not_higher(seed: int, startup_s: float) -> None:
    trace = make_trace(seed, 200)
    strict = bound_of(trace, Slo(1.0, 0.05), target=0.99, startup_s=startup_s)
    fewer = [bound_of(trace, Slo(1.0, 0.05), target=share, startup_s=startup_s) for share in (0.99, 0.95, 0.8, 0.3)]
    hours = [bound.lower_bound_gpu_hours for bound in fewer]
    assert hours == sorted(hours, reverse=True)
    assert bound_of(trace, Slo(1.0, 0.05), target=0.99).lower_bound_gpu_hours <= strict.lower_bound_gpu_hours + 1e-12


@pytest.mark.parametrize("seed", range(6))
def test_looser_targets_have_no_higher_bound(seed: int) -> None:
    """With instant start-ups, and nobody given up."""
    trace = make_trace(seed, 200)
    for slos in (
        (Slo(1.0, 0.02), Slo(1.0, 0.05), Slo(1.0, 0.2), Slo(1.0, math.inf)),
        (Slo(0.5, 0.05), Slo(5.0, 0.05), Slo(50.0, 0.05), Slo(math.inf, 0.05)),
    ):
        bounds = [bound_of(trace, slo) for slo in slos]
        assert {bound.infeasible for bound in bounds} == {0}
        hours = [bound.lower_bound_gpu_hours for bound in bounds]
        assert all(looser <= stricter * (1 + 1e-9) for stricter, looser in itertools.pairwise(hours))


@pytest.mark.parametrize("seed", range(6))
def test_work_does_not_depend_on_the_rate_and_the_bound_falls_to_it(seed: int) -> None:
    trace = make_trace(seed, 200)
    slow, fast = bound_of(trace), bound_of(trace.scale_rate(1000.0))
    assert fast.work_gpu_hours == pytest.approx(slow.work_gpu_hours)
    assert fast.work_gpu_hours <= fast.lower_bound_gpu_hours <= slow.lower_bound_gpu_hours * (1 + 1e-9)
    assert fast.peak_replicas >= slow.peak_replicas


# -- the command -------------------------------------------------------------------------------------------------------


@pytest.fixture
def command(tmp_path: Path) -> list[str]:
    write_plain(steady_trace(), tmp_path / "t.csv")
    return ["lower-bound", "--trace", str(tmp_path / "t.csv"), "--slo-ttft-ms", "500", "--slo-tpot-ms", "50"]


def test_the_command_prints_a_table_and_writes_json_and_a_page(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "bound.html"
    flags = ["--startup-s", "30", "--instances-min", "1", "--report", str(page), "--target", "0.99"]
    assert simulate.main([*command, *flags]) == 0
    *shown, last = capsys.readouterr().out.splitlines()
    assert any("any autoscaler" in line for line in shown)
    found = json.loads(last)
    assert found["complete"] is True
    assert 0 < found["work_gpu_hours"] <= found["lower_bound_gpu_hours"] <= found["fixed_gpu_hours"]
    assert (found["startup_s"], found["floor"], found["profile"]) == (30.0, 1, PROFILE)
    assert found["attainment"] >= 0.99
    assert all(len(point) == 2 for point in found["replicas"])
    assert "Instances over time" in page.read_text(encoding="utf-8")


def test_a_planned_fleet_stands_beside_the_bound(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page, fleet = tmp_path / "bound.html", ["--planner", "dopd", "--policy", "least-tokens", "--instances", "3"]
    flags = ["--startup-s", "5", "--plan-interval-s", "5", "--forecaster", "last", "--report", str(page)]
    assert simulate.main([*command, *fleet, *flags]) == 0
    *shown, last = capsys.readouterr().out.splitlines()
    found = json.loads(last)
    planned, name = found["planned"], "dopd beside least-tokens"
    assert any(name in line and "simulated" in line for line in shown)
    assert planned["name"] == name
    assert found["lower_bound_gpu_hours"] < planned["gpu_hours"]
    times_s, counts = zip(*planned["replicas"], strict=True)
    assert (counts[0], min(counts[:-1]), counts[-1]) == (3, 2, 0), "the load leaves what a planner keeps"
    area_s = sum(count * (after - before) for count, before, after in zip(counts, times_s, times_s[1:], strict=False))
    assert area_s / 3600 == pytest.approx(planned["gpu_hours"], rel=0.01), "of one GPU each"
    assert name in page.read_text(encoding="utf-8")


def test_who_cannot_be_kept_is_counted_and_named(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    trace = steady_trace(40)
    trace.input_tokens[3], trace.output_tokens[5] = 200_000, 500_000
    bound = bound_of(trace, Slo(0.5, 0.05), target=0.95)
    assert (bound.infeasible, bound.kept, bound.attainment) == (2, 38, 0.95)
    assert "1 of 40 requests does not fit an instance" in bound.notes[0]
    assert "cannot meet --slo-ttft-ms 500" in bound.notes[1]
    more = bound_of(trace, Slo(0.5, 0.05), target=1.0)
    assert more.kept == 38
    assert "nobody keeps the target of 1" in more.notes[-1]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--slo-ttft-ms", "5"], "200 of 200 requests cannot meet --slo-ttft-ms 5"),
        (["--slo-tpot-ms", "1"], "200 of 200 requests cannot meet --slo-tpot-ms 1"),
        (["--kv-capacity-tokens", "100"], "200 of 200 requests do not fit an instance"),
        (["--instances-of", "linear:1"], "--instances-of is given; allowed: instances of one --profile"),
        (["--compare", "arrow"], "--compare is for run, find-capacity, find-instances; lower-bound takes --rate"),
        (["--policy", "arrow"], "--policy is for the fleet beside the bound; allowed: with --planner NAME"),
        (["--startup-s", "-1"], "--startup-s -1 is out of range"),
        (["--head", "1", "--rate", "3"], "has no rate of its own to scale"),
    ],
)
def test_what_has_no_bound_is_named_and_ends_with_2(
    command: list[str], capsys: pytest.CaptureFixture[str], flags: list[str], message: str
) -> None:
    assert simulate.main([*command, *flags]) == 2
    assert message in capsys.readouterr().err


def test_an_empty_trace_and_closed_loops_have_no_bound(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "none.csv").write_text("arrival_s,input_tokens,output_tokens\n", encoding="utf-8")
    flags = ["--slo-ttft-ms", "500", "--slo-tpot-ms", "50"]
    assert simulate.main(["lower-bound", "--trace", str(tmp_path / "none.csv"), *flags]) == 2
    assert "allowed: at least one request" in capsys.readouterr().err
    loop = dataclasses.replace(steady_trace(4), session=np.zeros(4, np.int64), think_s=np.ones(4))
    with pytest.raises(ConfigError, match="--sessions open"):
        bound_of(loop)
    experiment = Experiment("arrow", SLO, sessions="open")
    assert find_lower_bound(experiment, loop, BoundTask(1.0, 0.0)).kept == 4


def test_one_request_has_a_bound() -> None:
    for slo in (SLO, Slo(math.inf, math.inf), Slo(math.inf, 0.1), Slo(2.0, math.inf)):
        bound = bound_of(steady_trace(1), slo, startup_s=10.0)
        assert 0 < bound.lower_bound_gpu_hours <= bound.fixed_gpu_hours
        assert json.dumps(bound.as_json(), allow_nan=False)
