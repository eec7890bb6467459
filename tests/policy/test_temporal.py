"""The temporal policy, rule by rule. FLAT model, boundary at 100 tokens, chunks of 1000.

Names of the columns: queue and chunk are what waits, then what shall run and why.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
from support.temporal_scene import AGED_S, NOW_S, RECENT_S, lone_short, owing, policy
from support.views import long, pass_view, short

from pla_sglang.policy.interface.prefill import Action, PassDecision, PassReason, PassView, PrefillClass
from pla_sglang.policy.pla.awd import AwdKnobs
from pla_sglang.policy.pla.temporal import TemporalPolicy
from pla_sglang.policy.slo.knobs import SloKnobs
from pla_sglang.policy.slo.mixed_batches import MixedBatches

FREE = {"kv_free": 100_000}


def blocked(made: TemporalPolicy, cls: PrefillClass, view: PassView) -> TemporalPolicy:
    """A pass of ``cls`` has just come back empty in the state of ``view``."""
    action = Action.SHORT if cls is PrefillClass.SHORT else Action.LONG
    made.on_pass(PassDecision(action, PassReason.NO_SHORT, (short(),)), view, (), NOW_S)
    return made


@dataclasses.dataclass(frozen=True)
class Case:
    name: str
    view: PassView
    action: Action
    reason: PassReason
    selected: tuple[int, ...] = ()  # indices into the queue
    park: bool = False
    make: Callable[[], TemporalPolicy | MixedBatches] = policy
    one_pass: bool = False  # LONG: chunk_tokens is None


S, L, H = Action.SHORT, Action.LONG, Action.HOLD


CASES = [
    # nothing, or one class only
    Case("nothing waits", pass_view(), H, PassReason.EMPTY),
    Case("a lone short on an idle server", pass_view([lone_short()]), S, PassReason.NO_GAIN, (0,)),
    Case("a lone long", pass_view([long(RECENT_S)]), L, PassReason.NO_SHORT, (0,)),
    Case("a running chunk goes on", pass_view([], long(RECENT_S)), L, PassReason.NO_SHORT),
    Case("other longs wait for it", pass_view([long(RECENT_S)], long(RECENT_S, 3000)), L, PassReason.NO_SHORT),
    Case(
        "one that fits a single pass overtakes",
        pass_view([long(RECENT_S, 900)], long(RECENT_S)),
        L,
        PassReason.NO_SHORT,
        (0,),
        park=True,
        one_pass=True,
    ),
    Case(
        "riders that have sat out a pass and would be late",
        pass_view([long(RECENT_S)], running=1, can_piggyback=True, decode_wait_s=0.02, token_slack_s=0.001),
        H,
        PassReason.TOKEN_DEADLINE,
        make=lambda: MixedBatches(policy(), SloKnobs()),
    ),
    Case(
        "a lost short, where targets decide",
        pass_view([short(RECENT_S, deadline_s=NOW_S), long(RECENT_S)]),
        L,
        PassReason.LOST_SHORT,
        (1,),
        make=lambda: policy(decide=True),
    ),
    Case(
        "a lost long, where targets decide",
        pass_view([long(RECENT_S, 2000, deadline_s=NOW_S), long(RECENT_S, 8000)]),
        L,
        PassReason.LOST_LONG,
        (1,),
        make=lambda: policy(decide=True),
    ),
    Case(
        "a long that would be lost behind a smaller one, where targets decide",
        pass_view([long(RECENT_S, 2000, deadline_s=NOW_S + 9.0), long(RECENT_S, 8000, deadline_s=NOW_S + 1.1)]),
        L,
        PassReason.URGENT,
        (1,),
        make=lambda: policy(decide=True),
    ),
    Case(
        "a lost short that has given way for its bound, where targets decide",
        pass_view([short(AGED_S, deadline_s=AGED_S), lone_short()]),
        S,
        PassReason.OVERDUE,
        (0,),
        make=lambda: policy(decide=True),
    ),
    Case(
        "a lost long would take the KV cache of those to come, where targets decide",
        pass_view([long(RECENT_S, 4000, deadline_s=NOW_S)], running=4, kv_free=20_000, kv_capacity=100_000),
        H,
        PassReason.RESERVE,
        make=lambda: policy(decide=True),
    ),
    # both classes
    Case("due shorts before a long", pass_view([long(RECENT_S), lone_short()]), S, PassReason.NO_GAIN, (1,)),
    Case(
        "due shorts park the chunk", pass_view([lone_short()], long(RECENT_S)), S, PassReason.NO_GAIN, (0,), park=True
    ),
    Case(
        "shorts of the queue only, in its order",
        pass_view([lone_short(), long(RECENT_S), lone_short(), long(RECENT_S)]),
        S,
        PassReason.NO_GAIN,
        (0, 2),
    ),
    # The chunk of 0.1 s between would cost more than a fuller batch saves: never held for a long.
    Case(
        "shorts are not held when a long's chunk would come between",
        pass_view([lone_short()], long(RECENT_S)),
        S,
        PassReason.NO_GAIN,
        (0,),
        make=lambda: policy(busy=True),
    ),
    Case(
        "shorts held by W_min, a long runs meanwhile",
        pass_view([lone_short()], long(RECENT_S)),
        L,
        PassReason.SHORT_HELD,
        make=lambda: policy(awd=AwdKnobs(wait_min_s=0.005, depth_max=16)),
    ),
    Case(
        "shorts wait for a fuller batch",
        pass_view([lone_short(), lone_short()]),
        H,
        PassReason.WAIT_FOR_DEPTH,
        make=lambda: policy(busy=True),
    ),
    Case("depth", pass_view([lone_short() for _ in range(16)]), S, PassReason.DEPTH, tuple(range(16))),
    Case("full", pass_view([lone_short() for _ in range(17)]), S, PassReason.TOKENS, tuple(range(16))),
    Case("resumed", pass_view([short(RECENT_S, resumed=True)]), S, PassReason.RESUMED, (0,)),
    Case("slack", pass_view([short(RECENT_S, deadline_s=NOW_S)]), S, PassReason.SLACK, (0,)),
    Case(
        "window",
        pass_view([short(NOW_S - 0.5), lone_short()]),
        S,
        PassReason.WINDOW,
        (0, 1),
        make=lambda: policy(busy=True),
    ),
    # priority
    Case(
        "a long with the better priority",
        pass_view([long(RECENT_S, priority_rank=0), short(RECENT_S, priority_rank=1)]),
        L,
        PassReason.PRIORITY,
        (0,),
    ),
    Case(
        "a chunk with the better priority",
        pass_view([short(RECENT_S, priority_rank=1)], long(RECENT_S, priority_rank=0)),
        L,
        PassReason.PRIORITY,
    ),
    Case(
        "a short of equal priority goes first",
        pass_view([long(RECENT_S, priority_rank=0), short(RECENT_S), short(RECENT_S, priority_rank=1)]),
        S,
        PassReason.NO_GAIN,
        (1, 2),
    ),
    Case(
        "a better priority does not help a long that does not fit",
        pass_view([long(RECENT_S, priority_rank=0), short(RECENT_S, priority_rank=1)], running=4, **FREE),
        S,
        PassReason.NO_GAIN,
        (1,),
        make=lambda: blocked(policy(), PrefillClass.LONG, pass_view(running=4, **FREE)),
    ),
    # age
    Case(
        "an aged long is owed the device",
        pass_view([long(AGED_S), lone_short()]),
        L,
        PassReason.AGE,
        (0,),
        make=lambda: owing(policy()),
    ),
    Case(
        "a long that has just aged waits for one pass",
        pass_view([long(AGED_S), lone_short()]),
        S,
        PassReason.NO_GAIN,
        (1,),
    ),
    Case("an aged chunk", pass_view([lone_short()], long(AGED_S)), L, PassReason.AGE, make=lambda: owing(policy())),
    Case(
        "age within the class of the best priority only",
        pass_view([long(AGED_S, priority_rank=1), long(RECENT_S), short(RECENT_S, priority_rank=1)]),
        L,
        PassReason.PRIORITY,
        (1,),
    ),
    Case(
        "an aged long, not the smallest one, in its time",
        pass_view([long(RECENT_S, 2000), long(AGED_S, 4000)]),
        L,
        PassReason.AGE,
        (1,),
        make=lambda: owing(policy()),
    ),
    # decode
    Case(
        "running requests have waited long enough",
        pass_view([lone_short()], running=1, decode_wait_s=0.05),
        H,
        PassReason.DECODE_TURN,
        make=lambda: policy(decode_gap_s=0.05),
    ),
    Case(
        "running requests wait beside a chunk alone",
        pass_view([], long(RECENT_S), running=1, decode_wait_s=0.05),
        H,
        PassReason.DECODE_TURN,
        make=lambda: policy(decode_gap_s=0.05),
    ),
    Case(
        "running requests have not waited long",
        pass_view([lone_short()], running=1, decode_wait_s=0.049),
        S,
        PassReason.NO_GAIN,
        (0,),
        make=lambda: policy(decode_gap_s=0.05),
    ),
    Case(
        "decode steps of 20 ms may take a twentieth of the device",
        pass_view([lone_short()], running=1, decode_wait_s=0.39, decode_step_s=0.02),
        S,
        PassReason.NO_GAIN,
        (0,),
        make=lambda: policy(decode_gap_s=0.05),
    ),
    Case(
        "after twenty of their own steps they run",
        pass_view([lone_short()], running=1, decode_wait_s=0.4, decode_step_s=0.02),
        H,
        PassReason.DECODE_TURN,
        make=lambda: policy(decode_gap_s=0.05),
    ),
    Case("decode turns are off", pass_view([lone_short()], running=1, decode_wait_s=9.0), S, PassReason.NO_GAIN, (0,)),
    # memory and slots
    Case(
        "an aged long that does not fit: nobody else takes memory",
        pass_view([long(AGED_S), lone_short()], running=4, **FREE),
        H,
        PassReason.KV_DRAIN,
        make=lambda: blocked(owing(policy()), PrefillClass.LONG, pass_view(running=4, **FREE)),
    ),
    Case(
        "the chunk under way has no room left: running requests go on until they free some",
        pass_view([], long(RECENT_S), kv_room=0, running=4),
        H,
        PassReason.KV_DRAIN,
    ),
    Case(
        "nor may what overtakes it be a reason to force it",
        pass_view([long(RECENT_S, 900)], long(RECENT_S), kv_room=0, running=4),
        H,
        PassReason.KV_DRAIN,
        make=lambda: blocked(policy(), PrefillClass.LONG, pass_view(running=4)),
    ),
    Case(
        "an aged chunk without room: nobody else takes memory",
        pass_view([lone_short()], long(AGED_S), kv_room=0, running=4),
        H,
        PassReason.KV_DRAIN,
        make=lambda: owing(policy()),
    ),
    Case(
        "a young long that does not fit: due shorts go on",
        pass_view([long(RECENT_S), lone_short()], running=4, **FREE),
        S,
        PassReason.NO_GAIN,
        (1,),
        make=lambda: blocked(policy(), PrefillClass.LONG, pass_view(running=4, **FREE)),
    ),
    Case(
        "a long that does not fit, alone",
        pass_view([long(RECENT_S)], running=4, **FREE),
        H,
        PassReason.BLOCKED,
        make=lambda: blocked(policy(), PrefillClass.LONG, pass_view(running=4, **FREE)),
    ),
    Case(
        "it is tried again once memory is free",
        pass_view([long(RECENT_S)], running=4, kv_free=100_001),
        L,
        PassReason.NO_SHORT,
        (0,),
        make=lambda: blocked(policy(), PrefillClass.LONG, pass_view(running=4, **FREE)),
    ),
    Case(
        "it is tried again once a request has ended",
        pass_view([long(RECENT_S)], running=3, **FREE),
        L,
        PassReason.NO_SHORT,
        (0,),
        make=lambda: blocked(policy(), PrefillClass.LONG, pass_view(running=4, **FREE)),
    ),
    Case(
        "with nothing running nothing can be freed: it is tried",
        pass_view([long(RECENT_S)], running=0, **FREE),
        L,
        PassReason.NO_SHORT,
        (0,),
        make=lambda: blocked(policy(), PrefillClass.LONG, pass_view(running=4, **FREE)),
    ),
    Case(
        "an overtaker that does not fit leaves the chunk to go on",
        pass_view([long(RECENT_S, 900)], long(RECENT_S), running=4, **FREE),
        L,
        PassReason.NO_SHORT,
        make=lambda: blocked(policy(), PrefillClass.LONG, pass_view(running=4, **FREE)),
    ),
    Case(
        "shorts that do not fit leave the device to a long",
        pass_view([lone_short(), long(RECENT_S)], running=4, **FREE),
        L,
        PassReason.SHORT_BLOCKED,
        (1,),
        make=lambda: blocked(policy(), PrefillClass.SHORT, pass_view(running=4, **FREE)),
    ),
    Case(
        "shorts that do not fit beside the parked chunk let it go on, with nothing else running",
        pass_view([lone_short()], long(RECENT_S), running=0, **FREE),
        L,
        PassReason.SHORT_BLOCKED,
        make=lambda: blocked(policy(), PrefillClass.SHORT, pass_view(running=0, **FREE)),
    ),
    Case(
        "an overtaker that does not fit leaves the chunk to go on, with nothing else running",
        pass_view([long(RECENT_S, 900)], long(RECENT_S), running=0, **FREE),
        L,
        PassReason.NO_SHORT,
        make=lambda: blocked(policy(), PrefillClass.LONG, pass_view(running=0, **FREE)),
    ),
    Case(
        "neither class fits beside the chunk, with nothing else running",
        pass_view([lone_short(), long(RECENT_S, 900)], long(RECENT_S), running=0, **FREE),
        L,
        PassReason.SHORT_BLOCKED,
        make=lambda: blocked(
            blocked(policy(), PrefillClass.SHORT, pass_view(running=0, **FREE)),
            PrefillClass.LONG,
            pass_view(running=0, **FREE),
        ),
    ),
    Case(
        "neither class fits",
        pass_view([lone_short(), long(RECENT_S)], running=4, **FREE),
        H,
        PassReason.BLOCKED,
        make=lambda: blocked(
            blocked(policy(), PrefillClass.SHORT, pass_view(running=4, **FREE)),
            PrefillClass.LONG,
            pass_view(running=4, **FREE),
        ),
    ),
    Case("no slot for shorts", pass_view([lone_short()], slots=0, running=4), H, PassReason.BLOCKED),
    Case(
        "no slot for shorts, the chunk has its own",
        pass_view([lone_short()], long(RECENT_S), slots=0),
        L,
        PassReason.SHORT_BLOCKED,
    ),
    Case(
        "a long may not take the memory that expected shorts need",
        pass_view([long(RECENT_S, 4000)], running=4, kv_free=4050),
        H,
        PassReason.KV_HEADROOM,
        make=lambda: policy(busy=True),
    ),
    Case(
        "enough memory for both",
        pass_view([long(RECENT_S, 4000)], running=4, kv_free=4081),
        L,
        PassReason.NO_SHORT,
        (0,),
        make=lambda: policy(busy=True),
    ),
    Case(
        "headroom is for shorts that are expected",
        pass_view([long(RECENT_S, 4000)], running=4, kv_free=4050),
        L,
        PassReason.NO_SHORT,
        (0,),
    ),
    Case(
        "headroom does not hold an idle device",
        pass_view([long(RECENT_S, 4000)], running=0, kv_free=4050),
        L,
        PassReason.NO_SHORT,
        (0,),
        make=lambda: policy(busy=True),
    ),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_decide(case: Case) -> None:
    decision = case.make().decide(case.view, NOW_S)
    assert (decision.action, decision.reason) == (case.action, case.reason)
    assert decision.selected == tuple(case.view.waiting[index] for index in case.selected)
    assert decision.park is case.park
    if case.action is L:
        assert (decision.chunk_tokens is None) == case.one_pass


def test_every_reason_is_in_the_table() -> None:
    # baseline orders, DOPD's batching, AWD with captured graphs (tests/policy/buckets)
    of_other_policies = {PassReason.ORDER, PassReason.QUEUE_END, PassReason.BUCKET}
    assert {case.reason for case in CASES} == set(PassReason) - of_other_policies


@pytest.mark.parametrize(("reason", "release"), [(PassReason.WAIT_FOR_DEPTH, True), (PassReason.BLOCKED, False)])
def test_a_hold_says_until_when(reason: PassReason, release: bool) -> None:
    case = next(case for case in CASES if case.reason is reason)
    decision = case.make().decide(case.view, NOW_S)
    assert (decision.release_s is not None) is release


def test_deciding_does_not_change_what_is_decided() -> None:
    for case in CASES:
        made = case.make()
        assert made.decide(case.view, NOW_S) == made.decide(case.view, NOW_S), case.name
