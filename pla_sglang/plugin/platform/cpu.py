"""The CPU platform: stock SGLang's scheduler, radix cache and KV pool on plain torch, without a GPU.

For tiny dense models in tests, benches and demonstrations. It is independent of our scheduler: a bench runs its stock
arm on this platform with our features off.
"""

from __future__ import annotations

import inspect
import logging
import os
from typing import TYPE_CHECKING

import torch
from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import SRTPlatform

if TYPE_CHECKING:
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.server_args import ServerArgs

logger = logging.getLogger(__name__)

CHUNKED_PREFILL_TOKENS = 2048
MAX_KV_TOKENS = 131_072
MAX_KV_SHARE_OF_MEMORY = 1 / 16
MAX_THREADS = 4
THREADS_BIND_ENV = "SGLANG_CPU_OMP_THREADS_BIND"
RETRACTED_KV = "disaggregation_decode_retraction_backup"  # not in every version


_ONLY_DENSE = "the CPU platform of pla_sglang serves dense models with multi-head attention only, not {what}"


class CpuKvPools:
    """Which classes keep the KV cache: SGLang's plain pool, and our allocator in plain torch."""

    def get_mha_kv_pool_cls(self) -> type:
        from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

        return MHATokenToKVPool

    def get_kv_pool_cls(self, *, kind: str) -> type | None:
        """Called by hosts from 0.5.20 instead of the three methods around; they resolve every kind in advance."""
        return self.get_mha_kv_pool_cls() if kind == "mha" else None

    def get_mla_kv_pool_cls(self) -> type:
        raise NotImplementedError(_ONLY_DENSE.format(what="multi-head latent attention"))

    def get_dsa_kv_pool_cls(self) -> type:
        raise NotImplementedError(_ONLY_DENSE.format(what="sparse attention"))

    def get_paged_allocator_cls(self) -> type:
        from pla_sglang.plugin.platform.paged_allocator import build_kv_allocator

        return build_kv_allocator  # type: ignore[return-value]  # SGLang only calls it, so a factory serves


class CpuPlatform(CpuKvPools, CpuDeviceMixin, SRTPlatform):
    """SGLang's own CPU device operations, as an out-of-tree platform that needs no compiled CPU kernels."""

    _enum = PlatformEnum.OOT

    def apply_server_args_defaults(self, server_args: ServerArgs) -> None:
        """Set defaults. Values given on the command line are kept, except an AMX backend."""
        if server_args.dtype == "auto":
            keep_full_precision(server_args)
        if server_args.attention_backend in (None, "intel_amx"):
            # SGLang puts "intel_amx" on every x86 CPU; its kernels are not in the official wheel.
            server_args.attention_backend = "torch_native"
        server_args.sampling_backend = "pytorch"
        if server_args.grammar_backend is None:
            # SGLang's default, xgrammar, pins host memory for a CUDA device and stops the scheduler without one.
            server_args.grammar_backend = "llguidance"
        if server_args.chunked_prefill_size is None:
            # SGLang derives it from device memory. Host memory says nothing about speed, so one value for all hosts.
            server_args.chunked_prefill_size = CHUNKED_PREFILL_TOKENS
        if server_args.mem_fraction_static is None:
            # A share of host memory would depend on whatever else runs here; a number of tokens does not.
            server_args.mem_fraction_static = 0.9
            if server_args.max_total_tokens is None:
                server_args.max_total_tokens = default_kv_tokens(
                    bytes_per_token(read_model(server_args)), self.get_device_total_memory()
                )
                logger.info("CPU platform: KV pool of %d tokens by default", server_args.max_total_tokens)
        if (ranks := count_bound_ranks(server_args)) > 1:
            # Only SGLang's AMX build binds threads by this list, but every build checks that it fits the ranks.
            os.environ.setdefault(THREADS_BIND_ENV, threads_bind(available_cores(), ranks))
        if getattr(server_args, RETRACTED_KV, "") is None and server_args.disaggregation_mode == "decode":
            # SGLang would keep the KV of retracted requests in a pool of memory that it pins through CUDA.
            setattr(server_args, RETRACTED_KV, "cpu_tensor")

    def init_backend(self) -> None:
        """Bound the threads of this worker, so that several servers share a few cores without thrashing."""
        if "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(default_threads(len(available_cores())))

    def get_default_attention_backend(self) -> str:
        return "torch_native"

    def get_dispatch_key_name(self) -> str:
        return "native"

    def get_compile_backend(self, mode: str | None = None) -> str:
        return "eager"

    def get_device(self, local_rank: int | None = None) -> str:
        # A string, not a torch.device: SGLang puts the answer into ServerArgs.device and compares it with "cpu".
        return "cpu"

    def is_pin_memory_available(self, device: object = None) -> bool:
        return False

    def get_torch_profiler_activity_str(self) -> str:
        return "CPU"

    def get_torch_profiler_activity(self) -> torch.profiler.ProfilerActivity:
        return torch.profiler.ProfilerActivity.CPU


def keep_full_precision(server_args: ServerArgs) -> None:
    """Run all models except bfloat16 ones in float32 if the user chose no dtype.

    SGLang turns float32 models into float16, which saves memory on a GPU. On a CPU float16
    is slower, and greedy output then differs between batch shapes.
    """
    if read_model(server_args).dtype != torch.bfloat16:
        server_args.dtype = "float32"


def read_model(server_args: ServerArgs) -> ModelConfig:
    """What the model is with these arguments. A copy: SGLang keeps its own, and would keep the first one's dtype."""
    from sglang.srt.configs.model_config import ModelConfig

    return ModelConfig.from_server_args(server_args)


def count_bound_ranks(server_args: ServerArgs) -> int:
    """For how many ranks SGLang's check wants cores in its list: those of a replica, or of the whole server."""
    from sglang.srt.utils.numa_utils import init_threads_binding

    if "world_size" not in inspect.signature(init_threads_binding).parameters:
        return server_args.tp_size
    return server_args.tp_size * server_args.dp_size * server_args.pp_size


def bytes_per_token(model: ModelConfig) -> int:
    """KV bytes of one token over all layers, both K and V, in the model's own dtype."""
    row = model.get_total_num_kv_heads() * (model.head_dim + model.v_head_dim)
    return int(model.num_hidden_layers * row * model.dtype.itemsize)


def default_kv_tokens(kv_bytes_per_token: int, total_memory_bytes: int) -> int:
    """KV pool size if the user gave none: enough for tiny models, a small share of host memory for others."""
    return max(1, min(MAX_KV_TOKENS, int(total_memory_bytes * MAX_KV_SHARE_OF_MEMORY) // kv_bytes_per_token))


def default_threads(cores: int) -> int:
    """Torch threads per worker: half of the cores, because a server also tokenizes, detokenizes and serves HTTP."""
    return max(1, min(MAX_THREADS, cores // 2))


def available_cores() -> list[int]:
    return sorted(os.sched_getaffinity(0))


def threads_bind(cores: list[int], ranks: int) -> str:
    """One core list per rank, in SGLang's notation ``0|1``. Ranks share cores if there are too few."""
    share = max(1, len(cores) // ranks)
    per_rank = [cores[(rank * share) % len(cores) :][:share] for rank in range(ranks)]
    return "|".join(",".join(str(core) for core in own) for own in per_rank)
