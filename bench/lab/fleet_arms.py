"""Configurations of a fleet that are compared: every one that stock SGLang can be given, and ours.

Stock: unified engines with ``--chunked-prefill-size`` 128 to 8,192, with and without ``--enable-mixed-chunk`` and
``--prefill-decode-interval``, or a static split into prefill and decode engines; each order of prefills that SGLang
0.5.23 has; five routers. In a split no pass of a prefill engine has decodes to join, so mixing and intervals make no
difference there and are left out. Its decode instance is named with the dispatch, as SGLang's router does, and makes
room when the prefill is done (``HostKnobs.place_first``). Ours: ``combined`` before temporal engines with mixed batches
whose deadlines decide, the same form for every workload.

Nobody knows how long an answer will be: moves of running requests are ordered as live (``Experiment.lengths`` and
``move_gain`` by default), and clients send a limit that says nothing (``client_limit_tokens``).

Arrow's own local scheduler (section 5.4) puts all decodes into a batch first and gives chunked prefills, first come
first served, what is left of it. That is ``fcfs`` with mixed chunks: each decode takes a token of the chunk.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from pla_sglang.common.errors import ConfigError
from pla_sglang.sim.core.engine_knobs import EngineKnobs
from pla_sglang.sim.core.experiment import TEMPORAL, Experiment
from pla_sglang.sim.core.host import HostKnobs
from pla_sglang.sim.metrics.goodput import Slo
from pla_sglang.sim.planning.forms import ORDERS, ROUTERS, STOCK_CHUNK_TOKENS, STOCK_ORDER
from pla_sglang.sim.workload import Trace

INSTANCES = 8
CHUNKS_TOKENS = (128, 256, 384, 512, 1024, 2048, 4096, 8192)
CHUNK_GROUPS = ((128, 256, 384), (512, 1024), (2048, 4096, 8192))  # of them; in a race the middle stands for all
INTERVALS = (0, 1, 4)  # decode steps between two prefill passes; 0: the flag is not set


@dataclasses.dataclass(frozen=True, order=True)
class FleetArm:
    """A fleet of ``INSTANCES`` instances as flags would make it.

    Attributes:
        policy: of the router.
        prefills: prefill instances of a static split; 0: unified engines, or what the policy makes of them.
        order: of prefills in an engine.
        decode_interval: of ``INTERVALS``.
        deadlines: of temporal engines (``Experiment.deadlines``).
    """

    policy: str
    prefills: int = 0
    mixed: bool = False
    chunk_tokens: int = STOCK_CHUNK_TOKENS
    order: str = STOCK_ORDER
    deadlines: str = "advise"
    decode_interval: int = 0

    @property
    def name(self) -> str:
        """Such as ``least-tokens/unified/mixed/2048/fcfs/interval-1`` or ``cache-aware/3+5/8192/hrrn``."""
        if self == OURS:
            return self.policy
        layout = f"{self.prefills}+{INSTANCES - self.prefills}" if self.prefills else "unified"
        mixing = ["mixed"] if self.mixed else []
        interval = [f"interval-{self.decode_interval}"] if self.decode_interval else []
        return "/".join([self.policy, layout, *mixing, str(self.chunk_tokens), self.order, *interval])

    @property
    def family(self) -> FleetArm:
        """The arm that stands for all that differ from it only in order, in how many steps an interval has, and in the
        size of chunks: within a group, or at all where decodes wait for every prompt, whatever its chunks.
        """
        chunk_tokens, interval = STOCK_CHUNK_TOKENS, min(self.decode_interval, 1)
        if self.mixed or interval:
            group = next(sizes for sizes in CHUNK_GROUPS if self.chunk_tokens in sizes)
            chunk_tokens = group[len(group) // 2]
        return dataclasses.replace(self, chunk_tokens=chunk_tokens, order=STOCK_ORDER, decode_interval=interval)

    def experiment(self, slo: Slo, profile: str | None = None, *, limit_tokens: int | None = None) -> Experiment:
        """With the profile, where None is given, and all else as ``Experiment`` has it by default.

        ``limit_tokens``: ``max_tokens`` of every request; None: just what its answer has, as benches of live engines
        ask for.
        """
        return Experiment(
            self.policy,
            slo,
            profile=profile or Experiment.profile,
            engine=self.order,
            instances=INSTANCES,
            prefills=self.prefills or None,
            chunk_tokens=self.chunk_tokens,
            mixed=self.mixed,
            decode_interval=self.decode_interval,
            deadlines=self.deadlines,
            host=HostKnobs(place_first=self.prefills > 0),
            output_limit_tokens=limit_tokens,
        )

    def as_json(self) -> dict[str, Any]:
        return {"name": self.name, **dataclasses.asdict(self)}


VLLM_CHUNK_TOKENS = 2048  # default of vLLM 0.7.3 with chunked prefill; Arrow is built on it and prints no other
ARROW = FleetArm("arrow", mixed=True, chunk_tokens=VLLM_CHUNK_TOKENS)
OURS = FleetArm("combined", mixed=True, chunk_tokens=4096, order=TEMPORAL, deadlines="decide")


def read_arm(fields: dict[str, Any]) -> FleetArm:
    """What ``as_json`` has written."""
    return FleetArm(**{name: value for name, value in fields.items() if name != "name"})


def client_limit_tokens(trace: Trace) -> int:
    """``max_tokens`` that all clients of a workload send: they know how long its answers may be, not how long each is.

    A smaller limit would cut answers; any higher one counts in admission as much as SGLang's clip. So the least is the
    clip: it stands for all clients that set a generous limit, or none.
    """
    return max(EngineKnobs.limit_clip_tokens, int(trace.output_tokens.max()))


def stock_arms(routers: Sequence[str] = ROUTERS) -> list[FleetArm]:
    """All of them behind these routers. Raises ConfigError for a router that stock does not have."""
    for router in routers:
        if router not in ROUTERS:
            raise ConfigError(f"router {router!r} is not known; allowed: {', '.join(ROUTERS)}")
    return [
        FleetArm(router, prefills, mixed, chunk_tokens, order, decode_interval=decode_interval)
        for router in routers
        for prefills in range(INSTANCES)
        for mixed in ((False, True) if not prefills else (False,))
        for chunk_tokens in CHUNKS_TOKENS
        for order in ORDERS
        for decode_interval in (INTERVALS if not prefills else (0,))
    ]
