"""What no scheduler can exceed on given arrivals: the share of requests in target, by work alone.

**Work.** Every request costs device time, whatever it is batched with, wherever it runs and in which order. From the
terms of the step profile (``StepProfile.step_s``), with ``k`` the least factor of a correction table:

* a prefill of ``n`` new tokens after ``h`` cached ones, in any chunks: at least
  ``k_p * (token_s * n + attention_s * n * (n + 2 h)) + min(read_s, k_p * token_s) * h``, since attention sums add up
  over chunks, and base time, floors and the cached part that later chunks read again are left out. ``h`` is the longest
  prefix whose blocks stood in any earlier prompt: as if nothing were ever evicted, and every instance held what any of
  them has computed. Whoever computes a block first, it is computed once, and each other request at least reads it.
  (Caches hold prompts only, as simulated engines do by default; with ``answers`` also blocks of earlier answers count.)
* an answer token at context ``c``, in a decode step or in a mixed batch. What the requests of a pass hold beside blocks
  that others share fits the KV capacity ``C`` of an instance, so of its base time a token with ``u`` tokens of unshared
  context bears at least the share ``u / C``. Hence at least ``a + k_d * read_s * c + base * u / C`` with
  ``a = min(k_d * request_s, k_p * token_s)`` and ``base = min(k_d * base_s [decode], k_p * base_s [prefill])``. The
  first token of an answer comes with the prefill and costs nothing here.

A mixed pass takes at least ``k_p * (base + tokens + attention) + reads``, a decode step at least
``k_d * (base + requests + reads)``: each is at least the sum of what its requests are charged above. So the work that
``m`` instances do in a time ``t`` is at most ``m * t``.

**Deadlines.** A kept request that arrives at ``t`` has its prefill done by ``t + ttft``, and ends by ``t + d`` with
``d = ttft + tpot * (answer tokens - 1)``. Take all requests that arrive in a window ``[a, b)``. Before ``a`` nothing of
them can be done, so for every ``x`` of at least ``ttft`` the kept ones among them satisfy

    sum of prefill work + sum of decode work of those with d <= x  <=  m * (b - a + x).

**Who may miss.** The fewest requests that must be given up for one such inequality are those with the most work in it
(any other set of that size leaves at least as much). Windows that share no request give up different requests, so what
they give up adds up; the windows here are halves of halves of the whole, and of a window and its two halves the larger
count is taken. Attainment is therefore at most ``1 - given up / requests``.

Everything that a real fleet also needs (one instance a request at a time, KV memory, passes that cannot be interrupted,
transfers) is relaxed. At a higher rate windows get shorter, and work, deadlines and who belongs to a window stay: the
bound falls with the rate, so the rate at which it crosses a target is an upper bound for every arm.

Sessions that are closed loops have no such bound: where a fleet is slow, their requests come later.
"""

from __future__ import annotations

import bisect
import dataclasses
import math
from collections import Counter

import numpy as np
import numpy.typing as npt

from pla_sglang.common.errors import ConfigError
from pla_sglang.profiles import StepProfile
from pla_sglang.sim.metrics.goodput import Slo
from pla_sglang.sim.workload import Trace

Floats = npt.NDArray[np.float64]
LEAST_WINDOW = 16  # requests; halving goes on above
HORIZON_QUANTILES = (0.5, 0.9, 1.0)  # of ``d``: where the work of answers is looked at


@dataclasses.dataclass(frozen=True)
class LeastWork:
    """What requests cost at least, and how long they have.

    Attributes:
        prefill_s, decode_s: [n] device seconds.
        deadline_s: [n] from the arrival to the last token.
        ttft_s: from the arrival to the end of the prefill.
    """

    prefill_s: Floats
    decode_s: Floats
    deadline_s: Floats
    ttft_s: float


def least_work(trace: Trace, slo: Slo, profile: StepProfile, *, answers: bool = False) -> LeastWork:
    """The least work of every request of the trace, as the module's text says. ``answers``: caches hold these too."""
    cached = longest_known_prefix_tokens(trace, answers=answers).astype(np.float64)
    new = trace.input_tokens - cached
    answer = np.maximum(trace.output_tokens - 1, 0).astype(np.float64)
    prefill, decode = profile.prefill, profile.decode
    least_p, least_d = least_corrections(profile)
    compute_s = prefill.token_s * new + prefill.attention_s * new * (new + 2 * cached)
    token_s = min(least_d * decode.request_s, least_p * prefill.token_s)
    base_s = min(least_d * decode.base_s, least_p * prefill.base_s) / profile.kv_capacity_tokens
    context, unshared = read_context_tokens(trace), unshared_context_tokens(trace, answers=answers)
    return LeastWork(
        prefill_s=least_p * compute_s + min(prefill.read_s, least_p * prefill.token_s) * cached,
        decode_s=answer * token_s + least_d * decode.read_s * context + base_s * unshared,
        deadline_s=slo.ttft_s + np.where(answer > 0, slo.tpot_s, 0.0) * answer,
        ttft_s=slo.ttft_s,
    )


def least_corrections(profile: StepProfile) -> tuple[float, float]:
    """The least factors of the correction tables, of prefills and of decode steps."""
    least_p = min([1.0, *profile.prefill_correction.factor])
    return least_p, min([1.0, *(factor for row in profile.decode_correction.factor for factor in row)])


def read_context_tokens(trace: Trace) -> Floats:
    """[n] summed over the decode steps of each request: its prompt and the answer tokens before the last one."""
    steps = np.maximum(trace.output_tokens - 1, 0).astype(np.float64)
    return steps * (trace.input_tokens + (steps - 1) / 2)


def unshared_context_tokens(trace: Trace, *, answers: bool = False) -> Floats:
    """``read_context_tokens`` without the leading blocks of prompts that another request has too."""
    context = read_context_tokens(trace)
    if trace.hash_ids is None:
        return context
    holders = Counter(block for blocks in trace.hash_ids for block in blocks)
    if answers and trace.answer_ids is not None:
        holders.update(block for blocks in trace.answer_ids for block in blocks)
    shared = np.array([sum(holders[block] > 1 for block in blocks) for blocks in trace.hash_ids], np.float64)
    steps = np.maximum(trace.output_tokens - 1, 0)
    unshared: Floats = context - steps * np.minimum(shared * trace.block_tokens, trace.input_tokens)
    return unshared


def longest_known_prefix_tokens(trace: Trace, *, answers: bool = False) -> npt.NDArray[np.int64]:
    """[n] tokens of the leading blocks that stood in an earlier prompt; at least one token of a prompt is new.

    ``answers``: or in an earlier prompt and its answer.
    """
    tokens = np.zeros(len(trace), np.int64)
    if trace.hash_ids is None:
        return tokens
    known: set[int] = set()
    for row, blocks in enumerate(trace.hash_ids):
        count = next((place for place, block in enumerate(blocks) if block not in known), len(blocks))
        tokens[row] = min(count * trace.block_tokens, int(trace.input_tokens[row]) - 1)
        known.update(blocks)
        if answers and trace.answer_ids is not None:
            known.update(trace.answer_ids[row])
    return tokens


def attainment_bound(arrival_s: Floats, work: LeastWork, instances: int) -> float:
    """No scheduler serves a larger share of these requests in target. Raises ConfigError without requests."""
    if not len(arrival_s):
        raise ConfigError("a bound needs requests; allowed: at least one")
    finite = work.deadline_s[np.isfinite(work.deadline_s)]
    horizons = sorted({work.ttft_s, *(float(np.quantile(finite, share)) for share in HORIZON_QUANTILES if len(finite))})
    # [horizons][n] what must be done within the horizon after the window's end
    demands = [
        work.prefill_s + np.where(work.deadline_s <= x, work.decode_s, 0.0) for x in horizons if math.isfinite(x)
    ]
    given_up = _given_up(arrival_s, demands, [x for x in horizons if math.isfinite(x)], instances)
    return 1.0 - given_up / len(arrival_s)


def _given_up(arrival_s: Floats, demands: list[Floats], horizons: list[float], instances: int) -> int:
    """The fewest requests of this window that cannot be kept."""
    window_s = float(arrival_s[-1] - arrival_s[0])
    whole = max(
        (_least_left_out(demand, instances * (window_s + x)) for demand, x in zip(demands, horizons, strict=True)),
        default=0,
    )
    if len(arrival_s) < 2 * LEAST_WINDOW:
        return whole
    middle = len(arrival_s) // 2
    halves = sum(
        _given_up(arrival_s[half], [demand[half] for demand in demands], horizons, instances)
        for half in (slice(None, middle), slice(middle, None))
    )
    return max(whole, halves)


def _least_left_out(demand_s: Floats, room_s: float) -> int:
    """How many of the largest must go until the rest fits."""
    if demand_s.sum() <= room_s:
        return 0
    kept = np.searchsorted(np.cumsum(np.sort(demand_s)), room_s, side="right")
    return len(demand_s) - int(kept)


def least_instances(trace: Trace, slo: Slo, profile: StepProfile, *, target: float, most: int) -> int:
    """With fewer instances no scheduler keeps ``target`` on these arrivals; ``most`` where it may be more than that.

    1 for closed loops.
    """
    if trace.think_s is not None:
        return 1
    return least_instances_for(trace.arrival_s, least_work(trace, slo, profile), target=target, most=most)


def least_instances_for(arrival_s: Floats, work: LeastWork, *, target: float, most: int) -> int:
    """``least_instances`` of requests whose work is known."""
    return 1 + bisect.bisect_left(
        range(1, most), True, key=lambda count: attainment_bound(arrival_s, work, count) >= target
    )
