"""Samples of the fleet over time, for reports: a few integers per instance and sample, as arrays."""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt

from pla_sglang.policy.interface.fleet import FleetView, InstanceState, Role

ROLE_ORDER = tuple(Role)
GONE = -1  # role code of an instance that is not ready


@dataclasses.dataclass(frozen=True)
class FleetSamples:
    """One row per sample, one column per instance ever started; missing values are 0, missing roles GONE.

    Attributes:
        at_s: [samples] float64.
        queued_tokens, context_tokens, running: [samples, instances] int64.
        role: [samples, instances] int8, index into ``ROLE_ORDER``.
    """

    at_s: npt.NDArray[np.float64]
    queued_tokens: npt.NDArray[np.int64]
    context_tokens: npt.NDArray[np.int64]
    running: npt.NDArray[np.int64]
    role: npt.NDArray[np.int8]


class Sampler:
    """Collects samples."""

    def __init__(self) -> None:
        self._at_s: list[float] = []
        self._rows: list[tuple[list[int], list[int], list[int], list[int]]] = []

    def take(self, fleet: FleetView, now_s: float) -> None:
        """One row from views that are up to date."""
        views = fleet.instances
        ready = InstanceState.READY
        self._at_s.append(now_s)
        self._rows.append(
            (
                [view.queued_tokens for view in views],
                [view.context_tokens for view in views],
                [view.running for view in views],
                [_CODES[view.role] if view.state is ready else GONE for view in views],
            )
        )

    def result(self) -> FleetSamples:
        width = max((len(row[0]) for row in self._rows), default=0)

        def column(place: int, fill: int) -> npt.NDArray[np.int64]:
            table = np.full((len(self._rows), width), fill, dtype=np.int64)
            for index, row in enumerate(self._rows):
                table[index, : len(row[place])] = row[place]
            return table

        return FleetSamples(
            np.array(self._at_s), column(0, 0), column(1, 0), column(2, 0), column(3, GONE).astype(np.int8)
        )


_CODES = {role: place for place, role in enumerate(ROLE_ORDER)}
