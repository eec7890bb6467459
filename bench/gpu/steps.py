"""Part (a): the time of one prefill pass by (tokens, requests, history), for one arm. One process an arm.

Inside the process of a real scheduler, from launch to synchronised device: metadata, forward pass, logits and sampling.
The file is written anew after each shape, so a run that is cut off leaves what it has.

Arms: *eager* (no prefill graphs), *breakable* (SGLang's default on CUDA), *full* (its one graph with attention),
*varlen* and *grid* (ours, in front of breakable).
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path
from typing import Any

from bench.gpu import models
from bench.gpu.parts import write_result
from pla_sglang.plugin.config import PlaConfig
from pla_sglang.testing.steps import BatchShape, Stepper

# Backend of SGLang's prefill graphs, by arm.
BACKEND = {"eager": "disabled", "breakable": "breakable", "full": "full", "varlen": "breakable", "grid": "breakable"}
ARMS = {"cuda": tuple(BACKEND), "cpu": ("eager", "varlen", "grid")}  # SGLang's graphs need a GPU, ours have a double
ROUNDS = 15  # timed passes of each shape
CHUNK = {"cuda": 8192, "cpu": 1024}
CAPTURE_BUDGET_S = {"cuda": 30.0, "cpu": 2.0}  # the double of graphs on a CPU captures no faster than it runs
FULL_SLOTS = 64  # request slots of SGLang's full graphs; by default it has one for every 512 tokens of a chunk
GRAPH_SIZES = (*range(8, 65, 8), *range(80, 257, 16), *range(288, 513, 32), *range(576, 1025, 64))

# The issue's own shape: 16 requests of 8 to 64 new tokens, history 2K.
TARGET = BatchShape(tuple(8 + 56 * index // 15 for index in range(16)), 2048)
MIXES = ((1, 16), (1, 64), (1, 256), (4, 32), (16, 32), (64, 16))  # requests, new tokens of each
SHAPES: dict[str, tuple[BatchShape, ...]] = {
    "cuda": (
        TARGET,
        *(BatchShape((tokens,) * requests, history) for requests, tokens in MIXES for history in (0, 2048)),
        BatchShape((128,) * 8),
    ),
    "cpu": (BatchShape(TARGET.new_tokens, 64), BatchShape((16,)), BatchShape((32,) * 4, 64)),
}


def launcher_flags(arm: str, model: Path | str, device: str) -> list[str]:
    flags = ["--model-path", str(model), "--chunked-prefill-size", str(CHUNK[device]), *models.launcher_flags(device)]
    if device == "cpu":
        return flags  # there are no graphs of SGLang's
    prefill: dict[str, Any] = {"backend": BACKEND[arm]}
    if arm != "eager":
        prefill["bs"] = list(GRAPH_SIZES)
    if arm == "full":
        prefill["full_prefill_max_req"] = FULL_SLOTS
    # Decode graphs are not measured, and their capture would take most of the start.
    config = {"prefill": prefill, "decode": {"backend": "disabled"}}
    return [*flags, "--cuda-graph-config", json.dumps(config), "--mem-fraction-static", "0.8"]


def measure(arm: str, model: str, device: str, out: str) -> None:
    """Times every shape in this process; there is no second scheduler in a process."""
    layout = arm if arm in ("varlen", "grid") else "off"
    config = PlaConfig(graph_layout=layout, graph_capture_budget_s=CAPTURE_BUDGET_S[device])
    stepper = Stepper(launcher_flags(arm, model, device), config)
    result: dict[str, Any] = {"arm": arm, "start_s": round(stepper.start_s, 2), "shapes": {}, "completed": False}
    for shape in SHAPES[device]:
        measured = result["shapes"][shape.name] = measure_shape(stepper, shape)
        result["graphs"] = stepper.graphs
        write_result(result, out)
        print(f"{arm:9} {shape.name:16} {measured['median_ms']:8.3f} ms", file=sys.stderr, flush=True)
    result["completed"] = True
    write_result(result, out)


def measure_shape(stepper: Stepper, shape: BatchShape) -> dict[str, Any]:
    """Two passes to warm up (the second one's miss may be captured), then the timed ones."""
    stepper.time_shape(shape, rounds=2)
    stepper.idle()
    passes = stepper.time_shape(shape, rounds=ROUNDS)
    milliseconds = sorted(timed.seconds * 1e3 for timed in passes)
    return {
        "median_ms": round(statistics.median(milliseconds), 4),
        "best_ms": round(milliseconds[0], 4),
        "worst_ms": round(milliseconds[-1], 4),
        "requests": len(shape.new_tokens),
        "new_tokens": sum(shape.new_tokens),
        "history_tokens": shape.history_tokens,
        "first_tokens": [list(timed.first_tokens) for timed in passes],
    }
