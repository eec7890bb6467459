"""Host functions that the CPU platform needs changed, beyond what a platform class may say.

A declaration only. Whoever installs it does so where ``pla_sglang.platform.is_active()``, and verifies it.
"""

from __future__ import annotations

from dataclasses import dataclass

HOOK_TYPES = ("before", "after", "around", "replace")


@dataclass(frozen=True)
class Seam:
    """One touch-point in the host."""

    id: str
    target: str  # dotted path in the host
    hook: str  # one of HOOK_TYPES
    handler: str  # "module:function" of ours
    why: str
    verify: str  # how one sees that it took effect
    exit: str  # when it can go

    def __post_init__(self) -> None:
        if self.hook not in HOOK_TYPES:
            raise ValueError(f"hook {self.hook!r} of seam {self.id} is not known; allowed: {', '.join(HOOK_TYPES)}")


CPU_SEAMS: tuple[Seam, ...] = (
    Seam(
        id="cpu-nixl-dram",
        target="sglang.srt.disaggregation.nixl.conn.NixlKVManager.__init__",
        hook="before",
        handler="pla_sglang.platform.nixl_dram:announce_kv_as_dram",
        why="NIXL takes the KV pool for GPU memory unless KVArgs.kv_data_mem_kinds says DRAM; only HiSparse sets it.",
        verify="the log says 'Register kv tensors, kind=DRAM' at debug level; tests/e2e/test_cpu_pd.py moves KV.",
        exit="when SGLang derives kv_data_mem_kinds from the device of the KV pool.",
    ),
    Seam(
        id="cpu-collectives",
        target="sglang.srt.distributed.parallel_state.GroupCoordinator.__init__",
        hook="before",
        handler="pla_sglang.platform.host_fixes:without_gpu_communicators",
        why="With more than one rank the coordinator builds NCCL communicators on torch.cuda whatever the platform.",
        verify="a server with --tp-size 2 --device cpu answers; without the seam it stops in PyNcclCommunicator.",
        exit="when GroupCoordinator asks the platform for its communicator (DeviceMixin.get_communicator_class).",
    ),
)
