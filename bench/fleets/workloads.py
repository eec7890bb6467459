"""The named workloads of the fleet benches: recorded traces where a data folder has them, generated ones always.

Recorded traces are not part of this repository. ``--data FOLDER``, or the environment variable ``PLA_BENCH_DATA``, says
where they are; what is missing there is left out of the results, not replaced. The folder holds plain CSV files
(docs/workloads.md) with the names in ``RECORDED``, directly or in a folder ``traces``.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import random
from pathlib import Path

import numpy as np

from pla_sglang.errors import ConfigError
from pla_sglang.metrics.goodput import SLOS, Slo
from pla_sglang.workload import Arrivals, Trace, chat_trace, generated_trace, hol_trace, length_model, load_trace

DATA_VARIABLE = "PLA_BENCH_DATA"
HOL_PERIOD_S = 10.0
CHAT_TIMES = 3  # as many requests of ``chat`` as of others: conversations take their time to fill a fleet


@dataclasses.dataclass(frozen=True)
class Workload:
    """A trace with targets, and what the benches need to know to load a fleet with it.

    Attributes:
        recorded: real arrivals and lengths; False: generated from a model.
        low_per_s, high_per_s: bounds of a search for the highest rate, for 8 instances.
        steady_per_s: rate of the GPU-hours figure, which asks for a handful of instances.
    """

    name: str
    trace: Trace
    slo: Slo
    recorded: bool
    low_per_s: float
    high_per_s: float
    steady_per_s: float

    def head(self, requests: int | None) -> Workload:
        """Its first requests; None: all of them."""
        if requests is None or requests >= len(self.trace):
            return self
        return dataclasses.replace(self, trace=self.trace.head(requests))


@dataclasses.dataclass(frozen=True)
class _Recorded:
    file: str
    slo: Slo
    low_per_s: float
    high_per_s: float
    steady_per_s: float
    recorded: bool = True


# Targets of Arrow's Table 1; ``burst`` has made-up requests with the burstiness of BurstGPT, ``reason`` is generated
# from measured distributions of clients of a reasoning model.
RECORDED: dict[str, _Recorded] = {
    "azure_code": _Recorded("azure_code_2023.csv.gz", SLOS["azure_code"], 8.0, 400.0, 26.0),
    "azure_conv": _Recorded("azure_conv_2023.csv.gz", SLOS["azure_conv"], 8.0, 400.0, 55.0),
    "mooncake": _Recorded("mooncake_conv_min00_10.csv.gz", SLOS["mooncake"], 1.0, 100.0, 9.0),
    "burst": _Recorded("SYNTHETIC_burstgpt_like_1h.csv.gz", SLOS["burstgpt"], 4.0, 400.0, 30.0, recorded=False),
    "reason": _Recorded("servegen_r1_10h_1rps.csv.gz", Slo(2.0, 0.03), 1.0, 100.0, 8.0, recorded=False),
}
GENERATED = ("chat", "hol", "star")
NAMES = (*RECORDED, *GENERATED)


def data_folder(flag: Path | None) -> Path | None:
    """The folder with traces: the flag, else the environment. Raises ConfigError when it is no folder."""
    named = flag or (Path(os.environ[DATA_VARIABLE]) if os.environ.get(DATA_VARIABLE) else None)
    if named is None:
        return None
    if not named.is_dir():
        raise ConfigError(f"data folder {named} does not exist; give --data or {DATA_VARIABLE}")
    return named / "traces" if (named / "traces").is_dir() else named


def available(folder: Path | None) -> list[str]:
    """Names of the workloads that can be had with this data folder, in a fixed order."""
    return [name for name in NAMES if name in GENERATED or (folder and (folder / RECORDED[name].file).is_file())]


@functools.lru_cache(maxsize=16)
def workload(name: str, folder: Path | None, requests: int | None = None, seed: int = 1) -> Workload:
    """A workload by name. Raises ConfigError for an unknown one, or one whose file is not there."""
    if name in RECORDED:
        told = RECORDED[name]
        if folder is None or not (folder / told.file).is_file():
            raise ConfigError(f"workload {name} needs {told.file}; give a folder with it by --data or {DATA_VARIABLE}")
        trace = load_trace(folder / told.file)
        rates = (told.low_per_s, told.high_per_s, told.steady_per_s)
        return Workload(name, trace, told.slo, told.recorded, *rates).head(requests)
    makers = {"chat": _chat, "hol": _hol, "star": _star}
    if name not in makers:
        raise ConfigError(f"workload {name!r} is not known; allowed: {', '.join(NAMES)}")
    times = CHAT_TIMES if name == "chat" else 1
    return makers[name](times * (requests or 10_000), random.Random(seed)).head(requests and times * requests)


def _chat(requests: int, rng: random.Random) -> Workload:
    """Conversations with LMSYS-like prompts; rates count requests, so that sessions arrive 5.45 times as seldom."""
    trace = chat_trace(max(1, requests // 3), Arrivals(2.0, rng, think_s=20.0))
    return Workload("chat", trace, Slo(0.5, 0.04), False, 4.0, 800.0, 80.0)


def _hol(requests: int, rng: random.Random) -> Workload:
    """The burst of SGLang issue #22831, 18 prompts of 24,000 and 11 of 2,000 tokens in random order, over and over."""
    one = hol_trace()
    count = max(1, min(requests, 2_000) // len(one))
    orders = [np.array(rng.sample(range(len(one)), len(one))) for _ in range(count)]
    trace = Trace(
        "hol",
        np.concatenate([one.arrival_s + HOL_PERIOD_S * place for place in range(count)]),
        np.concatenate([one.input_tokens[order] for order in orders]),
        np.concatenate([one.output_tokens[order] for order in orders]),
    )
    return Workload("hol", trace, Slo(4.0, 0.1), False, 0.5, 100.0, 4.0)


def _star(requests: int, rng: random.Random) -> Workload:
    """Short prompts and long answers, a sixth of them cut at 32K tokens: STAR's Table 2, ShareGPT."""
    inputs, outputs = length_model("star_sharegpt_input"), length_model("star_sharegpt_output")
    trace = generated_trace(min(requests, 1_000), Arrivals(2.0, rng), inputs, outputs, name="star")
    return Workload("star", trace, Slo(2.0, 0.03), False, 0.5, 50.0, 3.0)
