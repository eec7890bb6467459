"""Cost moments, waiting time and batching timeout (DOPD section IV-A and IV-C, eq. 1 to 10, 17, 18).

Eq. 1 to 5 define the cost of one request as C(L) = k1*H^2*L + k2*H*L^2 + k3*H*H'*L. In seconds that is a*L + b*L^2: the
constants come from a profile, so hidden sizes do not appear here. The Pareto law (eq. 9) is given as its moments.
"""

from __future__ import annotations

import math

from pla_sglang.policy.checks import require


def expected_cost_s(mean_tokens: float, variance: float, linear_s: float, square_s: float) -> float:
    """E[C] of eq. 6 and 7: linear_s * E[L] + square_s * (Var(L) + E[L]^2). By eq. 8 at least C(E[L])."""
    require("variance", variance, 0)
    return linear_s * mean_tokens + square_s * (variance + mean_tokens * mean_tokens)


def pareto_moments(minimum: float, alpha: float) -> tuple[float, float]:
    """Mean and second moment of eq. 9; infinite for alpha at most 1 and at most 2."""
    require("pareto minimum", minimum, 0, above=True)
    require("pareto alpha", alpha, 0, above=True)
    mean = alpha * minimum / (alpha - 1) if alpha > 1 else math.inf
    second = alpha * minimum**2 / (alpha - 2) if alpha > 2 else math.inf
    return mean, second


def utilisation(rate_per_s: float, service_s: float) -> float:
    """rho of eq. 17."""
    require("rate_per_s", rate_per_s, 0)
    require("service_s", service_s, 0)
    return rate_per_s * service_s


def kingman_wait_s(rate_per_s: float, service_s: float, arrival_cv2: float, service_cv2: float) -> float:
    """W_q of eq. 10 for G/G/1; infinite at a utilisation of 1 or more. Exact for M/M/1 and M/D/1 (and all M/G/1)."""
    require("arrival_cv2", arrival_cv2, 0)
    require("service_cv2", service_cv2, 0)
    rho = utilisation(rate_per_s, service_s)
    if rho >= 1:
        return math.inf
    return rho / (1 - rho) * (arrival_cv2 + service_cv2) / 2 * service_s


def batch_timeout_s(wait_s: float, *, safety: float, longest_s: float) -> float:
    """T_timeout of eq. 18, the least that it allows: ``safety`` * W_q, and never more than ``longest_s``.

    Eq. 18 is a lower bound; the least value adds the least wait. Raises ConfigError unless 0 < safety <= 1.
    """
    require("safety", safety, 0, 1, above=True)
    require("longest_s", longest_s, 0)
    return min(safety * wait_s, longest_s)


def servers_for_wait(
    rate_per_s: float,
    service_s: float,
    *,
    budget_s: float,
    arrival_cv2: float,
    service_cv2: float,
) -> int:
    """Least n with wait + service <= budget when n instances share the arrivals evenly (eq. 10 on each).

    Where the service alone exceeds the budget no n is enough: the least n that keeps utilisation at or below 0.8.
    """
    if rate_per_s <= 0:
        return 1
    stable = math.floor(rate_per_s * service_s) + 1
    if service_s >= budget_s:
        return max(1, math.ceil(rate_per_s * service_s / 0.8))
    count = stable
    while kingman_wait_s(rate_per_s / count, service_s, arrival_cv2, service_cv2) + service_s > budget_s:
        count += 1
    return count
