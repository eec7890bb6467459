"""Part (d): our kernels against what torch offers, on a GPU. Without one there is nothing to compare.

    python -m bench.gpu.kernels --out kernels.json

Times are of CUDA events over many launches. A kernel that does not beat its alternative is to be dropped.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

WARM_UP, LAUNCHES = 20, 200
# Layers, KV heads and head size of Qwen2.5-7B; bfloat16.
LAYERS, HEADS, HEAD_DIM = 28, 4, 128
POOL_TOKENS = 65_536


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


def packing(requests: int, tokens: int) -> dict[str, float]:
    """Static buffers of a graph: one launch against torch operators, as SGLang's runner fills its own."""
    from pla_kernels.pack_batch import kernel, reference
    from pla_kernels.pack_batch.buffers import BatchTensors, allocate

    def integers(count: int) -> torch.Tensor:
        return torch.ones(count, dtype=torch.int64, device="cuda")

    new = torch.full((requests,), tokens // requests, dtype=torch.int64, device="cuda")
    real = int(new.sum())
    batch = BatchTensors(
        input_ids=integers(real),
        positions=integers(real),
        out_cache_loc=integers(real),
        seq_lens=new,
        extend_seq_lens=new,
        extend_prefix_lens=integers(requests),
        req_pool_indices=integers(requests),
        orig_seq_lens=new,
    )
    into = allocate(1024, 64, "cuda")
    return {
        "ours_us": time_us(lambda: kernel.pack_batch(batch, into, 1024, 64)),
        "torch_us": time_us(lambda: reference.pack_batch(batch, into, 1024, 64)),
    }


def pages(count: int, page_size: int, *, into_pool: bool) -> dict[str, float]:
    """KV of ``count`` pages, K and V of all layers: one launch against one indexing operator a layer."""
    from pla_kernels.kv_pages import kernel, reference

    shape = (POOL_TOKENS, HEADS, HEAD_DIM)
    layers = [torch.zeros(shape, dtype=torch.bfloat16, device="cuda") for _ in range(2 * LAYERS)]
    chosen = torch.randperm(POOL_TOKENS // page_size, device="cuda")[:count]
    staging = torch.zeros((2 * LAYERS, count * page_size, HEADS, HEAD_DIM), dtype=torch.bfloat16, device="cuda")

    def by_torch() -> None:
        if into_pool:
            reference.scatter(staging, layers, chosen, page_size)
        else:
            reference.gather(layers, chosen, staging, page_size)

    ours = time_us(lambda: kernel.move(layers, chosen, staging, page_size, into_pool=into_pool))
    return {"ours_us": ours, "torch_us": time_us(by_torch), "bytes": float(staging.nbytes)}


def measure(out: Path) -> dict[str, Any]:
    if not torch.cuda.is_available():
        return {"not_run": "kernels need a GPU; tests/kernels compare their results with torch in Triton's interpreter"}
    cases: dict[str, Callable[[], dict[str, float]]] = {
        "pack 1 x 64": lambda: packing(1, 64),
        "pack 16 x 36": lambda: packing(16, 576),
        "pack 64 x 16": lambda: packing(64, 1024),
    }
    for page_size in (1, 16, 64):
        for into_pool in (False, True):
            name = f"{'scatter' if into_pool else 'gather'} 2048 tokens, page {page_size}"
            cases[name] = partial(pages, 2048 // page_size, page_size, into_pool=into_pool)
    found: dict[str, Any] = {}
    for name, case in cases.items():
        found[name] = {key: round(value, 3) for key, value in case().items()}
        found[name]["keep"] = found[name]["ours_us"] < found[name]["torch_us"]
        out.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    return found


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu.kernels", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="JSON file")
    args = parser.parse_args(argv)
    args.out.write_text(json.dumps(measure(args.out), indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
