"""Admission and the fair queue in front of a simulated fleet: off by default, and the router's rules when on."""

from __future__ import annotations

import numpy as np
import pytest
from support.sim import Route, profile, simulation, to_decode_pool, trace

from pla_sglang.common.errors import ConfigError
from pla_sglang.policy.admission import AdmissionKnobs
from pla_sglang.policy.interface.fleet import Role
from pla_sglang.sim.core.config import InstanceFault, InstanceSpec
from pla_sglang.sim.core.front import AdmissionQueueKnobs

HAND = profile(token_s=1e-3, decode_base_s=0.01)
ONE = [InstanceSpec(HAND)]
ROWS = tuple((0.01 * row, 20, 3) for row in range(12))


def test_without_limits_nothing_changes() -> None:
    plain = simulation(trace(*ROWS), ONE).run()
    fronted = simulation(trace(*ROWS), ONE, front=AdmissionQueueKnobs()).run()
    assert fronted.digest() == plain.digest()


def test_a_limit_on_open_requests_refuses_the_others() -> None:
    knobs = AdmissionQueueKnobs(AdmissionKnobs(open_requests=2))
    result = simulation(trace((0.0, 50, 5), (0.0, 50, 5), (0.0, 50, 5), (1000.0, 50, 5)), ONE, front=knobs).run()
    assert result.stage == ["finished", "finished", "refused", "finished"]
    assert result.counts["refused_open_limit"] == 1


def test_tenants_take_turns_while_the_fleet_is_saturated() -> None:
    """Tenant 0 sends five requests before the one of tenant 1, which is then the second to be dispatched."""
    rows = trace(*[(0.001 * row, 100, 1) for row in range(6)], client=np.array([0, 0, 0, 0, 0, 1]))
    fair = simulation(rows, ONE, front=AdmissionQueueKnobs(hold_tokens=50)).run()
    order = np.argsort(fair.served.first_token_s, kind="stable").tolist()
    assert order == [0, 5, 1, 2, 3, 4]
    plain = simulation(rows, ONE).run()
    assert np.argsort(plain.served.first_token_s, kind="stable").tolist()[-1] == 5


def test_requests_wait_in_the_queue_until_an_instance_is_ready() -> None:
    faults = [InstanceFault(0.0, 0, down_s=5.0)]
    result = simulation(trace(*ROWS), ONE, instance_faults=faults, startup_s=1.0, front=AdmissionQueueKnobs()).run()
    assert set(result.stage) == {"finished"}
    assert (result.served.first_token_s > 6.0).all()


def test_nobody_is_lost_when_instances_die_and_users_leave() -> None:
    specs = [InstanceSpec(HAND, count=2, role=Role.PREFILL), InstanceSpec(HAND, count=2, role=Role.DECODE)]
    made = simulation(
        trace(*[(0.05 * row, 60, 20) for row in range(80)]),
        specs,
        route=to_decode_pool(),
        front=AdmissionQueueKnobs(hold_tokens=100),
        instance_faults=[InstanceFault(0.7, 0, down_s=0.5), InstanceFault(1.1, 3, down_s=0.5)],
        startup_s=0.2,
        cancels=dict.fromkeys(range(0, 80, 7), 0.3),
    )
    result = made.run()
    made.cluster.check_integrity()
    assert set(result.stage) <= {"finished", "cancelled"}
    assert len(result.stage) == 80


def test_a_predicted_ttft_above_the_limit_is_refused_once_predictions_are_judged() -> None:
    class Pessimist(Route):
        def dispatch(self, request, fleet, now_s):  # type: ignore[no-untyped-def]
            answer = super().dispatch(request, fleet, now_s)
            return type(answer)(answer.prefill, answer.decode, answer.reason, predicted_ttft_s=1.0)

    knobs = AdmissionQueueKnobs(AdmissionKnobs(ttft_s=0.0001, judged=3, window=3))
    rows = trace(*[(10.0 * row, 20, 2) for row in range(6)])
    result = simulation(rows, ONE, route=Pessimist(), ttft_slo_s=1.0, front=knobs).run()
    assert result.stage == ["finished"] * 3 + ["refused"] * 3
    assert result.counts["refused_ttft_limit"] == 3


def test_bad_hold_tokens() -> None:
    with pytest.raises(ConfigError, match="front hold_tokens 0 is out of range; allowed: at least 1"):
        AdmissionQueueKnobs(hold_tokens=0)
