"""STAR Algorithm 1, scheduler side: classification, candidates, best feasible move.

Every source-target pair and every request of the source is a candidate. Candidates of one source are evaluated at once
as a [targets, requests] array from the running sums of ``horizon.py``. Sources, and for each source its targets, are
taken in order of an upper bound of what a move can bring; the search ends when the bound is below the best found. So
the answer is exact, and few of the pairs are looked at.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from pla_sglang.common.checks import Range, check_fields, knob
from pla_sglang.policy.common.client_gain import ClientGain, DecodeLoad
from pla_sglang.policy.interface.step_times import StepTimes
from pla_sglang.policy.star.horizon import Floats, Horizon, Summary, expect_arrivals

TARGETS_AT_ONCE = 16

ROUNDING = 1e-12  # of the mean squared load: a gain below is the rounding of the running sums, not a gain


@dataclasses.dataclass(frozen=True)
class SelectKnobs:
    """Limits of Algorithm 1.

    Attributes:
        theta: an instance is overloaded above (1 + theta) times the mean weighted load (line 14).
        migrate_base_s, migrate_s_per_token: C_mig, the time to move a request.
        memory_share: share of a target's KV cache that may be planned full (C_mem).
        unknown_tokens: room that a request of unknown remaining length must find on its target.
        min_gain: least reduction, as a share of what two instances have of the objective on average; below, the move is
            not worth its traffic.
    """

    theta: float = knob(0.1, allowed=Range(0))
    migrate_base_s: float = knob(0.020, allowed=Range(0))
    migrate_s_per_token: float = knob(5e-6, allowed=Range(0))
    memory_share: float = knob(0.95, allowed=Range(0, 1, above=True))
    unknown_tokens: int = knob(1024, allowed=Range(0))
    min_gain: float = knob(0.01, allowed=Range(0, 1))

    def __post_init__(self) -> None:
        check_fields(self, "star")


@dataclasses.dataclass(slots=True, eq=False)
class DecodeInstance:
    """One instance for the selection.

    Attributes:
        summary: what the worker reported.
        room_tokens: KV capacity.
        other_tokens: KV tokens in use beyond those of the running requests (prefills, arrivals on their way).
        step_s: T_exec, duration of a decode step there.
        steps: as ``InstanceView.steps``.
    """

    summary: Summary
    room_tokens: int
    other_tokens: int = 0
    step_s: float = 0.02
    steps: StepTimes | None = None

    def decode_load(self) -> DecodeLoad:
        """What runs there now."""
        batch = self.summary.batch
        requests = len(batch.rids) + batch.unlisted_requests
        return DecodeLoad(requests, float(self.summary.loads[0]), self.steps)


@dataclasses.dataclass(slots=True, frozen=True)
class Move:
    """The best feasible move: positions of source, target and request, and the reduction of the objective."""

    source: int
    target: int
    request: int
    gain: float


@dataclasses.dataclass(slots=True)
class Stacked:
    """The summaries of all instances, one row each; shapes [instances, points + 1 or + 2]."""

    loads: Floats
    sum_wn: Floats
    sum_wtn: Floats
    peak: Floats
    room: Floats  # [instances]: tokens that may be planned

    @classmethod
    def of(cls, workers: Sequence[DecodeInstance], share: float) -> Stacked:
        summaries = [worker.summary for worker in workers]
        return cls(
            loads=np.stack([summary.loads for summary in summaries]),
            sum_wn=np.stack([summary.sum_wn for summary in summaries]),
            sum_wtn=np.stack([summary.sum_wtn for summary in summaries]),
            peak=np.stack([summary.peak for summary in summaries]),
            room=np.array([share * worker.room_tokens - worker.other_tokens for worker in workers]),
        )


def classify(workers: Sequence[DecodeInstance], theta: float) -> tuple[list[int], list[int]]:
    """Lines 11 to 16: overloaded and underloaded positions. An instance can be both; it is never its own target.

    Beyond the paper: an instance is overloaded as well when its load now is, though its future is not. Eq. 4 counts now
    as much as all later steps together; line 14 alone would leave such an instance as it is.
    """
    mean = sum(worker.summary.weighted for worker in workers) / len(workers)
    now = sum(worker.summary.loads[0] for worker in workers) / len(workers)
    limit, limit_now = (1 + theta) * mean, (1 + theta) * now
    overloaded = [
        index
        for index, worker in enumerate(workers)
        if worker.summary.weighted > limit or worker.summary.loads[0] > limit_now
    ]
    underloaded = [index for index, worker in enumerate(workers) if worker.summary.loads[0] < limit]
    return overloaded, underloaded


def objective(loads: Floats, horizon: Horizon) -> float:
    """Eq. 4: the weighted sum of variances over the instances."""
    return float(horizon.weights @ loads.var(axis=0))


def movable(worker: DecodeInstance, knobs: SelectKnobs) -> npt.NDArray[np.bool_]:
    """Line 20: requests with more steps to come than their move takes. Unknown lengths pass."""
    batch = worker.summary.batch
    move_s = knobs.migrate_base_s + knobs.migrate_s_per_token * batch.tokens
    with np.errstate(invalid="ignore"):
        pays = batch.remaining > move_s / max(worker.step_s, 1e-9)
    return batch.movable & (pays | np.isnan(batch.remaining))


def fits(
    stacked: Stacked, targets: npt.NDArray[np.int64], tokens: Floats, remaining: Floats, ends: npt.NDArray[np.int64]
) -> npt.NDArray[np.bool_]:
    """Line 21, [targets, requests]: the target holds the request to its end, and at every grid step until then.

    The paper adds the remaining length to the target's load; the tokens that the request brings along count too.
    """
    room = stacked.room[targets][:, None]
    to_the_end = stacked.loads[targets, 0][:, None] + (tokens + remaining)[None, :] <= room
    at_all_steps = stacked.peak[targets[:, None], ends[None, :]] + tokens[None, :] <= room
    return to_the_end & at_all_steps


def pays_for_clients(
    client: ClientGain,
    worker: DecodeInstance,
    targets: Sequence[DecodeInstance],
    chosen: npt.NDArray[np.int64],
    knobs: SelectKnobs,
) -> npt.NDArray[np.bool_]:
    """True where the client of each ``chosen`` request of ``worker`` gains by the move; shape [targets, requests].

    Where the cache of the source is planned full before the end of a request, a move away always does.
    """
    batch, summary = worker.summary.batch, worker.summary
    tokens, remaining = batch.tokens[chosen].astype(np.float64), batch.remaining[chosen]
    remaining = client.fill_unknown(remaining, knobs.unknown_tokens)
    loads = [target.decode_load() for target in targets]
    pays = client.pays(worker.decode_load(), loads, tokens, remaining, interval_s=worker.step_s)
    room = knobs.memory_share * worker.room_tokens - worker.other_tokens
    heaviest = np.maximum.accumulate(summary.loads)[np.maximum(summary.ends[chosen], 1) - 1]
    return pays | (heaviest > room)[None, :]


def _known_remaining(remaining: Floats, knobs: SelectKnobs) -> Floats:
    """With ``unknown_tokens`` for requests of unknown length."""
    return np.where(np.isnan(remaining), float(knobs.unknown_tokens), remaining)


def source_gains(
    worker: DecodeInstance,
    stacked: Stacked,
    targets: npt.NDArray[np.int64],
    chosen: npt.NDArray[np.int64],
    horizon: Horizon,
    knobs: SelectKnobs,
) -> Floats:
    """Reductions [targets, requests] of the ``chosen`` requests of ``worker``; -inf where a move is not feasible."""
    summary = worker.summary
    tokens = summary.batch.tokens[chosen].astype(np.float64)
    remaining = _known_remaining(summary.batch.remaining[chosen], knobs)
    ends = summary.ends[chosen]
    own = tokens**2 * horizon.sum_w[ends] + 2 * tokens * horizon.sum_wt[ends] + horizon.sum_wtt[ends]
    held = tokens * summary.sum_wn[ends] + summary.sum_wtn[ends] - own
    rows, columns = targets[:, None], ends[None, :]
    other = tokens[None, :] * stacked.sum_wn[rows, columns] + stacked.sum_wtn[rows, columns]
    gains: Floats = 2.0 / len(stacked.room) * (held[None, :] - other)
    feasible = fits(stacked, targets, tokens, remaining, ends)
    return np.where(feasible, gains, -np.inf)


def pair_bounds(held: Floats, largest: Floats, others: Floats, horizon: Horizon) -> Floats:
    """What no move between two instances can exceed; shapes broadcast to [..., points + 1], answer [...].

    At each grid step a request takes x of the distance d, which brings x * (d - x): most at x = d / 2, or at the
    largest x that any request has.
    """
    distance = np.maximum(0.0, held - others)
    part = np.minimum(distance / 2, largest)
    bounds: Floats = (part * (distance - part)) @ horizon.weights
    return bounds


@dataclasses.dataclass(slots=True, frozen=True)
class MoveChoice:
    """What Algorithm 1 found.

    Attributes:
        best: the best feasible move that brings anything, worth its traffic or not; None where there is none.
        worth: the gain above which a move is made (``min_gain``).
        overloaded: whether any instance was.
    """

    best: Move | None
    worth: float
    overloaded: bool

    @property
    def move(self) -> Move | None:
        """The move to make."""
        return self.best if self.best is not None and self.best.gain > self.worth else None


def best_move(
    workers: Sequence[DecodeInstance], horizon: Horizon, knobs: SelectKnobs, client: ClientGain | None = None
) -> MoveChoice:
    """Lines 5 to 8 and 24 to 34. With ``client``, moves by which the client of the request does not gain are left out.

    The answer is a function of the input: of equal moves the first in the order of search is taken. Loads to come
    include arrivals (``horizon.py``). Without them each load to come would be below each present one where answers are
    shorter than the horizon, and line 15, which compares the two, would leave no target.
    """
    if len(workers) > 1:
        reports = expect_arrivals([worker.summary for worker in workers], horizon)
        workers = [dataclasses.replace(worker, summary=report) for worker, report in zip(workers, reports, strict=True)]
    overloaded, underloaded = classify(workers, knobs.theta) if len(workers) > 1 else ([], [])
    if not overloaded or not underloaded:
        return MoveChoice(None, 0.0, bool(overloaded))
    stacked = Stacked.of(workers, knobs.memory_share)
    targets = np.array(underloaded, dtype=np.int64)
    largest = np.stack([workers[source].summary.largest for source in overloaded])
    scale = 2.0 / len(workers)
    bounds = scale * pair_bounds(stacked.loads[overloaded], largest, stacked.loads[targets].min(axis=0), horizon)
    best: Move | None = None
    least = ROUNDING * float(horizon.weights @ (stacked.loads**2).mean(axis=0))
    worth = max(least, scale * knobs.min_gain * objective(stacked.loads, horizon))
    for place in np.argsort(-bounds, kind="stable"):
        if bounds[place] <= least:
            break
        move = _best_from(overloaded[place], workers, stacked, targets, horizon, knobs, client=client, least=least)
        if move is not None:
            best, least = move, move.gain
    return MoveChoice(best, worth, True)


def _best_from(
    source: int,
    workers: Sequence[DecodeInstance],
    stacked: Stacked,
    targets: npt.NDArray[np.int64],
    horizon: Horizon,
    knobs: SelectKnobs,
    *,
    client: ClientGain | None,
    least: float,
) -> Move | None:
    """The best feasible move from ``source`` that brings more than ``least``."""
    worker = workers[source]
    chosen = np.flatnonzero(movable(worker, knobs))
    targets = targets[targets != source]
    if not len(chosen) or not len(targets):
        return None
    bounds = pair_bounds(worker.summary.loads, worker.summary.largest, stacked.loads[targets], horizon)
    bounds *= 2.0 / len(workers)
    order = np.argsort(-bounds, kind="stable")
    best: Move | None = None
    for start in range(0, len(order), TARGETS_AT_ONCE):
        some = order[start : start + TARGETS_AT_ONCE]
        if bounds[some[0]] <= least:
            break
        gains = source_gains(worker, stacked, targets[some], chosen, horizon, knobs)
        if client is not None:
            there = [workers[index] for index in targets[some]]
            gains = np.where(pays_for_clients(client, worker, there, chosen, knobs), gains, -np.inf)
        row, column = np.unravel_index(int(np.argmax(gains)), gains.shape)
        if gains[row, column] > least:
            least = float(gains[row, column])
            best = Move(source, int(targets[some[row]]), int(chosen[column]), least)
    return best
