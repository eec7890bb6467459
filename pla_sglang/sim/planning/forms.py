"""Forms of a fleet that are compared: a policy, its engines and a step profile, in any number of instances.

A form by name is ``POLICY[/WORD...]``; each word changes one thing against the command line: an order of prefills
(``temporal``), ``mixed`` or ``unmixed``, what deadlines do (``advise`` or ``decide``), a number (chunk tokens), a
profile of the package, or ``split``: prefill and decode instances behind a router that knows both.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from pla_sglang.common.checks import describe_allowed
from pla_sglang.common.errors import ConfigError
from pla_sglang.plugin.config import DEADLINES
from pla_sglang.policy_packages import find_policy
from pla_sglang.profiles import profile_names
from pla_sglang.sim.core.experiment import ENGINES, Experiment

# What stock SGLang 0.5.23 can be started with, and how it starts.
ORDERS = ("fcfs", "shortest-prefill-first", "hrrn")
ROUTERS = ("round-robin", "least-requests", "two-choices", "cache-aware", "least-tokens")
STOCK_CHUNK_TOKENS, STOCK_ORDER = 8192, "fcfs"
# As the flags have the engines, and with engines of ours with mixed batches in which targets decide.
OURS = ("combined", "combined/temporal/mixed/decide")
# As SGLang starts, the best ones that ``python -m bench best_stock`` has found (each router with mixed chunks), and the
# best static split.
STOCK_FORMS = (
    "round-robin",
    "least-tokens/mixed/4096",
    "least-tokens/mixed/4096/shortest-prefill-first",
    "cache-aware/mixed/4096",
    "least-tokens/split",
)
SPLIT = "split"
MIXED = {"mixed": True, "unmixed": False}


@dataclasses.dataclass(frozen=True)
class FleetForm:
    """One form. ``experiment`` has everything but sizes and rate; ``split``: prefill and decode instances, fixed."""

    name: str
    experiment: Experiment
    split: bool

    @property
    def stock(self) -> bool:
        """Stock SGLang can be started like this."""
        return self.experiment.policy in ROUTERS and self.experiment.engine in ORDERS

    def of_size(self, instances: int, prefills: int | None, rate_per_s: float) -> Experiment:
        """So many instances; policies that plan a number of them get no other."""
        return dataclasses.replace(
            self.experiment,
            instances=instances,
            prefills=prefills,
            instances_min=instances,
            instances_max=instances,
            rate_per_s=rate_per_s,
        )


def parse_form(text: str, base: Experiment) -> FleetForm:
    """The form of this name; ``base`` has what it does not say. Raises ConfigError."""
    policy, *words = text.split("/")
    changes: dict[str, object] = {"policy": policy}
    split = False
    for word in words:
        if word == SPLIT:
            split = True
        elif word in MIXED:
            changes["mixed"] = MIXED[word]
        elif word in DEADLINES:
            changes["deadlines"] = word
        elif word in ENGINES:
            changes["engine"] = word
        elif word.isdecimal():
            changes["chunk_tokens"] = int(word)
        elif word in profile_names():
            changes["profile"] = word
        else:
            words_known = (*MIXED, SPLIT, *DEADLINES, "a number of chunk tokens", *ENGINES, *profile_names())
            raise ConfigError(f"--compare {text!r}: {word!r} is not known; {describe_allowed(word, words_known)}")
    experiment = dataclasses.replace(base, **changes)  # type: ignore[arg-type]
    known = find_policy(policy)
    if known.scales:
        raise ConfigError(
            f"policy {policy!r} adds and removes instances as it sees fit, so it has no least number of them; "
            "run it without find-instances, and compare GPU hours"
        )
    if split and not (known.fixed_split or policy in ROUTERS):
        raise ConfigError(f"--compare {text!r}: split is for {', '.join(ROUTERS)}; {policy} has roles of its own")
    return FleetForm(text, experiment, split or known.fixed_split)


def default_forms(base: Experiment) -> list[FleetForm]:
    """Ours, with the engines of the command line where their names say nothing else, and stock ones."""
    stock = dataclasses.replace(base, engine=STOCK_ORDER, chunk_tokens=STOCK_CHUNK_TOKENS, mixed=False)
    return [*(parse_form(text, base) for text in OURS), *(parse_form(text, stock) for text in STOCK_FORMS)]


def parse_forms(names: Sequence[str], base: Experiment) -> list[FleetForm]:
    """Raises ConfigError, also for a name that stands there twice."""
    for place, name in enumerate(names):
        if name in names[:place]:
            raise ConfigError(f"--compare has {name!r} twice; allowed: each once")
    return [parse_form(name, base) for name in names]
