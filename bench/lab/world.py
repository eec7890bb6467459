"""Simulated fleets with policies that the caller has built, and what a closed loop of users shows of them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from pla_sglang.policy.interface.decisions import Controller, Dispatcher, PolicySet
from pla_sglang.policy.interface.remaining_length import NoPrediction, RemainingPredictor
from pla_sglang.sim.core.config import InstanceSpec, MakeEngine, SimConfig
from pla_sglang.sim.core.engine_knobs import EngineKnobs
from pla_sglang.sim.core.experiment import engine_policy
from pla_sglang.sim.core.simulation import RunResult, Simulation
from pla_sglang.sim.metrics.goodput import Served, Slo, quantile
from pla_sglang.sim.workload import Trace


@dataclasses.dataclass(frozen=True)
class World:
    """A fleet and what drives it. Policies have state, so a world runs once.

    Attributes:
        engine: the name of an order, or what makes the policy of one engine.
        lengths: as of ``Simulation``.
        config: fields of ``SimConfig`` beyond fleet, engine limits and network.
    """

    fleet: Sequence[InstanceSpec]
    dispatcher: Dispatcher
    controllers: Sequence[Controller] = ()
    engine: str | MakeEngine = "fcfs"
    knobs: EngineKnobs = dataclasses.field(default_factory=EngineKnobs)
    bandwidth_bytes_per_s: float = 50e9
    lengths: RemainingPredictor = dataclasses.field(default_factory=NoPrediction)
    config: Mapping[str, object] = dataclasses.field(default_factory=dict)

    def simulation(self, trace: Trace) -> Simulation:
        config = SimConfig(
            self.fleet,
            engine=self.knobs,
            bandwidth_bytes_per_s=self.bandwidth_bytes_per_s,
            **self.config,  # type: ignore[arg-type]
        )
        engine = functools.partial(engine_policy, self.engine) if isinstance(self.engine, str) else self.engine
        policy = PolicySet("world", self.dispatcher, tuple(self.controllers))
        return Simulation(trace, config, policy, engine, self.lengths)

    def run(self, trace: Trace) -> RunResult:
        return self.simulation(trace).run()


# -- a closed loop of users --------------------------------------------------------------------------------------------


SAME_S = 1e-9  # between an end and the arrival that follows it, at most


@dataclasses.dataclass(frozen=True)
class Steady:
    """Requests of a closed loop after the first round, whose users all came at once.

    Attributes:
        requests_per_s: rate of ends while all users are there.
        tokens_per_s: output tokens of requests in target, at that rate: the goodput of DOPD section VI-B2.
        violations: share that missed a target.
    """

    requests_per_s: float
    tokens_per_s: float
    violations: float
    ttft_mean_s: float
    ttft_p90_s: float
    tpot_p90_s: float
    e2e_mean_s: float


def steady(served: Served, users: int, slo: Slo, *, pauses: bool = False) -> Steady:
    """Of a run with so many users in all, who come at once. Rows count from the second round, while all are there.

    With ``pauses`` between a user's requests there is no round, and nobody is known to be gone: all others count.
    """
    served = served if pauses else while_all_are_there(served, users)
    order = np.argsort(served.arrival_s, kind="stable")
    chosen = take_rows(served, order[users:] if len(order) > 2 * users else order)
    met = chosen.met(slo)
    rate = rate_of_ends(served)
    return Steady(
        requests_per_s=rate,
        tokens_per_s=rate * float((chosen.output_tokens * met).mean()),
        violations=float(1 - met.mean()),
        ttft_mean_s=float(np.nanmean(chosen.ttft_s())),
        ttft_p90_s=quantile(chosen.ttft_s(), 90),
        tpot_p90_s=quantile(chosen.tpot_s(), 90),
        e2e_mean_s=float(np.nanmean(chosen.e2e_s())),
    )


def while_all_are_there(served: Served, users: int) -> Served:
    """Rows that arrived before the first of ``users`` had nothing left to send.

    While all are there, each end is the arrival of another row. The conversations of a trace last longer for some users
    than for others.
    """
    arrivals_s, ends_s = np.sort(served.arrival_s), np.sort(served.finish_s[np.isfinite(served.finish_s)])
    followed = min(len(ends_s), max(0, len(arrivals_s) - users))
    alone = np.flatnonzero(arrivals_s[users : users + followed] > ends_s[:followed] + SAME_S)
    return take_rows(served, served.arrival_s <= ends_s[alone[0]]) if len(alone) else served


def rate_of_ends(served: Served) -> float:
    """Ends per second between the first arrival and the last: then every user has a request under way."""
    last_s = float(served.arrival_s.max())
    span_s = float(np.ptp(served.arrival_s))
    return int((served.finish_s <= last_s).sum()) / span_s if span_s > 0 else float("nan")


def take_rows(served: Served, rows: npt.NDArray[np.int64] | npt.NDArray[np.bool_]) -> Served:
    """By index or mask."""
    return Served(**{column.name: getattr(served, column.name)[rows] for column in dataclasses.fields(served)})
