"""What a fleet bears colocated, and what with roles: the highest steady rate at both targets, in closed form.

Let p be the new tokens of a request, o its answer, k its mean context while it runs, T the TPOT target, and t the time
between two tokens of an answer.

*Colocated*, an instance that gets r requests a second has B = r * o * t running (Little's law), and computes
c = r * p * t new tokens between two tokens of theirs. It settles at the least t with

    t = least(mixed(c, B, B*k), decode(B, B*k) + prefill(j*c) / j)

and bears r if that is at most T and B fits the KV cache. The first is a mixed batch; the second lets decodes step j
times between two prefill passes, which an answer tolerates if it has j tokens or more. A prompt that takes several
passes reads its history again in each.

*With roles*, prefill instances compute whole prompts, and decode instances have the largest B whose step is within T:

    most over n_p of  least(n_p / prefill(p),  n_d * B / (o * decode(B, B*k)))      (DOPD eq. 15)

In both, requests wait for the servers of their prefill: for all instances, or for n_p of them (``usable_share``).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

from pla_sglang.policy.interface.step_times import StepTimes

ROUNDS = 16  # of a bisection: one part in 65,000
SETTLED = 1e-3  # relative change of t from round to round at which it has settled
BATCHED_TOKENS = 2048  # short prompts share a pass of so many: beyond it a token costs the same


@dataclasses.dataclass(frozen=True, slots=True)
class Traffic:
    """What requests are like, on average.

    Attributes:
        new_tokens, history_tokens: of a prompt, computed and from the prefix cache.
        attention: of L * (L + 2 * H).
        output_tokens: of an answer.
        short_output_tokens: of a short answer, such as one in ten.
        context_tokens: of a running request.
        variation: squared coefficient of variation of prefill times.
    """

    new_tokens: float
    history_tokens: float
    attention: float
    output_tokens: float
    short_output_tokens: float
    context_tokens: float
    variation: float = 1.0


@dataclasses.dataclass(frozen=True, slots=True)
class FleetShape:
    """The fleet: how many instances, tokens of KV cache of each, targets, and whether decodes join prefill passes."""

    instances: int
    kv_tokens: float
    ttft_s: float
    tpot_s: float
    mixes: bool = True


def bears_colocated(rate_per_s: float, steps: StepTimes, traffic: Traffic, shape: FleetShape) -> bool:
    """True where the whole fleet bears so many requests a second without roles."""
    each_per_s, prompt_s = rate_per_s / shape.instances, find_prompt_s(steps, traffic)
    if each_per_s * prompt_s > usable_share(shape.instances, prompt_s, shape.ttft_s, traffic.variation):
        return False
    interval_s = _settle_s(each_per_s, steps, traffic, shape)
    batch = each_per_s * traffic.output_tokens * interval_s
    return interval_s <= shape.tpot_s and batch * traffic.context_tokens + traffic.new_tokens <= shape.kv_tokens


def _settle_s(rate_per_s: float, steps: StepTimes, traffic: Traffic, shape: FleetShape) -> float:
    """The least time between two tokens at this rate; above the target: some time above it.

    From below, as all times rise with it.
    """
    interval_s = 0.0
    while interval_s <= shape.tpot_s:
        needed_s = _needed_s(rate_per_s, interval_s, steps, traffic, shape)
        if needed_s <= interval_s * (1 + SETTLED):
            break
        interval_s = needed_s
    return interval_s


def _needed_s(rate_per_s: float, interval_s: float, steps: StepTimes, traffic: Traffic, shape: FleetShape) -> float:
    """What the work that comes in ``interval_s`` takes, beside a token for all that run then."""
    batch, prompts = rate_per_s * traffic.output_tokens * interval_s, rate_per_s * interval_s
    context_tokens = batch * traffic.context_tokens
    decode_s = steps.decode_s(max(1, math.ceil(batch)), context_tokens)
    if prompts <= 0:
        return decode_s
    needed_s = math.inf
    if shape.mixes:
        new, attention, history = _amounts(prompts, traffic)
        requests = max(1, round(prompts))
        needed_s = steps.mixed_s(new, attention, history, requests, max(1, math.ceil(batch)), context_tokens)
    turns = 1
    while turns <= max(1.0, traffic.short_output_tokens):
        needed_s = min(needed_s, decode_s + _prefill_s(turns * prompts, steps, traffic) / turns)
        turns *= 2
    return needed_s


def _amounts(prompts: float, traffic: Traffic) -> tuple[float, float, float]:
    """New tokens, attention and history of a pass over so many prompts, or over a part of one."""
    history = prompts * traffic.history_tokens
    if prompts < 1:
        history = traffic.history_tokens + (1 - prompts) * traffic.new_tokens / 2
    return prompts * traffic.new_tokens, prompts * traffic.attention, history


def _prefill_s(prompts: float, steps: StepTimes, traffic: Traffic) -> float:
    return steps.prefill_s(*_amounts(prompts, traffic), max(1, round(prompts)))


def find_prompt_s(steps: StepTimes, traffic: Traffic) -> float:
    """Prefill time of one prompt; short ones share a pass."""
    prompts = max(1.0, BATCHED_TOKENS / traffic.new_tokens)
    return _prefill_s(prompts, steps, traffic) / prompts


def disaggregated_rps(steps: StepTimes, traffic: Traffic, shape: FleetShape) -> tuple[float, int]:
    """Requests/s that the fleet bears with roles, and the number of prefill instances then; (0, 0): none."""
    prompt_s, decode_rps = find_prompt_s(steps, traffic), decode_instance_rps(steps, traffic, shape)

    def rate_per_s(prefills: int) -> float:
        usable = usable_share(prefills, prompt_s, shape.ttft_s, traffic.variation)
        return min(prefills * usable / prompt_s, (shape.instances - prefills) * decode_rps)

    # The first term rises with the number of prefill instances, the second falls: by bisection where they meet.
    low, high = 1, shape.instances - 1
    while high - low > 1:
        middle = (low + high) // 2
        usable = usable_share(middle, prompt_s, shape.ttft_s, traffic.variation)
        low, high = (
            (middle, high) if middle * usable / prompt_s < (shape.instances - middle) * decode_rps else (low, middle)
        )
    best = max(((rate_per_s(count), count) for count in (low, high) if 1 <= count < shape.instances), default=(0.0, 0))
    return best if best[0] > 0 else (0.0, 0)


def decode_instance_rps(steps: StepTimes, traffic: Traffic, shape: FleetShape) -> float:
    """Requests/s of one decode instance at the largest batch within target and memory."""

    def fits(batch: float) -> bool:
        return steps.decode_s(max(1, math.ceil(batch)), batch * traffic.context_tokens) <= shape.tpot_s

    batch = _largest(fits, shape.kv_tokens / traffic.context_tokens)
    if batch <= 0:
        return 0.0
    step_s = steps.decode_s(max(1, math.ceil(batch)), batch * traffic.context_tokens)
    return batch / (traffic.output_tokens * step_s)


def usable_share(servers: int, service_s: float, allowed_s: float, variation: float) -> float:
    """The utilisation of ``servers`` at which requests wait as long as their target allows, on average.

    Sakasegawa's approximation of the wait in G/G/m, with Poisson arrivals.
    """
    spare_s = allowed_s - service_s
    if spare_s <= 0:
        return 0.0

    def waits_within(share: float) -> bool:
        wait_s = service_s * share ** (math.sqrt(2 * (servers + 1)) - 1) / (servers * (1 - share))
        return wait_s * (1 + variation) / 2 <= spare_s

    return _largest(waits_within, 1.0)


def _largest(holds: Callable[[float], bool], most: float) -> float:
    """The largest value below ``most`` for which ``holds``, which is true up to it; by bisection."""
    low, high = 0.0, most
    for _ in range(ROUNDS):
        middle = (low + high) / 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low
