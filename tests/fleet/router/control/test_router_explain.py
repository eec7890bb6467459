"""What /pla/explain says beside the stages: times of the day, where a target came from, a first transfer."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import Any

import pytest
from support.records import make_record
from support.router_scene import scene

from pla_sglang.fleet.router.control.observability.explain import FIRST_TRANSFER, ExplainStore
from pla_sglang.fleet.router.control.requests.targets import TPOT_MEMBER, TTFT_MEMBER, Target, find_target
from pla_sglang.fleet.router.wire import messages as m

CHAT = {"messages": [{"role": "user", "content": "hello"}]}


def custom(target_ms: Any) -> dict[str, Any]:
    return CHAT | {"custom_params": {"slo_ttft_ms": target_ms}}


def test_times_are_those_of_the_day() -> None:
    noon_s = datetime(2026, 11, 22, 12, 0, 0, tzinfo=UTC).timestamp()
    store = ExplainStore(wall_s=lambda: noon_s, clock=lambda: 1000.0)
    store.add(make_record("r", 990.0, assigned_s=990.25, sent_s=990.5, first_token_s=998.0004))
    explained = store.explain("r")
    assert explained is not None
    assert explained["times"] == {
        "arrived": "2026-11-22T11:59:50.000Z",
        "decided": "2026-11-22T11:59:50.250Z",
        "sent": "2026-11-22T11:59:50.500Z",
        "prefill_done": None,
        "first": "2026-11-22T11:59:58.000Z",
        "ended": None,
    }


async def test_the_router_tells_the_time_of_day() -> None:
    async with scene(["null"]) as one:
        before_s = time.time()
        one.ask("r")
        arrived = one.admin("GET", "/pla/explain/r")[1]["times"]["arrived"]
        assert before_s - 60 <= datetime.fromisoformat(arrived).timestamp() <= time.time() + 60


@pytest.mark.parametrize(
    ("body", "fields", "policy", "target"),
    [
        (CHAT, {}, "cache-aware", Target(2.0, "default")),
        (CHAT, {"ttft_slo_ms": 300.0}, "cache-aware", Target(0.3, "header")),
        (custom(400), {}, "cache-aware", Target(0.4, "body")),
        (custom(400), {"ttft_slo_ms": 300.0}, "cache-aware", Target(0.4, "body")),  # as at an instance
        ({"text": "x", "sampling_params": custom(250.5)}, {}, "cache-aware", Target(0.2505, "body")),
        (custom(-4), {}, "cache-aware", Target(2.0, "default")),  # the instance refuses it
        (custom("soon"), {}, "cache-aware", Target(2.0, "default")),
        (custom(True), {}, "cache-aware", Target(2.0, "default")),
        (CHAT | {"custom_params": "slo_ttft_ms"}, {}, "cache-aware", Target(2.0, "default")),
        (CHAT | {"user": '"slo_ttft_ms"'}, {}, "cache-aware", Target(2.0, "default")),
    ],
)
async def test_where_a_target_came_from(
    body: dict[str, Any], fields: dict[str, Any], policy: str, target: Target
) -> None:
    async with scene(["null"], policy=policy, slo_ttft_s=2.0, slo_tpot_s=0.05) as one:
        one.ask("r", body, **fields, tpot_slo_ms=70.0)
        explained = one.admin("GET", "/pla/explain/r")[1]
        assert (explained["slo_ttft_s"], explained["slo_tpot_s"]) == (target.slo_s, 0.07)
        assert explained["slo_from"] == {"ttft": target.source, "tpot": "header"}
        view = one.plane.dispatcher.explained._records["r"].view
        assert view.ttft_slo_s == target.slo_s  # and so the policy knows it


def test_a_target_for_the_time_between_tokens_may_be_in_the_body_too() -> None:
    body = b'{"text": "x", "sampling_params": {"custom_params": {"slo_tpot_ms": 40, "slo_ttft_ms": 400}}}'
    assert find_target(body, TPOT_MEMBER, 70.0, 0.1) == Target(0.04, "body")
    assert find_target(None, TPOT_MEMBER, 70.0, 0.1) == Target(0.07, "header")


@pytest.mark.parametrize(
    "body", [None, b"", b'{"slo_ttft_ms"', b'["slo_ttft_ms"]', b'{"custom_params": {"slo_ttft_ms"']
)
def test_a_body_that_is_none_asks_for_nothing(body: bytes | None) -> None:
    assert find_target(body, TTFT_MEMBER, None, 1.5) == Target(1.5, "default")


async def test_no_prediction_learns_from_the_set_up_of_a_connection() -> None:
    """Requests that are on their way while two instances connect wait for that as the first one does."""
    async with scene(["prefill", "decode"], policy="minimal-load") as one:
        correction = one.plane.dispatcher.admission.correction
        for rid in ("first", "second"):
            one.assign(rid)
        for rid in ("first", "second"):
            one.reach(rid, m.Milestone.SENT, m.Milestone.PREFILL_DONE, m.Milestone.FIRST_TOKEN)
            explained = one.admin("GET", f"/pla/explain/{rid}")[1]
            assert explained["predicted_ttft_s"] is not None
            assert explained["first_transfer"] == FIRST_TRANSFER
        assert correction.count == 0
        one.ask("third")
        one.reach("third", m.Milestone.SENT, m.Milestone.PREFILL_DONE, m.Milestone.FIRST_TOKEN)
        assert "first_transfer" not in one.admin("GET", "/pla/explain/third")[1]
        assert correction.count == 1


@pytest.mark.parametrize("policy", ["minimal-load", "arrow", "combined", "dopd", "pla"])
async def test_what_each_candidate_was_predicted(policy: str) -> None:
    """So that the choice can be judged: the one that has most to do is predicted to be latest."""
    async with scene(["null", "null", "null"], policy=policy) as one:
        views = [worker.view for worker in one.plane.table]
        for number in range(12):
            one.assign(f"before-{number}", input_tokens=200 * (number % 5 + 1))
        one.assign("r", input_tokens=1000)
        explained = one.admin("GET", "/pla/explain/r")[1]
        candidates = explained["candidates"]
        assert explained["policy_predicts"]
        assert candidates.keys() == {view.name for view in views}
        chosen = candidates[explained["prefill"]]
        assert chosen["predicted_ttft_s"] == explained["predicted_ttft_s"] > 0
        by_queue = sorted(candidates.values(), key=lambda one: one["queued_tokens"])
        assert by_queue[0]["predicted_ttft_s"] < by_queue[-1]["predicted_ttft_s"]


async def test_a_policy_that_does_not_predict_says_so() -> None:
    async with scene(["null", "null"], policy="round-robin") as one:
        one.assign("r")
        explained = one.admin("GET", "/pla/explain/r")[1]
        assert not explained["policy_predicts"]
        assert {row["predicted_ttft_s"] for row in explained["candidates"].values()} == {None}
        assert explained["predicted_ttft_s"] > 0, "the router's own, for admission"


async def test_nobody_prefills_at_a_decode_instance() -> None:
    async with scene(["prefill", "decode"], policy="minimal-load") as one:
        one.assign("r")
        explained = one.admin("GET", "/pla/explain/r")[1]
        assert explained["candidates"][explained["decode"]]["predicted_ttft_s"] is None
        assert explained["candidates"][explained["prefill"]]["predicted_ttft_s"] == explained["predicted_ttft_s"]


async def test_a_unified_instance_transfers_nothing() -> None:
    async with scene(["null"], policy="minimal-load") as one:
        one.ask("r")
        one.reach("r", m.Milestone.SENT, m.Milestone.FIRST_TOKEN)
        assert "first_transfer" not in one.admin("GET", "/pla/explain/r")[1]
        assert one.plane.dispatcher.admission.correction.count == 1
