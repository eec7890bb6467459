"""The lower bound of ``lower_bound.py`` where an instance is paid for ``startup_s`` before it is ready.

Time is cut into bins. Charges whose window lies in one bin are paid in that bin; the others are left out here. Let
``N(t)`` be the whole number of ready instances. What is paid is ``startup_s`` for every rise of ``N`` by one, and the
integral of ``N``. (Those that are ready at the first arrival are paid from then on.)

In a bin of length ``L`` let ``N`` begin at ``p`` and end at ``q``, with ``low`` and ``high`` as its least and largest
values. Then it rises by at least ``high - low - max(0, p - q)``: from ``p`` to both of them in either order, and to
``q``. Its integral is at least ``low * L``, and at least the charges ``w`` in the bin, which need ``w <= high * L``. So
the least that is paid is a shortest path over the bins, with ``N`` at their borders as states; bins without charges in
a row count as one, so a gap of days costs no more time than one of a second.

**Who may miss.** For every price ``mu >= 0`` of a request, what is paid is at least the least of "paid, and ``mu`` for
each request given up" over all choices, less ``mu * may_miss`` (weak duality). With the price, each bin chooses for
itself: giving up its ``d`` dearest requests leaves ``w(d)``, which needs ``w(d) <= high * L``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from pla_sglang.sim.core.lower_bound import ROUNDING, Charge, Demands, choose_windows

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
CHUNK = 2_000_000  # costs that are computed at once


@dataclasses.dataclass(frozen=True)
class Bins:
    """Bins in order, from the first with charges to the last.

    Attributes:
        start_s, length_s: [bins].
        first: [bins] the place of each in the others.
        left_s: for each bin what is charged in it when none, one, ... and all of its requests are given up.
        dearest_s: what the next one to give up is charged; 0 after the last.
    """

    start_s: Floats
    length_s: Floats
    first: Ints
    left_s: Floats
    dearest_s: Floats

    def __len__(self) -> int:
        return len(self.start_s)

    def most_instances(self) -> int:
        """More are of no use."""
        return int(np.ceil(self.left_s[self.first] / self.length_s).max(initial=0))


@dataclasses.dataclass(frozen=True)
class PaidStarts:
    """``instance_s``: the bound. ``parts``: start, length and mean instances of one path that costs as much."""

    instance_s: float
    parts: list[tuple[float, float, float]]
    starts: int


@dataclasses.dataclass(frozen=True)
class Prices:
    """What starts, and requests given up, cost in instance-seconds; ``least``, ``most``: instances at any time."""

    startup_s: float
    request_s: float
    least: int
    most: int


def even_edges(demands: Demands, bin_s: float) -> Floats:
    """Edges of bins of one length, where requests arrive."""
    start_s = demands.arrival_s[0]
    places = np.unique(np.floor((demands.arrival_s - start_s) / bin_s))
    edges: Floats = start_s + np.unique(np.concatenate([places, places + 1])) * bin_s
    return edges


def window_edges(demands: Demands, worth: Floats) -> Floats:
    """Edges of windows that do not overlap, chosen by ``worth``."""
    chosen = choose_windows(demands.arrival_s, demands.due_s, worth) & np.isfinite(demands.due_s)
    edges: Floats = np.unique(np.concatenate([demands.arrival_s[chosen], demands.due_s[chosen]]))
    return edges


def cut_bins(demands: Demands, charge: Charge, edges: Floats) -> Bins:
    """The bins between these edges; those without charges in a row are one."""
    place = np.searchsorted(edges, demands.arrival_s, side="right") - 1
    end_s = np.append(edges, np.inf)[place + 1]
    end_s[(place < 0) | (place >= len(edges) - 1)] = -np.inf
    inside_s = np.where(demands.first_due_s <= end_s, charge.prefill_s, 0.0)
    inside_s += np.where(demands.due_s <= end_s, charge.decode_s, 0.0)
    rows = np.flatnonzero(inside_s > 0)
    order = rows[np.lexsort((-inside_s[rows], place[rows]))]  # in each bin the dearest first
    full, count = np.unique(place[order], return_counts=True)
    empty = full[1:][np.diff(full) > 1]  # a bin without charges ends where such a one begins
    begins = np.unique(np.concatenate([full, full[:-1][np.diff(full) > 1] + 1])) if len(empty) else full
    sizes = np.zeros(len(begins), np.int64)
    sizes[np.searchsorted(begins, full)] = count
    ends = np.append(begins[1:], full[-1:] + 1)
    first = np.cumsum(sizes + 1) - (sizes + 1)
    dearest_s = np.zeros(int(sizes.sum()) + len(begins))
    dearest_s[np.arange(len(order)) + np.repeat(np.arange(len(begins)), sizes)] = inside_s[order]
    after_s = np.cumsum(dearest_s[::-1])[::-1]
    left_s = after_s - np.repeat(np.append(after_s, 0.0)[first + sizes], sizes + 1)
    return Bins(edges[begins], edges[ends] - edges[begins], first, left_s, dearest_s)


class BinCosts:
    """What bins cost by the numbers of instances at their borders."""

    def __init__(self, bins: Bins, prices: Prices) -> None:
        self._bins = bins
        self._prices = prices
        self.counts = np.arange(prices.least, prices.most + 1)
        border = np.arange(len(self.counts))
        self._lower = np.minimum(border[:, None], border[None, :])
        self._higher = np.maximum(border[:, None], border[None, :])
        self._no_starts_s = prices.startup_s * np.maximum(self.counts[:, None] - self.counts[None, :], 0)
        room_s = np.repeat(bins.length_s, np.diff(np.append(bins.first, len(bins.left_s)))) * (1 + ROUNDING)
        dearer = np.add.reduceat(bins.dearest_s > prices.request_s, bins.first, dtype=np.int64)
        needed = [np.add.reduceat(bins.left_s > count * room_s, bins.first, dtype=np.int64) for count in self.counts]
        self._needed = np.stack(needed, axis=1)  # [bins, high] how many requests must be given up
        self._given_up = np.maximum(self._needed, dearer[:, None])

    def between(self, of: slice) -> Floats:
        """[bins, p, q] the least costs."""
        paid = np.minimum.accumulate(self._paid(of), axis=1)
        paid = np.minimum.accumulate(paid[:, :, ::-1], axis=2)[:, :, ::-1]
        costs: Floats = paid[:, self._lower, self._higher] - self._no_starts_s
        return costs

    def left_s(self, of: slice) -> Floats:
        """[bins, high] charges of those that are not given up."""
        left_s: Floats = self._bins.left_s[self._bins.first[of, None] + self._given_up[of]]
        return left_s

    def _paid(self, of: slice) -> Floats:
        """[bins, low, high]; ``between`` reads only those with low up to high."""
        prices, counts = self._prices, self.counts
        charged_s = self.left_s(of) + prices.request_s * self._given_up[of]
        held_s = counts[None, :, None] * self._bins.length_s[of, None, None]
        held_s = held_s + prices.request_s * self._needed[of, None, :]
        starts_s = prices.startup_s * (counts[None, :] - counts[:, None])
        paid: Floats = starts_s + np.maximum(held_s, charged_s[:, None, :])
        return paid

    def follow(self, place: int, p: int, q: int) -> tuple[float, int]:
        """Mean instances and rises on the least way between two borders of a bin."""
        lower, higher, of = min(p, q), max(p, q), slice(place, place + 1)
        paid = self._paid(of)[0, : lower + 1, higher:]
        low, high = divmod(int(paid.argmin()), paid.shape[1])
        left_s = float(self.left_s(of)[0, high + higher])
        mean = max(float(self.counts[low]), left_s / float(self._bins.length_s[place]))
        return mean, high + higher - low - max(0, p - q)


def least_with_starts(bins: Bins, prices: Prices, may_miss: int) -> float:
    """The bound, in instance-seconds."""
    *_, best = _walk(bins, BinCosts(bins, prices))
    return float(best.min()) - prices.request_s * may_miss


def find_path(bins: Bins, prices: Prices, may_miss: int) -> PaidStarts:
    """The bound, and one path that costs as much."""
    costs = BinCosts(bins, prices)
    bests = list(_walk(bins, costs))
    q = int(bests[-1].argmin())
    parts, starts = [], 0
    for place in reversed(range(len(bins))):
        p = int((bests[place] + costs.between(slice(place, place + 1))[0, :, q]).argmin())
        mean, more = costs.follow(place, p, q)
        parts.append((float(bins.start_s[place]), float(bins.length_s[place]), mean))
        starts += more
        q = p
    return PaidStarts(float(bests[-1].min()) - prices.request_s * may_miss, parts[::-1], starts)


def _walk(bins: Bins, costs: BinCosts) -> Iterator[Floats]:
    """The least cost up to each border, by instances there: before the first bin, and after each."""
    best = np.zeros(len(costs.counts))
    yield best
    size = max(1, CHUNK // len(best) ** 2)
    for start in range(0, len(bins), size):
        for between in costs.between(slice(start, start + size)):
            best = (best[:, None] + between).min(axis=0)
            yield best
