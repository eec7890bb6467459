"""Roles of stateless instances are labels: who changes them, when, and what comes of a late or a failed change."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from support.router_scene import scene

from pla_sglang.fleet.router.control.policy_setup import RouterEffects
from pla_sglang.fleet.router.wire import messages as m
from pla_sglang.parity import replay_file
from pla_sglang.policy.interface.decisions import Dispatch, FleetAction, PolicySet, SetRole
from pla_sglang.policy.interface.fleet import FleetView, InstanceKind, InstanceView, RequestView, Role
from pla_sglang.policy.interface.reasons import FleetReason
from pla_sglang.policy.pairs import PairRunner
from pla_sglang.policy.runner import Refusal
from pla_sglang.policy_packages import build
from pla_sglang.recording.file import read
from pla_sglang.recording.rows import VERSION
from pla_sglang.recording.setup import setup_of
from pla_sglang.sim.core.parity import Replay

P, D = Role.PREFILL, Role.DECODE
WHY = FleetReason.FLIP_TTFT
STATELESS = ["stateless"] * 4


def fleet(*roles: Role, kind: InstanceKind = InstanceKind.STATELESS) -> FleetView:
    fixed = kind is not InstanceKind.STATELESS
    views = [InstanceView(index, f"i{index}", kind, role, fixed_role=fixed) for index, role in enumerate(roles)]
    return FleetView(views)


class Flipping:
    """Wants to flip the first instance of each dispatch, and answers with what it is told."""

    def __init__(self, view: FleetView) -> None:
        self.view = view
        self.prefill: InstanceView | None = None
        self.fails = False

    def dispatch(self, request: RequestView, view: FleetView, now_s: float) -> Dispatch:
        first = view.instances[0]
        flips: tuple[FleetAction, ...] = (SetRole(first, P, WHY, first.role_epoch),)
        return Dispatch(self.prefill, None, FleetReason.PREFILL_FLIP, 0.1, flips)

    def place_decode(self, request: RequestView, view: FleetView, now_s: float) -> Dispatch:
        raise RuntimeError("no idea")


def runner_of(policy: Flipping) -> PairRunner:
    effects = RouterEffects(policy.view, lambda view: None)
    return PairRunner(PolicySet("flipping", policy, ()), policy.view, effects)  # type: ignore[arg-type]


def test_a_label_changes_once_and_late_or_repeated_orders_change_nothing() -> None:
    view = fleet(D, D)
    effects = RouterEffects(view, lambda view: None)
    one = view.instances[0]
    order = SetRole(one, P, WHY, one.role_epoch)
    assert effects.set_role(order, 1.0) is None
    seen = (one.role, one.role_epoch, one.since_s)
    assert seen == (P, 1, 1.0)
    assert effects.set_role(order, 2.0) is Refusal.LATE, "the same order, delivered twice"
    assert effects.set_role(SetRole(one, D, WHY, 0), 3.0) is Refusal.LATE, "based on the role before"
    assert effects.set_role(SetRole(one, P, WHY), 4.0) is Refusal.REPEATED
    assert effects.set_role(SetRole(one, P, WHY, 1), 4.0) is Refusal.REPEATED
    assert (one.role, one.role_epoch, one.since_s) == seen
    assert effects.set_role(SetRole(one, D, WHY, 1), 5.0) is None
    assert (one.role, one.role_epoch, one.since_s) == (D, 2, 5.0)
    view.check_integrity()
    stock = fleet(P, D, kind=InstanceKind.DECODE)
    of_stock = RouterEffects(stock, lambda view: None)
    assert of_stock.set_role(SetRole(stock.instances[1], P, WHY), 1.0) is Refusal.UNSUPPORTED
    assert [one.role for one in stock.instances] == [P, D]


@pytest.mark.parametrize("fails", [False, True])
def test_a_flip_for_a_request_that_cannot_be_placed_is_rolled_back(fails: bool) -> None:
    view = fleet(D, D)
    policy = Flipping(view)
    runner = runner_of(policy)
    request = RequestView("r", 10, 0.0)
    policy.prefill = view.instances[0] if fails else None
    for turn in (1, 2):
        if fails:
            with pytest.raises(RuntimeError, match="no idea"):
                runner.choose(request, float(turn))
        else:
            assert runner.choose(request, float(turn)) is FleetReason.NO_INSTANCE
        one = view.instances[0]
        assert (one.role, one.role_epoch) == (D, 2 * turn), "back, and every change has its epoch"
    assert runner.moved == {"arrow.flip_ttft": 2, "any.rolled_back": 2}
    assert [(move.role, move.epoch) for move in runner.moves][:2] == [("prefill", 1), ("decode", 2)]
    assert runner.actions["SetRole:any.rolled_back"] == 2
    view.check_integrity()


async def test_operators_change_roles_and_requests_under_way_end_where_they_are() -> None:
    async with scene(["stateless", "stateless"], policy="static-pd") as one:
        await one.connected()
        by_role = {worker.view.role: worker for worker in one.plane.table}
        prefill, decode = by_role[P], by_role[D]
        first = one.assign("r1")
        assert (first.prefill, first.decode) == (prefill.number, decode.number)
        one.reach("r1", m.Milestone.SENT, m.Milestone.PREFILL_DONE, m.Milestone.FIRST_TOKEN)
        epoch = decode.view.role_epoch
        status, row = one.admin("POST", f"/workers/{decode.number}/role", {"role": "prefill", "epoch": epoch})
        assert (status, row["role"], row["role_epoch"]) == (200, "decode_to_prefill", epoch + 1), "it still decodes"
        status, row = one.admin("POST", f"/workers/{prefill.number}/role", {"role": "decode"})
        assert (status, row["role"]) == (200, "decode"), "it has nothing left"
        second = one.assign("r2")
        assert (second.prefill, second.decode) == (decode.number, prefill.number)
        one.ended("r1")
        one.reach("r2", m.Milestone.SENT, m.Milestone.PREFILL_DONE, m.Milestone.FIRST_TOKEN)
        one.ended("r2")
        one.assert_at_rest()
        for number, body, wanted, text in (
            (decode.number, {"role": "decode", "epoch": epoch}, 409, f"its epoch is {epoch + 1}, not {epoch}"),
            (decode.number, {"role": "boss"}, 400, "'boss' cannot be; allowed: prefill, decode, mixed"),
            (9, {"role": "decode"}, 404, "no worker"),
        ):
            status, told = one.admin("POST", f"/workers/{number}/role", body)
            assert (status, text in told["error"]["message"]) == (wanted, True), told
        status, row = one.admin("POST", f"/workers/{decode.number}/role", {"role": "prefill"})
        assert (status, row["role_epoch"]) == (200, epoch + 1), "a repeated order changes nothing"
        state = one.admin("GET", "/pla/state")[1]
        assert [(move["role"], move["reason"]) for move in state["last_moves"]] == [
            ("decode_to_prefill", "any.operator"),
            ("decode", "any.operator"),
        ]
        assert state["last_moves"][0]["epoch"] == epoch + 1
        assert state["refusals"] == {"late": 1, "repeated": 1}
        assert state["roles"] == {"decode": [prefill.view.name], "decode_to_prefill": [decode.view.name]}
        metrics = one.admin("GET", "/metrics")[1]
        assert 'pla_router_actions_total{action="SetRole",reason="any.operator"} 2.0' in metrics
        assert 'pla_router_actions_total{action="SetRole.refused",reason="any.operator"} 2.0' in metrics
    async with scene(["null"], policy="round-robin") as one:
        status, told = one.admin("POST", "/workers/0/role", {"role": "prefill"})
        assert (status, "its role is fixed" in told["error"]["message"]) == (409, True)


async def test_arrow_flips_for_ttft_and_settles_and_the_recording_replays(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl.gz"
    async with scene(STATELESS, policy="arrow", record=path, slo_ttft_s=0.5) as one:
        await one.connected()
        runner, table = one.plane.policy.runner, one.plane.table
        assert runner is not None
        by_role = {role: [w for w in table if w.view.role is role] for role in (P, D)}
        assert [len(members) for members in by_role.values()] == [2, 2]
        asked = [one.ask(f"a{number}") for number in range(2)]
        for number in range(2):
            one.reach(f"a{number}", m.Milestone.SENT, m.Milestone.PREFILL_DONE, m.Milestone.FIRST_TOKEN)
        for worker in by_role[P]:
            one.instances[worker.number].load |= {"num_waiting_reqs": 1, "num_waiting_uncached_tokens": 100_000}
        await one.until(lambda: all(w.view.queued_tokens > 50_000 for w in by_role[P]))
        flipping = one.assign("late")
        assert flipping.reason == "arrow.prefill_flip"
        flipped = table.by_number[flipping.prefill]  # type: ignore[index]
        assert flipped in by_role[D]
        assert flipped.view.role in (P, Role.DECODE_TO_PREFILL)
        assert runner.moved["arrow.flip_ttft"] == 1
        one.reach("late", m.Milestone.SENT, m.Milestone.PREFILL_DONE, m.Milestone.FIRST_TOKEN)
        assert all(isinstance(assign, m.Assign) for assign in asked)
        for rid in ("a0", "a1", "late"):
            one.ended(rid)
        await one.until(lambda: all(w.view.role in (P, D) for w in table))
        one.assert_at_rest()
    header, result = replay_file(path)
    assert header.version == VERSION
    assert "arrow.prefill_flip" in result.reasons
    assert result.identical_share == 1.0, result.differences


async def test_knobs_of_the_policy_hold_and_the_recording_replays_with_them(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl.gz"
    knobs = ("arrow.low_load=1e-9", "arrow.idle_s=3600")
    async with scene(STATELESS, policy="arrow", record=path, slo_ttft_s=0.5, policy_knobs=knobs) as one:
        await one.connected()
        assert one.admin("GET", "/pla/state")[1]["policy_knobs"] == list(knobs)
        prefills, decodes = ([worker for worker in one.plane.table if worker.view.role is role] for role in (P, D))
        for worker in prefills:
            one.instances[worker.number].load |= {"num_waiting_reqs": 1, "num_waiting_uncached_tokens": 100_000}
        one.instances[decodes[0].number].load |= {"num_running_reqs": 1, "num_used_tokens": 100}
        await one.until(lambda: all(worker.view.queued_tokens > 50_000 for worker in prefills))
        await one.until(lambda: decodes[0].view.decode_tokens() > 0)
        late = one.assign("late")
        assert late.reason == "arrow.prefill_fallback", "a single decode is no low load"
        one.ended("late")
    header, result = replay_file(path)
    assert header.setup["knobs"] == {"arrow.low_load": 1e-9, "arrow.idle_s": 3600.0}
    assert result.identical_share == 1.0, result.differences
    plain = msgspec.structs.replace(header, setup={**header.setup, "knobs": {}})
    setup = setup_of(plain)
    replay = Replay(build("arrow", setup), list(read(path))[1:], steps=setup.steps)
    assert replay.run().identical_share < 1.0


async def test_arrow_flips_only_stateless_instances_of_a_mixed_fleet() -> None:
    async with scene(["prefill", "decode", "decode"], policy="arrow", slo_ttft_s=0.5) as one:
        one.instances[0].load |= {"num_waiting_reqs": 1, "num_waiting_uncached_tokens": 100_000}
        await one.until(lambda: one.plane.table.workers[0].view.queued_tokens > 50_000)
        assign = one.assign("late")
        assert (assign.reason, assign.prefill) == ("arrow.prefill_fallback", 0)
        assert not one.plane.policy.runner.moved  # type: ignore[union-attr]
    async with scene(["prefill", "decode", "stateless", "stateless"], policy="arrow", slo_ttft_s=0.5) as one:
        table = one.plane.table
        ours = [worker for worker in table if worker.view.role is D and not worker.view.fixed_role]
        assert len(ours) == 1
        busy = [worker for worker in table if worker.view.role is P]
        for worker in busy:
            one.instances[worker.number].load |= {"num_waiting_reqs": 1, "num_waiting_uncached_tokens": 100_000}
        await one.until(lambda: all(worker.view.queued_tokens > 50_000 for worker in busy))
        assign = one.assign("late")
        assert assign.reason == "arrow.prefill_flip"
        assert ours[0].view.role in (P, Role.DECODE_TO_PREFILL)
