"""DOPD's choice of a tensor-parallel size for prefill and for decode instances (sections IV-B and IV-C, eq. 11 to 16).

    V_mem = (M_gpu - M') TP - M_model                     bytes                 eq. 11
    V_BW  = t_SLO alpha TP BW                             bytes                 eq. 12
    cc_d  = min(V_mem, V_BW) / ((ISL + OSL/2) M_token)    requests              eq. 13
    cc_d  = min(cc_d, cc_g)                               requests              eq. 14
    n_p / n_d = cc_d t_p / (t_d OSL)                      ``ratio.py``          eq. 15
    T_prefill = C(ISL) / S(TP) + tau(TP)                  seconds               eq. 16

Decode: the smallest size whose cc_d, before eq. 14, is 0.9 cc_g or more, "to improve headroom for bursty traffic".
Prefill: "just the right value to support the maximum model sequence length", as more load is met by more instances.

What the paper leaves open, and what is done here:

* no size reaches 0.9 cc_g, or there is no cc_g: the one with the most decodes a GPU; of equal ones the smallest.
* whether prefill has to keep a target: of those that hold the longest request, the smallest one whose T_prefill is
  within the share of the TTFT target that prefill may take. None is: the fastest, which by eq. 16 need not be the
  largest.
* S and tau are not printed: a profile of each size has T_prefill, and t_d, measured. Its KV cache is V_mem / M_token,
  and what one decode step reads within the target stands for V_BW. So eq. 11 to 14 are not computed here.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence

from pla_sglang.policy.common.capacity import max_running_tokens
from pla_sglang.policy.dopd.ratio import optimal_ratio
from pla_sglang.policy.interface.step_times import StepTimes

GRAPH_SHARE = 0.9  # of cc_g, section IV-B
WAIT_SHARE = 0.5  # of the TTFT target, as ``PlannerKnobs.wait_share``: the rest is for waiting


class SizeReason(enum.Enum):
    """Why a size was chosen."""

    GRAPH_FULL = "graph_full"  # decode: the smallest one that serves 0.9 cc_g
    MOST_A_GPU = "most_a_gpu"  # decode: none serves that many, so the one with the most decodes a GPU
    LONGEST_FITS = "longest_fits"  # prefill: the smallest one that holds the longest request, within the target
    FASTEST = "fastest"  # prefill: none is within the target


@dataclasses.dataclass(frozen=True, slots=True)
class SizeFigures:
    """What an instance of one size can do for a load.

    Attributes:
        tensor_parallel: GPUs of an instance.
        prefill_s: T_prefill of the mean prompt (eq. 16).
        concurrency: cc_d of eq. 13, before eq. 14.
        kv_capacity_tokens: V_mem / M_token.
    """

    tensor_parallel: int
    prefill_s: float
    concurrency: int
    kv_capacity_tokens: float


def choose_decode_size(sizes: Sequence[SizeFigures], graph_batch: int | None) -> tuple[SizeFigures, SizeReason] | None:
    """``graph_batch``: cc_g; None: there is no limit. None: no size serves a single request."""
    able = sorted((one for one in sizes if one.concurrency > 0), key=lambda one: one.tensor_parallel)
    if not able:
        return None
    if graph_batch is not None:
        full = [one for one in able if one.concurrency >= GRAPH_SHARE * graph_batch]
        if full:
            return full[0], SizeReason.GRAPH_FULL
    return max(able, key=lambda one: one.concurrency / one.tensor_parallel), SizeReason.MOST_A_GPU


def choose_prefill_size(
    sizes: Sequence[SizeFigures], *, longest_tokens: float, budget_s: float
) -> tuple[SizeFigures, SizeReason] | None:
    """``budget_s``: that T_prefill of the mean prompt may take. None: no size holds the longest request."""
    able = [one for one in sizes if one.kv_capacity_tokens >= longest_tokens]
    if not able:
        return None
    within = [one for one in able if one.prefill_s <= budget_s]
    if within:
        return min(within, key=lambda one: one.tensor_parallel), SizeReason.LONGEST_FITS
    return min(able, key=lambda one: (one.prefill_s, one.tensor_parallel)), SizeReason.FASTEST


@dataclasses.dataclass(frozen=True, slots=True)
class MeasuredSize:
    """A profile of instances of one size."""

    tensor_parallel: int
    steps: StepTimes
    kv_capacity_tokens: int


@dataclasses.dataclass(frozen=True, slots=True)
class SizeLoad:
    """What the sizes are chosen for.

    Attributes:
        input_tokens, output_tokens: ISL and OSL, means.
        longest_tokens: prompt and answer of the longest request.
        ttft_slo_s, tpot_slo_s: targets.
        graph_batch: cc_g; None: there is no limit.
    """

    input_tokens: float
    output_tokens: float
    longest_tokens: float
    ttft_slo_s: float
    tpot_slo_s: float
    graph_batch: int | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class SizeChoice:
    """``concurrency``: cc_d of the decode size (eq. 14); ``ratio``: n_p / n_d of instances of these sizes (eq. 15)."""

    prefill: int
    decode: int
    prefill_reason: SizeReason
    decode_reason: SizeReason
    concurrency: int
    ratio: float


def measure_size(size: MeasuredSize, load: SizeLoad) -> SizeFigures:
    """Out of its profile. Raises ConfigError for lengths and targets that are not above 0."""
    context = load.input_tokens + load.output_tokens / 2
    tokens = max_running_tokens(
        size.steps,
        tpot_slo_s=load.tpot_slo_s,
        kv_capacity_tokens=size.kv_capacity_tokens,
        mean_context_tokens=context,
        margin=1.0,
    )
    prefill_s = size.steps.prefill_s(load.input_tokens, load.input_tokens**2, 0, 1)
    return SizeFigures(size.tensor_parallel, prefill_s, int(tokens / context), size.kv_capacity_tokens)


def choose_sizes(sizes: Sequence[MeasuredSize], load: SizeLoad) -> SizeChoice | None:
    """The size for each phase. None: no size can do one of them."""
    figures = [measure_size(size, load) for size in sizes]
    found = choose_decode_size(figures, load.graph_batch)
    budget_s = WAIT_SHARE * load.ttft_slo_s
    chosen = choose_prefill_size(figures, longest_tokens=load.longest_tokens, budget_s=budget_s)
    if found is None or chosen is None:
        return None
    decode, prefill = found[0], chosen[0]
    most = decode.concurrency if load.graph_batch is None else min(decode.concurrency, load.graph_batch)
    steps = next(size.steps for size in sizes if size.tensor_parallel == decode.tensor_parallel)
    ratio = optimal_ratio(
        prefill_s=prefill.prefill_s,
        step_s=steps.decode_s(most, most * (load.input_tokens + load.output_tokens / 2)),
        output_tokens=max(1.0, load.output_tokens),
        concurrency=most,
    )
    return SizeChoice(prefill.tensor_parallel, decode.tensor_parallel, chosen[1], found[1], most, ratio)
