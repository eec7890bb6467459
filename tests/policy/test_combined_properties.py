"""What holds for the combined policy after any sequence of events: with scaling, with roles, and free to give them up.

Arrivals, prefills that finish, decodes that grow, deaths, drains, new instances and ticks come in any order. After
every answer: only ready instances are named, every role change is an edge of Arrow's diagram, no phase loses its last
instance by a decision, and no migration goes where it does not fit.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.combined import cost, mode
from support.fleets import LinearSteps, instance, predictor, request

from pla_sglang.policy.arrow.policy import ArrowKnobs, ArrowPolicy
from pla_sglang.policy.combined.colocation import FleetMode
from pla_sglang.policy.combined.policy import CombinedKnobs, CombinedPolicy, Parts
from pla_sglang.policy.combined.stall_budget import InPlace, InPlaceKnobs
from pla_sglang.policy.common.pools import PoolEvent, transition
from pla_sglang.policy.common.tables import DecodeTable, PrefillTable
from pla_sglang.policy.dopd.dispatch import DopdDispatcher, DopdDispatchKnobs
from pla_sglang.policy.dopd.planner import DopdController, Planner, PlannerKnobs
from pla_sglang.policy.interface.decisions import FleetAction, Migrate, ScaleTo, SetLengthClass, SetRole
from pla_sglang.policy.interface.fleet import DecodeBatch, FleetView, InstanceState, InstanceView, Role
from pla_sglang.policy.pla.fitted_boundary import FittedBoundary
from pla_sglang.policy.pla.pressure import PressureController, PressureKnobs
from pla_sglang.policy.pla.spatial import SpatialDispatcher, SpatialKnobs
from pla_sglang.policy.star.policy import StarKnobs, StarRescheduler

LIMIT_TOKENS = 1000  # Max Running Tokens
KV_TOKENS = 2000


class SlowMixed(LinearSteps):
    """Prefills take a tenth, and a mixed pass is too long for the TPOT target: whether roles pay follows from the
    lengths of the few requests that a sequence has."""

    def prefill_s(self, new_tokens: float, attention: float, history_tokens: float, requests: int) -> float:
        return 0.1 * super().prefill_s(new_tokens, attention, history_tokens, requests)

    def mixed_s(self, *amounts: Any) -> float:
        return 0.060


def policy_of(*, scaling: bool, unite: bool) -> CombinedPolicy:
    arrow = ArrowPolicy(ArrowKnobs(1.0, 0.05, {"": LIMIT_TOKENS}, tpot_window_s=0.0, idle_s=0.0), predictor())
    tables = PrefillTable.profile(LinearSteps()), DecodeTable.profile(LinearSteps())
    knobs = PlannerKnobs(1.0, 10, interval_s=1.0, down_intervals=1, instances_max=12)
    parts = Parts(
        arrow,
        in_place=InPlace(InPlaceKnobs(), arrow, LinearSteps()),
        local=DopdDispatcher(DopdDispatchKnobs(), arrow.predictor),
        spatial=SpatialDispatcher(SpatialKnobs(1.0), arrow.predictor, FittedBoundary(fixed_tokens=100)),
        pressure=PressureController(PressureKnobs(1.0, cool_down_s=0.0), arrow.predictor),
        star=StarRescheduler(StarKnobs()),
        planner=DopdController(Planner(knobs, *tables)) if scaling else None,
        # Judges by two requests and changes its mind in a second: sequences are short.
        unite=mode(SlowMixed(), arrow, memory=2, prior=2, rest_s=1.0) if unite else None,
        cost=cost(arrow) if unite else None,
    )
    return CombinedPolicy(CombinedKnobs(), parts)


class Driver:
    """Applies answers to a view, and checks each before it does."""

    def __init__(self, roles: list[Role], *, scaling: bool, unite: bool = False) -> None:
        views = [instance(index, role, kv_capacity_tokens=KV_TOKENS) for index, role in enumerate(roles)]
        self.view = FleetView(views, decodes=self._decodes)
        self.policy = policy_of(scaling=scaling, unite=unite)
        self.now_s = 0.0
        self.count = 0
        self.open: list[Any] = []
        self.ticked = False
        self.known = 0  # instances at the last tick

    def _decodes(self, member: InstanceView) -> DecodeBatch:
        each = member.context_tokens // max(1, member.running)
        return DecodeBatch.of([(f"{member.name}-{row}", each, 500.0) for row in range(member.running)])

    # -- events ----------------------------------------------------------------------------------------------------

    def arrive(self, tokens: int) -> None:
        self.count += 1
        ask = request(tokens, self.now_s, rid=str(self.count))
        self.policy.on_arrival(ask, self.now_s)
        answer = self.policy.dispatch(ask, self.view, self.now_s)
        self.apply(answer.actions)
        assert (answer.prefill is None) == (not self.view.ready)
        if answer.prefill is None:
            return
        assert self.view.is_ready(answer.prefill)
        assert answer.decode is None or self.view.is_ready(answer.decode)
        answer.prefill.queued_prefills += 1
        answer.prefill.queued_tokens += tokens
        self.open.append((ask, answer.prefill, answer.decode, tokens))

    def finish_prefill(self, place: int) -> None:
        if not self.open:
            return
        ask, member, planned, tokens = self.open.pop(place % len(self.open))
        if member.state is InstanceState.DEAD:
            return
        member.queued_prefills -= 1
        member.queued_tokens -= tokens
        if planned is None or not self.view.is_ready(planned):
            ask.prefilled_on = member
            answer = self.policy.place_decode(ask, self.view, self.now_s)
            self.apply(answer.actions)
            assert (answer.decode is None) == (not self.view.ready)
            planned = answer.decode
        if planned is not None:
            assert self.view.is_ready(planned)
            planned.running += 1
            planned.context_tokens += tokens
            planned.kv_used_tokens += tokens

    def answer(self, tokens: int) -> None:
        self.count += 1
        self.policy.on_finish(request(1, self.now_s, rid=str(self.count)), 1 + tokens % 40, self.now_s)

    def empty_decode(self, place: int) -> None:
        member = self.view.instances[place % len(self.view.instances)]
        member.running = member.context_tokens = member.kv_used_tokens = 0

    def slow_decode(self, place: int) -> None:
        member = self.view.instances[place % len(self.view.instances)]
        member.token_interval_s = None if member.token_interval_s else 0.06

    def die(self, place: int) -> None:
        member = self.view.instances[place % len(self.view.instances)]
        if member.state is not InstanceState.DEAD:
            self.view.set_state(member, InstanceState.DEAD)

    def start(self, place: int) -> None:
        role = (Role.PREFILL, Role.DECODE, Role.MIXED)[place % 3]
        self.view.add(instance(len(self.view.instances), role, kv_capacity_tokens=KV_TOKENS))

    def tick(self, place: int) -> None:
        self.now_s += (0.25, 1.0, 5.0)[place % 3]
        self.apply(self.policy.tick(self.view, self.now_s))
        self.ticked, self.known = True, len(self.view.instances)

    def check_mode(self) -> None:
        """While united no instance that was there at the last tick has a role; newcomers get theirs at the next one."""
        unite = self.policy.parts.unite
        if unite is None or unite.mode is FleetMode.ROLES:
            return
        before = {Role.MIXED} if self.ticked else set(Role)
        assert all(one.role in before for one in self.view.ready if one.index < self.known)

    # -- answers ---------------------------------------------------------------------------------------------------

    def phases(self) -> tuple[bool, bool]:
        return bool(self.view.prefill_capable()), bool(self.view.decode_capable())

    def apply(self, actions: Any) -> None:
        before = self.phases()
        for action in actions:
            self.check_and_do(action)
        self.view.check_integrity()
        after = self.phases()
        assert all(now or not then for then, now in zip(before, after, strict=True)), f"a phase was lost: {actions}"

    def check_and_do(self, action: FleetAction) -> None:
        match action:
            case SetRole():
                assert self.view.is_ready(action.instance)
                assert action.role in legal_roles(action.instance)
                self.view.set_role(action.instance, action.role, self.now_s)
            case SetLengthClass():
                assert self.view.is_ready(action.instance)
                action.instance.length_class = action.length_class
            case Migrate():
                self.check_move(action)
            case ScaleTo():
                self.scale(action)

    def check_move(self, move: Migrate) -> None:
        assert move.source is not move.target
        assert self.view.is_ready(move.source)
        assert self.view.is_ready(move.target)
        assert move.target.role not in (Role.DECODE_TO_PREFILL, Role.PREFILL)
        assert move.target.kv_used_tokens + move.tokens <= KV_TOKENS
        assert move.target.decode_tokens() + move.tokens <= LIMIT_TOKENS

    def scale(self, action: ScaleTo) -> None:
        for member in action.drain:
            assert self.view.is_ready(member)
            self.view.set_state(member, InstanceState.DRAINING)
        for _ in range(action.start):
            self.start(0 if action.role is Role.PREFILL else 1)


def legal_roles(member: InstanceView) -> set[Role]:
    """Where Arrow's diagram allows the instance to go now."""
    found = set()
    for event in PoolEvent:
        try:
            found.add(
                transition(
                    member.role,
                    event,
                    has_prefills=member.queued_prefills > 0,
                    has_decodes=member.running > 0 or member.waiting_decodes > 0,
                )
            )
        except ValueError:
            continue
    return found


EVENTS = st.tuples(
    st.sampled_from(
        ["arrive", "arrive", "finish_prefill", "answer", "empty_decode", "slow_decode", "die", "start", "tick", "tick"]
    ),
    st.integers(1, 950),
)
ROLES = st.lists(st.sampled_from([Role.PREFILL, Role.DECODE, Role.MIXED]), min_size=2, max_size=8)


@pytest.mark.parametrize(("scaling", "unite"), [(False, False), (True, False), (False, True)])
@settings(max_examples=150, deadline=None)
@given(roles=ROLES, events=st.lists(EVENTS, max_size=60))
def test_any_sequence_of_events(scaling: bool, unite: bool, roles: list[Role], events: list[tuple[str, int]]) -> None:
    driver = Driver(roles, scaling=scaling, unite=unite)
    for name, value in events:
        getattr(driver, name)(value)
        driver.check_mode()


@pytest.mark.parametrize("lost", [Role.PREFILL, Role.DECODE])
def test_a_phase_that_died_out_is_repaired_at_the_next_tick(lost: Role) -> None:
    driver = Driver([Role.PREFILL, Role.PREFILL, Role.DECODE, Role.DECODE], scaling=False)
    for member in list(driver.view.by_role[lost]):
        driver.view.set_state(member, InstanceState.DEAD)
    assert driver.phases() != (True, True)
    driver.tick(0)
    assert driver.phases() == (True, True)


def test_sequences_reach_both_forms() -> None:
    driver = Driver([Role.MIXED] * 4, scaling=False, unite=True)
    seen = []
    for tokens, answer in ((900, 39), (10, 4), (900, 39)):
        for _ in range(8):
            driver.arrive(tokens)
            driver.finish_prefill(0)
            driver.answer(answer)
        driver.tick(1)
        driver.check_mode()
        driver.tick(1)
        seen.append(driver.policy.parts.unite.mode)  # type: ignore[union-attr]
        for place in range(4):
            driver.empty_decode(place)
    assert seen == [FleetMode.ROLES, FleetMode.UNITED, FleetMode.ROLES]
