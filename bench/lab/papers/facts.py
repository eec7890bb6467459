"""What a result says of a trace, so that it can be written again without the trace."""

from __future__ import annotations

import dataclasses

from pla_sglang.sim.workload.trace import Trace

GENERATED = "generated, like"  # begins the name of a stand-in: synthetic workloads say so wherever they are shown


@dataclasses.dataclass(frozen=True)
class TraceFacts:
    """What results say of a trace. ``label``: its name."""

    label: str
    requests: int
    input_tokens: float  # mean
    output_tokens: float
    span_s: float  # of its arrivals

    @property
    def is_recorded(self) -> bool:
        return not self.label.startswith(GENERATED)

    @property
    def text(self) -> str:
        lengths = f"{self.input_tokens:.0f} in, {self.output_tokens:.0f} out on average"
        return f"{self.label}: {self.requests} requests, {lengths}"


def facts_of(trace: Trace) -> TraceFacts:
    inputs, outputs = float(trace.input_tokens.mean()), float(trace.output_tokens.mean())
    return TraceFacts(trace.name, len(trace), inputs, outputs, float(trace.arrival_s[-1] - trace.arrival_s[0]))
