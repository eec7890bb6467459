"""Runs that measure by concurrency: a closed loop of users, and what the requests after the first round show."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from pla_sglang.metrics.goodput import Served, Slo, quantile
from pla_sglang.policy.decisions import Controller, Dispatcher
from pla_sglang.profiles import StepProfile
from pla_sglang.sim.config import InstanceSpec, Policies, SimConfig
from pla_sglang.sim.experiment import engine_policy
from pla_sglang.sim.interfaces import EngineKnobs, EnginePolicy
from pla_sglang.sim.network import NetworkKnobs
from pla_sglang.sim.simulation import RunResult, Simulation
from pla_sglang.workload import Trace

MakeEngine = Callable[[StepProfile, EngineKnobs], EnginePolicy]


def fcfs(profile: StepProfile, knobs: EngineKnobs) -> EnginePolicy:
    """The stock order."""
    return engine_policy("fcfs", profile, knobs)


@dataclasses.dataclass(frozen=True)
class World:
    """A fleet and what drives it. Objects with state, so one is made for each run.

    Attributes:
        config: fields of ``SimConfig`` beyond fleet, engine limits and network.
    """

    fleet: Sequence[InstanceSpec]
    dispatcher: Dispatcher
    controllers: Sequence[Controller] = ()
    engine: MakeEngine = fcfs
    knobs: EngineKnobs = dataclasses.field(default_factory=EngineKnobs)
    bandwidth_bytes_per_s: float = 50e9
    config: Mapping[str, object] = dataclasses.field(default_factory=dict)

    def run(self, trace: Trace) -> RunResult:
        network = NetworkKnobs(self.bandwidth_bytes_per_s)
        config = SimConfig(self.fleet, engine=self.knobs, network=network, **self.config)  # type: ignore[arg-type]
        return Simulation(trace, config, Policies(self.dispatcher, self.engine, self.controllers)).run()


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


def steady(served: Served, users: int, slo: Slo) -> Steady:
    """Of a run with so many users in all. Rows count from the second round to the last arrival but one round."""
    order = np.argsort(served.arrival_s, kind="stable")
    some = order[users:] if len(order) > 2 * users else order
    chosen = Served(
        served.arrival_s[some], served.first_token_s[some], served.finish_s[some], served.output_tokens[some]
    )
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


def rate_of_ends(served: Served) -> float:
    """Ends per second between the first arrival and the last: then every user has a request under way."""
    last_s = float(served.arrival_s.max())
    first_s = float(served.arrival_s.min())
    ended = int((served.finish_s <= last_s).sum())
    return ended / (last_s - first_s) if last_s > first_s else float("nan")


def of_kind(served: Served, kinds: npt.NDArray[np.int64], kind: int) -> Served:
    """The rows of one kind of user."""
    rows = kinds == kind
    return Served(served.arrival_s[rows], served.first_token_s[rows], served.finish_s[rows], served.output_tokens[rows])
