"""Workloads: recorded traces in their public formats, and generators. Data only, no decisions."""

from pla_sglang.sim.workload.agentic import AgenticKnobs
from pla_sglang.sim.workload.generate import Arrivals, chat_trace, generated_trace, hol_trace
from pla_sglang.sim.workload.lengths import LengthModel, length_model
from pla_sglang.sim.workload.load import TRACE_KINDS, load_trace
from pla_sglang.sim.workload.trace import BadRow, Trace, TraceError

__all__ = [
    "TRACE_KINDS",
    "AgenticKnobs",
    "Arrivals",
    "BadRow",
    "LengthModel",
    "Trace",
    "TraceError",
    "chat_trace",
    "generated_trace",
    "hol_trace",
    "length_model",
    "load_trace",
]
