"""Workloads of the papers: recorded traces from a folder, or generated ones that say so in their name.

A folder holds the files named here, itself or in ``traces/``. Generated stand-ins have the published mean and median of
the trace (log-normal), and gamma gaps; they show that everything runs, not what the trace would.
"""

from __future__ import annotations

import dataclasses
import math
import random
from pathlib import Path

from bench.papers.context import Context
from pla_sglang.errors import ConfigError
from pla_sglang.workload import Arrivals, LengthModel, Trace, generated_trace, load_trace

GENERATED = "generated, like"


@dataclasses.dataclass(frozen=True)
class Shape:
    """A trace: its file, and what a stand-in is drawn from: mean and median of prompts and answers, cv of gaps."""

    file: str
    requests: int
    rate_per_s: float
    inputs: tuple[float, float]
    outputs: tuple[float, float]
    cv: float


# Means, medians and rates of the published files (azure: Azure/AzurePublicDataset, CC BY 4.0; mooncake: kvcache-ai/
# Mooncake, Apache-2.0). BurstGPT's requests are not in its repository: its stand-in has Arrow's count (Table 1), and
# its burstiness is a guess in either form.
SHAPES = {
    "azure_code": Shape("azure_code_2023.csv.gz", 8819, 2.57, (2047.8, 1469), (27.9, 13), 3.0),
    "azure_conv": Shape("azure_conv_2023.csv.gz", 19366, 5.53, (1154.7, 1020), (211.1, 129), 1.5),
    "burstgpt": Shape("SYNTHETIC_burstgpt_like_1h.csv.gz", 6009, 1.67, (621, 294), (126, 30), 3.0),
    "mooncake": Shape("mooncake_conv_min00_10.csv.gz", 1756, 2.93, (14_002, 8038), (353.8, 364), 1.0),
}


def log_normal(mean: float, median: float, most: int = 128_000) -> LengthModel:
    """The log-normal of this mean and median; the median alone where the mean is not above it."""
    sigma = math.sqrt(2 * math.log(mean / median)) if mean > median else 0.3
    return LengthModel((1.0,), (math.log(median),), (sigma,), most=most)


def path_of(context: Context, file: str) -> Path | None:
    """The file in the data folder; None where there is no folder. Raises ConfigError where the file is missing."""
    if context.data is None:
        return None
    for folder in (context.data, context.data / "traces"):
        if (folder / file).is_file():
            return folder / file
    raise ConfigError(f"--data {context.data} holds no {file}; allowed: a folder with it, or no --data")


def trace_named(context: Context, name: str) -> Trace:
    """One of ``SHAPES``, whole. The recorded one where there is a data folder."""
    shape = SHAPES[name]
    path = path_of(context, shape.file)
    if path is not None:
        return dataclasses.replace(load_trace(path), name=name)
    arrivals = Arrivals(shape.rate_per_s, random.Random(context.seed), cv=shape.cv)
    models = log_normal(*shape.inputs), log_normal(*shape.outputs)
    count = context.pick(200, shape.requests, shape.requests)
    return generated_trace(count, arrivals, *models, name=f"{GENERATED} {name}")


def is_recorded(trace: Trace) -> bool:
    return not trace.name.startswith(GENERATED)


def described(trace: Trace) -> str:
    """Name, size and mean lengths."""
    lengths = f"{trace.input_tokens.mean():.0f} in, {trace.output_tokens.mean():.0f} out on average"
    return f"{trace.name}: {len(trace)} requests, {lengths}"
