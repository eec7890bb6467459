"""Part (d): our kernels against what torch offers, on a GPU. Without one there is nothing to compare.

Times are of CUDA events over many launches. A kernel that does not beat its alternative is to be dropped.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from bench.gpu.parts import write_result

WARM_UP, LAUNCHES = 20, 200
PACKINGS = {"pack 1 x 64": (1, 64), "pack 16 x 36": (16, 576), "pack 64 x 16": (64, 1024)}  # requests, all tokens


def time_us(run: Callable[[], None]) -> float:
    """Microseconds of one call on the device, launches queued back to back."""
    for _ in range(WARM_UP):
        run()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    start.record()
    for _ in range(LAUNCHES):
        run()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end)) * 1e3 / LAUNCHES


def time_packing(requests: int, tokens: int) -> dict[str, float]:
    """Static buffers of a graph: one launch against torch operators, as SGLang's runner fills its own."""
    from pla_kernels.pack_batch import kernel, reference
    from pla_kernels.pack_batch.buffers import BatchTensors, allocate

    new = torch.full((requests,), tokens // requests, dtype=torch.int64, device="cuda")
    ones, one_each = torch.ones_like(new).repeat(tokens // requests), torch.ones_like(new)
    batch = BatchTensors(
        input_ids=ones,
        positions=ones,
        out_cache_loc=ones,
        seq_lens=new,
        extend_seq_lens=new,
        extend_prefix_lens=one_each,
        req_pool_indices=one_each,
        orig_seq_lens=new,
    )
    into = allocate(1024, 64, "cuda")
    return {
        "ours_us": time_us(lambda: kernel.pack_batch(batch, into, 1024, 64)),
        "torch_us": time_us(lambda: reference.pack_batch(batch, into, 1024, 64)),
    }


def measure(out: Path | str) -> None:
    """Writes the microseconds of each case to ``out``, and whether the kernel is worth keeping."""
    if not torch.cuda.is_available():
        reason = "kernels need a GPU; tests/kernels compare their results with torch in Triton's interpreter"
        write_result({"not_run": reason}, out)
        return
    by_case: dict[str, Any] = {}
    for name, (requests, tokens) in PACKINGS.items():
        times_us = time_packing(requests, tokens)
        by_case[name] = {key: round(value, 3) for key, value in times_us.items()}
        by_case[name]["keep"] = times_us["ours_us"] < times_us["torch_us"]
        write_result(by_case, out)
