"""Host functions that the CPU platform needs changed, beyond what a platform class may say. Part of the seam table."""

from __future__ import annotations

from pla_patches.seam import Group, Hook, Seam

_BOTH = ("0.5.17", "0.5.23")

CPU = (
    Seam(
        id="cpu.nixl_dram",
        group=Group.CPU,
        target="sglang.srt.disaggregation.nixl.conn.NixlKVManager.__init__",
        hook=Hook.BEFORE,
        handler="pla_sglang.platform.nixl_dram:announce_kv_as_dram",
        parameters="self, args, disaggregation_mode, server_args, is_mla_backend",
        why="NIXL takes the KV pool for GPU memory unless KVArgs.kv_data_mem_kinds says DRAM; only HiSparse sets it.",
        verify="the log says 'Register kv tensors, kind=DRAM' at debug level; tests/e2e moves KV between processes",
        exit="When SGLang derives kv_data_mem_kinds from the device of the KV pool.",
        host_versions=_BOTH,
    ),
    Seam(
        id="cpu.collectives",
        group=Group.CPU,
        target="sglang.srt.distributed.parallel_state.GroupCoordinator.__init__",
        hook=Hook.BEFORE,
        handler="pla_sglang.platform.host_fixes:without_gpu_communicators",
        parameters="self, group_ranks, local_rank, torch_distributed_backend, use_pynccl, use_pymscclpp, "
        "use_custom_allreduce, use_torch_symm_mem_all_reduce, use_hpu_communicator, use_xpu_communicator, "
        "use_npu_communicator, use_message_queue_broadcaster, group_name, gloo_timeout, recovered_rank, rank_offset, "
        "max_world_size",
        why="With more than one rank the coordinator builds NCCL communicators on torch.cuda whatever the platform.",
        verify="a server with --tp-size 2 --device cpu answers; without the seam it stops in PyNcclCommunicator",
        exit="When GroupCoordinator asks the platform for its communicator (DeviceMixin.get_communicator_class).",
        host_versions=_BOTH,
    ),
)
