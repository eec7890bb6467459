"""What no number of instances can mend, and what a step profile does not cover: found before anything is simulated."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from pla_sglang.common.checks import plain
from pla_sglang.profiles import StepProfile
from pla_sglang.sim.core.experiment import Experiment
from pla_sglang.sim.core.lower_bound import Demands
from pla_sglang.sim.core.upper_bound import longest_known_prefix_tokens
from pla_sglang.sim.metrics.goodput import Slo
from pla_sglang.sim.planning.search import Trial
from pla_sglang.sim.workload.trace import Trace

Bools = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float64]


@dataclasses.dataclass(frozen=True)
class Finding:
    """Requests with one thing in common, and in words which and why."""

    rows: Bools  # [n]
    text: str

    @property
    def count(self) -> int:
        return int(self.rows.sum())


def count_spare(requests: int, target: float) -> int:
    """So many may miss their targets."""
    return math.floor((1 - target) * requests + 1e-9)


def profile_of(experiment: Experiment) -> StepProfile:
    """With the KV capacity of the experiment. Raises ProfileError."""
    profile = experiment.load_steps(experiment.profile)
    capacity_tokens = experiment.kv_capacity_tokens or profile.kv_capacity_tokens
    return dataclasses.replace(profile, kv_capacity_tokens=capacity_tokens)


def find_unservable(experiment: Experiment, trace: Trace) -> list[Finding]:
    """Requests that miss a target on an idle instance, or fit none: in a fleet of any size."""
    profile = profile_of(experiment)
    cached = longest_known_prefix_tokens(trace)
    ttft_s = lone_prefill_s(trace, cached, profile, chunk_tokens=experiment.chunk_tokens)
    tpot_s = np.array([profile.decode_s(1, tokens + 1) for tokens in trace.input_tokens.tolist()])
    total, name = trace.input_tokens + trace.output_tokens, profile.name

    def size(row: int) -> str:
        return f"{total[row]:,} tokens of prompt and answer"

    def prefill(row: int) -> str:
        return f"a prompt of {trace.input_tokens[row]:,} tokens, whose prefill takes {1e3 * ttft_s[row]:,.0f} ms"

    def decode(row: int) -> str:
        return f"a decode step of {1e3 * tpot_s[row]:.1f} ms"

    slo, alone = experiment.slo, f"on an idle instance of {name}"
    room = f"which has {profile.kv_capacity_tokens:,} KV tokens"
    late_ttft = f"would miss --slo-ttft-ms {plain(1e3 * slo.ttft_s)} {alone}"
    late_tpot = f"would miss --slo-tpot-ms {plain(1e3 * slo.tpot_s)} {alone}"
    found = [
        _describe(total > profile.kv_capacity_tokens, f"do not fit an instance of {name}, {room}", size),
        _describe(ttft_s > slo.ttft_s, late_ttft, prefill),
        _describe((tpot_s > slo.tpot_s) & (trace.output_tokens > 1), late_tpot, decode),
    ]
    return [finding for finding in found if finding is not None]


def describe_unkeepable(trace: Trace, demands: Demands, slo: Slo, profile: StepProfile) -> list[Finding]:
    """Requests that no scheduler keeps, whatever it does: by the least that they cost, not by passes of one engine."""
    prefill_s, total = demands.alone_prefill_s, trace.input_tokens + trace.output_tokens
    room = f"which has {profile.kv_capacity_tokens:,} KV tokens"
    late_ttft = f"cannot meet --slo-ttft-ms {plain(1e3 * slo.ttft_s)} on any fleet of {profile.name}"
    late_tpot = f"cannot meet --slo-tpot-ms {plain(1e3 * slo.tpot_s)} on any fleet of {profile.name}"
    found = [
        _describe(
            demands.too_long,
            f"do not fit an instance of {profile.name}, {room}",
            lambda row: f"{total[row]:,} tokens of prompt and answer",
        ),
        _describe(
            demands.late_ttft,
            late_ttft,
            lambda row: f"a prompt of {trace.input_tokens[row]:,} tokens, {1e3 * prefill_s[row]:,.0f} ms of work",
        ),
        _describe(demands.late_end, late_tpot, lambda row: f"a context of {trace.input_tokens[row]:,} tokens and more"),
    ]
    return [finding for finding in found if finding is not None]


def lone_prefill_s(trace: Trace, cached: npt.NDArray[np.int64], profile: StepProfile, *, chunk_tokens: int) -> Floats:
    """[n] device seconds of each prompt by itself, in whole chunks after its cached tokens."""
    pairs, places = np.unique(np.stack([trace.input_tokens, cached]), axis=1, return_inverse=True)
    times = []
    for prompt, history in pairs.T.tolist():
        seconds = 0.0
        while history < prompt:
            new = min(chunk_tokens, prompt - history)
            seconds += profile.prefill_s(new, new * (new + 2 * history), history)
            history += new
        times.append(seconds)
    return np.array(times)[places.reshape(-1)]


def find_uncovered(experiment: Experiment, trace: Trace) -> list[Finding]:
    """Requests with sizes beyond those that the profile was made from."""
    profile = profile_of(experiment)
    coverage = profile.coverage
    context = trace.input_tokens + trace.output_tokens
    found = []
    for sizes, bounds, what in (
        (trace.input_tokens, coverage.prompt_tokens, "prompts"),
        (context, coverage.decode_context_tokens, "contexts"),
    ):
        if bounds:
            text = f"have {what} beyond those that {profile.name} was made from, {bounds[0]:,} to {bounds[1]:,} tokens"
            found.append(_describe(sizes > bounds[1], text, lambda row, sizes=sizes: f"{sizes[row]:,} tokens"))  # type: ignore[misc]
    return [finding for finding in found if finding is not None]


def describe_uncovered(experiment: Experiment, trial: Trial) -> list[str]:
    """In words, which passes of a run were outside of what the profile was made from."""
    profile = profile_of(experiment)
    coverage, notes = profile.coverage, []
    if not coverage.pass_tokens:
        return [f"{profile.name} does not say which passes it was made from: its times hold for no known device"]
    measured = f"{profile.name} was made from"
    if experiment.chunk_tokens > coverage.pass_tokens[1]:
        most = coverage.pass_tokens[1]
        notes.append(f"prefill passes of up to {experiment.chunk_tokens:,} tokens; {measured} {most:,} at most")
    for seen, bounds, what in (
        (trial.batch_most, coverage.decode_batch, "requests in a decode step"),
        (trial.step_tokens_most, coverage.decode_step_tokens, "tokens of context in a decode step"),
    ):
        if seen > bounds[1]:
            notes.append(f"up to {seen:,} {what}; {measured} {bounds[1]:,} at most")
    if 0 < trial.batch_median < coverage.decode_batch[0]:
        least = coverage.decode_batch[0]
        notes.append(f"{trial.batch_median:,.0f} requests in a decode step (median); {measured} {least:,} at least")
    return notes


def _describe(rows: Bools, text: str, example: Callable[[int], str]) -> Finding | None:
    """None where there are none. ``example`` says of a row what is wrong with it."""
    if not rows.any():
        return None
    first, count = int(rows.argmax()), int(rows.sum())
    verb = text.replace("do not", "does not", 1).replace("have", "has", 1) if count == 1 else text
    return Finding(rows, f"{count:,} of {len(rows):,} requests {verb}; the first, row {first}, has {example(first)}")
