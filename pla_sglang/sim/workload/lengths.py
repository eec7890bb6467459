"""Length models: parametric distributions of token counts, with what they were fitted to.

The figures come from published shares and quantiles (source with each model), not from texts.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

from pla_sglang.common.checks import describe_allowed
from pla_sglang.sim.workload.trace import TraceError


@dataclass(frozen=True)
class LengthModel:
    """A mixture of log-normals, and a share of requests that reach a cap.

    Attributes:
        weights, mus, sigmas: of the log-normals of tokens (natural log); weights add up to 1.
        least, most: draws are rounded and clipped to this range of tokens.
        cap_share: share of draws that are ``most`` independent of the log-normals (answers cut at a limit).
        source: the reproduced figures and their origin.

    Raises:
        TraceError: the lists differ in length, weights do not add up to 1, or a value is out of range.
    """

    weights: tuple[float, ...]
    mus: tuple[float, ...]
    sigmas: tuple[float, ...]
    least: int = 1
    most: int = 32_768
    cap_share: float = 0.0
    source: str = ""

    def __post_init__(self) -> None:
        if not len(self.weights) == len(self.mus) == len(self.sigmas) > 0:
            raise TraceError("a length model needs as many weights as mus and sigmas, at least one")
        if not math.isclose(sum(self.weights), 1.0, abs_tol=1e-6) or min(self.weights) < 0:
            raise TraceError(f"weights {self.weights}; allowed: 0 and more, sum 1")
        if min(self.sigmas) < 0:
            raise TraceError(f"sigmas {self.sigmas}; allowed: 0 and more")
        if not 1 <= self.least <= self.most:
            raise TraceError(f"tokens from {self.least} to {self.most}; allowed: 1 <= least <= most")
        if not 0 <= self.cap_share <= 1:
            raise TraceError(f"cap_share is {self.cap_share}; allowed: 0 to 1")

    def draw(self, rng: random.Random) -> int:
        """One length in tokens."""
        if self.cap_share and rng.random() < self.cap_share:
            return self.most
        part = 0 if len(self.weights) == 1 else rng.choices(range(len(self.weights)), self.weights)[0]
        tokens = round(rng.lognormvariate(self.mus[part], self.sigmas[part]))
        return min(max(tokens, self.least), self.most)


def one(mu: float, sigma: float, *, most: int, cap_share: float = 0.0, source: str = "") -> LengthModel:
    """A single log-normal."""
    return LengthModel((1.0,), (mu,), (sigma,), most=most, cap_share=cap_share, source=source)


_LMSYS = "PLA-Serve Fig. 2: share under 256 tokens; the share over 1,024 is assumed"
_STAR = "STAR Table 2, answers of a 7B reasoning model with a 32K limit"
_STAR_INPUT = "STAR Table 2, prompts"
_SHAREGPT4 = "fit to token lengths of 21,658 ShareGPT-4 turns (project-etalon/etalon, Apache-2.0)"
MODELS: dict[str, LengthModel] = {
    "lmsys_first_turn_prompt": one(5.1948, 1.05582, most=8192, source=f"{_LMSYS}: 63 % and 5 %"),
    "lmsys_later_turn_prompt": one(4.51016, 1.17897, most=8192, source=f"{_LMSYS}: 81 % and 2 %"),
    "star_sharegpt_output": one(7.02824, 1.14425, most=32_675, cap_share=0.17558, source=f"{_STAR}, ShareGPT"),
    "star_alpaca_output": one(6.39929, 1.2944, most=32_690, cap_share=0.22971, source=f"{_STAR}, Alpaca"),
    "star_sharegpt_input": LengthModel(
        (0.6887, 0.3113), (3.1639, 6.3092), (0.7112, 1.0861), source=f"{_STAR_INPUT}, ShareGPT"
    ),
    "star_alpaca_input": LengthModel((1.0,), (2.30259,), (0.31639,), least=3, most=64, source=f"{_STAR_INPUT}, Alpaca"),
    "sharegpt4_first_turn_prompt": LengthModel(
        (0.6175, 0.3825), (3.5678, 5.6582), (0.7016, 1.128), most=7398, source=f"{_SHAREGPT4}, first turns"
    ),
    "sharegpt4_later_turn_prompt": LengthModel(
        (0.8694, 0.1306), (3.1199, 6.1618), (0.9767, 1.1741), most=6330, source=f"{_SHAREGPT4}, later turns"
    ),
    "sharegpt4_output": LengthModel(
        (0.4958, 0.5042), (6.2983, 5.451), (0.346, 0.8501), most=1024, source=f"{_SHAREGPT4}, answers"
    ),
}


def length_model(name: str) -> LengthModel:
    """Raises TraceError for an unknown name, with the known ones."""
    if name not in MODELS:
        raise TraceError(f"length model {name!r} is not known; {describe_allowed(name, sorted(MODELS))}")
    return MODELS[name]


def fixed(tokens: int) -> LengthModel:
    """Always the same length."""
    return LengthModel((1.0,), (math.log(tokens),), (0.0,), least=tokens, most=tokens, source="fixed")
