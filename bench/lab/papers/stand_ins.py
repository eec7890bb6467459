"""The papers' recorded traces from a folder, or generated stand-ins that say so in their name.

Stand-ins have the published mean and median of the trace (log-normal), and gamma gaps; they show that everything runs,
not what the trace would.
"""

from __future__ import annotations

import dataclasses
import math
import random
from pathlib import Path

from bench.lab.papers.facts import GENERATED
from pla_sglang.common.errors import ConfigError
from pla_sglang.sim.workload.generate import Arrivals, generated_trace
from pla_sglang.sim.workload.lengths import LengthModel
from pla_sglang.sim.workload.load import load_trace
from pla_sglang.sim.workload.trace import Trace


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


def log_normal(mean: float, median: float) -> LengthModel:
    """The log-normal of this mean and median; the median alone where the mean is not above it."""
    sigma = math.sqrt(2 * math.log(mean / median)) if mean > median else 0.3
    return LengthModel((1.0,), (math.log(median),), (sigma,), most=128_000)


def recorded_or_generated(name: str, folder: Path | None, *, seed: int, most: int | None = None) -> Trace:
    """One of ``SHAPES``: the file in ``folder``, whole; None: generated, at most ``most`` requests.

    Raises ConfigError where the folder lacks it.
    """
    shape = SHAPES[name]
    if folder is not None:
        if not (folder / shape.file).is_file():
            raise ConfigError(f"--data {folder} holds no {shape.file}; allowed: a folder with it, or no --data")
        label = f"{GENERATED} {name}" if shape.file.startswith("SYNTHETIC") else name
        return dataclasses.replace(load_trace(folder / shape.file), name=label)
    arrivals = Arrivals(shape.rate_per_s, random.Random(seed), cv=shape.cv)
    models = log_normal(*shape.inputs), log_normal(*shape.outputs)
    return generated_trace(min(shape.requests, most or shape.requests), arrivals, *models, name=f"{GENERATED} {name}")
