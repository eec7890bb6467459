"""Future token load of an instance, summed up once by the worker (STAR section 5.2, "worker-side functions").

Time is counted in decode steps: a running request r holds N(r) + t tokens at step t while t is below its remaining
length, and none after. Loads are kept on a grid of steps, 0 = now, with weights: 1 for now and beta_t for later steps
(eq. 4), the betas summing to 1.

A move of r from s to t changes the load of two instances only and leaves the mean as it is, so it lowers the objective

    sum_j w_j Var({N_i(j)})   by   2/n * sum_{j < k} w_j x_j (N_s(j) - N_t(j) - x_j),   x_j = N(r) + t_j,

where k is the number of grid steps before r ends. ``reduction`` is that sum, O(H). As x_j is linear in t_j, it falls
into sums over j < k that do not depend on r: with the running sums that a ``Summary`` keeps, a candidate costs O(1).

Beyond the paper, whose future "is derived from active requests only" (section 5.1): who ends makes room for arrivals,
and dispatch sends them where the load is least. So the fleet is taken to hold at each grid step at least what it holds
now, and N_i(j) is what runs or the level up to which arrivals fill the emptiest instances, whichever is more:

    M_i(j) = max(N_i(j), level_j),   level_j such that sum_i M_i(j) = max(sum_i N_i(j), sum_i N_i(0))

Of all ways to spread arrivals this one has the least variance. After a move (M_s - x, M_t + x) is one of the ways, so
the reduction computed from M is a lower bound of the true one. Where no length is known nothing ends, and M is N.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from pla_sglang.common.checks import Range, check_fields, knob, require
from pla_sglang.policy.interface.fleet import DecodeBatch

Floats = npt.NDArray[np.float64]


@dataclasses.dataclass(frozen=True)
class HorizonKnobs:
    """The grid.

    Attributes:
        steps: H, decode steps looked ahead; 0: only now counts ("usePrediction" off in Algorithm 1).
        points: grid points over these steps.
        half_life_steps: beta_t halves every so many steps.
    """

    steps: int = knob(2000, allowed=Range(0))
    points: int = knob(32, allowed=Range(1))
    half_life_steps: float = 1000.0

    def __post_init__(self) -> None:
        check_fields(self, "star horizon")
        require("star half_life_steps", self.half_life_steps, 0, above=True)


class Horizon:
    """Grid steps t_j, weights w_j, and running sums of w, w*t and w*t^2. Shapes [points + 1] and [points + 2]."""

    def __init__(self, knobs: HorizonKnobs) -> None:
        points = min(knobs.points, knobs.steps)
        ahead = np.linspace(knobs.steps / points, knobs.steps, points) if points else np.zeros(0)
        beta = 0.5 ** (ahead / knobs.half_life_steps)
        self.knobs = knobs
        self.steps: Floats = np.concatenate([[0.0], np.round(ahead)])
        self.beta: Floats = beta / beta.sum() if points else beta  # of the later steps
        self.weights: Floats = np.concatenate([[1.0], self.beta])
        self.sum_w = running(self.weights)
        self.sum_wt = running(self.weights * self.steps)
        self.sum_wtt = running(self.weights * self.steps**2)


def running(values: Floats) -> Floats:
    """Sums of the first k values of each row, k = 0 ... len; shape [..., len + 1]."""
    sums = np.zeros((*values.shape[:-1], values.shape[-1] + 1))
    np.cumsum(values, axis=-1, out=sums[..., 1:])
    return sums


@dataclasses.dataclass(slots=True, eq=False)
class Summary:
    """What a worker reports.

    Attributes:
        loads: predicted token load on the grid, ``loads[0]`` is now; shape [points + 1].
        sum_wn, sum_wtn: running sums of w*N and w*t*N; shape [points + 2].
        peak: largest N(j) + t_j over the first k grid steps, 0 for k = 0; shape [points + 2].
        largest: largest trace value of any request at each grid step; shape [points + 1].
        weighted: w_i of Algorithm 1 line 13; the load now where there is no prediction.
        batch: the requests, with predicted remaining lengths.
        ends: k of each request; shape [requests] int64.
    """

    loads: Floats
    sum_wn: Floats
    sum_wtn: Floats
    peak: Floats
    largest: Floats
    weighted: float
    batch: DecodeBatch
    ends: npt.NDArray[np.int64]


def summarise(batch: DecodeBatch, horizon: Horizon) -> Summary:
    """The loads of one worker. O(R log R + R H) in one pass of numpy each; see ``summaries``."""
    return summaries([batch], horizon)[0]


def summaries(batches: Sequence[DecodeBatch], horizon: Horizon) -> list[Summary]:
    """The loads of several workers at once: one call of numpy a step for all of them, whatever their number.

    A request of unknown remaining length is taken to last beyond the horizon, and so is one that is not listed. Rows
    are filled up with requests that hold nothing and have ended, so that all are equally long.
    """
    steps, weights = horizon.steps, horizon.weights
    remaining, tokens, inside = _padded(batches)
    rows = np.arange(len(batches))[:, None]
    order = np.argsort(remaining, axis=1)
    tokens, ordered = tokens[rows, order], remaining[rows, order]
    gone = (ordered[:, None, :] <= steps[:, None]).sum(axis=2)  # requests with remaining <= t_j, padding too
    left = remaining.shape[1] - gone
    ended = running(tokens)
    loads = ended[:, -1:] - ended[rows, gone] + left * steps + _unlisted_loads(batches, steps)
    heaviest = np.zeros_like(ended)  # of those at or after each place
    np.maximum.accumulate(tokens[:, ::-1], axis=1, out=heaviest[:, -2::-1])
    largest = np.where(left > 0, heaviest[rows, gone] + steps, 0.0)
    peak = np.zeros((len(batches), len(steps) + 1))
    np.maximum.accumulate(loads + steps, axis=1, out=peak[:, 1:])
    weighted = loads[:, 1:] @ horizon.beta if len(steps) > 1 else loads[:, 0]
    sum_wn, sum_wtn = running(weights * loads), running(weights * steps * loads)
    ends = np.searchsorted(steps, remaining, side="left")
    return [
        Summary(loads[i], sum_wn[i], sum_wtn[i], peak[i], largest[i], float(weighted[i]), batch, ends[i, inside[i]])
        for i, batch in enumerate(batches)
    ]


def expect_arrivals(reports: Sequence[Summary], horizon: Horizon) -> Sequence[Summary]:
    """The same with the arrivals that take the place of requests that end: M of the module. ``peak`` is left as it is.

    Line 21 asks for memory before arrivals, which are sent where there is room. O(n log n) a grid step.
    """
    loads = np.stack([report.loads for report in reports])
    missing = loads[:, 0].sum() - loads.sum(axis=0)
    if not (missing > 0).any():
        return reports
    loads = np.maximum(loads, arrival_level(loads, np.maximum(missing, 0.0)))
    sum_wn, sum_wtn = running(horizon.weights * loads), running(horizon.weights * horizon.steps * loads)
    weighted = loads[:, 1:] @ horizon.beta
    return [
        dataclasses.replace(report, loads=row, sum_wn=sums, sum_wtn=sums_t, weighted=float(mean))
        for report, row, sums, sums_t, mean in zip(reports, loads, sum_wn, sum_wtn, weighted, strict=True)
    ]


def arrival_level(loads: Floats, missing: Floats) -> Floats:
    """The level up to which so many tokens fill the lowest of ``loads``, [instances, points]; shape [points]."""
    ordered = np.sort(loads, axis=0)
    filled = np.arange(1, len(loads) + 1)[:, None]
    levels = (missing + np.cumsum(ordered, axis=0)) / filled  # if the lowest 1, 2, ... share them
    # One more instance is filled as long as its load is below the level of those before it, so the least level holds.
    least: Floats = levels.min(axis=0)
    return least


def _unlisted_loads(batches: Sequence[DecodeBatch], steps: Floats) -> Floats:
    """Token load of the requests that are not listed, at each grid step; shape [batches, points + 1]."""
    tokens = np.array([[batch.unlisted_tokens] for batch in batches], dtype=np.float64)
    requests = np.array([[batch.unlisted_requests] for batch in batches], dtype=np.float64)
    return tokens + requests * steps


def _padded(batches: Sequence[DecodeBatch]) -> tuple[Floats, Floats, list[slice]]:
    """Remaining lengths (at least 1; unknown: inf) and tokens, shape [batches, most requests], 0 beyond the last; and
    which places of each row are requests."""
    counts = [len(batch.tokens) for batch in batches]
    places = np.arange(max(counts)) < np.array(counts)[:, None]
    remaining, tokens = np.zeros(places.shape), np.zeros(places.shape)
    known = np.concatenate([batch.remaining for batch in batches])
    remaining[places] = np.where(np.isnan(known), np.inf, np.maximum(known, 1.0))
    tokens[places] = np.concatenate([batch.tokens for batch in batches])
    return remaining, tokens, [slice(count) for count in counts]
