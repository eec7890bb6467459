"""What the best order of prefills reaches: shortest remaining prefill first on the same arrivals, without a host.

At the pass boundary it may park a chunk, but not interrupt a pass. The fluid one may interrupt anything: no order has a
lower mean (Schrage 1968). Both starve longs, so the worst long is no bound for anything.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pla_sglang.policy.baselines.dispatch import RoundRobin
from pla_sglang.policy.baselines.orders import fluid_srpt
from pla_sglang.profiles import StepProfile
from pla_sglang.sim.config import InstanceSpec, Policies, SimConfig
from pla_sglang.sim.experiment import engine_policy
from pla_sglang.sim.interfaces import EngineKnobs
from pla_sglang.sim.simulation import Simulation
from pla_sglang.workload import Trace

Arrival = tuple[float, int]  # seconds, prompt tokens


def at_pass_boundary_s(arrivals: Sequence[Arrival], profile: StepProfile, chunk_tokens: int) -> list[float]:
    """TTFT in seconds of each arrival (sorted by time), one output token each, passes of at most ``chunk_tokens``."""
    times, tokens = zip(*arrivals, strict=True)
    trace = Trace("ideal", np.array(times), np.array(tokens, dtype=np.int64), np.ones(len(times), dtype=np.int64))
    config = SimConfig([InstanceSpec(profile)], engine=EngineKnobs(chunk_tokens=chunk_tokens))
    policies = Policies(RoundRobin(), lambda own, knobs: engine_policy("pass-srpt", own, knobs))
    return [float(ttft_s) for ttft_s in Simulation(trace, config, policies).run().served.ttft_s()]


def fluid_s(arrivals: Sequence[Arrival], profile: StepProfile) -> list[float]:
    """TTFT in seconds of each arrival (sorted by time), each prompt in one piece that may be interrupted."""
    return fluid_srpt([(at_s, profile.prefill_s(tokens, tokens * tokens)) for at_s, tokens in arrivals])
