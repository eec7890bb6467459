"""Online fit of the step model from measured prefill passes (PLA-Serve section 2.1, "Fitting at runtime").

Only total step times can be observed, never the two terms apart. The split follows from the roofline: a sample belongs
to the term that the present model finds larger, each term is fitted to its own samples by non-negative least squares on
relative errors, and the two steps alternate until no sample changes sides. Of all models on the way, the former one and
the scaled start, the one with the least sum of absolute errors is taken. A cost that grows with L alone cannot be told
apart between the terms (gw and b); all of it goes to the compute term, so gw = 0 in fitted models.

A pass also costs its host a fixed time where the device waits for it. That part is measured by itself and is added to
both terms after the fit: over a few lengths of prompts a floor and an intercept look alike, and a fit that takes the
launch for free would cut every prompt to pieces.

Where the two terms meet, a device may be slower than either says. Passes measured there decide whether chunks may be
as small as the crossing (``StepModel.ridge``): the fit often puts a floor just below the smallest passes it has seen.

What the window does not say is taken from the start model: a few of its predictions, scaled to the measured level,
stand among the samples with little weight. A server that sees prompts of one length only keeps a sane boundary.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Iterator

import numpy as np

from pla_sglang.policy.common.step_model import BEND_TOKENS, StepModel

RIDGE_SAMPLES = 8  # passes near the crossing that say how sharp the roofline bends there
RIDGE_TOLERANCE = 0.05
BEND_SAMPLES = 4  # passes of about one size that say what such a pass takes
BEND_LIMITS = (0.5, 2.0)


Solve = Callable[[np.ndarray, np.ndarray], np.ndarray]


@dataclasses.dataclass(frozen=True, slots=True)
class StepSample:
    """One measured prefill pass: sums over its requests, and its duration.

    ``attention`` is the sum of L*(L + 2*H), L new and H history tokens of each request. ``host_s`` is the part of
    ``step_s`` in which the device waited for its host.
    """

    new_tokens: int
    history_tokens: int
    attention: float
    step_s: float
    host_s: float = 0.0


@dataclasses.dataclass(frozen=True)
class FitKnobs:
    """Sizes in samples. A sample is an outlier when its error is ``outlier_mads`` median deviations off the median.

    A new server is refitted after each ``min_samples``: until then it decides by a start model that may be off by a
    factor of twenty, and the first long would be cut for another device. From ``refit_every`` samples on that many make
    a new fit, and outliers are looked for only from there on: of a few samples none is the odd one.

    ``anchor_weight`` is that of one prediction of the start model, a sample's being 1.
    """

    window: int = 256
    refit_every: int = 16
    min_samples: int = 4
    outlier_mads: float = 6.0
    rounds: int = 8
    anchor_weight: float = 0.1


def scipy_solver() -> Solve:
    """Imports it now: that takes a second, which a running server cannot spare at its first fit."""
    from scipy.optimize import nnls

    def solve(columns: np.ndarray, target: np.ndarray) -> np.ndarray:
        coefficients: np.ndarray = nnls(columns, target)[0]
        return coefficients

    return solve


class StepFit:
    """Sliding window of samples, refitted every few of them. Deterministic: same samples, same model.

    ``solve``: least squares with coefficients >= 0 of columns and a target; None: scipy's, which is the fastest.
    """

    def __init__(self, start: StepModel, knobs: FitKnobs | None = None, *, solve: Solve | None = None) -> None:
        self._solve = scipy_solver() if solve is None else solve
        self.model = start
        self._start = start
        self._device = start  # the last fit without the host's part
        self.fits = 0
        self.passes = 0  # behind the model, those included that have left the window; 0: it is the start model
        self._observed = 0
        self.error: float | None = None  # mean absolute relative error of the last fit on its window
        self._knobs = knobs or FitKnobs()
        self._samples: deque[StepSample] = deque(maxlen=self._knobs.window)
        self._fresh = 0

    def __len__(self) -> int:
        return len(self._samples)

    def is_young(self) -> bool:
        """It is still refitted after every few samples."""
        return len(self._samples) <= self._knobs.refit_every

    def observe(self, sample: StepSample) -> bool:
        """Take one sample; True when the model changed. Samples without tokens or time say nothing and are dropped."""
        if sample.new_tokens <= 0 or sample.step_s <= sample.host_s:
            return False
        self._samples.append(sample)
        self._observed += 1
        self._fresh += 1
        if self._fresh < (self._knobs.min_samples if self.is_young() else self._knobs.refit_every):
            return False
        self._fresh = 0
        return self._refit()

    def _refit(self) -> bool:
        """Fit, drop outliers, fit again; True when the model changed."""
        table = np.array(
            [(s.new_tokens, s.history_tokens, s.attention, s.step_s - s.host_s) for s in self._samples],
            dtype=np.float64,
        )
        model = self._fit(table, self._device)
        error = np.abs(_predict(table, model) / table[:, 3] - 1)
        spread = float(np.median(np.abs(error - np.median(error)))) + 1e-9
        kept = table[error <= float(np.median(error)) + self._knobs.outlier_mads * spread]
        if self._knobs.refit_every <= len(kept) < len(table):
            model = self._fit(kept, model)
            table = kept
        bend, edge = _bend(table, model)
        bent = dataclasses.replace(model, bend=bend, edge=edge)
        factors = np.array([bent.factor(tokens) for tokens in table[:, 0]])
        self.error = float(np.mean(np.abs(_predict(table, model) * factors / table[:, 3] - 1)))
        self.fits += 1
        self.passes = self._observed
        self._device = model
        host_s = float(np.median([sample.host_s for sample in self._samples]))
        before, self.model = self.model, dataclasses.replace(bent, pass_s=host_s, ridge=_ridge(table, model))
        return self.model != before

    def _fit(self, table: np.ndarray, model: StepModel) -> StepModel:
        level = float(np.median(table[:, 3] / _predict(table, self._start)))
        anchors = ANCHORS.copy()
        anchors[:, 3] = level * _predict(ANCHORS, self._start)
        weights = np.concatenate((np.ones(len(table)), np.full(len(anchors), self._knobs.anchor_weight)))
        rows = np.vstack((table, anchors))
        # A single slow pass can pull a term to itself that no other sample speaks of, and the steps settle there. The
        # sum of absolute errors, anchors included, does not follow one sample.
        found = [_scaled(self._start, level), model, *_alternate(rows, weights, model, self._knobs.rounds, self._solve)]
        return min(found, key=lambda one: float(weights @ np.abs(_predict(rows, one) / rows[:, 3] - 1)))


def _anchors() -> np.ndarray:
    """Rows of new tokens, history, L*(L + 2*H), and room for a duration: from launch-bound to compute-bound."""
    points = [(new, history) for new in (1, 16, 64, 256, 1024, 4096, 8192) for history in (0, 4096)]
    return np.array([(new, history, new * (new + 2 * history), 0.0) for new, history in points], dtype=np.float64)


ANCHORS = _anchors()


def _predict(table: np.ndarray, model: StepModel) -> np.ndarray:
    memory = model.g0_s + model.gw_s * table[:, 0] + model.gr_s * table[:, 1]
    compute = model.k0_s + model.kr_s * table[:, 1] + model.b_s * table[:, 0] + model.a_s * table[:, 2]
    return np.maximum(memory, compute)


def _ridge(table: np.ndarray, model: StepModel) -> float:
    """1.0 where passes between the crossing and twice the crossing were seen to take what the terms say, else 2.0."""
    crossing = model.crossing_tokens(0)
    near = table[(table[:, 0] >= crossing) & (table[:, 0] < 2 * crossing)]
    if len(near) < RIDGE_SAMPLES:
        return 2.0
    slower = float(np.median(near[:, 3] / _predict(near, model)))
    return 1.0 if slower <= 1 + RIDGE_TOLERANCE else 2.0


def _bend(table: np.ndarray, model: StepModel) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """``StepModel.bend`` and ``edge``: the median of measured over modelled time of the passes near each size.

    Apart for those that are at most as large and those that are larger, where the two differ; 1 without enough passes.
    """
    ratios = table[:, 3] / _predict(table, model)
    exact = np.log2(table[:, 0] / BEND_TOKENS[0])
    nearest = np.clip(np.round(exact), 0, len(BEND_TOKENS) - 1)

    def median(near: np.ndarray) -> float | None:
        return float(np.clip(np.median(near), *BEND_LIMITS)) if len(near) >= BEND_SAMPLES else None

    bend, edge = [], []
    for place in range(len(BEND_TOKENS)):
        near, larger = nearest == place, exact > place
        below, behind, both = median(ratios[near & ~larger]), median(ratios[near & larger]), median(ratios[near])
        if below is None or behind is None or abs(behind / below - 1) <= RIDGE_TOLERANCE:
            below = behind = 1.0 if both is None else both
        bend.append(below)
        edge.append(behind)
    return tuple(bend), () if bend == edge else tuple(edge)


def _scaled(model: StepModel, factor: float) -> StepModel:
    times = {
        name: factor * value
        for name, value in dataclasses.asdict(model).items()
        if name not in ("ridge", "pass_s", "bend", "edge")
    }
    return dataclasses.replace(model, **times)


def _alternate(
    table: np.ndarray, weights: np.ndarray, start: StepModel, rounds: int, solve: Solve
) -> Iterator[StepModel]:
    """Assign samples to terms, fit each term, repeat; every model on the way.

    A term without samples keeps its former coefficients.
    """
    ones = np.ones(len(table))
    # The first split is by size: the small passes are where a floor would show.
    in_compute = table[:, 0] > np.median(table[weights == 1, 0])
    model = start
    for _ in range(rounds):
        memory = _nnls(np.column_stack((ones, table[:, 1])), table[:, 3], weights, ~in_compute, solve)
        compute = _nnls(
            np.column_stack((ones, table[:, 1], table[:, 0], table[:, 2])), table[:, 3], weights, in_compute, solve
        )
        g0, gr = memory if memory is not None else (model.g0_s, model.gr_s)
        k0, kr, b, a = compute if compute is not None else (model.k0_s, model.kr_s, model.b_s, model.a_s)
        model = StepModel(g0_s=g0, gw_s=0.0, gr_s=gr, k0_s=k0, kr_s=kr, b_s=b, a_s=a)
        yield model
        by_memory = model.g0_s + model.gr_s * table[:, 1]
        by_compute = model.k0_s + model.kr_s * table[:, 1] + model.b_s * table[:, 0] + model.a_s * table[:, 2]
        split = by_compute > by_memory
        if np.array_equal(split, in_compute):
            return
        in_compute = split


def _nnls(
    columns: np.ndarray, seconds: np.ndarray, weights: np.ndarray, rows: np.ndarray, solve: Solve
) -> tuple[float, ...] | None:
    """Non-negative coefficients by relative least squares on ``rows``; None with fewer rows than coefficients."""
    if int(rows.sum()) < columns.shape[1]:
        return None
    weight = weights[rows]
    scaled = columns[rows] * (weight / seconds[rows])[:, None]
    scale = np.linalg.norm(scaled, axis=0)
    scale[scale == 0] = 1.0
    return tuple(float(value) for value in solve(scaled / scale, weight) / scale)
