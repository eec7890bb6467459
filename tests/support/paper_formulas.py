"""Closed forms of the papers that no decision uses: the product's models are held to them, and analysis may need them.

PLA-Serve section 2: boundaries and the penalty of mixing. DOPD section IV-A: eq. 1 to 5 define the cost of one request
as C(L) = k1*H^2*L + k2*H*L^2 + k3*H*H'*L. In seconds that is a*L + b*L^2: the constants come from a profile, so hidden
sizes do not appear here. The Pareto law (eq. 9) is given as its moments.
"""

from __future__ import annotations

import math

from pla_sglang.common.checks import require


def prefill_boundary(alpha: float, beta: float, gamma_w: float) -> float:
    """L_m in tokens of a first prefill: ``max(0, (gamma_w - beta) / alpha)`` (section 2.1).

    ``alpha`` is in s/token^2, ``beta`` and ``gamma_w`` in s/token. Raises ConfigError unless ``alpha > 0``.
    """
    require("alpha", alpha, 0, above=True)
    return max(0.0, (gamma_w - beta) / alpha)


def reprefill_boundary(alpha: float, beta: float, gamma_w: float, gamma_r: float, history_tokens: float) -> float:
    """L_m in tokens of a re-prefill on ``history_tokens`` cached tokens (section 2.1).

    Tends to ``gamma_r / (2 * alpha)`` for long histories. Units as above. Raises ConfigError unless ``alpha > 0``.
    """
    require("alpha", alpha, 0, above=True)
    linear = 2 * alpha * history_tokens + beta - gamma_w
    constant = gamma_r * history_tokens
    root = math.sqrt(linear * linear + 4 * alpha * constant)
    return 2 * constant / (linear + root) if linear > 0 else (root - linear) / (2 * alpha)


def head_of_line_penalty_s(rate: float, short_share: float, load: float, long_s: float, short_s: float) -> float:
    """Mean wait that mixing two classes adds in M/G/1 first come first served (section 2.2).

    Raises ValueError unless ``0 <= load < 1``.
    """
    if not 0 <= load < 1:
        raise ValueError(f"load must be in [0, 1), got {load}")
    return rate * short_share * (1 - short_share) / (2 * (1 - load)) * (long_s - short_s) ** 2


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
