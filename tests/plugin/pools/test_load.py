"""Pools under load in virtual time: a steady mix moves no rank back and forth, a changed one moves ranks once.

Four ranks that serve first come, first served, by the step model of ``test_pools``; they report every 50 ms. Poisson
arrivals of shorts (20 ms each) and longs (0.31 s each).
"""

from __future__ import annotations

import random
from collections import deque

import pytest

from pla_sglang.load.report import Backlog, Report
from pla_sglang.plugin.config import PlaConfig
from pla_sglang.plugin.engine.pools.driver import Pools
from pla_sglang.policy.common.step_model import StepModel

STEP = StepModel(g0_s=0.01, gw_s=0.0, gr_s=0.0, k0_s=0.0, b_s=1e-4, a_s=0.0)
TICK_S = 0.05
SHORT_TOKENS, LONG_TOKENS = 100, 3000


class Rank:
    """A queue of prefills and how much of its head is done."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.queue: deque[int] = deque()
        self.done_s = 0.0
        self.received = 0
        self.sequence = 0
        self.busy: deque[float] = deque([0.0] * 100, maxlen=100)

    def serve(self, seconds: float) -> None:
        left_s = seconds
        while self.queue and left_s > 0:
            need_s = 0.01 + self.queue[0] * 1e-4 - self.done_s
            if need_s > left_s:
                self.done_s += left_s
                left_s = 0.0
            else:
                left_s -= need_s
                self.queue.popleft()
                self.done_s = 0.0
        self.busy.append((seconds - left_s) / seconds)

    def report(self, now_s: float) -> Report:
        self.sequence += 1
        return Report(
            instance="a",
            dp_rank=self.index,
            dp_size=4,
            sequence=self.sequence,
            received=self.received,
            backlog=Backlog(len(self.queue), sum(self.queue), sum(n * n for n in self.queue), 0),
            utilisation=sum(self.busy) / len(self.busy),
            kv_capacity_tokens=100_000,
        )


def run(
    pools: Pools,
    ranks: list[Rank],
    rng: random.Random,
    rates: tuple[float, float],
    span: tuple[float, float],
    *,
    scale: float = 1.0,
) -> None:
    """Rates of shorts and longs per device second, from the first to the second time of ``span``."""
    for step in range(round(span[0] / TICK_S), round(span[1] / TICK_S)):
        now_s = step * TICK_S
        for rate, tokens in zip(rates, (SHORT_TOKENS, LONG_TOKENS), strict=True):
            due_s = rng.expovariate(rate)
            while due_s < TICK_S:
                rank = ranks[pools.place_request(f"{now_s}-{due_s}", [rng.randrange(1 << 30)] * tokens, scale * now_s)]
                rank.queue.append(tokens)
                rank.received += 1
                due_s += rng.expovariate(rate)
        for rank in ranks:
            rank.serve(TICK_S)
            pools.on_report(rank.report(scale * now_s), scale * now_s)
        pools.tick(scale * now_s)


def made(*, scale: float = 1.0) -> tuple[Pools, list[Rank]]:
    config = PlaConfig(
        prefill_disagg="spatial",
        boundary_tokens=256,
        slo_ttft_ms=1000.0 * scale,
        pressure_cool_down_ms=10_000.0,
        emulate="linear",
        time_scale=scale,
    )
    pools, ranks = Pools(4, config, STEP, 2048, lambda rank, role: None), [Rank(index) for index in range(4)]
    for rank in ranks:  # a server takes no request before
        pools.on_report(rank.report(-scale * TICK_S), -scale * TICK_S)
    return pools, ranks


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("rates", [(40.0, 3.0), (20.0, 4.0), (60.0, 1.0)], ids=str)
def test_a_steady_mix_settles(rates: tuple[float, float], seed: int) -> None:
    """0.8 and 0.93 s of work a second, 0.4 and 1.24, 1.2 and 0.31, for four ranks."""
    pools, ranks = made()
    rng = random.Random(seed)
    run(pools, ranks, rng, rates, (0.0, 40.0))
    before = sum(pools.runner.moved.values())
    run(pools, ranks, rng, rates, (40.0, 160.0))
    assert before <= 1
    assert sum(pools.runner.moved.values()) == before, [move.reason for move in pools.runner.moves]


@pytest.mark.parametrize("seed", range(3))
def test_more_longs_get_another_rank(seed: int) -> None:
    """2.5 s of long work a second is more than two ranks can do."""
    pools, ranks = made()
    rng = random.Random(seed)
    run(pools, ranks, rng, (60.0, 1.0), (0.0, 40.0))
    assert pools.runner.moved == {}, "the shorts need both of theirs"
    run(pools, ranks, rng, (10.0, 8.0), (40.0, 100.0))
    assert pools.roles.count("long") == 3
    assert pools.runner.moved == {"pla.pressure_long": 1}


def test_slowed_ranks_change_pools_at_the_same_device_times() -> None:
    """The knobs are the same, and the wall clock runs four times as long."""
    lives = []
    for scale in (1.0, 4.0):
        pools, ranks = made(scale=scale)
        rng = random.Random(1)
        run(pools, ranks, rng, (60.0, 1.0), (0.0, 40.0), scale=scale)
        run(pools, ranks, rng, (10.0, 8.0), (40.0, 100.0), scale=scale)
        moves = [(move.at_s / scale, move.instance.name, move.role, move.reason) for move in pools.runner.moves]
        lives.append((moves, pools.roles, pools.count_decisions(), pools.compute_pressures()))
        ages_s = [move["ago_s"] for move in pools.describe_state(scale * 100.0)["last_moves"]]
        assert ages_s == [scale * (100.0 - move[0]) for move in moves], "for people it is wall time"
    assert lives[0] == lives[1]
    assert lives[0][0], "no rank has moved"
