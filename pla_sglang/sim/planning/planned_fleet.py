"""What a planner has paid for a trace, to stand beside the least that anybody pays (``lower_bound.py``)."""

from __future__ import annotations

import dataclasses
from typing import Any

from pla_sglang.sim.core.experiment import ExperimentResult


@dataclasses.dataclass(frozen=True)
class PlannedFleet:
    """A simulated run.

    Attributes:
        name: of its planner and its policy.
        points: times, and how many instances there are from each on: ready, starting and draining ones are paid for.
    """

    name: str
    gpu_hours: float
    attainment: float
    points: tuple[tuple[float, int], ...]

    @classmethod
    def of(cls, outcome: ExperimentResult) -> PlannedFleet:
        experiment, log = outcome.experiment, outcome.result.plans
        points = [(float(outcome.result.served.arrival_s[0]), experiment.instances)]
        for point in log.points:
            if sum(point.counts) != points[-1][1]:
                points.append((point.at_s, sum(point.counts)))
        points.append((outcome.result.end_s, 0))
        name = f"{experiment.planner} beside {experiment.policy}"
        return cls(name, outcome.result.gpu_hours, outcome.figures.attainment, tuple(points))

    def as_json(self) -> dict[str, Any]:
        replicas = [[round(at_s, 3), count] for at_s, count in self.points]
        return {"name": self.name, "gpu_hours": self.gpu_hours, "attainment": self.attainment, "replicas": replicas}
