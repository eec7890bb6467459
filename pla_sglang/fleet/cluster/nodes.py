"""How many nodes and GPUs an instance takes, by its arguments. SGLang lays ranks out over nodes (``--nnodes``)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from pla_sglang.common.errors import ConfigError
from pla_sglang.fleet.cluster.stateless_flags import expand_flag, list_file_arguments
from pla_sglang.plugin.platform import value_of
from pla_sglang.plugin.start_checks import FILE_FLAG
from pla_sglang.sim.emulate.arguments import FLAG as EMULATE
from pla_sglang.sim.emulate.arguments import names_model

NODES = "--nnodes"
TP_FLAGS = ("--tp-size", "--tensor-parallel-size", "--tp")
PP_FLAGS = ("--pp-size", "--pipeline-parallel-size")
RANK, MEETING = "--node-rank", "--dist-init-addr"
PLACE_FLAGS = (RANK, MEETING, "--nccl-init-addr")
USE_RAY = "--use-ray"


@dataclasses.dataclass(frozen=True)
class NodeNeeds:
    """What an instance takes.

    Attributes:
        nodes: over which its ranks are spread, as many on each.
        gpus: of each node; 0: it runs on the CPU.
    """

    nodes: int
    gpus: int

    def __str__(self) -> str:
        which = "one node" if self.nodes == 1 else f"each of {self.nodes} nodes"
        return f"1 CPU and {self.gpus} GPUs of {which}"


def read_ray_needs(arguments: Sequence[str]) -> NodeNeeds:
    """What an instance with these arguments takes in Ray. Raises ConfigError for what actors cannot have."""
    full = list_arguments(arguments)
    if USE_RAY in full:
        raise ConfigError(f"{USE_RAY} is not for --on ray: actors start SGLang's usual processes; leave it out")
    for flag in PLACE_FLAGS:
        if (value := value_of(full, flag)) is not None:
            raise ConfigError(f"{flag} {value} is not for --on ray, which sets it on each node; leave it out")
    tp, pp, nodes = (_read_count(full, *flags) for flags in (TP_FLAGS, PP_FLAGS, (NODES,)))
    allowed = [count for count in range(1, tp * pp + 1) if _fit_nodes(tp, pp, count)]
    if nodes not in allowed:
        ranks = f"the ranks of {TP_FLAGS[0]} {tp} and {PP_FLAGS[0]} {pp}"
        raise ConfigError(f"{NODES} {nodes} does not divide {ranks}; allowed: {', '.join(map(str, allowed))}")
    on_cpu = value_of(full, EMULATE) is not None or value_of(full, "--device") == "cpu"
    has_gpus = names_model(full) and not on_cpu  # else the demo model
    return NodeNeeds(nodes, tp * pp // nodes if has_gpus else 0)


def check_local_nodes(arguments: Sequence[str]) -> None:
    """Raises ConfigError for an instance in a cluster on this machine that would wait for nodes nobody starts."""
    full = list_arguments(arguments)
    nodes = _read_count(full, NODES)
    if nodes > 1 and all(value_of(full, flag) is None for flag in PLACE_FLAGS):
        raise ConfigError(f"{NODES} {nodes} needs nodes beside this machine; allowed: 1, or --on ray")


def list_arguments(arguments: Sequence[str]) -> list[str]:
    """With the beginnings of flags written out, after those in the file of ``--config``. Raises ConfigError."""
    full = [expand_flag(argument) for argument in arguments]
    path = value_of(full, FILE_FLAG)
    return [*(list_file_arguments(path, {USE_RAY}) if path else ()), *full]


def _read_count(arguments: Sequence[str], *flags: str) -> int:
    text = value_of(arguments, *flags)
    if text is None:
        return 1
    if not (text.isascii() and text.isdecimal() and int(text) > 0):
        raise ConfigError(f"{flags[0]} {text!r} is no count; allowed: 1 and above")
    return int(text)


def _fit_nodes(tp: int, pp: int, nodes: int) -> bool:
    """True if SGLang's layout gives each rank a node: whole stages on each, or each stage on as many nodes."""
    return pp % nodes == 0 or (nodes % pp == 0 and tp % (nodes // pp) == 0)
