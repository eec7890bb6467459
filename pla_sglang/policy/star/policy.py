"""STAR's rescheduler as a controller: Algorithm 1 lines 1 to 10, once a scheduling interval.

Worker and scheduler side run here one after the other; a driver whose workers report summaries of their own calls
``select.best_move`` with those. Beyond the paper: up to ``moves`` moves a tick, chosen one after the other, and a
request that has been moved rests for ``rest_s``, so that a wrong prediction cannot send it round.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from pla_sglang.common.checks import Range, check_fields, knob
from pla_sglang.policy.common.client_gain import ClientGain
from pla_sglang.policy.interface.decisions import FleetAction, Hold, Migrate, Observer
from pla_sglang.policy.interface.fleet import DecodeBatch, FleetView, InstanceView, RequestView
from pla_sglang.policy.interface.reasons import FleetReason
from pla_sglang.policy.star.horizon import Horizon, HorizonKnobs, Summary, summaries, summarise
from pla_sglang.policy.star.select import DecodeInstance, Move, MoveChoice, SelectKnobs, best_move


@dataclasses.dataclass(frozen=True)
class StarKnobs:
    """Attributes:
    horizon, select: of the two sides.
    interval_s: scheduling interval; about 20 decode steps in the paper (section 5.3).
    moves: moves a tick at most; 1 in the paper.
    rest_s: minimum time between two moves of a request.
    step_s: T_exec where an instance has no measured token interval yet.
    """

    horizon: HorizonKnobs = dataclasses.field(default_factory=HorizonKnobs)
    select: SelectKnobs = dataclasses.field(default_factory=SelectKnobs)
    interval_s: float = knob(0.5, allowed=Range(0, above=True))
    moves: int = knob(1, allowed=Range(1))
    rest_s: float = knob(5.0, allowed=Range(0))
    step_s: float = knob(0.02, allowed=Range(0, above=True))

    def __post_init__(self) -> None:
        check_fields(self, "star")


class StarRescheduler(Observer):
    """Controller that answers ``Migrate``.

    Args:
        client: leaves out moves by which the client of the request does not gain; None: as in the paper, the balance of
            the instances alone counts.
    """

    moves_requests = True

    def __init__(
        self,
        knobs: StarKnobs,
        client: ClientGain | None = None,
    ) -> None:
        self.knobs = knobs
        self.client = client
        self.horizon = Horizon(knobs.horizon)
        self.interval_s = knobs.interval_s
        self._moved_s: dict[str, float] = {}

    def tick(self, fleet: FleetView, now_s: float) -> list[FleetAction]:
        instances = fleet.decode_capable()
        workers = self._workers(instances, fleet, now_s)
        actions: list[FleetAction] = []
        for _ in range(self.knobs.moves):
            choice = best_move(workers, self.horizon, self.knobs.select, self.client)
            move = choice.move
            if move is None:
                if not actions:
                    actions.append(Hold(_why_not(choice)))
                break
            actions.append(self._migrate(move, instances, workers, now_s))
            self._carry_out(move, workers)
        return actions

    def _workers(self, instances: list[InstanceView], fleet: FleetView, now_s: float) -> list[DecodeInstance]:
        """What all workers report, summed up together: a fleet of hundreds would spend its time in small calls."""
        batches = [self._seen(fleet.decodes(instance), now_s) for instance in instances]
        reports = summaries(batches, self.horizon) if batches else []
        return [self._worker(instance, report, now_s) for instance, report in zip(instances, reports, strict=True)]

    def _seen(self, batch: DecodeBatch, now_s: float) -> DecodeBatch:
        """Requests that rest cannot be moved; without a horizon, no length is looked at."""
        moved_s = np.array([self._moved_s.get(rid, -np.inf) for rid in batch.rids], dtype=np.float64)
        known = batch.remaining if self.knobs.horizon.steps else np.full(len(batch.rids), np.nan)
        rested = now_s - moved_s >= self.knobs.rest_s
        return dataclasses.replace(batch, remaining=known, movable=batch.movable & rested)

    def _worker(self, instance: InstanceView, report: Summary, now_s: float) -> DecodeInstance:
        running = int(report.batch.tokens.sum()) + report.batch.unlisted_tokens
        shared = max(0, running - instance.kv_used_tokens)  # of prefixes that several of them have in common
        used = max(instance.kv_used_tokens, running - shared + instance.waiting_decode_tokens)
        return DecodeInstance(
            report,
            room_tokens=instance.kv_capacity_tokens + shared,
            other_tokens=used + shared - running,
            step_s=instance.token_interval_s or self.knobs.step_s,
            steps=instance.steps,
        )

    def _migrate(
        self, move: Move, instances: list[InstanceView], workers: list[DecodeInstance], now_s: float
    ) -> Migrate:
        batch = workers[move.source].summary.batch
        rid = batch.rids[move.request]
        self._moved_s[rid] = now_s
        return Migrate(
            rid,
            instances[move.source],
            instances[move.target],
            int(batch.tokens[move.request]),
            FleetReason.STAR_MIGRATE,
            move.gain,
        )

    def _carry_out(self, move: Move, workers: list[DecodeInstance]) -> None:
        """Both summaries as they will be, for the next move of this tick; the moved request stays put there."""
        source, target = workers[move.source].summary.batch, workers[move.target].summary.batch
        stays = np.arange(len(source.rids)) != move.request
        left = dataclasses.replace(
            source,
            rids=[rid for rid, stay in zip(source.rids, stays, strict=True) if stay],
            tokens=source.tokens[stays],
            remaining=source.remaining[stays],
            movable=source.movable[stays],
        )
        joined = dataclasses.replace(
            target,
            rids=[*target.rids, source.rids[move.request]],
            tokens=np.append(target.tokens, source.tokens[move.request]),
            remaining=np.append(target.remaining, source.remaining[move.request]),
            movable=np.append(target.movable, False),
        )
        workers[move.source].summary = summarise(left, self.horizon)
        workers[move.target].summary = summarise(joined, self.horizon)

    def on_finish(self, request: RequestView, output_tokens: int, now_s: float) -> None:
        self._moved_s.pop(request.rid, None)
        if self.client is not None:
            self.client.note_answer(output_tokens)


def _why_not(choice: MoveChoice) -> FleetReason:
    if not choice.overloaded:
        return FleetReason.STAR_BALANCED
    return FleetReason.STAR_NO_CANDIDATE if choice.best is None else FleetReason.STAR_NO_GAIN
