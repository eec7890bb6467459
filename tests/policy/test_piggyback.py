"""Piggybacked decodes, rule by rule. FLAT model (10 ms floor, 0.1 ms a token), boundary at 100 tokens, chunks of
1000."""

from __future__ import annotations

import dataclasses

import pytest
from support.temporal_scene import KNOBS, NOW_S, RECENT_S, lone_short
from support.views import FLAT, long, pass_view, short

from pla_sglang.policy.common.step_model import StepModel
from pla_sglang.policy.interface.prefill import Action, PassDecision, PassView, Piggyback, WaitingView
from pla_sglang.policy.interface.prefill import PassReason as R
from pla_sglang.policy.pla.temporal import TemporalKnobs, TemporalPolicy
from pla_sglang.policy.slo.knobs import SloKnobs
from pla_sglang.policy.slo.mixed_batches import MixedBatches, MixedBatchModel, PassCost, plan_mixed_batch

DECODE = MixedBatchModel(base_s=0.010, request_s=0.0, read_s=0.0)
S, L, H = Action.SHORT, Action.LONG, Action.HOLD


def riding(view: PassView, *, slack_s: float | None = None, wait_s: float = 0.0, **fields: object) -> PassView:
    """Ten requests run, and may join."""
    fields = {"running": 10, "piggyback_kv_tokens": 10, **fields}
    return dataclasses.replace(view, can_piggyback=True, token_slack_s=slack_s, decode_wait_s=wait_s, **fields)  # type: ignore[arg-type]


def policy(
    mixed_model: MixedBatchModel = DECODE, knobs: TemporalKnobs = KNOBS, model: StepModel = FLAT
) -> MixedBatches:
    return MixedBatches(TemporalPolicy(knobs, model), SloKnobs(), mixed_model)


@dataclasses.dataclass(frozen=True)
class Case:
    view: PassView
    action: Action
    piggyback: Piggyback | None
    reason: R = R.NO_SHORT
    tokens: int | None = None  # of the long's chunk
    selected: int | None = None  # how many
    model: MixedBatchModel = DECODE


TWO_SHORTS = (short(RECENT_S, 90), short(RECENT_S, 90))
URGENT = short(RECENT_S, 90, deadline_s=NOW_S + 0.015)

CASES = {
    "nothing runs": Case(riding(pass_view([long(RECENT_S)]), running=0), L, None, tokens=1000),
    "the host mixes nothing": Case(pass_view([long(RECENT_S)], running=10), L, None, tokens=1000),
    "without targets they join as it is": Case(riding(pass_view([long(RECENT_S)])), L, Piggyback.TOGETHER, tokens=1000),
    "in time as it is": Case(riding(pass_view([long(RECENT_S)]), slack_s=0.102), L, Piggyback.TOGETHER, tokens=1000),
    # (tokens + 10 riders) * 0.1 ms
    "cut for the next token": Case(
        riding(pass_view([long(RECENT_S)]), slack_s=0.05), L, Piggyback.TOKEN_DEADLINE, tokens=490
    ),
    "and for what the model errs": Case(
        riding(pass_view([long(RECENT_S)]), slack_s=0.05),
        L,
        Piggyback.TOKEN_DEADLINE,
        tokens=240,
        model=dataclasses.replace(DECODE, error=1.0),
    ),
    "a chunk under way is cut too": Case(
        riding(pass_view([], long()), slack_s=0.05), L, Piggyback.TOKEN_DEADLINE, tokens=490
    ),
    "late, but at the crossing": Case(
        riding(pass_view([long(RECENT_S)]), slack_s=0.001), L, Piggyback.LATE, tokens=100
    ),
    "those that sat out a pass come first": Case(
        riding(pass_view([long(RECENT_S)]), slack_s=0.001, wait_s=0.02), H, None, R.TOKEN_DEADLINE
    ),
    "a decode step of their own is cheaper": Case(
        riding(pass_view([long(RECENT_S)])),
        L,
        Piggyback.ALONE,
        tokens=1000,
        model=MixedBatchModel(base_s=0.001, request_s=0.0, read_s=0.0, extra_s=0.02),
    ),
    "alone, the pass leaves time for that step": Case(
        riding(pass_view([long(RECENT_S)]), slack_s=0.05),
        L,
        Piggyback.ALONE,
        tokens=490,
        model=MixedBatchModel(base_s=0.001, request_s=0.0, read_s=0.0, extra_s=0.02),
    ),
    "no KV cache for their tokens": Case(
        riding(pass_view([long()], kv_free=1000), piggyback_kv_tokens=10), L, Piggyback.NO_ROOM
    ),
    "cut to two decode steps where KV cache is short": Case(
        riding(pass_view([long(RECENT_S)], kv_free=19_000, kv_capacity=100_000)), L, Piggyback.KV_SHORT, tokens=190
    ),
    "and where its next tokens have more time than that": Case(
        riding(pass_view([long(RECENT_S)], kv_free=19_000, kv_capacity=100_000), slack_s=0.05),
        L,
        Piggyback.KV_SHORT,
        tokens=190,
    ),
    "they come first where they have less": Case(
        riding(pass_view([long(RECENT_S)], kv_free=19_000, kv_capacity=100_000), slack_s=0.015),
        L,
        Piggyback.TOKEN_DEADLINE,
        tokens=139,
    ),
    "a chunk under way is cut for the cache too": Case(
        riding(pass_view([], long(), kv_free=19_000, kv_capacity=100_000)), L, Piggyback.KV_SHORT, tokens=190
    ),
    "who overtakes it has to be whole": Case(
        riding(pass_view([long(RECENT_S, 900)], long(RECENT_S), kv_free=19_000, kv_capacity=100_000)),
        L,
        Piggyback.TOGETHER,
        selected=1,
    ),
    "a fifth is not short": Case(
        riding(pass_view([long(RECENT_S)], kv_free=20_000, kv_capacity=100_000)), L, Piggyback.TOGETHER, tokens=1000
    ),
    "shorts together": Case(riding(pass_view(TWO_SHORTS)), S, Piggyback.TOGETHER, R.NO_GAIN, selected=2),
    "the last short waits for the next pass": Case(
        riding(pass_view(TWO_SHORTS), slack_s=0.012), S, Piggyback.TOKEN_DEADLINE, R.NO_GAIN, selected=1
    ),
    "one short goes in any case": Case(riding(pass_view([lone_short()]), slack_s=0.001), S, Piggyback.LATE, R.NO_GAIN),
    "who must start now is not left out": Case(
        riding(pass_view([TWO_SHORTS[0], URGENT]), slack_s=0.012, wait_s=0.001),
        S,
        Piggyback.TOGETHER,
        R.SLACK,
        selected=2,
    ),
    "who would overtake and be late gives way to the chunk": Case(
        riding(pass_view([long(RECENT_S, 900)], long(RECENT_S)), slack_s=0.05),
        L,
        Piggyback.TOKEN_DEADLINE,
        tokens=490,
        selected=0,
    ),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_rules(case: Case) -> None:
    made = policy(case.model)
    decision = made.decide(case.view, NOW_S)
    assert (decision.action, decision.reason, decision.piggyback) == (case.action, case.reason, case.piggyback)
    if case.tokens is not None:
        assert decision.chunk_tokens == case.tokens
    if case.selected is not None:
        assert len(decision.selected) == case.selected
    assert made.decide(case.view, NOW_S) == decision, "asking twice changes nothing"


def test_companions_wait_before_a_long_is_cut() -> None:
    made = policy(model=StepModel(g0_s=0.0, gw_s=0.0, gr_s=0.0, k0_s=0.05, b_s=1e-4, a_s=0.0))
    view = pass_view([long(RECENT_S, 200), long(RECENT_S, 200), *(long(RECENT_S, 900) for _ in range(8))])
    whole = made.decide(riding(view), NOW_S)
    assert (len(whole.selected), whole.piggyback) == (2, Piggyback.TOGETHER)
    alone = made.decide(riding(view, slack_s=0.072), NOW_S)
    assert (alone.selected, alone.piggyback) == ((view.waiting[0],), Piggyback.TOKEN_DEADLINE)


def test_a_cut_pass_keeps_as_many_companions_as_are_in_time() -> None:
    """Each of 0.01 s beside a launch of 0.05 s; behind a chunk under way, too."""
    made = policy(model=StepModel(g0_s=0.0, gw_s=0.0, gr_s=0.0, k0_s=0.05, b_s=1e-4, a_s=0.0))
    queue = [*(long(RECENT_S, 100) for _ in range(4)), *(long(RECENT_S, 900) for _ in range(20))]
    for chunk in (None, long(RECENT_S, 3000)):
        whole = made.decide(riding(pass_view(queue, chunk)), NOW_S)
        assert (whole.selected[:4], whole.piggyback) == (tuple(queue[:4]), Piggyback.TOGETHER)
        cut = made.decide(riding(pass_view(queue, chunk), slack_s=0.082), NOW_S)
        assert (cut.selected, cut.piggyback) == (tuple(queue[:3]), Piggyback.TOKEN_DEADLINE)


def test_a_chunk_is_cut_on_the_hosts_grid() -> None:
    knobs = dataclasses.replace(KNOBS, long_prompts=dataclasses.replace(KNOBS.long_prompts, grid_tokens=64))
    decision = policy(knobs=knobs).decide(riding(pass_view([long(RECENT_S)]), slack_s=0.05), NOW_S)
    assert decision.chunk_tokens == 490 // 64 * 64


@pytest.mark.parametrize(
    ("new", "context", "expected_s"),
    [(1000, 0, 0.101), (1000, 10_000, 0.111), (10, 30_000, 0.040)],
    ids=["tokens", "and context", "never below the decode step"],
)
def test_a_mixed_pass_costs_its_tokens_and_the_context_of_its_riders(new: int, context: int, expected_s: float) -> None:
    model = MixedBatchModel(base_s=0.010, request_s=0.0, read_s=1e-6)
    cost = PassCost(riding(pass_view(), context_tokens=context), FLAT, model)
    assert cost.mixed_s(new, 0, new * new) == pytest.approx(expected_s)


ALONE = MixedBatchModel(base_s=0.001, request_s=0.0, read_s=0.0, extra_s=0.02)


@pytest.mark.parametrize(
    ("name", "model", "wait_s", "action"),
    [
        ("they stayed out and have not stepped since", ALONE, 0.1, H),
        ("they stayed out and have stepped", ALONE, 0.0, L),
        ("they rode", DECODE, 0.1, L),
    ],
)
def test_a_step_of_their_own_comes_after_the_pass(
    name: str, model: MixedBatchModel, wait_s: float, action: Action
) -> None:
    """Without a decode gap; what riding would cost was weighed against one step after each pass."""
    made, long_prompts = policy(model), [long(RECENT_S), long(RECENT_S)]
    view = riding(pass_view(long_prompts))
    first = made.decide(view, NOW_S)
    made.on_pass(first, view, first.selected, NOW_S)
    second = made.decide(riding(pass_view(long_prompts[1:]), wait_s=wait_s), NOW_S + 0.1)
    assert second.action is action, name
    assert second.reason is (R.DECODE_TURN if action is H else R.NO_SHORT)


@pytest.mark.parametrize(
    ("slack_s", "piggyback"), [(None, Piggyback.PROBE), (0.2, Piggyback.PROBE), (0.115, Piggyback.ALONE)]
)
def test_riding_is_tried_again_after_many_passes_if_no_token_is_late(
    slack_s: float | None, piggyback: Piggyback
) -> None:
    """A mixed pass takes 121 ms by the model, the pass and a step 101 ms."""
    made, view = policy(ALONE), riding(pass_view([long(RECENT_S)]), slack_s=slack_s)
    for _ in range(SloKnobs.probe_passes):
        decision = made.decide(view, NOW_S)
        assert decision.piggyback is Piggyback.ALONE
        made.on_pass(decision, view, decision.selected, NOW_S)
    probe = made.decide(view, NOW_S)
    assert probe.piggyback is piggyback
    made.on_pass(probe, view, probe.selected, NOW_S)
    assert made.decide(view, NOW_S).piggyback is Piggyback.ALONE


@pytest.mark.parametrize("under_way", [True, False], ids=["behind a chunk under way", "nothing under way"])
@pytest.mark.parametrize(
    ("name", "first", "slack_s", "action", "tokens", "piggyback"),
    [
        # (tokens + 10 riders) * 0.1 ms, of 1,000 tokens in the whole pass
        ("in time as it is", 600, 0.101, None, 1000, Piggyback.TOGETHER),
        ("without the rest it is in time", 600, 0.062, S, None, Piggyback.TOGETHER),
        ("too late even so: it is cut, or the chunk goes on", 600, 0.050, L, 490, Piggyback.TOKEN_DEADLINE),
        ("later than at the crossing", 600, 0.005, L, 100, Piggyback.LATE),
        ("a short is never cut", 90, 0.005, S, None, Piggyback.LATE),
    ],
)
def test_an_urgent_long_prompt_does_not_run_whole_where_it_is_too_late_for_next_tokens(
    under_way: bool,
    name: str,
    first: int,
    slack_s: float,
    action: Action | None,
    tokens: int | None,
    piggyback: Piggyback,
) -> None:
    """It was to share a pass, with the chunk under way or with the beginning of a larger one."""
    one, larger = long(RECENT_S, first), long(RECENT_S, 3000)
    chunk: WaitingView | None = larger if under_way else None
    shared = PassDecision(S if under_way else L, R.SLACK, (one,) if under_way else (one, larger), 1000)
    view = riding(pass_view([one] if under_way else [one, larger], chunk), slack_s=slack_s)
    planned = plan_mixed_batch(shared, view, PassCost(view, FLAT, DECODE), SloKnobs(), now_s=NOW_S, grid_tokens=1)
    assert (planned.reason, planned.chunk_tokens, planned.piggyback) == (R.SLACK, tokens, piggyback)
    if action is None:
        assert planned == dataclasses.replace(shared, piggyback=piggyback)
        return
    assert planned.action is action
    goes_on = under_way and action is L
    assert planned.selected == (() if goes_on else (one,))
    assert planned.park is (under_way and not goes_on)


@pytest.mark.parametrize(
    ("name", "target_s", "due_s", "slack_s", "tokens"),
    [
        # 60 % of the target are 590 tokens. Seven of such passes do 4,000 in 0.41 s; 1.2 times that are 0.49 s
        ("first tokens have time", 0.1001, 0.8, None, 590),
        ("they have none to give", 0.1, 0.48, None, 1000),
        ("who has no target may have none", 0.1, None, None, 1000),
        ("who is late anyway does not count", 0.1001, -0.1, None, 590),
        ("a next token that is due sooner", 0.1, 0.8, 0.05, 490),
        ("nobody who runs has a target", None, 0.8, None, 1000),
        ("below the crossing a smaller pass would be no faster", 0.015, 0.8, None, 1000),
    ],
)
def test_a_pass_is_cut_to_a_share_of_the_token_target_while_first_tokens_have_time(
    name: str, target_s: float | None, due_s: float | None, slack_s: float | None, tokens: int
) -> None:
    waiting = long(RECENT_S, deadline_s=None if due_s is None else NOW_S + due_s)
    view = riding(pass_view([waiting]), slack_s=slack_s, tpot_target_s=target_s)
    decision = policy().decide(view, NOW_S)
    assert (decision.action, decision.chunk_tokens) == (L, tokens)


@pytest.mark.parametrize(
    ("name", "gap_s", "tokens"),
    [
        # With 0.8 s until they are due. A pass of 590 tokens does 9,800 a second.
        ("what arrives leaves them 80 %", 2.0, 589),
        ("what arrives leaves them 49 %", 0.8, 1000),
    ],
)
def test_no_pass_is_cut_so_where_what_arrives_leaves_no_time_for_it(name: str, gap_s: float, tokens: int) -> None:
    engine_policy = policy()
    for count in range(10, 0, -1):
        engine_policy.on_arrival(long(), NOW_S - gap_s * (count - 1))
    view = riding(pass_view([long(RECENT_S, deadline_s=NOW_S + 0.8)]), slack_s=None, tpot_target_s=0.1)
    assert engine_policy.decide(view, NOW_S).chunk_tokens == tokens
