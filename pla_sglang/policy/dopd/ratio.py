"""DOPD section IV-C in closed form: the optimal P/D ratio, how many instances keep waiting short, how long batches may
wait (eq. 10, 15, 17, 18)."""

from __future__ import annotations

import math

from pla_sglang.common.checks import require


def optimal_ratio(*, prefill_s: float, step_s: float, output_tokens: float, concurrency: float) -> float:
    """n_p / n_d of eq. 15: n_p / t_p = n_d * cc_d / (t_d * OSL).

    ``prefill_s`` is t_p of one request, ``step_s`` t_d of one decode step at ``concurrency``. Raises ConfigError unless
    all are above 0.
    """
    require("prefill_s", prefill_s, 0, above=True)
    require("step_s", step_s, 0, above=True)
    require("output_tokens", output_tokens, 0, above=True)
    require("concurrency", concurrency, 0, above=True)
    return concurrency * prefill_s / (step_s * output_tokens)


def kingman_wait_s(rate_per_s: float, service_s: float, arrival_cv2: float, service_cv2: float) -> float:
    """W_q of eq. 10 for G/G/1; infinite at a utilisation of 1 or more. Exact for M/M/1 and M/D/1 (and all M/G/1)."""
    require("rate_per_s", rate_per_s, 0)
    require("service_s", service_s, 0)
    require("arrival_cv2", arrival_cv2, 0)
    require("service_cv2", service_cv2, 0)
    rho = rate_per_s * service_s  # eq. 17
    if rho >= 1:
        return math.inf
    return rho / (1 - rho) * (arrival_cv2 + service_cv2) / 2 * service_s


def split_cv2(arrival_cv2: float, count: int) -> float:
    """What varies so much at one of ``count`` instances that share arrivals at random. Exact for renewal processes.

    A burst is shared by all. With the whole stream's variation on each of them, a fleet would be planned for bursts
    that none of its instances sees. Steady arrivals stay as they are: who dispatches them does not add chance.
    """
    return min(arrival_cv2, 1 + (arrival_cv2 - 1) / count)


def servers_for_wait(
    rate_per_s: float,
    service_s: float,
    *,
    budget_s: float,
    arrival_cv2: float,
    service_cv2: float,
) -> int:
    """Least n with wait + service <= budget when n instances share the arrivals (eq. 10 on each, ``split_cv2``).

    Where the service alone exceeds the budget no n is enough: the least n that keeps utilisation at or below 0.8.
    """
    if rate_per_s <= 0:
        return 1
    stable = math.floor(rate_per_s * service_s) + 1
    if service_s >= budget_s:
        return max(1, math.ceil(rate_per_s * service_s / 0.8))
    count = stable
    while (
        kingman_wait_s(rate_per_s / count, service_s, split_cv2(arrival_cv2, count), service_cv2) + service_s > budget_s
    ):
        count += 1
    return count


def batch_timeout_s(wait_s: float, *, safety: float, longest_s: float) -> float:
    """T_timeout of eq. 18, the least that it allows: ``safety`` * W_q, and never more than ``longest_s``.

    Eq. 18 is a lower bound; the least value adds the least wait. Raises ConfigError unless 0 < safety <= 1.
    """
    require("safety", safety, 0, 1, above=True)
    require("longest_s", longest_s, 0)
    return min(safety * wait_s, longest_s)
