"""An engine whose host decides one pass ahead, and pairs as SGLang runs them: times worked out by hand."""

from __future__ import annotations

import pytest
from support.sim import profile, simulation, to_decode_pool, trace

from pla_sglang.common.errors import ConfigError
from pla_sglang.policy.interface.fleet import Role
from pla_sglang.sim.core import network
from pla_sglang.sim.core.config import InstanceSpec
from pla_sglang.sim.core.engine_knobs import EngineKnobs
from pla_sglang.sim.core.host import HostKnobs
from pla_sglang.sim.core.simulation import RunResult
from pla_sglang.sim.workload.trace import Trace

HAND = profile(token_s=1e-3, decode_base_s=0.01)  # 1,000 KV bytes a token
P, D = InstanceSpec(HAND, role=Role.PREFILL), InstanceSpec(HAND, role=Role.DECODE)
SLOW = 1e6  # bytes/s: a token takes 1 ms
AHEAD = HostKnobs(overlap=True)
PAIR = HostKnobs(overlap=True, room_first=True)


@pytest.fixture(autouse=True)
def without_latency(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "LATENCY_S", 0.0)


def run(workload: Trace, fleet: object = HAND, *, host: HostKnobs = AHEAD, **options: object) -> RunResult:
    one = simulation(workload, fleet, host=host, **options)  # type: ignore[arg-type]
    result = one.run()
    one.cluster.check_integrity()
    return result


def run_pair(*rows: tuple[float, int, int], host: HostKnobs = PAIR, **options: object) -> RunResult:
    return run(trace(*rows), [P, D], route=to_decode_pool(), bandwidth_bytes_per_s=SLOW, host=host, **options)


def test_an_idle_engine_begins_at_once() -> None:
    assert run(trace((1.0, 100, 1))).served.first_token_s[0] == pytest.approx(1.1)


def test_an_arrival_waits_for_the_step_that_was_decided_before() -> None:
    """It comes at 1.123 in the step to 1.13; the one to 1.14 is launched already, its 0.2 s begin then."""
    served = run(trace((1.0, 100, 11), (1.123, 200, 1))).served
    assert served.first_token_s[1] == pytest.approx(1.34)
    assert served.finish_s[0] == pytest.approx(1.4)


def test_an_arrival_during_a_prefill_waits_for_the_decode_that_was_decided_before() -> None:
    """Both prompts at once would wait for 0.1 s; so the second waits for one step of the first as well."""
    served = run(trace((1.0, 100, 11), (1.05, 200, 1))).served
    assert served.first_token_s[1] == pytest.approx(1.1 + 0.01 + 0.2)


def test_what_came_before_the_pass_began_is_next() -> None:
    """With chunks of 100: the second prompt comes in the first chunk and follows the second chunk without a gap."""
    served = run(trace((1.0, 200, 11), (1.05, 100, 1)), engine=EngineKnobs(chunk_tokens=100)).served
    assert served.first_token_s.tolist() == pytest.approx([1.2, 1.3])


def test_a_batch_runs_once_more_after_its_last_request() -> None:
    """The first ends at 1.11; the step to 1.12 was launched, and delays who comes at 1.115."""
    served = run(trace((1.0, 100, 2), (1.115, 100, 1))).served
    assert served.finish_s[0] == pytest.approx(1.11)
    assert served.first_token_s[1] == pytest.approx(1.12 + 0.1)


def test_after_the_overrun_the_engine_is_idle() -> None:
    assert run(trace((1.0, 100, 2), (1.121, 100, 1))).served.first_token_s[1] == pytest.approx(1.221)


def test_blocks_of_a_pass_are_seen_one_decision_later() -> None:
    """The third was decided while the first was computed: it finds nothing. Who comes later does."""
    ids = ((1, 2), (7, 8), (1, 2, 3), (1, 2, 4))
    rows = trace((0.0, 130, 1), (0.01, 130, 1), (0.14, 200, 1), (9.0, 200, 1), hash_ids=ids, block_tokens=64)
    served = run(rows, engine=EngineKnobs(chunk_tokens=200)).served
    assert served.ttft_s()[3] == pytest.approx(0.2 - 0.128)
    rows = trace((0.0, 130, 5), (0.0, 200, 1), hash_ids=(ids[0], ids[2]), block_tokens=64)
    apart = run(rows, engine=EngineKnobs(chunk_tokens=130)).served
    assert apart.first_token_s[1] == pytest.approx(0.13 + 0.2, abs=1e-6), "two more chunks, nothing from the cache"


def test_the_way_in_delays_the_first_token_only() -> None:
    served = run(trace((1.0, 100, 11)), host=HostKnobs(overlap=True, front_s=0.02, step_s=0.001)).served
    assert served.first_token_s[0] == pytest.approx(1.0 + 0.02 + 0.101)
    assert served.finish_s[0] == pytest.approx(served.first_token_s[0] + 10 * 0.011)


def test_a_pair_gives_the_first_token_once_its_kv_is_there() -> None:
    """0.1 s of prefill, 0.1 s of transfer; then ten steps. The transfer is in TTFT, not in TPOT."""
    served = run_pair((0.0, 100, 11)).served
    assert served.ttft_s()[0] == pytest.approx(0.2)
    assert served.tpot_s()[0] == pytest.approx(0.01)


def test_a_pair_pays_handshake_and_hand_off_once_each() -> None:
    host = HostKnobs(overlap=True, room_first=True, front_s=0.01, handshake_s=0.02, handoff_s=0.03)
    assert run_pair((0.0, 100, 11), host=host).served.ttft_s()[0] == pytest.approx(0.26)


def test_a_host_that_waits_for_a_result_does_its_part_of_a_handshake_afterwards() -> None:
    """The second comes in the pass to 0.52. The host reads it then, and needs 0.02 s before its pass of 0.1 s."""
    host = HostKnobs(overlap=True, room_first=True, handshake_s=0.02)
    rows = trace((0.0, 500, 1), (0.1, 100, 1))
    served = run(rows, [P, D], route=to_decode_pool(), bandwidth_bytes_per_s=1e12, host=host).served
    assert served.first_token_s.tolist() == pytest.approx([0.52, 0.64], abs=1e-4)


def test_an_answer_of_one_token_comes_from_the_decode_instance_too() -> None:
    result = run_pair((0.0, 100, 1))
    assert result.served.finish_s[0] == pytest.approx(0.2)
    assert result.decode_instance[0] == 1


def test_a_busy_decode_instance_is_asked_at_its_steps() -> None:
    """The second comes at 0.205, in the step to 0.21, where it gets its room. Prefill to 0.305, noticed at 0.31; KV at
    0.405, first token at 0.41, its second in the step after the one that was launched by then."""
    served = run_pair((0.0, 100, 101), (0.205, 95, 2)).served
    assert served.first_token_s[1] == pytest.approx(0.41)
    assert served.finish_s[1] == pytest.approx(0.43)


def test_a_prefill_waits_for_room_at_its_decode_instance() -> None:
    """Room for one: the second is prefilled when the first has left, not before."""
    small = InstanceSpec(HAND, role=Role.DECODE, kv_capacity_tokens=150)
    rows = trace((0.0, 100, 21), (0.0, 100, 2))
    served = run(rows, [P, small], route=to_decode_pool(), bandwidth_bytes_per_s=SLOW, host=PAIR).served
    assert served.first_token_s[1] >= served.finish_s[0] + 0.2 - 1e-9


def test_a_pair_needs_a_host_that_works_ahead() -> None:
    with pytest.raises(ConfigError, match="room_first"):
        HostKnobs(room_first=True)
