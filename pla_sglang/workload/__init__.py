"""Workloads: recorded traces in their public formats, and generators. Pure data; nothing here decides anything."""

from pla_sglang.workload.generate import Arrivals, chat_trace, generated_trace, hol_trace
from pla_sglang.workload.lengths import LengthModel, length_model, length_model_names
from pla_sglang.workload.load import TRACE_KINDS, load_trace
from pla_sglang.workload.trace import BadRow, Trace, TraceError

__all__ = [
    "TRACE_KINDS",
    "Arrivals",
    "BadRow",
    "LengthModel",
    "Trace",
    "TraceError",
    "chat_trace",
    "generated_trace",
    "hol_trace",
    "length_model",
    "length_model_names",
    "load_trace",
]
