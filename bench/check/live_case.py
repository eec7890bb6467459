"""A live cluster by a name, ``LAYOUT/ENGINE/POLICY/WORKLOAD/LOAD``, and the same cluster as an experiment."""

from __future__ import annotations

import dataclasses

from pla_sglang.common.errors import ConfigError
from pla_sglang.sim.core.experiment import Experiment, capacity_of
from pla_sglang.sim.metrics.goodput import Slo
from pla_sglang.sim.workload.trace import Trace

ENGINE_FLAGS = {"fcfs": (), "temporal": ("--prefill-disagg", "temporal"), "mixed": ("--enable-mixed-chunk",)}
RATES_PER_S = (0.1, 200.0)  # between which a capacity is searched
TOLERANCE = 0.05
LOADS = (0.5, 0.8, 0.95)


@dataclasses.dataclass(frozen=True)
class LiveCase:
    """Engines of one kind behind one policy of the router, on one workload.

    Attributes:
        cluster: ``unified-N`` or ``P+D``, a slash, and one of ``ENGINE_FLAGS``.
        prefill, decode: instances by kind; ``decode`` is 0 for unified ones, which ``prefill`` counts.
        load: share of the capacity.
    """

    text: str
    cluster: str
    prefill: int
    decode: int
    policy: str
    workload: str
    load: float

    @classmethod
    def parse(cls, text: str) -> LiveCase:
        """Raises ConfigError for a text of another form, or a policy that is not known."""
        layout, _, rest = text.partition("/")
        parts = rest.split("/")
        counts = layout.removeprefix("unified-").split("+")
        legal = len(parts) == 4 and parts[0] in ENGINE_FLAGS and len(counts) == 1 + ("+" in layout)
        try:
            prefill, decode = int(counts[0]), int(counts[1]) if "+" in layout else 0
            load = float(parts[-1])
        except ValueError:
            legal = False
        if not legal or layout != (f"{prefill}+{decode}" if decode else f"unified-{prefill}") or not load > 0:
            engines = ", ".join(ENGINE_FLAGS)
            raise ConfigError(
                f"case {text!r} is not LAYOUT/ENGINE/POLICY/WORKLOAD/LOAD; layouts: unified-N, P+D; engines: {engines}"
            )
        return cls(text, f"{layout}/{parts[0]}", prefill, decode, parts[1], parts[2], load)

    @property
    def engine(self) -> str:
        return self.cluster.partition("/")[2]

    @property
    def counts(self) -> dict[str, int]:
        """Instances by kind, as ``launch_cluster`` names it."""
        return {"prefill": self.prefill, "decode": self.decode} if self.decode else {"unified": self.prefill}

    @property
    def launch_flags(self) -> list[str]:
        """The flags of ``launch_cluster``."""
        flags = [part for kind, count in self.counts.items() for part in (f"--{kind}", str(count))]
        return [*flags, *ENGINE_FLAGS[self.engine]]

    def experiment(self, *, profile: str, slo: Slo, kv_gbps: float, slots: int) -> Experiment:
        """``kv_gbps``: of a link; ``slots``: ``--max-running-requests``. Raises ConfigError."""
        return Experiment(
            policy=self.policy,
            slo=slo,
            engine=self.engine if self.engine == "temporal" else "fcfs",
            profile=profile,
            instances=self.prefill + self.decode,
            prefills=self.prefill if self.decode else None,
            mixed=self.engine == "mixed",
            slots=slots,
            bandwidth_bytes_per_s=kv_gbps * 1e9 / 8,
            report_interval_s=0.02,  # live engines report each change
        )

    def rate_per_s(self, experiment: Experiment, sample: Trace) -> float:
        """``load`` times the highest rate at which the experiment meets its targets. Raises ConfigError for none."""
        low, high = RATES_PER_S
        held = capacity_of(experiment, sample, low_per_s=low, high_per_s=high, tolerance=TOLERANCE).held_per_s
        if held is None:
            raise ConfigError(f"{self.text}: the targets are missed at any rate; leave out long prompts")
        return held * self.load


def list_grid() -> list[str]:
    """The names of the whole grid: two policies a cluster, three loads each."""
    unified = ("round-robin/azure_conv", "cache-aware/mooncake")
    pairs = ("static-pd-round-robin/azure_conv", "minimal-load/azure_conv")
    clusters = {f"unified-2/{engine}": unified for engine in ENGINE_FLAGS} | {"1+1/fcfs": pairs, "2+2/fcfs": pairs}
    return [f"{name}/{choice}/{load}" for name, choices in clusters.items() for choice in choices for load in LOADS]
