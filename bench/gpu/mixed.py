"""Part (f): what decodes cost that ride in a prefill pass: a chunk alone, decodes alone, both in one pass.

A decode that rides is a request of one new token whose context is in the cache, which is what SGLang makes of it.
Eager prefill passes, decode steps as graphs. The file is written anew after each row.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from bench.gpu import models
from bench.gpu.parts import write_result
from pla_sglang.plugin.config import PlaConfig
from pla_sglang.testing.steps import Stepper

WARM = 2  # passes before those that count
DECODE_STEPS = 24


class Case(NamedTuple):
    """Chunks of ``new_tokens`` with ``decodes`` beside them; all have ``history_tokens`` in the cache."""

    history_tokens: int
    new_tokens: tuple[int, ...]
    decodes: tuple[int, ...]
    rounds: int


CASES = {
    "cuda": (
        Case(1024, (256, 512, 1024, 2048, 4096), (16, 64, 128), 7),
        Case(4096, (512, 2048), (64,), 5),
        Case(0, (512, 2048, 8192), (), 5),
    ),
    "cpu": (Case(64, (128,), (2,), 3),),
}
CHUNK_TOKENS = {"cuda": 8192, "cpu": 1024}


def measure(model: str, device: str, out: str) -> None:
    decodes = sorted({count for case in CASES[device] for count in case.decodes})
    flags = ["--model-path", model, "--chunked-prefill-size", str(CHUNK_TOKENS[device])]
    flags += models.launcher_flags(device)
    if device == "cuda":
        graphs = {"prefill": {"backend": "disabled"}, "decode": {"bs": decodes}}
        flags += ["--cuda-graph-config", json.dumps(graphs), "--max-running-requests", "160"]
        flags += ["--mem-fraction-static", "0.85"]
    stepper = Stepper(flags, PlaConfig())
    result: dict[str, Any] = {"start_s": round(stepper.start_s, 2), "rows": [], "completed": False}
    for case in CASES[device]:
        for row in measure_case(stepper, case, CHUNK_TOKENS[device]):
            result["rows"].append(row)
            write_result(result, out)
            print(row, file=sys.stderr, flush=True)
    result["completed"] = True
    write_result(result, out)


def measure_case(stepper: Stepper, case: Case, chunk_tokens: int) -> Iterator[dict[str, Any]]:
    """Rows as they are measured: ``kind``, sizes, median and best in ms, passes that count."""
    histories = [stepper.tokens(case.history_tokens) for _ in range(1 + max(case.decodes, default=0))]
    if case.history_tokens:
        stepper.run(histories)
    own, riding = histories[0], histories[1:]
    for count in case.decodes:
        steps_s = stepper.time_decodes([history + stepper.tokens(3) for history in riding[:count]], DECODE_STEPS)
        yield row_of("decode", 0, count, case.history_tokens, steps_s)
    for new_tokens in case.new_tokens:
        for count in (0, *case.decodes):
            if new_tokens + count <= chunk_tokens:
                passes_s = []
                for _ in range(WARM + case.rounds):
                    riders = [history + stepper.tokens(1) for history in riding[:count]]
                    passes = stepper.run([own + stepper.tokens(new_tokens), *riders])
                    passes_s += [passes[0].seconds] if len(passes) == 1 else []
                yield row_of("mixed" if count else "prefill", new_tokens, count, case.history_tokens, passes_s)


def row_of(kind: str, new_tokens: int, decodes: int, history_tokens: int, passes_s: Sequence[float]) -> dict[str, Any]:
    """``ms`` and ``best`` are None where no pass held all of it."""
    counted = passes_s[WARM:]
    return {
        "kind": kind,
        "new_tokens": new_tokens,
        "decodes": decodes,
        "history_tokens": history_tokens,
        "ms": round(1e3 * statistics.median(counted), 3) if counted else None,
        "best": round(1e3 * min(counted), 3) if counted else None,
        "passes": len(counted),
    }
