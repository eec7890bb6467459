"""The pools of one server without any process: placement, reports, ranks that change pools."""

from __future__ import annotations

from typing import Any

import pytest

from pla_sglang.load.report import Backlog, PassTiming, PassTotals, Report
from pla_sglang.plugin.config import PlaConfig
from pla_sglang.plugin.engine.pools.driver import BLOCK_TOKENS, OPERATOR, Pools
from pla_sglang.policy.common.joining import split_ranks
from pla_sglang.policy.common.step_model import StepModel

# 10 ms and 0.1 ms a token; the TTFT target is 1 s.
STEP = StepModel(g0_s=0.01, gw_s=0.0, gr_s=0.0, k0_s=0.0, b_s=1e-4, a_s=0.0)
CONFIG = PlaConfig(prefill_disagg="spatial", boundary_tokens=256, slo_ttft_ms=1000.0, pressure_cool_down_ms=5000.0)


class Told(list[tuple[int, str]]):
    """Role changes, in order."""

    def __call__(self, rank: int, role: str) -> None:
        self.append((rank, role))


def make(ranks: int = 4, **changes: Any) -> tuple[Pools, Told]:
    told = Told()
    return Pools(ranks, CONFIG.replace(**changes), STEP, 2048, told), told


def report(rank: int, sequence: int = 1, **fields: Any) -> Report:
    named = {"instance": "a", "dp_rank": rank, "dp_size": 8, "kv_capacity_tokens": 100_000}
    return Report(sequence=sequence, **(named | fields))


def busy(seconds: float) -> Backlog:
    """A backlog of that long."""
    return Backlog(1, round((seconds - 0.01) / 1e-4), 0, 0)


@pytest.mark.parametrize(
    ("ranks", "shorts", "expected"),
    [
        (2, None, ["short", "long"]),
        (3, None, ["short", "long", "long"]),
        (4, 3, ["short", "short", "short", "long"]),
        (2, 0, ["long", "long"]),
    ],
)
def test_start_roles(ranks: int, shorts: int | None, expected: list[str]) -> None:
    assert [length_class.value for length_class in split_ranks(ranks, shorts)] == expected


def test_requests_go_to_the_pool_of_their_length() -> None:
    pools, _ = make()
    assert [pools.place_request(str(n), [n] * n, 0.0) for n in (1, 255, 256, 5000)] == [0, 1, 2, 3]
    assert pools.count_decisions()["dispatched"] == {"pla.short": 2, "pla.long": 2}


def test_a_burst_between_two_reports_spreads() -> None:
    pools, _ = make()
    for rank in range(4):
        pools.on_report(report(rank), 0.0)
    assert [pools.place_request(str(n), [n + 1] * 200, 0.0) for n in range(6)] == [0, 1, 0, 1, 0, 1]


def test_reports_include_what_was_sent() -> None:
    pools, _ = make(2)
    for rank in range(2):
        pools.on_report(report(rank), 0.0)
    pools.place_request("a", [1] * 100, 0.0)
    assert pools.describe_state(0.0)["ranks"][0]["outstanding"] == 1
    pools.on_report(report(0, 2, received=1), 0.1)
    assert pools.describe_state(0.1)["ranks"][0]["outstanding"] == 0
    assert pools.loads[0].view.queued_prefills == 0


def test_a_pool_that_would_be_late_spills() -> None:
    pools, _ = make(2)
    pools.on_report(report(0, backlog=busy(5.0)), 0.0)
    assert pools.place_request("late", [1] * 10, 0.0) == 1
    assert pools.place_request("patient", [2] * 10, 0.0, slo_s=60.0) == 0
    assert pools.count_decisions()["dispatched"] == {"pla.spill": 1, "pla.short": 1}


def test_what_is_cached_makes_a_request_short() -> None:
    """A second turn on a history of 1,000 tokens goes where the history is: there it is short."""
    pools, _ = make(2, short_ranks=1)
    history = list(range(1000))
    for rank in range(2):
        pools.on_report(report(rank), 0.0)
    assert pools.place_request("first", history, 0.0) == 1
    pools.on_report(report(1, 2, received=1), 0.1)
    assert pools.place_request("second", [*history, 7], 0.1) == 1
    assert pools.fleet.instances[1].queued_tokens == 1001 - 15 * BLOCK_TOKENS
    assert pools.count_decisions()["dispatched"] == {"pla.long": 1, "pla.holder": 1}
    pools.on_flush()
    pools.place_request("third", [*history, 8], 0.2)
    assert pools.fleet.instances[1].queued_tokens == 1001 - 15 * BLOCK_TOKENS + 1001


def test_a_request_that_names_its_rank_counts_there() -> None:
    pools, _ = make(2)
    pools.note_external(0, "a", [1] * 5000, 0.0)
    assert (pools.external, pools.fleet.instances[0].queued_tokens) == (1, 5000)
    assert pools.count_decisions()["dispatched"] == {}


def test_the_fit_sees_the_passes_of_all_ranks() -> None:
    pools, _ = make(2, boundary_tokens=None)
    before = pools.describe_state(0.0)
    steps = [PassTiming(n, n * n, 0, 1, 0.02 + 2e-4 * n) for n in range(50, 2050, 50)]
    for sequence, one in enumerate(steps, 1):
        pools.on_report(report(sequence % 2, sequence, steps=(one,), passes=PassTotals.of([one])), 0.0)
    after = pools.describe_state(0.0)
    assert after["step_model"] != before["step_model"]
    assert pools.predictor.curves[""].time_s(1000) == pytest.approx(0.22, rel=0.15)
    assert after["boundary_tokens"] == pools.boundary.tokens(0)


def test_a_rank_that_is_not_ours_is_ignored() -> None:
    pools, _ = make(2)
    pools.on_report(report(7, backlog=busy(1.0)), 0.0)
    assert pools.list_silent() == [0, 1]


# -- ranks that change pools -------------------------------------------------------------------------------------------


def run(pools: Pools, end_s: float, start_s: float = 0.0, step_s: float = 0.25) -> None:
    now_s = start_s
    while now_s <= end_s:
        pools.tick(now_s)
        now_s += step_s


def test_pressure_moves_the_least_loaded_rank() -> None:
    pools, told = make(4)
    pools.on_report(report(0, backlog=busy(0.05)), 0.0)
    for rank in (2, 3):
        pools.on_report(report(rank, backlog=busy(3.0)), 0.0)
    run(pools, 4.0)
    assert told == [(1, "long")]
    assert pools.roles == ["short", "long", "long", "long"]
    assert pools.runner.moved == {"pla.pressure_long": 1}
    (move,) = pools.runner.moves
    assert move.signals["long_pressure"] > 1.5 * move.signals["short_pressure"]
    assert pools.place_request("long", [1] * 5000, 5.0) == 1


def test_the_cool_down_and_the_minimum_hold() -> None:
    pools, told = make(4)
    for rank in (2, 3):
        pools.on_report(report(rank, backlog=busy(3.0)), 0.0)
    run(pools, 30.0)
    assert len(told) == 1, "one short rank is left"
    assert pools.count_decisions()["ticks"]["any.cool_down"] >= 4
    assert pools.count_decisions()["ticks"]["pla.pressure_minimum"] > 0


def test_switched_off_nothing_moves() -> None:
    pools, told = make(4, pressure="off")
    for rank in (2, 3):
        pools.on_report(report(rank, backlog=busy(3.0)), 0.0)
    run(pools, 30.0)
    assert (told, pools.count_decisions()["ticks"]) == ([], {})
    pools.set_config(pools.config.replace(pressure="auto"))
    run(pools, 35.0, 30.0)
    assert len(told) == 1


def test_one_pass_at_the_tick_is_no_pressure() -> None:
    """Each second a long of 0.5 s comes and is done; at every tick it happens to be there."""
    pools, told = make(4, pressure_interval_ms=1000.0)
    sequence = 0
    for second in range(60):
        for offset, backlog in ((0.0, busy(0.5)), (0.1, Backlog())):
            sequence += 1
            pools.on_report(report(2, sequence, backlog=backlog), second + offset)
            pools.tick(second + offset)
            pools.tick(second + offset + 0.09)
    assert told == []


def test_the_operator_moves_ranks_and_the_controller_goes_on_from_there() -> None:
    pools, told = make(4)
    pools.order_role(0, "long", 1.0)
    pools.order_role(0, "long", 2.0)
    assert told == [], "whoever asked has told the ranks"
    assert pools.roles == ["long", "short", "long", "long"]
    assert pools.runner.moved == {OPERATOR: 1}
    pools.order_role(None, "mixed", 3.0)
    assert pools.roles == ["mixed"] * 4
    assert pools.fleet.instances[0].length_class is None
    assert pools.place_request("any", [1] * 5000, 3.0) == 0


def test_an_order_is_not_undone_at_once() -> None:
    pools, told = make(4)
    pools.on_report(report(2, backlog=busy(3.0)), 0.0)
    run(pools, 0.9)
    pools.order_role(3, "short", 1.0)
    pools.set_config(pools.config.replace(slo_ttft_ms=900.0))
    run(pools, 5.5, 1.0)
    assert told == []
    assert set(pools.count_decisions()["ticks"]) == {"any.cool_down"}
    run(pools, 7.0, 5.5)
    assert len(told) == 1


def test_every_rank_is_told_its_first_role() -> None:
    pools, told = make(2)
    pools.announce_roles()
    assert told == [(0, "short"), (1, "long")]


def test_state_names_signals_as_the_paper_does() -> None:
    pools, _ = make(2)
    pools.on_report(report(1, backlog=busy(2.0), ttft_ratio=1.5, utilisation=0.5), 0.0)
    run(pools, 60.0)
    one = pools.describe_state(60.0)["ranks"][1]
    assert one["q"] == pytest.approx(2.0, rel=0.01)
    assert one["e"] == pytest.approx(0.5)
    assert one["u"] == pytest.approx(0.5, rel=0.01)
    assert one["psi"] == pytest.approx(2.0 + 0.5 * 0.5 - 0.1 * 0.5, rel=0.01)
    assert pools.describe_state(60.0)["pressure"]["long"] == pytest.approx(one["psi"])
