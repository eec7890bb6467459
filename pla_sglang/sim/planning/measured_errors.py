"""How far the simulator was from live clusters: the published result of ``python -m bench fidelity``, for planning.

A copy of ``bench/results/emulated/fidelity.json``, which is no part of an installation; a test holds the two equal.
"""

from __future__ import annotations

import dataclasses

from pla_sglang.policy_packages import find_policy
from pla_sglang.sim.planning.forms import STOCK_ORDER, FleetForm


@dataclasses.dataclass(frozen=True)
class MeasuredError:
    """The error of the simulator against one live cluster under one load.

    Attributes:
        case: LAYOUT/ENGINE/POLICY/WORKLOAD/LOAD; a layout is unified-N or P+D, the load a share of the capacity.
        attainment: simulated less live.
        ttft_p99, tpot_p99: simulated over live, less 1.
        valid: False: the machine of the live run was too slow for it, so it says nothing about the simulator.
    """

    case: str
    attainment: float
    ttft_p99: float
    tpot_p99: float
    valid: bool = True


MEASURED = (
    MeasuredError("unified-2/fcfs/round-robin/azure_conv/0.8", 0.0, 0.0027, -0.0001),
    MeasuredError("unified-2/fcfs/cache-aware/mooncake/0.5", -0.0033, -0.0676, 0.3447),
    MeasuredError("1+1/fcfs/static-pd-round-robin/azure_conv/0.8", 0.0062, -0.0501, 0.0143),
    MeasuredError("2+2/fcfs/minimal-load/azure_conv/0.5", 0.0, -0.0283, 0.0091),
    MeasuredError("unified-2/temporal/least-tokens/azure_conv/0.95", -0.0054, 0.036, -0.0202),
    MeasuredError("unified-2/mixed/cache-aware/mooncake/0.8", -0.0067, -0.0565, -0.1343),
)


def bound_attainment_error(form: FleetForm) -> float:
    """How far off attainment may be, either way: as measured, or where that is not known the largest measured."""
    error = find_error(form)
    known = [error] if isinstance(error, MeasuredError) else [one for one in MEASURED if one.valid]
    return max(abs(one.attainment) for one in known)


def find_error(form: FleetForm) -> MeasuredError | str:
    """The worst one with engines of this kind; else in words why none is known."""
    experiment = form.experiment
    policy = find_policy(experiment.policy)
    if not policy.live:
        return "no live cluster runs this policy"
    if policy.flips and experiment.stateless:
        return "stateless instances whose roles change: not measured"
    if policy.migrates and experiment.stateless:
        return "requests that move: not measured"
    engine = experiment.engine
    if experiment.mixed:
        engine = "mixed" if engine == STOCK_ORDER else f"{engine}, mixed"
    layout = "prefill and decode instances" if form.split else "unified instances"
    alike = []
    for error in MEASURED:
        measured_layout, measured_engine, *_ = error.case.split("/")
        if measured_engine == engine and ("+" in measured_layout) == form.split:
            alike.append(error)
    valid = [error for error in alike if error.valid]
    if valid:
        return max(valid, key=lambda error: abs(error.attainment))
    why = "the one measurement is not valid" if alike else "not measured"
    return f"{layout}, engine {engine}: {why}"
