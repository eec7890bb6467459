"""Errors of simulated runs against live ones, by hand; the constants of the hosts; names of live clusters."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

from bench.check.live_case import LiveCase
from bench.harness import fidelity
from pla_sglang.common.errors import ConfigError
from pla_sglang.sim.core.experiment import Experiment
from pla_sglang.sim.core.host import HostKnobs
from pla_sglang.sim.metrics.goodput import Served, Slo
from pla_sglang.sim.workload.trace import Trace

SLO = Slo(1.0, 0.1)
CASE = "1+1/fcfs/static-pd-round-robin/azure_conv/0.8"


def served(*rows: tuple[float, float, float, int]) -> Served:
    """Arrival, first token, finish, tokens."""
    columns = list(zip(*rows, strict=True))
    return Served(*(np.array(column, dtype=float) for column in columns[:3]), np.array(columns[3], dtype=np.int64))


def lone(*, pairs: bool, late_s: float = 0.0, slower_s: float = 0.0) -> tuple[Experiment, fidelity.Points]:
    """Ten requests far apart, and what the simulator without constants says, plus a delay and slower steps."""
    case = LiveCase.parse(CASE if pairs else "unified-2/fcfs/round-robin/azure_conv/0.8")
    experiment = case.experiment(profile="h100-llama3.1-8b-tp1", slo=SLO, kv_gbps=400.0, slots=64)
    tokens = [64.0, 512.0, 1024.0, 2048.0, 4096.0] * 2
    points = {"row": list(map(float, range(10))), "sent_s": [2.0 * place for place in range(10)]}
    points |= {"input_tokens": tokens, "output_tokens": [17.0] * 10}
    host = HostKnobs(overlap=True, room_first=pairs)
    points = fidelity.simulate_points(dataclasses.replace(experiment, host=host), points)
    points["live_first_s"] = [first_s + late_s for first_s in points.pop("sim_first_s")]
    points["live_finish_s"] = [finish_s + late_s + 16 * slower_s for finish_s in points.pop("sim_finish_s")]
    return experiment, points


def test_a_run_against_itself_has_no_error() -> None:
    run = served((0.0, 0.5, 1.5, 11), (1.0, 1.2, 4.2, 21))
    assert set(fidelity.compare_runs(run, run, SLO).values()) == {0.0}


def test_errors_by_hand() -> None:
    live = served((0.0, 0.5, 1.5, 11), (1.0, 2.0, 4.0, 11))
    simulated = served((0.0, 0.6, 1.5, 11), (1.0, 2.2, 4.0, 11))
    errors = fidelity.compare_runs(live, simulated, SLO)
    assert errors["ttft_mean"] == pytest.approx(1.8 / 1.5 - 1)
    assert errors["ttft_p50"] == pytest.approx(0.9 / 0.75 - 1)
    assert errors["e2e_mean"] == pytest.approx(0.0)
    assert errors["tpot_mean"] == pytest.approx(0.135 / 0.15 - 1)
    assert errors["attainment"] == pytest.approx(0.0), "0.1 s a token are in time, 0.2 are not"
    assert errors["throughput"] == pytest.approx(0.0)


def test_attainment_is_a_difference_and_its_sign_is_kept() -> None:
    live, simulated = served((0.0, 1.5, 2.0, 11)), served((0.0, 0.5, 1.0, 11))
    assert fidelity.compare_runs(live, simulated, SLO)["attainment"] == 1.0
    assert fidelity.compare_runs(simulated, live, SLO)["attainment"] == -1.0


def test_runs_of_different_requests_are_refused() -> None:
    one, two = served((0.0, 0.5, 1.5, 11)), served((0.0, 0.5, 1.5, 11), (0.0, 0.5, 1.5, 11))
    with pytest.raises(ConfigError, match="1 live requests, 2 simulated"):
        fidelity.compare_runs(one, two, SLO)


def test_means_and_worst_are_of_absolute_errors() -> None:
    cases = [dict.fromkeys(fidelity.GOALS, 0.03), dict.fromkeys(fidelity.GOALS, -0.05)]
    overall = fidelity.summarise_errors(cases)
    assert overall["e2e_mean_error"] == pytest.approx(0.04)
    assert overall["worst_e2e_mean_error"] == 0.05
    assert len(overall) == 2 * len(fidelity.GOALS)
    with pytest.raises(ConfigError, match="no case"):
        fidelity.summarise_errors([])


@pytest.mark.parametrize(
    ("size", "missed"),
    [
        (0.019, []),
        (0.021, ["attainment_error"]),
        (0.035, ["e2e_mean_error", "attainment_error"]),
        (0.041, ["e2e_mean_error", "attainment_error", "worst_attainment_error"]),
        (math.nan, None),
    ],
)
def test_goals(size: float, missed: list[str] | None) -> None:
    """Over all cases the goal, for each case twice as much; what is no number misses all."""
    overall = fidelity.summarise_errors([dict.fromkeys(fidelity.GOALS, size)])
    assert fidelity.find_missed(overall) == (list(overall) if missed is None else missed)


@pytest.mark.parametrize("pairs", [False, True])
def test_constants_are_found_again(pairs: bool) -> None:
    experiment, points = lone(pairs=pairs, late_s=0.03, slower_s=0.0005)
    host = fidelity.calibrate_host(experiment, points)
    assert (host.overlap, host.room_first) == (True, pairs)
    assert host.step_s == pytest.approx(0.0005, rel=0.01)
    assert host.front_s + host.handshake_s + host.handoff_s == pytest.approx(0.0295, rel=0.01)
    again = fidelity.simulate_points(dataclasses.replace(experiment, host=host), points)
    errors = fidelity.compare_points(again, SLO)["errors"]
    assert max(abs(errors[name]) for name in ("ttft_mean", "tpot_mean", "e2e_mean")) < 0.01


def test_a_gap_that_the_device_measured_under_load_counts_instead() -> None:
    experiment, points = lone(pairs=False, late_s=0.03, slower_s=0.0005)
    host, loaded = (fidelity.calibrate_host(experiment, points, gap_s=gap_s) for gap_s in (None, 0.002))
    assert loaded == dataclasses.replace(host, step_s=0.002)


def test_a_live_run_that_is_faster_gives_no_negative_constant() -> None:
    experiment, points = lone(pairs=False, late_s=-0.001)
    assert fidelity.calibrate_host(experiment, points).front_s == 0.0


def test_requests_share_what_their_trace_says() -> None:
    """Rows of the live run may be in another order than those of the trace."""
    experiment, _ = lone(pairs=False)
    experiment = dataclasses.replace(experiment, instances=1)
    arrivals = np.array([0.0, 1.0])
    lengths = np.array([1024, 4096]), np.array([2, 2])
    source = Trace("shared", arrivals, *lengths, hash_ids=((1, 2), (1, 2, 3, 4)), block_tokens=512)
    points = {"row": [1.0, 0.0], "sent_s": [0.0, 5.0], "input_tokens": [4096.0, 1024.0], "output_tokens": [2.0, 2.0]}
    apart, shared = (fidelity.simulate_points(experiment, points, trace) for trace in (None, source))
    assert shared["sim_first_s"][0] == apart["sim_first_s"][0]
    assert shared["sim_first_s"][1] < apart["sim_first_s"][1] - 0.005, "one block of the two, one is always computed"


def test_a_request_that_was_sent_a_moment_early_arrives_at_the_start() -> None:
    experiment, _ = lone(pairs=False)
    points = {"row": [0.0], "sent_s": [-1e-5], "input_tokens": [64.0], "output_tokens": [2.0]}
    assert fidelity.simulate_points(experiment, points)["sim_first_s"][0] > 0


def test_the_name_of_a_live_cluster() -> None:
    pair = LiveCase.parse(CASE)
    assert (pair.cluster, pair.prefill, pair.decode, pair.load) == ("1+1/fcfs", 1, 1, 0.8)
    assert pair.launch_flags == ["--prefill", "1", "--decode", "1"]
    temporal = LiveCase.parse("unified-3/temporal/cache-aware/mooncake/0.95")
    assert temporal.launch_flags == ["--unified", "3", "--prefill-disagg", "temporal"]
    made = temporal.experiment(profile="linear", slo=SLO, kv_gbps=8.0, slots=4)
    assert (made.engine, made.instances, made.prefills, made.mixed) == ("temporal", 3, None, False)
    assert made.bandwidth_bytes_per_s == 1e9


@pytest.mark.parametrize(
    "text",
    [
        "",
        "unified-2",
        "2/fcfs/round-robin/x/1",
        "1+x/fcfs/p/w/1",
        "unified-2/spatial/p/w/1",
        f"{CASE}/1",
        CASE[:-3] + "0",
    ],
)
def test_another_name_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="LAYOUT/ENGINE/POLICY/WORKLOAD/LOAD"):
        LiveCase.parse(text)


def test_a_workload_that_always_misses_has_no_capacity() -> None:
    experiment, _ = lone(pairs=False)
    hopeless = dataclasses.replace(experiment, slo=Slo(1e-6, 1e-6))
    sample = Trace("sample", np.array([0.0, 1.0]), np.array([500, 500]), np.array([10, 10]))
    case = LiveCase.parse("unified-2/fcfs/round-robin/azure_conv/0.8")
    with pytest.raises(ConfigError, match="missed at any rate"):
        case.rate_per_s(hopeless, sample)
