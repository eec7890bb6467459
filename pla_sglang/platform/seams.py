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
        why="SGLang declares every KV pool but HiSparse's to NIXL as VRAM, and UCX refuses host memory as VRAM.",
        verify="without it a PD server stops with NIXL_ERR_BACKEND while starting; tests/e2e/test_cpu_pd.py moves KV",
        exit="When SGLang derives kv_data_mem_kinds from the device of the KV pool.",
        host_versions=_BOTH,
    ),
    Seam(
        id="cpu.nixl_rest",
        group=Group.CPU,
        target="sglang.srt.disaggregation.nixl.conn.NixlKVManager.__init__",
        hook=Hook.BEFORE,
        handler="pla_sglang.platform.nixl_rest:let_nixl_rest",
        parameters="self, args, disaggregation_mode, server_args, is_mla_backend",
        why="NIXL's progress thread polls without a pause: three quarters of a core in every idle engine of a pair.",
        verify="tests/e2e/test_cpu_pd.py: an idle pair uses a fraction of a core; KV still moves, both orders",
        exit="When SGLang or NIXL's Python API has a setting for pthrDelay.",
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
    Seam(
        id="cpu.pd_early_send",
        group=Group.CPU,
        target="sglang.srt.disaggregation.prefill.SchedulerDisaggregationPrefillMixin.maybe_send_cached_prefix_chunk",
        hook=Hook.AROUND,
        handler="pla_sglang.platform.host_fixes:early_send_without_event",
        parameters="self, req",
        why="A prefill server with the overlap schedule records a torch.cuda.Event on the CPU forward stream.",
        verify="without it a prefill server stops at the second chunk of a prompt; tests/e2e/test_cpu_pd.py has such",
        exit="When SGLang takes the event from torch.get_device_module(device).",
        host_versions=_BOTH,
    ),
)
