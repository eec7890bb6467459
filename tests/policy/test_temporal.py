"""The temporal policy, rule by rule. FLAT model, boundary at 100 tokens, chunks of 1000.

Names of the columns: queue and chunk are what waits, then what shall run and why.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
from support.temporal_scene import AGED_S, NOW_S, RECENT_S, lone_short, owing, policy
from support.views import long, pass_view, short

from pla_sglang.policy.interface.prefill import Action, PassDecision, PassView, PrefillClass
from pla_sglang.policy.interface.prefill import PassReason as R
from pla_sglang.policy.pla.awd import AwdKnobs
from pla_sglang.policy.pla.temporal import TemporalPolicy
from pla_sglang.policy.slo.knobs import SloKnobs
from pla_sglang.policy.slo.mixed_batches import MixedBatches

FREE = {"kv_free": 100_000}


def blocked(made: TemporalPolicy, cls: PrefillClass, view: PassView) -> TemporalPolicy:
    """A pass of ``cls`` has just come back empty in the state of ``view``."""
    action = Action.SHORT if cls is PrefillClass.SHORT else Action.LONG
    made.on_pass(PassDecision(action, R.NO_SHORT, (short(),)), view, (), NOW_S)
    return made


@dataclasses.dataclass(frozen=True)
class Case:
    view: PassView
    expected: tuple[Any, ...]  # action, reason, and whom of the queue by their indices
    park: bool = False
    make: Callable[[], TemporalPolicy | MixedBatches] = policy
    one_pass: bool = False  # LONG: chunk_tokens is None


S, L, H = Action.SHORT, Action.LONG, Action.HOLD


CASES = {
    # nothing, or one class only
    "nothing waits": Case(pass_view(), (H, R.EMPTY)),
    "a lone short on an idle server": Case(pass_view([lone_short()]), (S, R.NO_GAIN, 0)),
    "a lone long": Case(pass_view([long(RECENT_S)]), (L, R.NO_SHORT, 0)),
    "a running chunk goes on": Case(pass_view([], long(RECENT_S)), (L, R.NO_SHORT)),
    "other longs wait for it": Case(pass_view([long(RECENT_S)], long(RECENT_S, 3000)), (L, R.NO_SHORT)),
    "one that fits a single pass overtakes": Case(
        pass_view([long(RECENT_S, 900)], long(RECENT_S)), (L, R.NO_SHORT, 0), park=True, one_pass=True
    ),
    "riders that have sat out a pass and would be late": Case(
        pass_view([long(RECENT_S)], running=1, can_piggyback=True, decode_wait_s=0.02, token_slack_s=0.001),
        (H, R.TOKEN_DEADLINE),
        make=lambda: MixedBatches(policy(), SloKnobs()),
    ),
    "a lost short, where targets decide": Case(
        pass_view([short(RECENT_S, deadline_s=NOW_S), long(RECENT_S)]),
        (L, R.LOST_SHORT, 1),
        make=lambda: policy(decide=True),
    ),
    "a lost long, where targets decide": Case(
        pass_view([long(RECENT_S, 2000, deadline_s=NOW_S), long(RECENT_S, 8000)]),
        (L, R.LOST_LONG, 1),
        make=lambda: policy(decide=True),
    ),
    "a long that would be lost behind a smaller one, where targets decide": Case(
        pass_view([long(RECENT_S, 2000, deadline_s=NOW_S + 9.0), long(RECENT_S, 8000, deadline_s=NOW_S + 1.1)]),
        (L, R.URGENT, 1),
        make=lambda: policy(decide=True),
    ),
    "a lost short that has given way for its bound, where targets decide": Case(
        pass_view([short(AGED_S, deadline_s=AGED_S), lone_short()]), (S, R.OVERDUE, 0), make=lambda: policy(decide=True)
    ),
    "a lost long would take the KV cache of those to come, where targets decide": Case(
        pass_view([long(RECENT_S, 4000, deadline_s=NOW_S)], running=4, kv_free=20_000, kv_capacity=100_000),
        (H, R.RESERVE),
        make=lambda: policy(decide=True),
    ),
    # both classes
    "due shorts before a long": Case(pass_view([long(RECENT_S), lone_short()]), (S, R.NO_GAIN, 1)),
    "due shorts park the chunk": Case(pass_view([lone_short()], long(RECENT_S)), (S, R.NO_GAIN, 0), park=True),
    "shorts of the queue only, in its order": Case(
        pass_view([lone_short(), long(RECENT_S), lone_short(), long(RECENT_S)]), (S, R.NO_GAIN, 0, 2)
    ),
    # The chunk of 0.1 s between would cost more than a fuller batch saves: never held for a long.
    "shorts are not held when a long's chunk would come between": Case(
        pass_view([lone_short()], long(RECENT_S)), (S, R.NO_GAIN, 0), make=lambda: policy(busy=True)
    ),
    "shorts held by W_min, a long runs meanwhile": Case(
        pass_view([lone_short()], long(RECENT_S)),
        (L, R.SHORT_HELD),
        make=lambda: policy(awd=AwdKnobs(wait_min_s=0.005, depth_max=16)),
    ),
    "shorts wait for a fuller batch": Case(
        pass_view([lone_short(), lone_short()]), (H, R.WAIT_FOR_DEPTH), make=lambda: policy(busy=True)
    ),
    "depth": Case(pass_view([lone_short() for _ in range(16)]), (S, R.DEPTH, *range(16))),
    "full": Case(pass_view([lone_short() for _ in range(17)]), (S, R.TOKENS, *range(16))),
    "resumed": Case(pass_view([short(RECENT_S, resumed=True)]), (S, R.RESUMED, 0)),
    "slack": Case(pass_view([short(RECENT_S, deadline_s=NOW_S)]), (S, R.SLACK, 0)),
    "window": Case(pass_view([short(NOW_S - 0.5), lone_short()]), (S, R.WINDOW, 0, 1), make=lambda: policy(busy=True)),
    # priority
    "a long with the better priority": Case(
        pass_view([long(RECENT_S, priority_rank=0), short(RECENT_S, priority_rank=1)]), (L, R.PRIORITY, 0)
    ),
    "a chunk with the better priority": Case(
        pass_view([short(RECENT_S, priority_rank=1)], long(RECENT_S, priority_rank=0)), (L, R.PRIORITY)
    ),
    "a short of equal priority goes first": Case(
        pass_view([long(RECENT_S, priority_rank=0), short(RECENT_S), short(RECENT_S, priority_rank=1)]),
        (S, R.NO_GAIN, 1, 2),
    ),
    "a better priority does not help a long that does not fit": Case(
        pass_view([long(RECENT_S, priority_rank=0), short(RECENT_S, priority_rank=1)], running=4, **FREE),
        (S, R.NO_GAIN, 1),
        make=lambda: blocked(policy(), PrefillClass.LONG, pass_view(running=4, **FREE)),
    ),
    # age
    "an aged long is owed the device": Case(
        pass_view([long(AGED_S), lone_short()]), (L, R.AGE, 0), make=lambda: owing(policy())
    ),
    "a long that has just aged waits for one pass": Case(pass_view([long(AGED_S), lone_short()]), (S, R.NO_GAIN, 1)),
    "an aged chunk": Case(pass_view([lone_short()], long(AGED_S)), (L, R.AGE), make=lambda: owing(policy())),
    "age within the class of the best priority only": Case(
        pass_view([long(AGED_S, priority_rank=1), long(RECENT_S), short(RECENT_S, priority_rank=1)]), (L, R.PRIORITY, 1)
    ),
    "an aged long, not the smallest one, in its time": Case(
        pass_view([long(RECENT_S, 2000), long(AGED_S, 4000)]), (L, R.AGE, 1), make=lambda: owing(policy())
    ),
    # decode
    "running requests have waited long enough": Case(
        pass_view([lone_short()], running=1, decode_wait_s=0.05),
        (H, R.DECODE_TURN),
        make=lambda: policy(decode_gap_s=0.05),
    ),
    "running requests wait beside a chunk alone": Case(
        pass_view([], long(RECENT_S), running=1, decode_wait_s=0.05),
        (H, R.DECODE_TURN),
        make=lambda: policy(decode_gap_s=0.05),
    ),
    "running requests have not waited long": Case(
        pass_view([lone_short()], running=1, decode_wait_s=0.049),
        (S, R.NO_GAIN, 0),
        make=lambda: policy(decode_gap_s=0.05),
    ),
    "decode steps of 20 ms may take a twentieth of the device": Case(
        pass_view([lone_short()], running=1, decode_wait_s=0.39, decode_step_s=0.02),
        (S, R.NO_GAIN, 0),
        make=lambda: policy(decode_gap_s=0.05),
    ),
    "after twenty of their own steps they run": Case(
        pass_view([lone_short()], running=1, decode_wait_s=0.4, decode_step_s=0.02),
        (H, R.DECODE_TURN),
        make=lambda: policy(decode_gap_s=0.05),
    ),
    "decode turns are off": Case(pass_view([lone_short()], running=1, decode_wait_s=9.0), (S, R.NO_GAIN, 0)),
    # memory and slots
    "an aged long that does not fit: nobody else takes memory": Case(
        pass_view([long(AGED_S), lone_short()], running=4, **FREE),
        (H, R.KV_DRAIN),
        make=lambda: blocked(owing(policy()), PrefillClass.LONG, pass_view(running=4, **FREE)),
    ),
    "the chunk under way has no room left: running requests go on until they free some": Case(
        pass_view([], long(RECENT_S), kv_room=0, running=4), (H, R.KV_DRAIN)
    ),
    "nor may what overtakes it be a reason to force it": Case(
        pass_view([long(RECENT_S, 900)], long(RECENT_S), kv_room=0, running=4),
        (H, R.KV_DRAIN),
        make=lambda: blocked(policy(), PrefillClass.LONG, pass_view(running=4)),
    ),
    "an aged chunk without room: nobody else takes memory": Case(
        pass_view([lone_short()], long(AGED_S), kv_room=0, running=4), (H, R.KV_DRAIN), make=lambda: owing(policy())
    ),
    "a young long that does not fit: due shorts go on": Case(
        pass_view([long(RECENT_S), lone_short()], running=4, **FREE),
        (S, R.NO_GAIN, 1),
        make=lambda: blocked(policy(), PrefillClass.LONG, pass_view(running=4, **FREE)),
    ),
    "a long that does not fit, alone": Case(
        pass_view([long(RECENT_S)], running=4, **FREE),
        (H, R.BLOCKED),
        make=lambda: blocked(policy(), PrefillClass.LONG, pass_view(running=4, **FREE)),
    ),
    "it is tried again once memory is free": Case(
        pass_view([long(RECENT_S)], running=4, kv_free=100_001),
        (L, R.NO_SHORT, 0),
        make=lambda: blocked(policy(), PrefillClass.LONG, pass_view(running=4, **FREE)),
    ),
    "it is tried again once a request has ended": Case(
        pass_view([long(RECENT_S)], running=3, **FREE),
        (L, R.NO_SHORT, 0),
        make=lambda: blocked(policy(), PrefillClass.LONG, pass_view(running=4, **FREE)),
    ),
    "with nothing running nothing can be freed: it is tried": Case(
        pass_view([long(RECENT_S)], running=0, **FREE),
        (L, R.NO_SHORT, 0),
        make=lambda: blocked(policy(), PrefillClass.LONG, pass_view(running=4, **FREE)),
    ),
    "an overtaker that does not fit leaves the chunk to go on": Case(
        pass_view([long(RECENT_S, 900)], long(RECENT_S), running=4, **FREE),
        (L, R.NO_SHORT),
        make=lambda: blocked(policy(), PrefillClass.LONG, pass_view(running=4, **FREE)),
    ),
    "shorts that do not fit leave the device to a long": Case(
        pass_view([lone_short(), long(RECENT_S)], running=4, **FREE),
        (L, R.SHORT_BLOCKED, 1),
        make=lambda: blocked(policy(), PrefillClass.SHORT, pass_view(running=4, **FREE)),
    ),
    "shorts that do not fit beside the parked chunk let it go on, with nothing else running": Case(
        pass_view([lone_short()], long(RECENT_S), running=0, **FREE),
        (L, R.SHORT_BLOCKED),
        make=lambda: blocked(policy(), PrefillClass.SHORT, pass_view(running=0, **FREE)),
    ),
    "an overtaker that does not fit leaves the chunk to go on, with nothing else running": Case(
        pass_view([long(RECENT_S, 900)], long(RECENT_S), running=0, **FREE),
        (L, R.NO_SHORT),
        make=lambda: blocked(policy(), PrefillClass.LONG, pass_view(running=0, **FREE)),
    ),
    "neither class fits beside the chunk, with nothing else running": Case(
        pass_view([lone_short(), long(RECENT_S, 900)], long(RECENT_S), running=0, **FREE),
        (L, R.SHORT_BLOCKED),
        make=lambda: blocked(
            blocked(policy(), PrefillClass.SHORT, pass_view(running=0, **FREE)),
            PrefillClass.LONG,
            pass_view(running=0, **FREE),
        ),
    ),
    "neither class fits": Case(
        pass_view([lone_short(), long(RECENT_S)], running=4, **FREE),
        (H, R.BLOCKED),
        make=lambda: blocked(
            blocked(policy(), PrefillClass.SHORT, pass_view(running=4, **FREE)),
            PrefillClass.LONG,
            pass_view(running=4, **FREE),
        ),
    ),
    "no slot for shorts": Case(pass_view([lone_short()], slots=0, running=4), (H, R.BLOCKED)),
    "no slot for shorts, the chunk has its own": Case(
        pass_view([lone_short()], long(RECENT_S), slots=0), (L, R.SHORT_BLOCKED)
    ),
    "a long may not take the memory that expected shorts need": Case(
        pass_view([long(RECENT_S, 4000)], running=4, kv_free=4050), (H, R.KV_HEADROOM), make=lambda: policy(busy=True)
    ),
    "enough memory for both": Case(
        pass_view([long(RECENT_S, 4000)], running=4, kv_free=4081), (L, R.NO_SHORT, 0), make=lambda: policy(busy=True)
    ),
    "headroom is for shorts that are expected": Case(
        pass_view([long(RECENT_S, 4000)], running=4, kv_free=4050), (L, R.NO_SHORT, 0)
    ),
    "headroom does not hold an idle device": Case(
        pass_view([long(RECENT_S, 4000)], running=0, kv_free=4050), (L, R.NO_SHORT, 0), make=lambda: policy(busy=True)
    ),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_decide(case: Case) -> None:
    decision = case.make().decide(case.view, NOW_S)
    action, reason, *selected = case.expected
    assert (decision.action, decision.reason) == (action, reason)
    assert decision.selected == tuple(case.view.waiting[index] for index in selected)
    assert decision.park is case.park
    if action is L:
        assert (decision.chunk_tokens is None) == case.one_pass


def test_every_reason_is_in_the_table() -> None:
    # baseline orders, DOPD's batching, AWD with captured graphs (tests/policy/buckets)
    of_other_policies = {R.ORDER, R.QUEUE_END, R.BUCKET}
    assert {case.expected[1] for case in CASES.values()} == set(R) - of_other_policies


@pytest.mark.parametrize(("reason", "release"), [(R.WAIT_FOR_DEPTH, True), (R.BLOCKED, False)])
def test_a_hold_says_until_when(reason: R, release: bool) -> None:
    case = next(case for case in CASES.values() if case.expected[1] is reason)
    decision = case.make().decide(case.view, NOW_S)
    assert (decision.release_s is not None) is release


def test_deciding_does_not_change_what_is_decided() -> None:
    for name, case in CASES.items():
        made = case.make()
        assert made.decide(case.view, NOW_S) == made.decide(case.view, NOW_S), name
