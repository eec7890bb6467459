"""Part (a): the time of one prefill pass by (tokens, requests, history), for one arm. One process an arm.

    python -m bench.gpu.steps --arm varlen --model FOLDER --device cuda --out steps.varlen.json

Inside the process of a real scheduler, from launch to synchronised device: metadata, forward pass, logits and sampling.
The file is written anew after each shape, so a run that is cut off leaves what it has.

Arms: *eager* (no prefill graphs), *breakable* (SGLang's default on CUDA), *full* (its one graph with attention),
*varlen* and *grid* (ours, in front of breakable).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.gpu.models import model_flags
from pla_sglang.config import PlaConfig
from pla_sglang.testing.steps import Shape, Stepper

ARMS = ("eager", "breakable", "full", "varlen", "grid")
BACKEND = {"eager": "disabled", "breakable": "breakable", "full": "full", "varlen": "breakable", "grid": "breakable"}
CHUNK = {"cuda": 8192, "cpu": 1024}
CAPTURE_BUDGET_S = {"cuda": 30.0, "cpu": 2.0}  # the double of graphs on a CPU captures no faster than it runs
FULL_SLOTS = 64  # request slots of SGLang's full graphs; by default it has one for every 512 tokens of a chunk
GRAPH_SIZES = (*range(8, 65, 8), *range(80, 257, 16), *range(288, 513, 32), *range(576, 1025, 64))

# The issue's own shape: 16 requests of 8 to 64 new tokens, history 2K.
TARGET = Shape(tuple(8 + 56 * index // 15 for index in range(16)), 2048)
MIXES = ((1, 16), (1, 64), (1, 256), (4, 32), (16, 32), (64, 16))  # requests, new tokens of each
SHAPES: dict[str, tuple[Shape, ...]] = {
    "cuda": (
        TARGET,
        *(Shape((tokens,) * requests, history) for requests, tokens in MIXES for history in (0, 2048)),
        Shape((128,) * 8),
    ),
    "cpu": (Shape(TARGET.new_tokens, 64), Shape((16,)), Shape((32,) * 4, 64)),
}


def launcher_flags(arm: str, model: Path, device: str) -> list[str]:
    flags = ["--model-path", str(model), "--device", device, "--chunked-prefill-size", str(CHUNK[device])]
    flags += [*model_flags(device), "--log-level", "warning"]
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


def measure(arm: str, model: Path, device: str, *, rounds: int, out: Path) -> dict[str, Any]:
    layout = arm if arm in ("varlen", "grid") else "off"
    config = PlaConfig(graph_layout=layout, graph_capture_budget_s=CAPTURE_BUDGET_S[device])
    stepper = Stepper(launcher_flags(arm, model, device), config)
    result: dict[str, Any] = {"arm": arm, "start_s": round(stepper.start_s, 2), "shapes": {}, "completed": False}
    for shape in SHAPES[device]:
        result["shapes"][shape.name] = of_shape(stepper, shape, rounds)
        result["graphs"] = stepper.graphs
        out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
        print(
            f"{arm:9} {shape.name:16} {result['shapes'][shape.name]['median_ms']:8.3f} ms", file=sys.stderr, flush=True
        )
    result["completed"] = True
    out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return result


def of_shape(stepper: Stepper, shape: Shape, rounds: int) -> dict[str, Any]:
    """Two passes to warm up (the second one's miss may be captured), then the timed ones."""
    stepper.time_shape(shape, rounds=2)
    stepper.idle()
    passes = stepper.time_shape(shape, rounds=rounds)
    milliseconds = sorted(one.seconds * 1e3 for one in passes)
    return {
        "median_ms": round(statistics.median(milliseconds), 4),
        "best_ms": round(milliseconds[0], 4),
        "worst_ms": round(milliseconds[-1], 4),
        "requests": len(shape.new_tokens),
        "new_tokens": sum(shape.new_tokens),
        "history_tokens": shape.history_tokens,
        "first_tokens": [list(one.first_tokens) for one in passes],
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu.steps", description=__doc__)
    parser.add_argument("--arm", choices=ARMS, required=True)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path, required=True, help="JSON file")
    args = parser.parse_args(argv)
    measure(args.arm, args.model, args.device, rounds=args.rounds, out=args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
