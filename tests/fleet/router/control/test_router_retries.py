"""The control plane and requests that are asked for again: another pair, a new room, a story of both attempts."""

from __future__ import annotations

from typing import Any

import pytest
from support.fleets import LinearSteps
from support.router_scene import Scene, scene

from pla_sglang.fleet.router.wire import messages as m
from pla_sglang.policy.interface.fleet import FleetView, InstanceKind, InstanceView, RequestView
from pla_sglang.policy.interface.prefill import PrefillClass
from pla_sglang.policy.interface.reasons import FleetReason
from pla_sglang.policy.pairs import PairRunner
from pla_sglang.policy.registry import Setup, build
from pla_sglang.policy.runner import Effects

BUSY = {"queued_tokens": 9}
FAILED = {"detail": "KVTransferError"}
TWO_PAIRS = ["prefill", "prefill", "decode", "decode"]


@pytest.mark.parametrize("policy", ["minimal-load", "cache-aware", "pla", "arrow-no-flips"])
@pytest.mark.parametrize("milestones", [(m.Milestone.SENT,), (m.Milestone.SENT, m.Milestone.PREFILL_DONE)])
async def test_a_failed_transfer_is_tried_between_two_others(policy: str, milestones: tuple[m.Milestone, ...]) -> None:
    async with scene(TWO_PAIRS, policy=policy) as one:
        first = one.assign("r")
        one.reach("r", *milestones)
        second = fail_transfer(one, 1)
        assert {first.prefill, second.prefill, first.decode, second.decode} == {0, 1, 2, 3}
        assert (second.attempt, second.reason) == (2, FleetReason.OTHER_PAIR.value)
        assert second.bootstrap_room != first.bootstrap_room
        assert list(one.plane.dispatcher.ledger.rooms) == [second.bootstrap_room]
        one.reach("r", m.Milestone.SENT, m.Milestone.PREFILL_DONE, m.Milestone.FIRST_TOKEN, attempt=2)
        one.ended("r")
        one.assert_at_rest()
        check_story(one, first, second)


def fail_transfer(one: Scene, attempt: int, **fields: Any) -> m.Assign:
    """The KV of this attempt has not got to its decode instance; the next one."""
    answer = one.ask_again("r", attempt, m.Cause.TRANSFER_FAILED, over=FAILED, **fields)
    assert isinstance(answer, m.Assign)
    return answer


def check_story(one: Scene, first: m.Assign, second: m.Assign) -> None:
    names = {worker.number: worker.view.name for worker in one.plane.table}
    told = one.admin("GET", "/pla/explain/r")[1]
    pairs = [(names[assign.prefill or 0], names[assign.decode]) for assign in (first, second)]
    assert [(row["prefill"], row["decode"]) for row in told["attempts"]] == pairs
    assert [(row["attempt"], row["cause"], row["how"], row["state"]) for row in told["attempts"]] == [
        (1, "dispatch", None, "over"),
        (2, "transfer_failed", None, "ended"),
    ]
    assert [(row["over"], row["detail"]) for row in told["attempts"]] == [
        ("transfer_failed", "KVTransferError"),
        (None, ""),
    ]
    assert (told["prefill"], told["decode"], told["end"]) == (*pairs[1], "finished")
    assert sum(told["stages"].values()) == pytest.approx(told["ttft_s"], rel=1e-9)
    metrics = one.admin("GET", "/metrics")[1]
    assert 'pla_router_retries_total{reason="transfer_failed"} 1.0' in metrics
    assert 'pla_router_dispatches_total{reason="any.other_pair"} 1.0' in metrics


async def test_the_only_pair_is_tried_again() -> None:
    async with scene(["prefill", "decode"]) as one:
        for attempt in (1, 2, 3):
            assign = fail_transfer(one, attempt - 1) if attempt > 1 else one.assign("r")
            assert (assign.attempt, assign.prefill, assign.decode) == (attempt, 0, 1)
            one.reach("r", m.Milestone.SENT, attempt=attempt)
        one.ended("r", m.Outcome.PREFILL_FAILED, aborted=(0, 1))
        one.assert_at_rest()
        assert [row["state"] for row in one.admin("GET", "/pla/explain/r")[1]["attempts"]] == ["over", "over", "ended"]


@pytest.mark.parametrize(
    ("rids", "names"), [((), {"pla-2~r_0", "pla-2~r_1"}), (("one", "two"), {"pla-2~one", "pla-2~two"})]
)
async def test_aborts_of_a_later_attempt_name_it(rids: tuple[str, ...], names: set[str]) -> None:
    """A relay that is gone aborts nothing: this is the control plane's, under the names that instances know."""
    async with scene(["prefill", "decode"]) as one:
        one.ask("r", prompts=2, rids=rids)
        one.reach("r", m.Milestone.SENT)
        fail_transfer(one, 1, prompts=2, rids=rids)
        one.plane.detach_relay(0)
        await one.until(lambda: all(set(fake.aborted) == names for fake in one.instances))
        await one.at_rest()


@pytest.mark.parametrize("tokens", [0, 1])
async def test_a_request_whose_token_was_seen_is_not_sent_again(tokens: int) -> None:
    """A relay does not ask for that; if one did, its client would get the beginning twice."""
    async with scene(["prefill", "decode"]) as one:
        one.ask("r")
        one.reach("r", m.Milestone.SENT, m.Milestone.PREFILL_DONE, m.Milestone.FIRST_TOKEN)
        answer = one.ask_again("r", 1, m.Cause.TRANSFER_FAILED, tokens=tokens, over=FAILED)
        assert isinstance(answer, m.Refuse)
        assert (answer.status, answer.over) == (409, 1)
        one.ended("r", m.Outcome.REFUSED)
        await one.at_rest()


SETUP = Setup(steps=LinearSteps(), kv_capacity_tokens=1000, ttft_slo_s=1.0, tpot_slo_s=0.1)
P, D, U = InstanceKind.PREFILL, InstanceKind.DECODE, InstanceKind.UNIFIED
SHORT, LONG = PrefillClass.SHORT, PrefillClass.LONG


@pytest.mark.parametrize(
    ("name", "members", "prefill", "decode"),
    [
        ("the least loaded of the others", [(P, {}), (P, {"queued_tokens": 9}), (P, {}), (D, {}), (D, {})], 2, 4),
        ("nobody else prefills", [(P, {}), (D, {}), (D, {"running": 5})], 0, 2),
        ("nobody else decodes", [(P, {}), (P, {"queued_tokens": 9}), (D, {})], 1, 2),
        (
            "a busier one of the same pool",
            [(P, {"length_class": SHORT}), (P, {"length_class": LONG}), (P, {"length_class": SHORT, **BUSY}), (D, {})],
            2,
            3,
        ),
        ("one that needs no transfer", [(P, {}), (U, {}), (D, {})], 1, 1),
        ("nobody decodes", [(P, {}), (P, {})], None, None),
    ],
)
def test_who_else_there_is(
    name: str, members: list[tuple[InstanceKind, dict[str, Any]]], prefill: int | None, decode: int | None
) -> None:
    """The first prefill and the first decode instance have failed."""
    views = [InstanceView(index, f"i{index}", kind=kind, **fields) for index, (kind, fields) in enumerate(members)]
    driver = PairRunner(build("round-robin", SETUP), FleetView(views), Effects())
    request = RequestView("r", 10, 0.0)
    failed = next((view for view in views if view.kind is D), views[-1])
    choice = driver.choose_other(request, views[0], failed)
    assert (choice and choice.prefill.index, choice and choice.decode.index) == (prefill, decode), name
    assert request.prefilled_on is (choice and choice.prefill)
