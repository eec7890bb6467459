"""Results as files for programs: JSON, and one parquet table of requests per run."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pla_sglang.sim.core.experiment import ExperimentResult


def as_json(one: ExperimentResult) -> dict[str, Any]:
    """Everything about a run but its requests, JSON-ready; numbers that are none are null."""
    result = one.result
    found = {
        "policy": one.experiment.policy,
        "planner": one.experiment.planner,
        "rate_per_s": one.rate_per_s,
        **dataclasses.asdict(one.figures),
        "counts": result.counts,
        "lengths": result.lengths,
        "reasons": result.reasons,
        "pass_reasons": result.pass_reasons,
        "gpu_hours": result.gpu_hours,
        "simulated_s": result.end_s,
        "events": result.events,
        "wall_s": result.wall_s,
        "cpu_s": result.cpu_s,
        "digest": result.digest(),
    }
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in found.items()
    }


def write_requests(one: ExperimentResult, path: Path) -> None:
    """One row per request, as parquet."""
    import pyarrow as pa
    import pyarrow.parquet as parquet

    result, served = one.result, one.result.served
    table = {
        "arrival_s": served.arrival_s,
        "first_token_s": served.first_token_s,
        "finish_s": served.finish_s,
        "output_tokens": served.output_tokens,
        "prefill_start_s": result.prefill_start_s,
        "decode_start_s": result.decode_start_s,
        "ttft_s": served.ttft_s(),
        "tpot_s": served.tpot_s(),
        "met": served.met(one.experiment.slo),
        "stage": result.stage,
        "prefill_instance": result.prefill_instance,
        "decode_instance": result.decode_instance,
        "retractions": result.retractions,
        "migrations": result.migrations,
    }
    parquet.write_table(pa.table(table), path)


def write_results(outcomes: Sequence[ExperimentResult], summary: dict[str, Any], folder: Path) -> None:
    """``summary.json`` and a parquet file per run."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "summary.json").write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
    for one in outcomes:
        write_requests(one, folder / f"{stem(one)}.parquet")


def stem(one: ExperimentResult) -> str:
    """File name of a run."""
    return f"{one.experiment.policy}_{one.rate_per_s:.4g}".replace("/", "-")
