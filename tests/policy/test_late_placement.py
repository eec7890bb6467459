"""Decodes that are placed when the prefill is done: what the runner asks, clamps, counts and takes back."""

from __future__ import annotations

import dataclasses
from random import Random

import pytest

from pla_sglang.policy.interface.decisions import Dispatch, FleetAction, Placement, PolicySet, SetRole
from pla_sglang.policy.interface.fleet import FleetView, InstanceKind, InstanceState, InstanceView, RequestView, Role
from pla_sglang.policy.interface.reasons import FleetReason, Reason
from pla_sglang.policy.pairs import PairChoice, PairRunner
from pla_sglang.policy.runner import Effects, Refusal

P, D = Role.PREFILL, Role.DECODE
LESS, UNIFIED, STOCK_P, STOCK_D = (
    InstanceKind.STATELESS,
    InstanceKind.UNIFIED,
    InstanceKind.PREFILL,
    InstanceKind.DECODE,
)
R = FleetReason


class Told:
    """A dispatcher that answers as it is told; ``placed`` None: it fails."""

    def __init__(self, dispatched: Dispatch, placed: Placement | None) -> None:
        self.dispatched, self.placed = dispatched, placed
        self.asked: list[tuple[InstanceView | None, float]] = []  # prefilled_on, device time

    def dispatch(self, request: RequestView, view: FleetView, now_s: float) -> Dispatch:
        return self.dispatched

    def place_decode(self, request: RequestView, view: FleetView, now_s: float) -> Placement:
        self.asked.append((request.prefilled_on, now_s))
        if self.placed is None:
            raise RuntimeError("no idea")
        return self.placed


class Labels(Effects):
    def __init__(self, view: FleetView) -> None:
        self._view = view

    def set_role(self, action: SetRole, now_s: float) -> Refusal | None:
        self._view.set_role(action.instance, action.role, now_s)
        return None


@dataclasses.dataclass
class Stage:
    """Instances of these kinds, a policy that sends to the first and places on the second, and the moves ordered."""

    kinds: tuple[InstanceKind, ...] = (LESS, LESS, LESS)
    moves: bool = True

    def __post_init__(self) -> None:
        self.views = [InstanceView(n, f"i{n}", kind, P if n == 0 else D) for n, kind in enumerate(self.kinds)]
        self.view = FleetView(self.views)
        answer = Dispatch(self.views[0], None, R.PREFILL_SLO, 0.1)
        self.policy = Told(answer, Placement(self.views[1], R.DECODE_SLO))
        policies = PolicySet("told", self.policy, ())  # type: ignore[arg-type]
        self.runner = PairRunner(policies, self.view, Labels(self.view))
        self.runner.places_late = True
        self.request = RequestView("r", 10, 0.0)
        self.ordered: list[tuple[str, Reason]] = []

    def choose(self, *, can_move: bool = True) -> PairChoice:
        choice = self.runner.choose(self.request, 1.0, can_move=can_move)
        assert isinstance(choice, PairChoice)
        return choice

    def place(self) -> Reason:
        return self.runner.place_prefilled(self.request, 2.0, move=self._move)

    def _move(self, target: InstanceView, why: Reason) -> bool:
        self.ordered.append((target.name, why))
        return self.moves


def test_a_request_is_served_whole_until_its_decode_is_placed() -> None:
    stage = Stage()
    choice = stage.choose()
    assert (choice.prefill, choice.decode) == (stage.views[0], stage.views[0])
    assert (choice.reason, choice.placement, choice.predicted_ttft_s) == (R.PREFILL_SLO, R.WHEN_PREFILLED, 0.1)
    assert stage.policy.asked == [], "it is asked when the prefill is done"
    assert stage.place() is R.DECODE_SLO
    assert stage.policy.asked == [(stage.views[0], 2.0)], "with what is then, and where it was prefilled"
    assert stage.ordered == [("i1", R.DECODE_SLO)]
    assert stage.runner.placements == {R.DECODE_SLO: 1}


@pytest.mark.parametrize(
    ("why", "kinds", "late", "can_move", "named"),
    [
        ("nobody wants it late", (LESS, LESS), False, True, False),
        ("the request cannot move", (LESS, LESS), True, False, False),
        ("a stock instance prefills", (STOCK_P, LESS), True, True, False),
        ("the policy has named the decode instance", (LESS, LESS), True, True, True),
    ],
)
def test_other_requests_are_placed_at_dispatch(
    why: str, kinds: tuple[InstanceKind, ...], late: bool, can_move: bool, named: bool
) -> None:
    stage = Stage(kinds)
    stage.runner.places_late = late
    if named:
        stage.policy.dispatched = dataclasses.replace(stage.policy.dispatched, decode=stage.views[1])
    choice = stage.choose(can_move=can_move)
    assert (choice.prefill, choice.decode) == (stage.views[0], stage.views[1]), why
    assert choice.placement is (R.KEEP_LOCAL if named else R.DECODE_SLO)
    assert len(stage.policy.asked) == (not named)


def test_a_unified_instance_serves_its_requests_whole() -> None:
    stage = Stage((UNIFIED, LESS))
    assert stage.choose().placement is R.KEEP_LOCAL


def test_a_request_stays_where_the_policy_decodes_in_place() -> None:
    stage = Stage()
    stage.policy.placed = Placement(stage.views[0], R.DECODE_IN_PLACE)
    stage.choose()
    assert stage.place() is R.DECODE_IN_PLACE
    assert stage.ordered == []


def flip_of(stage: Stage) -> tuple[FleetAction, ...]:
    return (SetRole(stage.views[2], P, R.FLIP_NO_ROOM, stage.views[2].role_epoch),)


STAYS = [
    ("nobody is ready", R.NO_INSTANCE),
    ("it drains", R.NO_INSTANCE),
    ("it is full", R.NO_INSTANCE),
    ("it is stock", R.NOT_MOVABLE),
    ("no KV cache can go there", R.NOT_CONNECTED),
    ("the move is refused", R.NOT_MOVABLE),
]


@pytest.mark.parametrize(("why", "reason"), STAYS, ids=[case[0] for case in STAYS])
def test_a_request_that_cannot_go_there_stays_and_roles_are_as_before(why: str, reason: FleetReason) -> None:
    stage = Stage((LESS, STOCK_D if why == "it is stock" else LESS, LESS), moves=why != "the move is refused")
    stage.choose()
    target = None if why == "nobody is ready" else stage.views[1]
    stage.policy.placed = Placement(target, R.DECODE_FLIP, flip_of(stage))
    if why == "it drains":
        stage.view.set_state(stage.views[1], InstanceState.DRAINING)
    if why == "it is full":
        stage.runner.hidden = {stage.views[1]}
    stage.runner.is_connected = lambda prefill, decode: why != "no KV cache can go there"
    assert stage.place() is reason
    assert len(stage.ordered) == (why == "the move is refused")
    assert stage.views[2].role is D
    assert stage.runner.moved == {"arrow.flip_no_room": 1, "any.rolled_back": 1}
    stage.view.check_integrity()


def test_what_a_policy_has_changed_before_its_mistake_is_taken_back() -> None:
    stage = Stage()
    stage.policy.dispatched = dataclasses.replace(stage.policy.dispatched, actions=flip_of(stage))
    stage.choose()
    stage.policy.placed = None
    with pytest.raises(RuntimeError, match="no idea"):
        stage.place()
    assert stage.views[2].role is P, "the change at dispatch was for a request that was sent"


def test_a_role_that_was_changed_for_a_placement_stays_with_it() -> None:
    stage = Stage()
    stage.choose()
    stage.policy.placed = Placement(stage.views[1], R.DECODE_FLIP, flip_of(stage))
    assert stage.place() is R.DECODE_FLIP
    assert stage.views[2].role is P
    assert stage.runner.moved == {"arrow.flip_no_room": 1}


def test_whatever_the_fleet_is_a_request_goes_on_somewhere() -> None:
    """At random: it is moved only to a ready stateless instance that is connected, and has one reason."""
    rng = Random(7)
    for _ in range(500):
        stage = Stage(tuple(rng.choice((LESS, LESS, STOCK_D)) for _ in range(4)), moves=rng.random() < 0.7)
        stage.views[0].kind = LESS
        assert stage.choose().placement is R.WHEN_PREFILLED
        target = rng.choice([None, *stage.views])
        stage.policy.placed = Placement(target, R.DECODE_FLIP, flip_of(stage) if rng.random() < 0.5 else ())
        cut = {view for view in stage.views if rng.random() < 0.2}
        stage.runner.is_connected = lambda prefill, decode, cut=cut: decode not in cut  # type: ignore[misc]
        for view in stage.views:
            if rng.random() < 0.2:
                stage.view.set_state(view, InstanceState.DRAINING)
        ready, before = set(stage.view.ready), stage.views[2].role
        reason = stage.place()
        goes = bool(stage.ordered) and stage.moves
        assert (reason is R.DECODE_FLIP) is (goes or target is stage.views[0])
        assert reason in (R.DECODE_FLIP, R.NO_INSTANCE, R.NOT_CONNECTED, R.NOT_MOVABLE)
        if stage.ordered:
            assert target is not None
            assert (target.kind, target in ready, target in cut) == (LESS, True, False)
        if reason is not R.DECODE_FLIP:
            assert stage.views[2].role is before
        stage.view.check_integrity()
