"""How a fleet policy is made: one description of the fleet, and what drivers must know of a policy before.

Each folder of policies exports its own in ``fleet.py``; ``registry.py`` lists them by name (``--policy NAME``).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import TypeVar

from pla_sglang.common.checks import Choice, Declared, Range, check_fields, knob, knobs_of_parts, require
from pla_sglang.common.errors import ConfigError
from pla_sglang.policy.common.arima import ArimaForecaster
from pla_sglang.policy.common.capacity import max_running_tokens
from pla_sglang.policy.common.client_gain import ClientGain, ClientGainKnobs
from pla_sglang.policy.common.curve import profile_curve
from pla_sglang.policy.common.dispatch import split_roles
from pla_sglang.policy.common.forecast import Forecaster, HoltWinters, LastValue, RecentPeak, SteadyLevel
from pla_sglang.policy.common.judged import Judged
from pla_sglang.policy.common.predictor import PredictorKnobs, TtftPredictor
from pla_sglang.policy.common.tables import DecodeTable, PrefillTable
from pla_sglang.policy.interface.decisions import Controller, Dispatcher
from pla_sglang.policy.interface.fleet import Role
from pla_sglang.policy.interface.step_times import StepTimes

_JUDGED: Mapping[
    str, Callable[[], Forecaster]
] = {  # the first is asked while nothing is known: it lets nobody go early
    "peak": RecentPeak,
    "arima": ArimaForecaster,
    "last": LastValue,
    "holt_winters": HoltWinters,
    "level": SteadyLevel,
}
FORECASTERS: Mapping[str, Callable[[], Forecaster]] = {
    "last": LastValue,
    "peak": RecentPeak,
    "holt_winters": HoltWinters,
    "arima": ArimaForecaster,
    "level": SteadyLevel,
    "judged": lambda: Judged(_JUDGED),
}
Knobs = TypeVar("Knobs")
NO_PLANNER = "none"
PLANNER_NAMES = (NO_PLANNER, "dopd", "threshold", "sla")  # made by ``policy/planners.py``
DEFAULT_FORECASTER = "judged"  # of planners: none of those it asks needs less everywhere, docs/benchmarks/planning.md
PAPER_FORECASTER = "arima"  # DOPD's

NO_GAIN = 1e9  # pauses: more than any lighter step gains


@dataclasses.dataclass(frozen=True)
class Setup:
    """What policies are built from.

    Attributes:
        steps: step profile of an instance.
        kv_capacity_tokens: of an instance.
        ttft_slo_s, tpot_slo_s: targets.
        instances: how many there are at the start.
        prefills: prefill instances of a static split; None: half of them, rounded down, at least one, and none for
            policies that serve both phases on every instance.
        seed: of policies that draw at random.
        mean_context_tokens: typical tokens of a running request.
        boundary_tokens: new tokens at which a prefill is long; None: fitted to the passes (``FittedBoundary``), but
            fixed in the combination (``combined/fleet.py``).
        riding_tokens: new tokens of the smallest pass to which engines cut a prefill beside piggybacked decodes: the
            chunk of stock engines with mixed chunks; 1 for engines that cut passes for the next token, as a pass below
            the crossing takes as long as one of one token. None: prefills and decodes take turns.
        small_first: engines run small prefills before larger ones; False: in the order in which they come.
        stateless: instances take either phase of any request. False: as stock engines, they keep their kind and their
            requests.
        migrates: running requests can be moved; False: a policy that does more than that leaves such moves out.
        scales: a policy that plans counts of its own accord may start and stop instances. False: it changes roles, as
            its ratio says.
        planner: what plans how many instances there are, beside any policy; a policy's own planner steps back.
        forecaster: one of ``FORECASTERS``; None: that of the planner, or of the paper where a policy plans by itself.
        instances_min, instances_max: for planners and policies that plan counts; equal ones: only the ratio is planned.
        plan_interval_s, headroom: of policies that plan from a forecast (``PlannerKnobs``).
        pressure_interval_s, pressure_cool_down_s, pressure_hysteresis: of PLA pools (``PressureKnobs``).
        move_interval_s, move_rest_s: of policies that move requests: between two decisions, and between two moves of a
            request.
        move_pause_s: predicted pause of a move, without the time that its KV cache takes.
        move_gain: a request moves only where its answer gains so many times the predicted pause (``client_gain.py``);
            0: whether it gains or not, as in the papers.
        knobs: of parts of the policy (``FleetPolicy.knobs``), by PART.NAME; others keep what the policy has.
    """

    steps: StepTimes
    kv_capacity_tokens: int
    ttft_slo_s: float
    tpot_slo_s: float
    instances: int = knob(8, allowed=Range(1))
    prefills: int | None = None
    seed: int = 1
    mean_context_tokens: float = knob(1024.0, allowed=Range(0, above=True))
    boundary_tokens: int | None = None
    riding_tokens: int | None = knob(None, allowed=Range(1))
    small_first: bool = False
    stateless: bool = True
    migrates: bool = True
    scales: bool = True
    planner: str = knob(NO_PLANNER, allowed=Choice(PLANNER_NAMES))
    forecaster: str | None = None
    instances_min: int = 2
    instances_max: int = 64
    plan_interval_s: float = 60.0
    headroom: float = 1.0
    pressure_interval_s: float = 1.0
    pressure_cool_down_s: float = 10.0
    pressure_hysteresis: float = 0.5
    move_interval_s: float = 0.5
    move_rest_s: float = 5.0
    move_pause_s: float = 0.02
    move_gain: float = knob(0.0, allowed=Range(0))
    knobs: Mapping[str, float] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        check_fields(self)
        require("ttft_slo_s", self.ttft_slo_s, 0, above=True)
        require("tpot_slo_s", self.tpot_slo_s, 0, above=True)
        require("kv_capacity_tokens", self.kv_capacity_tokens, 1)
        if self.planner != NO_PLANNER:
            require("instances_min", self.instances_min, 1)
            require("instances_max", self.instances_max, self.instances_min)

    def predictor_of_ttft(self) -> TtftPredictor:
        return TtftPredictor({"": profile_curve(self.steps)}, self.tune("predictor", PredictorKnobs()))

    def running_tokens(self, steps: StepTimes | None = None, kv_capacity_tokens: int | None = None) -> int:
        """Max Running Tokens; at least 1, so that a target no step can meet is late and not an error.

        ``steps``, ``kv_capacity_tokens``: of one instance; None: the setup's.
        """
        found = max_running_tokens(
            steps or self.steps,
            tpot_slo_s=self.tpot_slo_s,
            kv_capacity_tokens=kv_capacity_tokens or self.kv_capacity_tokens,
            mean_context_tokens=self.mean_context_tokens,
        )
        return max(1, found)

    def tune(self, part: str, knobs: Knobs) -> Knobs:
        """``knobs``, a dataclass object of that part, with those of its fields that were set. Raises ConfigError."""
        named = {f"{part}.{field.name}": field.name for field in dataclasses.fields(knobs)}  # type: ignore[arg-type]
        given = {named[name]: value for name, value in self.knobs.items() if name in named}
        return dataclasses.replace(knobs, **given)  # type: ignore[type-var]

    def split(self) -> list[Role]:
        """Roles at the start of a fleet with prefill and decode pools; one instance alone is MIXED."""
        if self.instances == 1:
            return [Role.MIXED]
        prefills = max(1, self.instances // 2) if self.prefills is None else self.prefills
        return split_roles(self.instances, prefills)

    def client_gain(self, *, balance: bool = True) -> ClientGain | None:
        """What policies that move requests ask; None: the client's gain does not count. ``balance`` False: no client
        gains by lighter steps.
        """
        if self.move_gain == 0:
            return None
        factor = self.move_gain if balance else NO_GAIN
        return ClientGain(ClientGainKnobs(factor=factor, base_s=self.move_pause_s), self.steps)

    def make_forecaster(self, default: str = DEFAULT_FORECASTER) -> Callable[[], Forecaster]:
        """Raises ConfigError for a name that is not known."""
        chosen = default if self.forecaster is None else self.forecaster
        if chosen not in FORECASTERS:
            raise ConfigError(f"forecaster must be one of {', '.join(FORECASTERS)}, got {chosen!r}")
        return FORECASTERS[chosen]

    def tables(self) -> tuple[PrefillTable, DecodeTable]:
        """What policies that plan how many instances there are look up."""
        return PrefillTable.profile(self.steps), DecodeTable.profile(self.steps)

    def concurrency(self) -> int:
        """Requests that one decode instance serves within its TPOT target."""
        return max(1, round(self.running_tokens() / self.mean_context_tokens))


Built = tuple[Dispatcher, tuple[Controller, ...], list[Role]]
Maker = Callable[[Setup], Built]


@dataclasses.dataclass(frozen=True)
class FleetPolicy:
    """How a policy is made, and what drivers must know of it before.

    Attributes:
        make: its dispatcher, its controllers, and the role of each instance at the start.
        live: the router offers it, as it can carry out what the policy decides; before stock instances, whose roles are
            fixed, the rest of it.
        length_blind: it looks at neither lengths nor prefixes of prompts, so the estimate of a relay will do.
        pools: prefill instances are in pools for short and for long prompts, from the start.
        fixed_split: the roles that instances have at the start are theirs for good, so their number is a choice.
        flips: it changes the roles of stateless instances.
        migrates: what it decides beside the place of a request is that running requests move.
        scales: it adds and removes instances by limits that no fleet of a fixed size can be given.
        own_planner: the planner that its ``make`` adds by itself where a setup names it.
        knobs: names of its parts, and the dataclasses of each that it tunes (``Setup.tune``): what operators may set.
    """

    make: Maker
    live: bool = False
    length_blind: bool = False
    pools: bool = False
    fixed_split: bool = False
    flips: bool = False
    migrates: bool = False
    scales: bool = False
    own_planner: str = NO_PLANNER
    knobs: Mapping[str, tuple[type, ...]] = dataclasses.field(default_factory=dict)

    def find_knob(self, name: str) -> Declared:
        """The field that PART.NAME stands for. Raises ConfigError."""
        known = knobs_of_parts(self.knobs)
        if name not in known:
            allowed = ", ".join(known) or "none, as it has no knobs to set"
            raise ConfigError(f"--policy-knob {name!r} is not known to the policy; allowed: {allowed}")
        return known[name]


def on_mixed_instances(make: Callable[[Setup], Dispatcher]) -> Maker:
    """Both phases of a request on one instance, unless the setup asks for a number of prefill instances."""
    return lambda setup: (make(setup), (), split_roles(setup.instances, setup.prefills or 0))


def on_static_split(make: Callable[[Setup], Dispatcher]) -> Maker:
    """Prefill and decode instances, fixed."""
    return lambda setup: (make(setup), (), setup.split())
