#!/usr/bin/env python
"""Make the profiles of the package from calibration tables.

    python scripts/make_profiles.py TABLES [OUT]

TABLES is a folder with ``composed_steps.csv`` and ``dopd_table1.csv``: columns model, gpu, tp, dtype, phase, tokens,
batch, context, latency_ms, source. The tables themselves are not part of the project.
"""

from __future__ import annotations

import csv
import dataclasses
import sys
from pathlib import Path
from typing import Any

from pla_sglang.profiles.fit import DecodePoint, PrefillPoint, fit_profile
from pla_sglang.profiles.load import FOLDER, write_profile
from pla_sglang.profiles.step import Curve, DecodeTerms, LaunchFloor, PrefillTerms, StepProfile

GIB = 1 << 30
GPU_BYTES = {"H100-SXM-80GB": int(79.1 * GIB), "H200-SXM-141GB": int(139.8 * GIB), "A100-SXM-80GB": int(79.1 * GIB)}
STATIC_SHARE = 0.88  # of GPU memory for weights and KV, near SGLang's own default for these sizes
# Splitwise's decode steps have a base of 30 ms on H100, tp 8, 80 layers: an engine of 2023 without CUDA graphs.
EAGER_S_PER_LAYER = 30e-3 / 80


@dataclasses.dataclass(frozen=True)
class Model:
    """Geometry of a model: layers, KV heads x head size, parameters in billions."""

    layers: int
    kv_width: int
    billions: float


MODELS = {
    "Llama-3.1-8B": Model(32, 1024, 8.03),
    "Llama-3.1-70B": Model(80, 1024, 70.6),
    "Qwen2.5-7B": Model(28, 512, 7.62),
    "Qwen2.5-14B": Model(48, 1024, 14.8),
    "Qwen2.5-32B": Model(64, 1024, 32.8),
    "Qwen3-14B": Model(40, 1024, 14.8),
}
# profile name -> (model, GPU, tensor parallel size, dtype) in the table of composed steps
COMPOSED = {
    "h100-llama3.1-8b-tp1": ("Llama-3.1-8B", "H100-SXM-80GB", 1, "bfloat16"),
    "h100-llama3.1-8b-tp2": ("Llama-3.1-8B", "H100-SXM-80GB", 2, "bfloat16"),
    "h100-llama3.1-8b-tp4": ("Llama-3.1-8B", "H100-SXM-80GB", 4, "bfloat16"),
    "h200-llama3.1-8b-tp1": ("Llama-3.1-8B", "H200-SXM-141GB", 1, "bfloat16"),
    "a100-llama3.1-8b-tp1": ("Llama-3.1-8B", "A100-SXM-80GB", 1, "bfloat16"),
    "h100-llama3.1-70b-fp8-tp1": ("Llama-3.1-70B", "H100-SXM-80GB", 1, "fp8"),
    "h100-llama3.1-70b-fp8-tp2": ("Llama-3.1-70B", "H100-SXM-80GB", 2, "fp8"),
    "h100-llama3.1-70b-fp8-tp4": ("Llama-3.1-70B", "H100-SXM-80GB", 4, "fp8"),
    "h200-llama3.1-70b-tp4": ("Llama-3.1-70B", "H200-SXM-141GB", 4, "bfloat16"),
    "h100-qwen2.5-7b-tp1": ("Qwen2.5-7B", "H100-SXM-80GB", 1, "bfloat16"),
    "h100-qwen2.5-14b-tp1": ("Qwen2.5-14B", "H100-SXM-80GB", 1, "bfloat16"),
    "h200-qwen2.5-14b-tp1": ("Qwen2.5-14B", "H200-SXM-141GB", 1, "bfloat16"),
    "h200-qwen2.5-32b-tp1": ("Qwen2.5-32B", "H200-SXM-141GB", 1, "bfloat16"),
}
# What one served H100 showed beside them (docs/benchmarks/gpu.md), by profile: seconds that a pass costs besides, and
# measured over modelled at sizes that the table has no points of: just above 512 tokens the matrix products take one
# more round of tiles. With 4 ms the simulated requests/s of stock at 1 to 64 clients are within 15 % of the measured
# ones, with 3 or 5 ms within 21 %.
SERVED = {"h100-qwen2.5-7b-tp1": (4e-3, {513.0: 1.25, 569.0: 1.29})}
MAX_DECODE_CONTEXT_TOKENS = 600_000  # per step; beyond it lie points that no engine reaches


def memory_fields(model: Model, gpu: str, tp: int, *, weight_bytes: int, kv_bytes: int = 2) -> dict[str, int]:
    """KV and weight sizes over all ranks; 2 GiB a GPU stay free for activations."""
    per_token = 2 * model.layers * model.kv_width * kv_bytes
    weights = int(model.billions * 1e9 * weight_bytes)
    room = tp * (GPU_BYTES[gpu] * STATIC_SHARE - 2 * GIB) - weights
    return {"kv_bytes_per_token": per_token, "kv_capacity_tokens": int(room // per_token), "weights_bytes": weights}


def points_of(rows: list[dict[str, str]]) -> tuple[list[PrefillPoint], list[DecodePoint]]:
    prefill, decode = [], []
    for row in rows:
        batch, context, seconds = int(row["batch"]), int(row["context"]), round(float(row["latency_ms"]) / 1e3, 9)
        if row["phase"] == "prefill":
            prefill.append(PrefillPoint(context, batch, seconds))
        elif batch * context <= MAX_DECODE_CONTEXT_TOKENS:
            decode.append(DecodePoint(batch, context, seconds))
    return prefill, decode


PASS_MOST_S = 0.007  # what a served pass cost besides at most, of 3 to 7 ms on one H100


def composed(name: str, table: list[dict[str, str]]) -> StepProfile:
    model, gpu, tp, dtype = COMPOSED[name]
    keys = {"model": model, "gpu": gpu, "tp": str(tp), "dtype": dtype}
    rows = [row for row in table if all(row[key] == value for key, value in keys.items())]
    geometry = MODELS[model]
    base: dict[str, Any] = {
        "name": name,
        "source": f"{model} {dtype}, {tp} x {gpu}: composed from operator times that were measured for vLLM "
        "(ai-dynamo/aiconfigurator 095f58a51c4c, Apache-2.0); GPU-busy time only, without what a served pass costs "
        "besides (3 to 7 ms on one H100). Eager launch floor: 0.375 ms a layer, from Splitwise's measured decode base "
        "(30 ms, 80 layers). KV capacity: 0.88 of the memory minus weights and 2 GiB a GPU.",
        "launch_floor": LaunchFloor(eager_s=round(EAGER_S_PER_LAYER * geometry.layers, 6)),
        "gpus": tp,
        **memory_fields(geometry, gpu, tp, weight_bytes=1 if dtype == "fp8" else 2),
    }
    return with_served(fit_profile(base, *points_of(rows)))


def with_served(profile: StepProfile) -> StepProfile:
    if profile.name not in SERVED:
        return dataclasses.replace(profile, fit_error=dataclasses.replace(profile.fit_error, pass_s=PASS_MOST_S))
    pass_s, factors = SERVED[profile.name]
    curve = profile.prefill_correction
    at, factor = zip(*sorted({**dict(zip(curve.at, curve.factor, strict=True)), **factors}.items()), strict=True)
    source = profile.source.replace(
        "without what a served pass costs besides (3 to 7 ms on one H100)",
        "but for the edge above 512 tokens and what a served pass costs besides, as one H100 showed them",
    )
    return dataclasses.replace(profile, pass_s=pass_s, prefill_correction=Curve(at, factor), source=source)


def dopd(table: list[dict[str, str]]) -> StepProfile:
    base: dict[str, Any] = {
        "name": "h100-llama70b-fp8-dopd",
        "source": "Llama-70B-FP8 on H100, measured through an engine: DOPD Table I (prefill 100 to 1,700 tokens on one "
        "GPU; decode 104 to 248 requests, taken as tp 2). Launches are inside the measured times. Memory: two GPUs, "
        "KV in fp8, as 248 x 1,700 tokens must fit.",
        "gpus": 2,
        **memory_fields(MODELS["Llama-3.1-70B"], "H100-SXM-80GB", 2, weight_bytes=1, kv_bytes=1),
    }
    return fit_profile(base, *points_of(table), grid=True)


def linear() -> StepProfile:
    return StepProfile(
        name="linear",
        source="Made up: 20 ms a pass and 1 ms a new token, decode tokens included. The cost model of a published "
        "comparison of prefill schedulers on SGLang issue 22831; no GPU behaves like it.",
        prefill=PrefillTerms(floor_s=20e-3, base_s=20e-3, token_s=1e-3, attention_s=0.0),
        decode=DecodeTerms(base_s=20e-3, request_s=1e-3, read_s=0.0),
        kv_bytes_per_token=1024,
        kv_capacity_tokens=64_000,
        weights_bytes=0,
    )


def read_table(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def main(arguments: list[str]) -> None:
    if not 1 <= len(arguments) <= 2:
        raise SystemExit(__doc__)
    tables = Path(arguments[0])
    out = Path(arguments[1]) if len(arguments) == 2 else FOLDER
    out.mkdir(parents=True, exist_ok=True)
    steps = read_table(tables / "composed_steps.csv")
    made = [composed(name, steps) for name in COMPOSED]
    made += [dopd(read_table(tables / "dopd_table1.csv")), linear()]
    for profile in made:
        write_profile(profile, out / f"{profile.name}.json")
        error = profile.fit_error
        print(
            f"{profile.name:28} prefill mean {error.prefill_mean:6.1%} max {error.prefill_max:6.1%}   "
            f"decode mean {error.decode_mean:6.1%} max {error.decode_max:6.1%}   "
            f"KV {profile.kv_capacity_tokens:,} tokens"
        )


if __name__ == "__main__":
    main(sys.argv[1:])
