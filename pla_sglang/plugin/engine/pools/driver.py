"""The pools of one server: views of its ranks, dispatch by length, and ranks that change pools.

Holds no socket and no clock: reports and requests come in, ranks and role changes go out.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from pla_sglang.load.instance_load import prefill_sample
from pla_sglang.load.prefix_index import PrefixIndex, even_block_ends, token_block_keys
from pla_sglang.load.report import Report
from pla_sglang.load.tracker import LoadTracker, Phase, ReportEffect, TrackedRequest
from pla_sglang.plugin.config import PlaConfig
from pla_sglang.policy.common.curve import PrefillCurve
from pla_sglang.policy.common.device_clock import DeviceClock
from pla_sglang.policy.common.joining import split_ranks
from pla_sglang.policy.common.predictor import TtftPredictor
from pla_sglang.policy.common.step_fit import StepFit
from pla_sglang.policy.common.step_model import StepModel
from pla_sglang.policy.interface.decisions import PolicySet, SetLengthClass
from pla_sglang.policy.interface.fleet import FleetView, InstanceKind, InstanceView, RequestView, Role
from pla_sglang.policy.interface.prefill import PrefillClass
from pla_sglang.policy.pla.averaged_pressure import AveragedPressure
from pla_sglang.policy.pla.fitted_boundary import FittedBoundary
from pla_sglang.policy.pla.pressure import PressureKnobs
from pla_sglang.policy.pla.spatial import SpatialDispatcher, SpatialKnobs
from pla_sglang.policy.runner import Effects, FleetRunner, PoolMove, Refusal

BLOCK_TOKENS = 64
ROLE_CLASSES = {"mixed": None, "short": PrefillClass.SHORT, "long": PrefillClass.LONG}
OPERATOR = "operator"  # reason of a move that somebody asked for


def make_curve(model: StepModel) -> PrefillCurve:
    """The step model as a cost per request: each pays the larger floor, as if it were computed alone."""
    return PrefillCurve(max(model.g0_s, model.k0_s), model.b_s, model.a_s, max(model.gr_s, model.kr_s))


def make_pressure_knobs(config: PlaConfig, ttft_slo_s: float) -> PressureKnobs:
    """Inputs of Algorithm 2 as the flags have them; ``ttft_slo_s`` in device seconds, as the flags' times are."""
    return PressureKnobs(
        ttft_slo_s=ttft_slo_s,
        tau=config.pressure_hysteresis,
        cool_down_s=config.pressure_cool_down_ms / 1e3,
        interval_s=config.pressure_interval_ms / 1e3,
    )


class RankEffects(Effects):
    """Ranks change pools; their other roles are fixed. ``relabel`` is called with rank, role and device time."""

    def __init__(self, relabel: Callable[[int, str, float], None]) -> None:
        self._relabel = relabel

    def set_length_class(self, action: SetLengthClass, now_s: float) -> Refusal | None:
        assert action.length_class is not None, "the pressure controller knows two classes"
        self._relabel(action.instance.index, action.length_class.value, now_s)
        return None


class Pools:
    """Ranks in two pools.

    Args:
        ranks: data-parallel ranks, numbered from 0.
        start: step model until reports have said more, in device seconds.
        chunk_tokens: upper limit of the boundary; None: no chunking.
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
        self.clock = DeviceClock(config.time_scale)
        self.roles = [length_class.value for length_class in split_ranks(ranks, config.short_ranks)]
        views = [
            InstanceView(
                rank, f"rank-{rank}", kind=InstanceKind.UNIFIED, role=Role.MIXED, length_class=ROLE_CLASSES[role]
            )
            for rank, role in enumerate(self.roles)
        ]
        self.fleet = FleetView(views)
        self.loads = [LoadTracker(view, follows_requests=False, clock=self.clock) for view in views]
        self._prefixes = PrefixIndex(even_block_ends(BLOCK_TOKENS))
        self.boundary = FittedBoundary(StepFit(start), fixed_tokens=config.boundary_tokens, cap_tokens=chunk_tokens)
        self._model = start  # that the predictor has now
        self.predictor = TtftPredictor({"": make_curve(start)})
        self.external = 0
        self._requests = 0  # sent to any rank
        target_s = self._target_s(config)
        self.pressure = AveragedPressure(make_pressure_knobs(config, target_s), self.predictor)
        self._dispatcher = SpatialDispatcher(SpatialKnobs(target_s), self.predictor, self.boundary)
        policy = PolicySet("pla", self._dispatcher, (self.pressure,))
        effects = RankEffects(self._change_pool)
        self.runner = FleetRunner(policy, self.fleet, effects, move_signals=self._move_signals, clock=self.clock)
        self.set_config(config)

    def set_config(self, config: PlaConfig) -> None:
        """New knobs. A cool-down that is under way goes on."""
        self.config = config
        self.boundary.set_fixed(config.boundary_tokens)
        target_s = self._target_s(config)
        self._dispatcher.knobs = SpatialKnobs(ttft_slo_s=target_s)
        self.pressure.retune(make_pressure_knobs(config, target_s))

    def _target_s(self, config: PlaConfig) -> float:
        return self.clock.device_s(config.pool_slo_ttft_ms / 1e3)

    # -- requests ----------------------------------------------------------------------------------------------------

    def place_request(
        self, rid: str, tokens: Sequence[int], now_s: float, *, slo_s: float | None = None, salt: object = None
    ) -> int:
        """The rank for a request; it counts as sent there. Raises RuntimeError when no rank is ready."""
        keys = token_block_keys(tokens, BLOCK_TOKENS, salt=salt)
        request = RequestView(
            rid,
            input_tokens=max(1, len(tokens)),
            arrival_s=self.clock.device_s(now_s),
            cached=self._prefixes.lookup(keys),
            ttft_slo_s=None if slo_s is None else self.clock.device_s(slo_s),
        )
        decision = self.runner.dispatch(request, now_s)
        if decision.prefill is None:
            raise RuntimeError("no data-parallel rank is ready")
        self._add_request(decision.prefill.index, request, keys, now_s)
        return decision.prefill.index

    def note_external(self, rank: int, rid: str, tokens: Sequence[int], now_s: float, *, salt: object = None) -> None:
        """A request that names its rank itself was sent there."""
        self.external += 1
        keys = token_block_keys(tokens, BLOCK_TOKENS, salt=salt)
        request = RequestView(rid, max(1, len(tokens)), self.clock.device_s(now_s), self._prefixes.lookup(keys))
        self._add_request(rank, request, keys, now_s)

    def _add_request(self, rank: int, request: RequestView, keys: Sequence[int], now_s: float) -> None:
        """It was sent to ``rank``. A request id may come again, so a number keeps the tracker's keys apart."""
        view = self.fleet.instances[rank]
        new, history = request.new_tokens(view), request.history_tokens(view)
        self._requests += 1
        tracked = TrackedRequest(new, history, now_s, Phase.QUEUED, decodes_here=False)
        self.loads[rank].add_request((request.rid, self._requests), tracked)
        tokens = request.input_tokens
        self._prefixes.insert_prompt(
            rank,
            keys,
            tokens,
            size=tokens,
            now_s=self.clock.device_s(now_s),
            capacity_tokens=view.kv_capacity_tokens,
            answer_tokens=0,  # nobody says here when a request ends, or with which answer
        )
        self._prefixes.show_cache(view)

    # -- reports -----------------------------------------------------------------------------------------------------

    def on_report(self, report: Report, now_s: float) -> None:
        if report.dp_rank >= len(self.loads):
            return
        load = self.loads[report.dp_rank]
        effect = load.on_report(report, now_s)
        if effect is ReportEffect.RESTARTED:
            load.restart()
            effect = load.on_report(report, now_s)
        self._prefixes.show_cache(load.view)
        sample = prefill_sample(load.view, report, self.clock)
        if effect is not ReportEffect.APPLIED or sample is None:
            return
        self.runner.prefilled(sample, now_s)
        if self.boundary.model is not self._model:
            self._model = self.boundary.model
            self.predictor.curves[""] = make_curve(self._model)

    def list_silent(self) -> list[int]:
        """Ranks that have not reported yet."""
        return [rank for rank, load in enumerate(self.loads) if load.reported_s is None]

    def on_flush(self) -> None:
        """The ranks forget their prefixes."""
        for rank in range(len(self.roles)):
            self._prefixes.forget_instance(rank)

    # -- pools -------------------------------------------------------------------------------------------------------

    def tick(self, now_s: float) -> None:
        """Call often; decides once in a control period."""
        if self.config.pressure == "off":
            self.pressure.look(self.fleet, self.clock.device_s(now_s))
        else:
            self.runner.tick(0, now_s)

    def order_role(self, rank: int | None, role: str, now_s: float) -> None:
        """The operator wants ``role`` for a rank, or for all. The ranks have been told by whoever asked."""
        for index in range(len(self.roles)) if rank is None else [rank]:
            if self.roles[index] != role:
                move = PoolMove(now_s, self.fleet.instances[index], role, OPERATOR, self._move_signals())
                self._relabel(index, role, self.clock.device_s(now_s))
                self.runner.note_move(move)

    def announce_roles(self) -> None:
        """Tell every rank the role that it starts with."""
        for rank, role in enumerate(self.roles):
            self._set_role(rank, role)

    def _change_pool(self, rank: int, role: str, now_s: float) -> None:
        self._relabel(rank, role, now_s)
        self._set_role(rank, role)

    def _relabel(self, rank: int, role: str, now_s: float) -> None:
        """At ``now_s`` of the device."""
        self.roles[rank] = role
        view = self.fleet.instances[rank]
        view.length_class, view.since_s = ROLE_CLASSES[role], now_s
        self.pressure.cool_down_from(now_s)

    def _move_signals(self) -> dict[str, float]:
        return {f"{cls}_pressure": pressure for cls, pressure in self.compute_pressures().items()}

    def compute_pressures(self) -> dict[str, float]:
        """P of each pool, from the averaged signals."""
        instances = self.fleet.instances
        return {
            cls.value: self.pressure.pool_pressure([view for view in instances if view.length_class is cls])
            for cls in PrefillClass
        }

    # -- for people --------------------------------------------------------------------------------------------------

    def count_decisions(self) -> dict[str, Counter[str]]:
        """Dispatches, the pressure controller's answers and moves, each by reason."""
        answers: Counter[str] = Counter()
        for key, count in self.runner.actions.items():
            answers[key.partition(":")[2]] += count
        dispatched = Counter({reason.value: count for reason, count in self.runner.decisions.items()})
        return {"dispatched": dispatched, "ticks": answers, "moves": self.runner.moved}

    def describe_state(self, now_s: float) -> dict[str, Any]:
        """Plain values."""
        return {
            "ranks": [self._rank_state(rank, now_s) for rank in range(len(self.roles))],
            "pressure": self.compute_pressures(),
            "boundary_tokens": self.boundary.tokens(0),
            "boundary_tokens_at_8k_history": self.boundary.tokens(8192),
            "step_model": self._model.to_dict(),
            "external": self.external,
            **{name: dict(counter) for name, counter in self.count_decisions().items()},
            "last_moves": [
                {
                    "at_s": move.at_s,
                    "ago_s": now_s - move.at_s,
                    "rank": move.instance.index,
                    "role": move.role,
                    "reason": move.reason,
                    **move.signals,
                }
                for move in self.runner.moves
            ],
            "knobs": {**dataclasses.asdict(self.pressure.knobs), "pressure": self.config.pressure},
        }

    def _rank_state(self, rank: int, now_s: float) -> dict[str, Any]:
        load, view = self.loads[rank], self.fleet.instances[rank]
        report = load.reports.get(rank)
        return {
            "rank": rank,
            "role": self.roles[rank],
            "draining": report is not None and report.draining,
            "report_age_s": None if load.reported_s is None else now_s - load.reported_s,
            "reports_lost": load.lost_reports,
            "outstanding": load.open_requests(),
            "queued_prefills": view.queued_prefills,
            "queued_tokens": view.queued_tokens,
            "delay_s": self.clock.wall_s(self.predictor.delay_s(view)),
            "curve_factor": self.predictor.factor(view),
            **self.pressure.signals(view)._asdict(),
        }
