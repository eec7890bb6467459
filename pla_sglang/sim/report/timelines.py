"""What a fleet did over time: pools, their load, and every instance with its role. Roles keep their colours."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from pla_sglang.common.legend.colours import NOT_READY_COLOUR, ROLE_COLOURS
from pla_sglang.sim.core.samples import GONE, ROLE_ORDER, FleetSamples
from pla_sglang.sim.metrics.goodput import Floats
from pla_sglang.sim.report.figures import MOST_POINTS, cut_digits, make_layout, name_axis
from pla_sglang.sim.report.page import Figure

NOT_READY = "not ready"
MOST_INSTANCES = 64  # that have a row of their own
GAP = 0.06  # between panels, of the height


@dataclass(frozen=True, slots=True)
class BinnedSamples:
    """Samples in at most ``MOST_POINTS`` bins of equal numbers of samples.

    Attributes:
        at_s: [bins] time of the first sample of each.
        role: [bins, instances] of that sample, as in ``FleetSamples``.
        queued_tokens, context_tokens: [bins, instances] means over the samples of a bin.
        width_s: of a bin; 0 with one sample only.
        samples: of a bin, at most.
    """

    at_s: Floats
    role: npt.NDArray[np.int8]
    queued_tokens: Floats
    context_tokens: Floats
    width_s: float
    samples: int

    @property
    def note(self) -> str:
        """What a point over time is, in words."""
        if not self.width_s:
            return "There is one sample."
        return f"Tokens are {'as sampled every' if self.samples == 1 else 'means over'} {self.width_s:.3g} s."


def bin_samples(samples: FleetSamples) -> BinnedSamples:
    count = len(samples.at_s)
    each = max(1, -(-count // MOST_POINTS))
    starts = np.arange(0, count, each)
    sizes = np.diff(np.append(starts, count))[:, None]

    def mean(table: npt.NDArray[np.int64]) -> Floats:
        return np.add.reduceat(table, starts, axis=0) / sizes

    at_s = samples.at_s[starts]
    width_s = float(at_s[1] - at_s[0]) if len(at_s) > 1 else 0.0
    return BinnedSamples(
        at_s, samples.role[starts], mean(samples.queued_tokens), mean(samples.context_tokens), width_s, each
    )


def draw_pools(binned: BinnedSamples) -> Figure:
    """Three panels over time: instances by role, and the load per instance of each pool for both phases."""
    data: list[dict[str, Any]] = []
    for name, mask, colour in list_pools(binned.role):
        counts = mask.sum(axis=1)
        sizes = _trace(binned, counts, name, colour, panel=1)
        data.append({**sizes, "stackgroup": "pools", "line": {"color": colour, "width": 0, "shape": "hv"}})
        if name == NOT_READY:
            continue
        for panel, table in ((2, binned.queued_tokens), (3, binned.context_tokens)):
            means = np.divide((table * mask).sum(axis=1), counts, where=counts > 0, out=np.full(len(counts), np.nan))
            data.append({**_trace(binned, means, name, colour, panel=panel), "showlegend": False})
    titles = ("instances", "queued prefill<br>tokens each", "decode context<br>tokens each")
    return {"data": data, "layout": stack_panels(titles, 620), "height": 620}


def list_pools(role: npt.NDArray[np.int8]) -> Iterator[tuple[str, npt.NDArray[np.bool_], str]]:
    """Name, [bins, instances] who is in it, and colour of each pool that ever had a member."""
    for place, known in enumerate(ROLE_ORDER):
        if (mask := role == place).any():
            yield known.value, mask, ROLE_COLOURS[known]
    if (gone := role == GONE).any():
        yield NOT_READY, gone, NOT_READY_COLOUR


def _trace(binned: BinnedSamples, values: Floats, name: str, colour: str, *, panel: int) -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": "lines",
        "name": name,
        "legendgroup": name,
        "x": cut_digits(binned.at_s),
        "y": cut_digits(values),
        "line": {"color": colour, "width": 1.8},
        "hovertemplate": f"{name}: %{{y:,}} at %{{x}} s<extra></extra>",
        **axes_of(panel),
    }


def axes_of(panel: int) -> dict[str, str]:
    return {"xaxis": "x", "yaxis": "y" if panel == 1 else f"y{panel}"}


def stack_panels(titles: tuple[str, ...], height: int, **options: Any) -> dict[str, Any]:
    """Panels with one time axis, the first at the top."""
    count = len(titles)
    share = (1 - GAP * (count - 1)) / count
    axes: dict[str, Any] = {}
    for place, title in enumerate(titles):
        top = 1 - place * (share + GAP)
        name = "yaxis" if place == 0 else f"yaxis{place + 1}"
        axes[name] = name_axis(title, domain=[max(0.0, top - share), top], **options)
    lowest = "y" if count == 1 else f"y{count}"
    return make_layout(height, xaxis=name_axis("s", anchor=lowest), **axes)


def draw_instances(binned: BinnedSamples) -> Figure:
    """Three panels over time with a row per instance: its role, its queued prefill tokens, its decode context."""
    instances = binned.role.shape[1]
    names = [f"i{index}" for index in range(instances)]
    data: list[dict[str, Any]] = list(_role_bars(binned, names))
    for panel, (table, what) in enumerate(
        ((binned.queued_tokens, "queued prefill tokens"), (binned.context_tokens, "decode context tokens")), 2
    ):
        data.append(
            {
                "type": "heatmap",
                "x": cut_digits(binned.at_s + binned.width_s / 2),  # the middle of a cell
                "y": names,
                "z": [cut_digits(row) for row in table.T],
                "colorscale": "Cividis",
                "showscale": True,
                "colorbar": _colour_bar(panel, what),
                "hovertemplate": f"%{{y}} at %{{x}} s: %{{z:,}} {what}<extra></extra>",
                **axes_of(panel),
            }
        )
    height = 240 + 3 * max(90, 16 * instances)
    titles = ("role", "queued prefill<br>tokens", "decode context<br>tokens")
    layout = stack_panels(titles, height, type="category", categoryarray=names, autorange="reversed")
    return {"data": data, "layout": {**layout, "barmode": "overlay", "bargap": 0.15}, "height": height}


def _colour_bar(panel: int, what: str) -> dict[str, Any]:
    share = (1 - 2 * GAP) / 3
    middle = 1 - (panel - 1) * (share + GAP) - share / 2
    return {"y": middle, "len": share, "thickness": 10, "tickformat": "~s", "title": {"text": "", "side": "right"}}


def _role_bars(binned: BinnedSamples, names: list[str]) -> Iterator[dict[str, Any]]:
    """One trace per role: a bar for each time that an instance had it."""
    pools = {name: colour for name, _, colour in list_pools(binned.role)}
    spans: dict[str, list[tuple[str, float, float]]] = {name: [] for name in pools}
    end_s = float(binned.at_s[-1]) + binned.width_s
    for index, name in enumerate(names):
        roles = binned.role[:, index]
        starts = np.flatnonzero(np.diff(roles, prepend=roles[0] + 1))
        ends_s = [*(float(binned.at_s[start]) for start in starts[1:]), end_s]
        for start, until_s in zip(starts, ends_s, strict=True):
            code = int(roles[start])
            label = NOT_READY if code == GONE else ROLE_ORDER[code].value
            spans[label].append((name, float(binned.at_s[start]), until_s))
    for label, parts in spans.items():
        yield {
            "type": "bar",
            "orientation": "h",
            "name": label,
            "y": [name for name, _, _ in parts],
            "base": cut_digits(start_s for _, start_s, _ in parts),
            "x": cut_digits(until_s - start_s for _, start_s, until_s in parts),
            "marker": {"color": pools[label], "line": {"width": 0}},
            "hovertemplate": f"%{{y}}: {label} for %{{x}} s from %{{base}} s<extra></extra>",
            **axes_of(1),
        }
