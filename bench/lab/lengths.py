"""How well the rest of an answer is predicted: by a constant, by its prompt, and by a survival curve.

No server, no simulation: the lengths of STAR's Table 2 and of the recorded traces. Of each, the first requests in their
order are learned from and the next are predicted, at each ``--every`` tokens of their answers (STAR section 4.3), so
that long answers count as often as they would be asked about. The survival curve is what the router learns while it
serves; here one request ends after another. Errors are mean absolute ones, in tokens.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import math
import random
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import numpy.typing as npt

from bench.harness.bench import Result, measuring
from bench.harness.report import Cells, emit, environment, markdown, number, progress_bar, show
from bench.lab.cells import data_folder
from bench.lab.named_workloads import WORKLOADS, workload
from pla_sglang.common.checks import require
from pla_sglang.common.errors import ConfigError
from pla_sglang.policy.common.survival import SurvivalKnobs, SurvivalPredictor
from pla_sglang.policy.interface.remaining_length import EndedAnswer, RunningAnswers
from pla_sglang.sim.workload import length_model

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
STAR = "star"
RECORDED = ("azure_code", "azure_conv", "mooncake", "reason", "burst", "agentic")
LIMITS = {STAR: 32_768}  # of answers, as clients send it; others: none is known
AFTER = 500  # ended requests, after which what is learned is to be near its end
PROMPT_CLASSES = 10  # of as many requests each
GENERATED = (0, 100, 1000, 2000, 4000, 8000, 16_000, 32_768)  # lower edges of what is shown; the last is an end
LENGTHS = (0, 100, 1000, 2000, 4000, 8000, 16_000, 30_000, 10**6)
CONSTANT, PROMPT, SURVIVAL, EARLY = "constant", "prompt_only", "survival", f"survival_{AFTER}"
Errors = Mapping[str, Floats]  # absolute errors by method; shape [points]


@dataclasses.dataclass(frozen=True)
class Answers:
    """Requests in the order in which they end; shape [requests]."""

    prompts: Ints
    lengths: Ints
    limit_tokens: float = math.inf

    def part(self, start: int, end: int) -> Answers:
        return Answers(self.prompts[start:end], self.lengths[start:end], self.limit_tokens)

    def __len__(self) -> int:
        return len(self.lengths)

    def ended(self, place: int) -> EndedAnswer:
        """What the router is told of one."""
        return EndedAnswer(
            str(place),
            int(self.lengths[place]),
            whole=bool(self.lengths[place] < self.limit_tokens),
            prompt_tokens=int(self.prompts[place]),
            limit_tokens=self.limit_tokens,
            started_s=float(place),
            ended_s=float(place),
        )


@dataclasses.dataclass(frozen=True)
class Points:
    """Where predictions are asked for; shape [points]. ``request``: its place in the answers."""

    request: Ints
    generated: Floats
    lengths: Floats
    prompts: Floats
    limit_tokens: float

    @classmethod
    def of(cls, answers: Answers, every_tokens: int) -> Points:
        counts = -(-answers.lengths // every_tokens)
        request = np.repeat(np.arange(len(answers)), counts)
        place = np.arange(len(request)) - np.repeat(np.cumsum(counts) - counts, counts)
        lengths, prompts = answers.lengths[request].astype(float), answers.prompts[request].astype(float)
        return cls(request, (place * every_tokens).astype(float), lengths, prompts, answers.limit_tokens)

    @property
    def rest(self) -> Floats:
        return self.lengths - self.generated

    def seen(self) -> RunningAnswers:
        """As the router would see them."""
        some = np.ones(len(self.request))
        limits = np.full(len(some), self.limit_tokens)
        rids = [""] * len(some)
        return RunningAnswers(rids, self.generated, np.nan * some, self.prompts, limits, some, 0 * some)


# -- what predicts -----------------------------------------------------------------------------------------------------


def predict_by_prompt(learned: Answers, points: Points) -> Floats:
    """The median length of prompts of a class, less what is there: a prediction that is made once."""
    edges = np.quantile(learned.prompts, np.arange(1, PROMPT_CLASSES) / PROMPT_CLASSES)
    classes = np.searchsorted(edges, learned.prompts)
    whole = np.median(learned.lengths)
    medians = [
        np.median(learned.lengths[classes == one]) if (classes == one).any() else whole for one in range(PROMPT_CLASSES)
    ]
    return np.maximum(1.0, np.array(medians)[np.searchsorted(edges, points.prompts)] - points.generated)


def learn_curve(learned: Answers) -> SurvivalPredictor:
    """After these have ended. The window holds all of them, so that only what was learned differs."""
    predictor = SurvivalPredictor(SurvivalKnobs(window_ends=len(learned)))
    for place in range(len(learned)):
        predictor.observe_end(learned.ended(place))
    return predictor


def measure(answers: Answers, learn: int, every_tokens: int) -> tuple[Points, dict[str, Floats], dict[str, float]]:
    """The points of what is held out, absolute errors there by method, and the shares of points left unknown."""
    learned, held_out = answers.part(0, learn), answers.part(learn, len(answers))
    points, past = Points.of(held_out, every_tokens), Points.of(learned, every_tokens)
    constant = float(np.median(past.rest))
    found = {
        CONSTANT: np.full(len(points.rest), constant),
        PROMPT: predict_by_prompt(learned, points),
        SURVIVAL: learn_curve(learned).predict(points.seen()),
        EARLY: learn_curve(learned.part(0, AFTER)).predict(points.seen()),
    }
    unknown = {name: float(np.isnan(told).mean()) for name, told in found.items()}
    errors = {
        name: np.abs(np.where(np.isnan(told), constant, told) - points.rest)  # what is not known: the constant
        for name, told in found.items()
    }
    return points, errors, unknown


# -- figures -----------------------------------------------------------------------------------------------------------


def by_bucket(edges: Sequence[int], values: Floats, errors: Errors) -> dict[str, dict[str, float]]:
    """Mean errors of points whose value is from one edge up to the next."""
    found = {}
    for low, high in itertools.pairwise(edges):
        inside = (values >= low) & (values < high)
        if inside.any():
            found[str(low)] = {name: float(of_one[inside].mean()) for name, of_one in errors.items()}
    return found


def figures_of(answers: Answers, learn: int, every_tokens: int) -> dict[str, Any]:
    points, errors, unknown = measure(answers, learn, every_tokens)
    means = {f"mae_{name}": float(of_one.mean()) for name, of_one in errors.items()}
    shown = {name: errors[name] for name in (CONSTANT, PROMPT, SURVIVAL)}
    return {
        "learned": learn,
        "held_out": len(answers) - learn,
        **means,
        "to_constant": means["mae_survival"] / means["mae_constant"],
        "early_to_final": means[f"mae_{EARLY}"] / means["mae_survival"],
        "unknown_share": unknown[SURVIVAL],
        "mae_by_generated": by_bucket(GENERATED, points.generated, shown),
        "mae_by_length": by_bucket(LENGTHS, points.lengths, shown),
    }


def answers_of(name: str, folder: Path | None, options: argparse.Namespace, seed: int) -> Answers:
    """``options.learn`` requests and half as many, or, of a shorter recording, all of them."""
    most = options.learn + options.learn // 2
    if name != STAR:
        trace = workload(name, folder).trace
        return Answers(trace.input_tokens[:most], trace.output_tokens[:most], LIMITS.get(name, math.inf))
    rng = random.Random(seed)
    inputs, outputs = (length_model(f"star_sharegpt_{part}") for part in ("input", "output"))
    pairs = [(inputs.draw(rng), outputs.draw(rng)) for _ in range(most)]
    prompts, lengths = np.array(pairs, dtype=np.int64).T
    return Answers(prompts, lengths, LIMITS[STAR])


def mean_figures(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The mean over seeds of each figure; a bucket that is not in all of them is left out."""
    shared = [name for name in runs[0] if all(name in run for run in runs)]
    return {
        name: mean_figures([run[name] for run in runs])
        if isinstance(runs[0][name], Mapping)
        else fmean(run[name] for run in runs)
        for name in shared
    }


# -- the bench ---------------------------------------------------------------------------------------------------------


def table(result: Mapping[str, Any]) -> Cells:
    """A row a source of lengths."""
    header = ["answers of", "learned from", "best constant", "by prompt", f"survival, {AFTER} ended", "survival"]
    rows = [
        [
            name,
            f"{one['learned']:.0f}",
            *(number(round(one[f"mae_{key}"])) for key in (CONSTANT, PROMPT, EARLY, SURVIVAL)),
            f"{one['to_constant']:.2f}",
        ]
        for name, one in result["sources"].items()
    ]
    return [*header, "to the constant"], rows


def generated_table(result: Mapping[str, Any]) -> Cells:
    """Of STAR's lengths: a row a range of tokens generated."""
    rows = [
        [f"from {low}", *(number(round(one[name])) for name in (CONSTANT, PROMPT, SURVIVAL))]
        for low, one in result["mae_by_generated"].items()
    ]
    return ["tokens generated", "best constant", "by prompt", "survival"], rows


def page(result: Result) -> str:
    foot = f"Mean absolute error, tokens. Seeds of `star`: {result['seeds']}. Commit"
    return "\n\n".join(
        [markdown(*table(result), right=range(1, 9)), f"{foot} {result['environment']['plugin_commit']}."]
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--data", type=Path, help="folder of recorded traces; default: PLA_BENCH_DATA")
    parser.add_argument("--sources", help=f"names with commas between, of {STAR}, {', '.join(RECORDED)}; default: all")
    parser.add_argument("--learn", type=int, default=4096, help="requests that are learned from")
    parser.add_argument("--every", type=int, default=20, help="tokens of an answer between two predictions")
    parser.add_argument("--seeds", type=int, default=5, help=f"of {STAR}, from 1")
    parser.add_argument("--out", type=Path, default=Path("bench_out"), help="folder of the result")


def sources_of(names: str | None, folder: Path | None) -> list[str]:
    """Raises ConfigError for one that is not known."""
    known = (STAR, *RECORDED)
    if names is None:
        return [name for name in known if name == STAR or WORKLOADS[name].is_in(folder)]
    chosen = names.split(",")
    if other := [name for name in chosen if name not in known]:
        raise ConfigError(f"--sources {other[0]!r} is not known; allowed: {', '.join(known)}")
    return chosen


def cases_of(names: Iterable[str], seeds: int) -> list[tuple[str, int]]:
    return [(name, seed) for name in names for seed in (range(1, 1 + seeds) if name == STAR else [1])]


def run(options: argparse.Namespace) -> int:
    """Raises ConfigError."""
    for name, least in (("learn", 2 * AFTER), ("every", 1), ("seeds", 1)):
        require(f"--{name}", getattr(options, name), least)
    about, folder = environment(), data_folder(options.data)
    cases = cases_of(sources_of(options.sources, folder), options.seeds)
    runs: dict[str, list[dict[str, Any]]] = {}
    with measuring(), progress_bar("lengths", len(cases)) as advance:
        for name, seed in cases:
            answers = answers_of(name, folder, options, seed)
            learn = min(options.learn, 2 * len(answers) // 3)
            runs.setdefault(name, []).append(figures_of(answers, learn, options.every))
            advance()
    sources = {name: mean_figures(of_one) for name, of_one in runs.items()}
    first = sources.get(STAR) or next(iter(sources.values()), {})
    result: dict[str, Any] = {
        "bench": "lengths",
        "mae": first.get("mae_survival"),  # of the best that there is
        "mae_constant": first.get("mae_constant"),
        "mae_prompt_only": first.get("mae_prompt_only"),
        "mae_survival": first.get("mae_survival"),
        "mae_by_generated": first.get("mae_by_generated", {}),
        "overhead_share": None,  # nothing is computed in an engine
        "sources": sources,
        "every_tokens": options.every,
        "seeds": options.seeds,
        "environment": about,
    }
    show("mean absolute error of what remains, tokens", *table(result))
    show("by tokens generated", *generated_table(result))
    emit(result, "lengths", options.out)
    return 0


PAGES = {"lengths": page}
