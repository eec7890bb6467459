"""The pools of one server: views of its ranks, dispatch by length, and ranks that change pools.

Holds no socket and no clock: reports and requests come in, ranks and role changes go out.
"""

from __future__ import annotations

import dataclasses
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Any

from pla_sglang.config import PlaConfig
from pla_sglang.engine.pools.prefixes import PrefixModel, block_hashes
from pla_sglang.policy.arrow.curve import PrefillCurve
from pla_sglang.policy.arrow.predictor import TtftPredictor
from pla_sglang.policy.boundary import Boundary, StepModel
from pla_sglang.policy.decisions import SetLengthClass
from pla_sglang.policy.fit import StepFit, StepSample
from pla_sglang.policy.fleet import FleetView, InstanceKind, InstanceView, RequestView, Role
from pla_sglang.policy.pla.pressure import PressureKnobs
from pla_sglang.policy.pla.spatial import SpatialDispatcher, SpatialKnobs
from pla_sglang.policy.pla.steady import SteadyPressure
from pla_sglang.policy.types import PrefillClass
from pla_sglang.telemetry.book import ROLE_CLASSES, InstanceBook
from pla_sglang.telemetry.message import Report

MOVES_KEPT = 64
OPERATOR = "operator"  # reason of a move that somebody asked for


@dataclasses.dataclass(frozen=True, slots=True)
class Move:
    """A rank has changed its role; pressures as they were then."""

    at_s: float
    rank: int
    role: str
    reason: str
    short_pressure: float
    long_pressure: float


def curve_of(model: StepModel) -> PrefillCurve:
    """The step model as a cost per request: each pays the larger floor, as if it were computed alone."""
    return PrefillCurve(max(model.g0_s, model.k0_s), model.b_s, model.a_s, max(model.gr_s, model.kr_s))


def start_roles(ranks: int, short_ranks: int | None) -> list[str]:
    """The first ``short_ranks`` are short, half of them by default. With one pool empty its class goes to the other."""
    shorts = ranks // 2 if short_ranks is None else short_ranks
    return ["short"] * shorts + ["long"] * (ranks - shorts)


def pressure_knobs(config: PlaConfig) -> PressureKnobs:
    """Inputs of Algorithm 2 as the flags have them."""
    return PressureKnobs(
        ttft_slo_s=config.pool_slo_ttft_ms / 1e3,
        tau=config.pressure_hysteresis,
        cool_down_s=config.pressure_cool_down_ms / 1e3,
        interval_s=config.pressure_interval_ms / 1e3,
    )


class Pools:
    """Ranks in two pools.

    Args:
        ranks: data-parallel ranks, numbered from 0.
        start: step model until reports have said more.
        chunk_tokens: upper limit of a boundary that is fitted; None: no chunking.
        set_role: performs a role change; called with rank and role.
    """

    def __init__(
        self,
        ranks: int,
        config: PlaConfig,
        start: StepModel,
        chunk_tokens: int | None,
        set_role: Callable[[int, str], None],
    ) -> None:
        self._set_role = set_role
        self.roles = start_roles(ranks, config.short_ranks)
        views = [
            InstanceView(
                rank, f"rank-{rank}", kind=InstanceKind.UNIFIED, role=Role.MIXED, length_class=ROLE_CLASSES[role]
            )
            for rank, role in enumerate(self.roles)
        ]
        self.fleet = FleetView(views)
        self.books = [InstanceBook(view) for view in views]
        self._prefixes = [PrefixModel() for _ in views]
        self._fit = StepFit(start)
        self.predictor = TtftPredictor({"": curve_of(start)})
        self._cap_tokens = chunk_tokens
        self.dispatched: Counter[str] = Counter()
        self.ticks: Counter[str] = Counter()
        self.moves: deque[Move] = deque(maxlen=MOVES_KEPT)
        self.move_count: Counter[str] = Counter()
        self.external = 0
        self._pressure = SteadyPressure(pressure_knobs(config), self.predictor)
        self.set_config(config)

    def set_config(self, config: PlaConfig) -> None:
        """New knobs. A cool-down that is under way goes on."""
        self.config = config
        target_s = config.pool_slo_ttft_ms / 1e3
        self.boundary = Boundary(
            fixed_tokens=config.boundary_tokens, cap_tokens=self._cap_tokens, model=self._fit.model
        )
        self._dispatcher = SpatialDispatcher(
            SpatialKnobs(ttft_slo_s=target_s, boundary_tokens=max(1, self.boundary.tokens(0))), self.predictor
        )
        self._pressure.retune(pressure_knobs(config))

    # -- requests ----------------------------------------------------------------------------------------------------

    def place(
        self, rid: str, tokens: Sequence[int], now_s: float, *, slo_s: float | None = None, salt: object = None
    ) -> int:
        """The rank for a request; it counts as sent there. Raises RuntimeError when no rank is ready."""
        hashes = block_hashes(tokens, salt)
        cached = {rank: model.matched_tokens(hashes) for rank, model in enumerate(self._prefixes)}
        request = RequestView(
            rid,
            input_tokens=max(1, len(tokens)),
            arrival_s=now_s,
            cached={rank: count for rank, count in cached.items() if count},
            ttft_slo_s=slo_s,
        )
        decision = self._dispatcher.dispatch(request, self.fleet, now_s)
        self.dispatched[decision.reason.value] += 1
        if decision.prefill is None:
            raise RuntimeError("no data-parallel rank is ready")
        self._sent(decision.prefill.index, request, hashes)
        return decision.prefill.index

    def sent_elsewhere(self, rank: int, rid: str, tokens: Sequence[int], now_s: float, *, salt: object = None) -> None:
        """A request that names its rank itself was sent there."""
        self.external += 1
        hashes = block_hashes(tokens, salt)
        matched = self._prefixes[rank].matched_tokens(hashes)
        self._sent(rank, RequestView(rid, max(1, len(tokens)), now_s, {rank: matched}), hashes)

    def _sent(self, rank: int, request: RequestView, hashes: Sequence[int]) -> None:
        view = self.fleet.instances[rank]
        self.books[rank].sent(request.new_tokens(view), request.history_tokens(view))
        self._prefixes[rank].insert(hashes, view.kv_capacity_tokens)

    # -- reports -----------------------------------------------------------------------------------------------------

    def on_report(self, report: Report, now_s: float) -> None:
        if report.dp_rank >= len(self.books):
            return
        sample = self.books[report.dp_rank].update(report, now_s)
        if sample is None:
            return
        self._dispatcher.on_prefill(sample, now_s)
        changed = False
        for one in report.steps:
            step = StepSample(one.new_tokens, one.history_tokens, one.attention, one.duration_s)
            changed = self._fit.observe(step) or changed
        if changed:
            self.predictor.curves[""] = curve_of(self._fit.model)
            self.boundary.update(self._fit.model)
            knobs = dataclasses.replace(self._dispatcher.knobs, boundary_tokens=max(1, self.boundary.tokens(0)))
            self._dispatcher.knobs = knobs

    def silent(self) -> list[int]:
        """Ranks that have not reported yet."""
        return [rank for rank, book in enumerate(self.books) if book.report is None]

    def on_flush(self) -> None:
        """The ranks forget their prefixes."""
        for model in self._prefixes:
            model.clear()

    # -- pools -------------------------------------------------------------------------------------------------------

    def tick(self, now_s: float) -> None:
        """Call often; decides once in a control period."""
        if self.config.pressure == "off":
            self._pressure.look(self.fleet, now_s)
            return
        for action in self._pressure.tick(self.fleet, now_s):
            self.ticks[action.reason.value] += 1
            if isinstance(action, SetLengthClass):
                assert action.length_class is not None, "the pressure controller knows two classes"
                self._move(action.instance.index, action.length_class.value, action.reason.value, now_s)

    def order_role(self, rank: int | None, role: str, now_s: float) -> None:
        """The operator wants ``role`` for a rank, or for all. The ranks have been told by whoever asked."""
        for one in range(len(self.roles)) if rank is None else [rank]:
            if self.roles[one] != role:
                self._label(one, role, OPERATOR, now_s)

    def announce(self) -> None:
        """Tell every rank the role that it starts with."""
        for rank, role in enumerate(self.roles):
            self._set_role(rank, role)

    def _move(self, rank: int, role: str, reason: str, now_s: float) -> None:
        self._label(rank, role, reason, now_s)
        self._set_role(rank, role)

    def _label(self, rank: int, role: str, reason: str, now_s: float) -> None:
        pressures = self.pressures()
        self.roles[rank] = role
        view = self.fleet.instances[rank]
        view.length_class, view.since_s = ROLE_CLASSES[role], now_s
        self.moves.append(Move(now_s, rank, role, reason, pressures["short"], pressures["long"]))
        self.move_count[reason] += 1
        self._pressure.cool_down_from(now_s)

    def pool(self, cls: PrefillClass) -> list[InstanceView]:
        return [view for view in self.fleet.instances if view.length_class is cls]

    def pressures(self) -> dict[str, float]:
        """P of each pool, from the averaged signals."""
        return {cls.value: self._pressure.pool_pressure(self.pool(cls)) for cls in PrefillClass}

    # -- for people --------------------------------------------------------------------------------------------------

    def signals(self, rank: int) -> dict[str, float]:
        """q, e, u and psi of one rank (Algorithm 2 lines 18 to 21), averaged."""
        return self._pressure.signals(self.fleet.instances[rank])._asdict()

    def state(self, now_s: float) -> dict[str, Any]:
        """Plain values."""
        return {
            "ranks": [self._rank_state(rank, now_s) for rank in range(len(self.roles))],
            "pressure": self.pressures(),
            "boundary_tokens": self._dispatcher.knobs.boundary_tokens,
            "step_model": dataclasses.asdict(self._fit.model),
            "dispatched": dict(self.dispatched),
            "external": self.external,
            "ticks": dict(self.ticks),
            "moves": dict(self.move_count),
            "last_moves": [{**dataclasses.asdict(move), "ago_s": now_s - move.at_s} for move in self.moves],
            "knobs": {**dataclasses.asdict(self._pressure.knobs), "pressure": self.config.pressure},
        }

    def _rank_state(self, rank: int, now_s: float) -> dict[str, Any]:
        book, view = self.books[rank], self.fleet.instances[rank]
        return {
            "rank": rank,
            "role": self.roles[rank],
            "draining": bool(book.report and book.report.draining),
            "report_age_s": book.age_s(now_s),
            "reports_lost": book.lost,
            "outstanding": book.outstanding(),
            "queued_prefills": view.queued_prefills,
            "queued_tokens": view.queued_tokens,
            "delay_s": self.predictor.delay_s(view),
            "curve_factor": self.predictor.factor(view),
            **self.signals(rank),
        }
