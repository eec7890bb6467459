"""The upper bound against schedules found by brute force, against work by hand, and against simulated fleets."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

from pla_sglang.common.errors import ConfigError
from pla_sglang.profiles import load_profile
from pla_sglang.sim.core.experiment import Experiment, run_experiment
from pla_sglang.sim.core.upper_bound import (
    LeastWork,
    attainment_bound,
    least_work,
    longest_known_prefix_tokens,
    read_context_tokens,
    unshared_context_tokens,
)
from pla_sglang.sim.metrics.goodput import Slo
from pla_sglang.sim.workload import Trace, hol_trace

PROFILE = load_profile("h100-llama3.1-8b-tp1")


def most_kept(arrival_s: list[float], work_s: list[float], due_s: list[float], servers: int) -> int:
    """By brute force: every order of every choice of requests, each on the server that is free first."""
    jobs = range(len(work_s))
    for count in range(len(work_s), 0, -1):
        for order in itertools.permutations(jobs, count):
            free_s = [0.0] * servers
            for job in order:
                server = min(range(servers), key=free_s.__getitem__)
                free_s[server] = max(free_s[server], arrival_s[job]) + work_s[job]
                if free_s[server] > due_s[job]:
                    break
            else:
                return count
    return 0


@pytest.mark.parametrize("seed", range(25))
def test_no_schedule_keeps_more_than_the_bound_says(seed: int) -> None:
    rng = random.Random(seed)
    count, servers, target_s = 6, rng.choice((1, 2)), rng.uniform(0.5, 3.0)
    arrival_s = sorted(rng.uniform(0.0, 4.0) for _ in range(count))
    work_s = [rng.uniform(0.2, 2.5) for _ in range(count)]
    kept = most_kept(arrival_s, work_s, [at + target_s for at in arrival_s], servers)
    work = LeastWork(np.array(work_s), np.zeros(count), np.full(count, target_s), target_s)
    assert attainment_bound(np.array(arrival_s), work, servers) >= kept / count - 1e-12


def test_the_bound_is_what_one_server_reaches_when_all_come_at_once() -> None:
    work_s = [3.0, 1.0, 2.0, 0.5, 4.0]
    work = LeastWork(np.array(work_s), np.zeros(5), np.full(5, 3.6), 3.6)
    assert most_kept([0.0] * 5, work_s, [3.6] * 5, 1) == 3  # 0.5, 1 and 2
    assert attainment_bound(np.zeros(5), work, 1) == pytest.approx(0.6)


def test_bursts_far_apart_give_up_requests_each() -> None:
    """Over the whole span all of it would fit; the windows within see that each burst does not."""
    arrival_s = np.repeat([0.0, 1000.0], 32)
    work = LeastWork(np.full(64, 1.0), np.zeros(64), np.full(64, 16.0), 16.0)
    assert attainment_bound(arrival_s, work, 1) == pytest.approx(0.5)


def test_answers_count_where_their_deadline_has_come() -> None:
    prefill_s, decode_s = np.full(40, 0.1), np.full(40, 0.9)
    soon = LeastWork(prefill_s, decode_s, np.full(40, 10.0), 10.0)
    late = LeastWork(prefill_s, decode_s, np.full(40, 40.0), 10.0)
    assert attainment_bound(np.zeros(40), soon, 1) == pytest.approx(10 / 40)
    assert attainment_bound(np.zeros(40), late, 1) == 1.0
    with pytest.raises(ConfigError, match="at least one"):
        attainment_bound(np.zeros(0), soon, 1)


def test_work_is_that_of_the_profile_without_what_passes_share() -> None:
    trace = Trace("t", np.array([0.0, 1.0]), np.array([2048, 2048]), np.array([1, 101]))
    work = least_work(trace, Slo(3.0, 0.1), PROFILE)
    assert work.decode_s[0] == 0.0
    assert work.deadline_s.tolist() == [3.0, pytest.approx(13.0)]
    assert work.prefill_s[0] < PROFILE.prefill_s(2048, 2048.0**2) < 1.3 * work.prefill_s[0]
    batch = PROFILE.kv_capacity_tokens // 2100  # the cheapest decode steps are those with a full memory
    least_step_s = PROFILE.decode_s(batch, PROFILE.kv_capacity_tokens) / batch
    assert 0.7 * 100 * least_step_s < work.decode_s[1] <= 100 * least_step_s


def test_what_an_earlier_prompt_held_is_never_computed_again() -> None:
    ids = ((1, 2), (1, 2, 3), (4,), (1, 2, 3))
    trace = Trace("t", np.arange(4.0), np.array([25, 35, 15, 30]), np.ones(4, np.int64), hash_ids=ids, block_tokens=10)
    assert longest_known_prefix_tokens(trace).tolist() == [0, 20, 0, 29]
    work = least_work(trace, Slo(1.0, 0.1), PROFILE)
    assert work.prefill_s[3] < work.prefill_s[1] < work.prefill_s[0]


def test_blocks_that_several_hold_take_memory_once() -> None:
    ids = ((1, 2), (1, 2, 3), (4,))
    trace = Trace("t", np.arange(3.0), np.array([25, 35, 15]), np.array([3, 3, 1]), hash_ids=ids, block_tokens=10)
    assert read_context_tokens(trace).tolist() == [51, 71, 0], "two steps: the prompt, then an answer token more"
    assert unshared_context_tokens(trace).tolist() == [11, 31, 0]


def test_blocks_of_earlier_answers_are_known_where_caches_hold_them() -> None:
    ids, answers = ((1,), (1, 2, 3)), ((2,), ())
    sizes = np.array([10, 35]), np.array([10, 1])
    trace = Trace("t", np.arange(2.0), *sizes, hash_ids=ids, answer_ids=answers, block_tokens=10)
    assert longest_known_prefix_tokens(trace).tolist() == [0, 10]
    assert longest_known_prefix_tokens(trace, answers=True).tolist() == [0, 20]


@pytest.mark.parametrize("policy", ["least-tokens", "combined"])
@pytest.mark.parametrize("mixed", [False, True])
def test_simulated_fleets_stay_below_it(policy: str, mixed: bool) -> None:
    burst, slo = hol_trace(), Slo(4.0, 0.1)
    arrival_s = np.concatenate([burst.arrival_s + 8.0 * place for place in range(8)])
    trace = Trace("hol", arrival_s, np.tile(burst.input_tokens, 8), np.tile(burst.output_tokens, 8))
    work = least_work(trace, slo, PROFILE)
    for rate_per_s in (6.0, 16.0, 40.0):
        experiment = Experiment(policy, slo, mixed=mixed, chunk_tokens=2048, rate_per_s=rate_per_s)
        attainment = run_experiment(experiment, trace).figures.attainment
        assert attainment <= attainment_bound(trace.at_rate(rate_per_s).arrival_s, work, 8)
