"""Every router and planner policy by name (``--policy NAME``), built from one description of the fleet."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from random import Random
from typing import TypeVar

from pla_sglang.checks import Declared, Range, check_fields, declared_fields, knob, require
from pla_sglang.errors import ConfigError
from pla_sglang.policy.arrow.capacity import max_running_tokens
from pla_sglang.policy.arrow.curve import profile_curve, solve_nonnegative
from pla_sglang.policy.arrow.flips import FlipKnobs
from pla_sglang.policy.arrow.policy import ArrowKnobs, ArrowPolicy
from pla_sglang.policy.arrow.predictor import TtftPredictor
from pla_sglang.policy.baselines import dispatch as plain
from pla_sglang.policy.baselines.migration import LoadMigration, LoadMigrationKnobs
from pla_sglang.policy.baselines.scalers import SlaKnobs, SlaScaler, ThresholdKnobs, ThresholdScaler
from pla_sglang.policy.client_gain import ClientGain, ClientGainKnobs
from pla_sglang.policy.combined.colocation import ColocationKnobs, ColocationMode
from pla_sglang.policy.combined.policy import CombinedKnobs, CombinedPolicy, Parts
from pla_sglang.policy.combined.stall_budget import InPlace, InPlaceKnobs
from pla_sglang.policy.dopd.arima import ArimaForecaster
from pla_sglang.policy.dopd.dispatch import DopdDispatcher, DopdDispatchKnobs
from pla_sglang.policy.dopd.forecast import Forecaster, HoltWinters, LastValue, RecentPeak
from pla_sglang.policy.dopd.labels import RatioController, Settling
from pla_sglang.policy.dopd.planner import DopdController, Planner, PlannerKnobs
from pla_sglang.policy.dopd.tables import DecodeTable, PrefillTable
from pla_sglang.policy.interface.decisions import Controller, Dispatcher, PolicySet
from pla_sglang.policy.interface.fleet import Role
from pla_sglang.policy.interface.prefill import PrefillClass
from pla_sglang.policy.interface.step_times import StepTimes
from pla_sglang.policy.pla.averaged_pressure import AveragedPressure
from pla_sglang.policy.pla.fitted_boundary import FittedBoundary, fleet_boundary
from pla_sglang.policy.pla.length_classes import join_pools
from pla_sglang.policy.pla.pressure import PressureController, PressureKnobs
from pla_sglang.policy.pla.spatial import SpatialDispatcher, SpatialKnobs
from pla_sglang.policy.star.horizon import HorizonKnobs
from pla_sglang.policy.star.policy import StarKnobs, StarRescheduler
from pla_sglang.policy.star.predictors import NoPrediction, RemainingPredictor
from pla_sglang.policy.star.select import SelectKnobs

FORECASTERS: Mapping[str, Callable[[], Forecaster]] = {
    "last": LastValue,
    "peak": RecentPeak,
    "holt_winters": HoltWinters,
    "arima": ArimaForecaster,
}
COMBINED_BOUNDARY_TOKENS = 256
IN_PLACE_TOKENS = 2048  # of the combination: what it costs decides, and its own guard on the stall (docs/fleets.md)
Knobs = TypeVar("Knobs")
DEFAULT_FORECASTER = "arima"  # the paper's; others need as few GPU-hours: docs/fleets.md, "Forecasts"


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
            ``COMBINED_BOUNDARY_TOKENS`` in the combination.
        riding_tokens: new tokens of the smallest pass to which engines cut a prefill beside riding decodes: the chunk
            of stock engines with mixed chunks; 1 for engines that cut passes for the next token, as a pass below the
            crossing takes as long as one of one token. None: prefills and decodes take turns.
        small_first: engines run small prefills before larger ones; False: in the order in which they come.
        stateless: instances take either phase of any request. False: as stock engines, they keep their kind and their
            requests.
        migrates: running requests can be moved; False: a policy that does more than that leaves such moves out.
        scales: instances can be started and stopped. False: a planner of counts changes roles, as its ratio says.
        forecaster: one of ``FORECASTERS``, or a function that makes one.
        predictor: of remaining lengths; None: what the driver reports.
        instances_min, instances_max: for policies that plan counts; equal ones: only the ratio is planned.
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
    forecaster: str | Callable[[], Forecaster] = DEFAULT_FORECASTER
    predictor: RemainingPredictor | None = None
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

    def predictor_of_ttft(self) -> TtftPredictor:
        return TtftPredictor({"": profile_curve(self.steps)})

    def running_tokens(self) -> int:
        """Max Running Tokens; at least 1, so that a target no step can meet is late and not an error."""
        found = max_running_tokens(
            self.steps,
            tpot_slo_s=self.tpot_slo_s,
            kv_capacity_tokens=self.kv_capacity_tokens,
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
        return plain.split_roles(self.instances, prefills)

    def client_gain(self) -> ClientGain | None:
        """Of policies that move requests; None: the client's gain does not count."""
        if self.move_gain == 0:
            return None
        return ClientGain(ClientGainKnobs(factor=self.move_gain, base_s=self.move_pause_s), self.steps)

    def make_forecaster(self) -> Callable[[], Forecaster]:
        """Raises ConfigError for a name that is not known."""
        if not isinstance(self.forecaster, str):
            return self.forecaster
        if self.forecaster not in FORECASTERS:
            raise ConfigError(f"forecaster must be one of {', '.join(FORECASTERS)}, got {self.forecaster!r}")
        return FORECASTERS[self.forecaster]


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
    knobs: Mapping[str, tuple[type, ...]] = dataclasses.field(default_factory=dict)

    def find_knob(self, name: str) -> Declared:
        """The field that PART.NAME stands for. Raises ConfigError."""
        configs = [(part, config) for part, of_part in self.knobs.items() for config in of_part]
        known = {f"{part}.{one.field.name}": one for part, config in configs for one in declared_fields(config)}
        if name not in known:
            allowed = ", ".join(known) or "none, as it has no knobs to set"
            raise ConfigError(f"--policy-knob {name!r} is not known to the policy; allowed: {allowed}")
        return known[name]


def on_mixed_instances(make: Callable[[Setup], Dispatcher]) -> Maker:
    """Both phases of a request on one instance, unless the setup asks for a number of prefill instances."""
    return lambda setup: (make(setup), (), plain.split_roles(setup.instances, setup.prefills or 0))


def on_static_split(make: Callable[[Setup], Dispatcher]) -> Maker:
    """Prefill and decode instances, fixed."""
    return lambda setup: (make(setup), (), setup.split())


def _minimal_load(setup: Setup) -> Dispatcher:
    return plain.MinimalLoad(setup.predictor_of_ttft())


def _arrow_policy(setup: Setup, *, adaptive: bool = True) -> ArrowPolicy:
    flips, room = setup.tune("arrow", FlipKnobs()), {"": setup.running_tokens()}
    knobs = ArrowKnobs(setup.ttft_slo_s, setup.tpot_slo_s, room, flips, adaptive=adaptive)
    return ArrowPolicy(setup.tune("arrow", knobs), setup.predictor_of_ttft())


def _arrow(setup: Setup) -> Built:
    policy = _arrow_policy(setup)
    return policy, (policy,), setup.split()


def _load_migration(setup: Setup) -> Built:
    knobs = LoadMigrationKnobs(interval_s=setup.move_interval_s)
    return plain.least_tokens(), (LoadMigration(knobs, setup.client_gain()),), setup.split()


def _star_controller(setup: Setup, *, predict: bool = True) -> StarRescheduler:
    knobs = StarKnobs(
        HorizonKnobs() if predict else HorizonKnobs(steps=0),
        SelectKnobs(migrate_base_s=setup.move_pause_s),
        interval_s=setup.move_interval_s,
        rest_s=setup.move_rest_s,
    )
    return StarRescheduler(knobs, setup.predictor if predict else NoPrediction(), setup.client_gain())


def _star(setup: Setup, *, predict: bool = True) -> Built:
    return plain.least_tokens(), (_star_controller(setup, predict=predict),), setup.split()


def _tables(setup: Setup) -> tuple[PrefillTable, DecodeTable]:
    return PrefillTable.profile(setup.steps), DecodeTable.profile(setup.steps)


def _concurrency(setup: Setup) -> int:
    return max(1, round(setup.running_tokens() / setup.mean_context_tokens))


def _dopd_controller(setup: Setup, kind: type[DopdController] = DopdController) -> DopdController:
    knobs = PlannerKnobs(
        setup.ttft_slo_s,
        _concurrency(setup),
        interval_s=setup.plan_interval_s,
        instances_min=max(2, setup.instances_min),
        instances_max=max(2, setup.instances_max),
        headroom=setup.headroom,
    )
    return kind(Planner(setup.tune("dopd", knobs), *_tables(setup)), setup.make_forecaster())


def _dopd(setup: Setup) -> Built:
    dispatcher = DopdDispatcher(setup.tune("dopd", DopdDispatchKnobs()), setup.predictor_of_ttft())
    if not setup.scales:
        return dispatcher, (_dopd_controller(setup, RatioController), Settling()), setup.split()
    return dispatcher, (_dopd_controller(setup),), setup.split()


def _pla(setup: Setup) -> Built:
    predictor = setup.predictor_of_ttft()
    boundary = fleet_boundary(setup.steps, solve_nonnegative, setup.boundary_tokens)
    dispatcher = SpatialDispatcher(SpatialKnobs(setup.ttft_slo_s), predictor, boundary)
    knobs = PressureKnobs(
        setup.ttft_slo_s,
        tau=setup.pressure_hysteresis,
        cool_down_s=setup.pressure_cool_down_s,
        interval_s=setup.pressure_interval_s,
    )
    return dispatcher, (AveragedPressure(knobs, predictor),), setup.split()


def _threshold(setup: Setup) -> Built:
    dispatcher = plain.MinimalLoad(setup.predictor_of_ttft())
    role_max = max(1, setup.instances_max // 2)
    scaler = ThresholdScaler(ThresholdKnobs(setup.ttft_slo_s, role_max=role_max), dispatcher.predictor)
    return dispatcher, (scaler,), setup.split()


def _sla(setup: Setup) -> Built:
    knobs = SlaKnobs(
        setup.tpot_slo_s,
        _concurrency(setup),
        role_max=max(1, setup.instances_max // 2),
        interval_s=setup.plan_interval_s,
    )
    return _minimal_load(setup), (SlaScaler(knobs, *_tables(setup), setup.make_forecaster()),), setup.split()


def _colocation(setup: Setup, arrow: ArrowPolicy) -> ColocationMode:
    knobs = setup.tune("unite", ColocationKnobs())
    return ColocationMode(knobs, arrow, setup.steps, setup.riding_tokens, small_first=setup.small_first)


def _united_for_good(setup: Setup) -> Built:
    """The combination where no role can change and no request can move: least cost of both phases over the instances
    that do both, Arrow's request scheduling over others."""
    arrow = _arrow_policy(setup, adaptive=False)
    parts = Parts(arrow, unite=_colocation(setup, arrow))
    policy = CombinedPolicy(setup.tune("combined", CombinedKnobs()), parts)
    return policy, (policy,), plain.split_roles(setup.instances, setup.prefills or 0)


def _combined(setup: Setup, *, scaling: bool = False, unite: bool = True) -> Built:
    if unite and not setup.stateless:
        return _united_for_good(setup)
    arrow = _arrow_policy(setup)
    boundary = FittedBoundary(fixed_tokens=setup.boundary_tokens or COMBINED_BOUNDARY_TOKENS)
    local = setup.tune("dopd", DopdDispatchKnobs(local_max_tokens=IN_PLACE_TOKENS))
    parts = Parts(
        arrow,
        in_place=InPlace(setup.tune("in_place", InPlaceKnobs()), arrow, setup.steps, setup.riding_tokens),
        local=DopdDispatcher(local, arrow.predictor),
        spatial=SpatialDispatcher(SpatialKnobs(setup.ttft_slo_s, spill_at=1.0), arrow.predictor, boundary),
        pressure=PressureController(PressureKnobs(setup.ttft_slo_s), arrow.predictor),
        star=_star_controller(setup) if setup.migrates else None,
        planner=_dopd_controller(setup) if scaling else None,
        unite=_colocation(setup, arrow) if unite else None,
    )
    policy = CombinedPolicy(setup.tune("combined", CombinedKnobs()), parts)
    return policy, (policy,), [Role.MIXED] * setup.instances if unite else setup.split()


_ARROW_KNOBS = {"arrow": (ArrowKnobs, FlipKnobs)}
_DOPD_KNOBS = {"dopd": (PlannerKnobs, DopdDispatchKnobs)}
_COMBINED_KNOBS: Mapping[str, tuple[type, ...]] = {
    "combined": (CombinedKnobs,),
    "in_place": (InPlaceKnobs,),
    "dopd": (DopdDispatchKnobs,),
    **_ARROW_KNOBS,
}

POLICIES: Mapping[str, FleetPolicy] = {
    "round-robin": FleetPolicy(on_mixed_instances(lambda setup: plain.RoundRobin()), live=True, length_blind=True),
    "least-requests": FleetPolicy(
        on_mixed_instances(lambda setup: plain.least_requests()), live=True, length_blind=True
    ),
    "least-tokens": FleetPolicy(on_mixed_instances(lambda setup: plain.least_tokens()), live=True, length_blind=True),
    "two-choices": FleetPolicy(
        on_mixed_instances(lambda setup: plain.TwoChoices(Random(setup.seed))), live=True, length_blind=True
    ),
    "cache-aware": FleetPolicy(on_mixed_instances(lambda setup: plain.CacheAware()), live=True),
    "static-pd-round-robin": FleetPolicy(
        on_static_split(lambda setup: plain.RoundRobin()), live=True, length_blind=True, fixed_split=True
    ),
    "static-pd": FleetPolicy(on_static_split(_minimal_load), live=True, fixed_split=True),
    "minimal-load": FleetPolicy(on_static_split(_minimal_load), live=True, fixed_split=True),
    "load-migration": FleetPolicy(_load_migration, live=True, fixed_split=True, migrates=True),
    "threshold-scaler": FleetPolicy(_threshold, scales=True),
    "sla-scaler": FleetPolicy(_sla, scales=True),
    "pla": FleetPolicy(_pla, live=True, pools=True, fixed_split=True),
    "arrow": FleetPolicy(_arrow, live=True, flips=True, knobs=_ARROW_KNOBS),
    "arrow-no-flips": FleetPolicy(
        on_static_split(lambda setup: _arrow_policy(setup, adaptive=False)), live=True, fixed_split=True
    ),
    "star": FleetPolicy(_star, live=True, fixed_split=True, migrates=True),
    "star-no-prediction": FleetPolicy(
        lambda setup: _star(setup, predict=False), live=True, fixed_split=True, migrates=True
    ),
    "dopd": FleetPolicy(_dopd, live=True, flips=True, knobs=_DOPD_KNOBS),
    "combined": FleetPolicy(_combined, live=True, flips=True, knobs={**_COMBINED_KNOBS, "unite": (ColocationKnobs,)}),
    "combined-roles": FleetPolicy(
        lambda setup: _combined(setup, unite=False), live=True, flips=True, knobs=_COMBINED_KNOBS
    ),
    "combined-scaling": FleetPolicy(  # DOPD plans counts of roles
        lambda setup: _combined(setup, scaling=True, unite=False), knobs={**_COMBINED_KNOBS, **_DOPD_KNOBS}
    ),
}


def policy_names() -> list[str]:
    """In the order of the docs: baselines, then the systems."""
    return list(POLICIES)


def live_policy_names() -> list[str]:
    """Those of ``policy_names`` that the router offers."""
    return [name for name, policy in POLICIES.items() if policy.live]


def build(name: str, setup: Setup) -> PolicySet:
    """Fresh objects for one run. Raises ConfigError for a name that is not known, or a setup that does not fit it."""
    policy = POLICIES.get(name)
    if policy is None:
        raise ConfigError(f"policy must be one of {', '.join(POLICIES)}, got {name!r}")
    return build_policy(name, policy, setup)


def build_policy(name: str, policy: FleetPolicy, setup: Setup) -> PolicySet:
    """Fresh objects of ``policy`` for one run, called ``name``. Raises ConfigError for a setup that does not fit it."""
    for knob_name in setup.knobs:
        policy.find_knob(knob_name)
    dispatcher, controllers, roles = policy.make(setup)
    classes = _length_classes(roles) if policy.pools else ()
    return PolicySet(name, dispatcher, controllers, tuple(roles), classes)


def _length_classes(roles: list[Role]) -> tuple[PrefillClass | None, ...]:
    """Pools over the prefill instances; one instance alone takes both classes."""
    prefills = [index for index, role in enumerate(roles) if role is not Role.DECODE]
    if len(prefills) < 2:
        return ()
    classes: list[PrefillClass | None] = [None] * len(roles)
    for index, length_class in zip(prefills, join_pools((), len(prefills)), strict=True):
        classes[index] = length_class
    return tuple(classes)
