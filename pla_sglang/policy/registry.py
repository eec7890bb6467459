"""Every router and planner policy by name (``--policy NAME``), built from one description of the fleet."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from random import Random

from pla_sglang.errors import ConfigError
from pla_sglang.policy.arrow.capacity import max_running_tokens
from pla_sglang.policy.arrow.curve import profile_curve
from pla_sglang.policy.arrow.policy import ArrowKnobs, ArrowPolicy
from pla_sglang.policy.arrow.predictor import TtftPredictor
from pla_sglang.policy.baselines import dispatch as plain
from pla_sglang.policy.baselines.migration import LoadMigration
from pla_sglang.policy.baselines.scalers import SlaKnobs, SlaScaler, ThresholdKnobs, ThresholdScaler
from pla_sglang.policy.checks import require
from pla_sglang.policy.combined import CombinedKnobs, CombinedPolicy, Parts
from pla_sglang.policy.decisions import Controller, Dispatcher, Observer
from pla_sglang.policy.dopd.dispatch import DopdDispatcher, DopdDispatchKnobs
from pla_sglang.policy.dopd.forecast import Forecaster, HoltWinters, LastValue, RecentPeak
from pla_sglang.policy.dopd.planner import DopdController, Planner, PlannerKnobs
from pla_sglang.policy.dopd.tables import DecodeTable, PrefillTable
from pla_sglang.policy.fleet import Role
from pla_sglang.policy.in_place import InPlace, InPlaceKnobs
from pla_sglang.policy.pla.pressure import PressureController, PressureKnobs
from pla_sglang.policy.pla.spatial import SpatialDispatcher, SpatialKnobs
from pla_sglang.policy.pla.steady import SteadyPressure
from pla_sglang.policy.star.horizon import HorizonKnobs
from pla_sglang.policy.star.policy import StarKnobs, StarRescheduler
from pla_sglang.policy.star.predictors import NoPrediction, RemainingPredictor
from pla_sglang.policy.steps import StepTimes
from pla_sglang.policy.types import PrefillClass
from pla_sglang.policy.unite import Unite, UniteKnobs

FORECASTERS = ("last", "peak", "holt_winters", "arima")
IN_PLACE_TOKENS = 2048  # of the combination: what it costs decides, and its own guard on the stall (docs/fleets.md)
DEFAULT_FORECASTER = "arima"  # fewest GPU-hours at equal attainment: docs/fleets.md, "Forecasts"


@dataclasses.dataclass(frozen=True)
class Setup:
    """What policies are built from.

    Attributes:
        steps: step profile of an instance.
        kv_capacity_tokens: of an instance.
        ttft_slo_s, tpot_slo_s: targets.
        instances: how many there are at the start.
        prefills: prefill instances of a static split; None: half of them, rounded down, at least one.
        seed: of policies that draw at random.
        mean_context_tokens: typical tokens of a running request.
        boundary_tokens: new tokens at which a prefill is long.
        forecaster: one of ``FORECASTERS``, or a function that makes one.
        predictor: of remaining lengths; None: what the driver reports.
        instances_min, instances_max: for policies that plan counts; equal ones: only the ratio is planned.
        plan_interval_s, headroom: of policies that plan from a forecast (``PlannerKnobs``).
        pressure_interval_s, pressure_cool_down_s, pressure_hysteresis: of PLA pools (``PressureKnobs``).
    """

    steps: StepTimes
    kv_capacity_tokens: int
    ttft_slo_s: float
    tpot_slo_s: float
    instances: int = 8
    prefills: int | None = None
    seed: int = 1
    mean_context_tokens: float = 1024.0
    boundary_tokens: int = 256
    forecaster: str | Callable[[], Forecaster] = DEFAULT_FORECASTER
    predictor: RemainingPredictor | None = None
    instances_min: int = 2
    instances_max: int = 64
    plan_interval_s: float = 60.0
    headroom: float = 1.0
    pressure_interval_s: float = 1.0
    pressure_cool_down_s: float = 10.0
    pressure_hysteresis: float = 0.5

    def __post_init__(self) -> None:
        require("ttft_slo_s", self.ttft_slo_s, 0, above=True)
        require("tpot_slo_s", self.tpot_slo_s, 0, above=True)
        require("kv_capacity_tokens", self.kv_capacity_tokens, 1)
        require("instances", self.instances, 1)
        require("mean_context_tokens", self.mean_context_tokens, 0, above=True)

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

    def split(self) -> list[Role]:
        """Roles at the start of a fleet with prefill and decode pools; one instance alone is MIXED."""
        if self.instances == 1:
            return [Role.MIXED]
        prefills = max(1, self.instances // 2) if self.prefills is None else self.prefills
        return plain.split_roles(self.instances, prefills)

    def make_forecaster(self) -> Callable[[], Forecaster]:
        """Raises ConfigError for a name that is not known."""
        if not isinstance(self.forecaster, str):
            return self.forecaster
        if self.forecaster == "arima":
            from pla_sglang.policy.dopd.arima import ArimaForecaster  # statsmodels takes a second to import

            return ArimaForecaster
        known: dict[str, Callable[[], Forecaster]] = {
            "last": LastValue,
            "peak": RecentPeak,
            "holt_winters": HoltWinters,
        }
        if self.forecaster not in known:
            raise ConfigError(f"forecaster must be one of {', '.join(FORECASTERS)}, got {self.forecaster!r}")
        return known[self.forecaster]


@dataclasses.dataclass(frozen=True)
class PolicySet:
    """A policy ready to drive a fleet.

    Attributes:
        roles: one an instance at the start.
        length_classes: one an instance at the start; empty: none has one.
    """

    name: str
    dispatcher: Dispatcher
    controllers: tuple[Controller, ...]
    roles: tuple[Role, ...]
    length_classes: tuple[PrefillClass | None, ...] = ()

    def observers(self) -> list[Observer]:
        """Who wants reports, each object once."""
        found: dict[int, Observer] = {}
        for part in (self.dispatcher, *self.controllers):
            if isinstance(part, Observer):
                found[id(part)] = part
        return list(found.values())


Maker = Callable[[Setup], tuple[Dispatcher, tuple[Controller, ...], list[Role]]]


def _mixed(make: Callable[[Setup], Dispatcher]) -> Maker:
    """Both phases of a request on one instance."""
    return lambda setup: (make(setup), (), [Role.MIXED] * setup.instances)


def _static(make: Callable[[Setup], Dispatcher]) -> Maker:
    """Prefill and decode instances, fixed."""
    return lambda setup: (make(setup), (), setup.split())


def _minimal_load(setup: Setup) -> Dispatcher:
    return plain.MinimalLoad(setup.predictor_of_ttft())


def _arrow_policy(setup: Setup, *, adaptive: bool = True) -> ArrowPolicy:
    knobs = ArrowKnobs(setup.ttft_slo_s, setup.tpot_slo_s, {"": setup.running_tokens()}, adaptive=adaptive)
    return ArrowPolicy(knobs, setup.predictor_of_ttft())


def _arrow(setup: Setup) -> tuple[Dispatcher, tuple[Controller, ...], list[Role]]:
    policy = _arrow_policy(setup)
    return policy, (policy,), setup.split()


def _star_controller(setup: Setup, *, predict: bool = True) -> StarRescheduler:
    if predict:
        return StarRescheduler(StarKnobs(), setup.predictor)
    return StarRescheduler(StarKnobs(horizon=HorizonKnobs(steps=0)), NoPrediction())


def _star(setup: Setup, *, predict: bool = True) -> tuple[Dispatcher, tuple[Controller, ...], list[Role]]:
    return plain.least_tokens(), (_star_controller(setup, predict=predict),), setup.split()


def _load_migration(setup: Setup) -> tuple[Dispatcher, tuple[Controller, ...], list[Role]]:
    return plain.least_tokens(), (LoadMigration(),), setup.split()


def _tables(setup: Setup) -> tuple[PrefillTable, DecodeTable]:
    return PrefillTable.profile(setup.steps), DecodeTable.profile(setup.steps)


def _concurrency(setup: Setup) -> int:
    return max(1, round(setup.running_tokens() / setup.mean_context_tokens))


def _dopd_controller(setup: Setup) -> DopdController:
    knobs = PlannerKnobs(
        setup.ttft_slo_s,
        _concurrency(setup),
        interval_s=setup.plan_interval_s,
        instances_min=max(2, setup.instances_min),
        instances_max=max(2, setup.instances_max),
        headroom=setup.headroom,
    )
    return DopdController(Planner(knobs, *_tables(setup)), setup.make_forecaster())


def _dopd(setup: Setup) -> tuple[Dispatcher, tuple[Controller, ...], list[Role]]:
    dispatcher = DopdDispatcher(DopdDispatchKnobs(), setup.predictor_of_ttft())
    return dispatcher, (_dopd_controller(setup),), setup.split()


def _pla(setup: Setup) -> tuple[Dispatcher, tuple[Controller, ...], list[Role]]:
    predictor = setup.predictor_of_ttft()
    dispatcher = SpatialDispatcher(SpatialKnobs(setup.ttft_slo_s, setup.boundary_tokens), predictor)
    knobs = PressureKnobs(
        setup.ttft_slo_s,
        tau=setup.pressure_hysteresis,
        cool_down_s=setup.pressure_cool_down_s,
        interval_s=setup.pressure_interval_s,
    )
    return dispatcher, (SteadyPressure(knobs, predictor),), setup.split()


def _threshold(setup: Setup) -> tuple[Dispatcher, tuple[Controller, ...], list[Role]]:
    dispatcher = plain.MinimalLoad(setup.predictor_of_ttft())
    role_max = max(1, setup.instances_max // 2)
    scaler = ThresholdScaler(ThresholdKnobs(setup.ttft_slo_s, role_max=role_max), dispatcher.predictor)
    return dispatcher, (scaler,), setup.split()


def _sla(setup: Setup) -> tuple[Dispatcher, tuple[Controller, ...], list[Role]]:
    knobs = SlaKnobs(
        setup.tpot_slo_s,
        _concurrency(setup),
        role_max=max(1, setup.instances_max // 2),
        interval_s=setup.plan_interval_s,
    )
    return _minimal_load(setup), (SlaScaler(knobs, *_tables(setup), setup.make_forecaster()),), setup.split()


def _combined(
    setup: Setup, *, scaling: bool = False, unite: bool = True
) -> tuple[Dispatcher, tuple[Controller, ...], list[Role]]:
    arrow = _arrow_policy(setup)
    parts = Parts(
        arrow,
        in_place=InPlace(InPlaceKnobs(), arrow, setup.steps),
        local=DopdDispatcher(DopdDispatchKnobs(local_max_tokens=IN_PLACE_TOKENS), arrow.predictor),
        spatial=SpatialDispatcher(SpatialKnobs(setup.ttft_slo_s, setup.boundary_tokens, spill_at=1.0), arrow.predictor),
        pressure=PressureController(PressureKnobs(setup.ttft_slo_s), arrow.predictor),
        star=_star_controller(setup),
        planner=_dopd_controller(setup) if scaling else None,
        unite=Unite(UniteKnobs(), arrow, setup.steps) if unite else None,
    )
    policy = CombinedPolicy(CombinedKnobs(), parts)
    return policy, (policy,), [Role.MIXED] * setup.instances if unite else setup.split()


POLICIES: Mapping[str, Maker] = {
    "round-robin": _mixed(lambda setup: plain.RoundRobin()),
    "least-requests": _mixed(lambda setup: plain.least_requests()),
    "least-tokens": _mixed(lambda setup: plain.least_tokens()),
    "two-choices": _mixed(lambda setup: plain.TwoChoices(Random(setup.seed))),
    "cache-aware": _mixed(lambda setup: plain.CacheAware()),
    "static-pd-round-robin": _static(lambda setup: plain.RoundRobin()),
    "static-pd": _static(_minimal_load),
    "minimal-load": _static(_minimal_load),
    "load-migration": _load_migration,
    "threshold-scaler": _threshold,
    "sla-scaler": _sla,
    "pla": _pla,
    "arrow": _arrow,
    "arrow-no-flips": _static(lambda setup: _arrow_policy(setup, adaptive=False)),
    "star": _star,
    "star-no-prediction": lambda setup: _star(setup, predict=False),
    "dopd": _dopd,
    "combined": _combined,
    "combined-roles": lambda setup: _combined(setup, unite=False),
    "combined-scaling": lambda setup: _combined(setup, scaling=True, unite=False),  # DOPD plans counts of roles
}


def policy_names() -> list[str]:
    """In the order of the docs: baselines, then the systems."""
    return list(POLICIES)


def build(name: str, setup: Setup) -> PolicySet:
    """Fresh objects for one run. Raises ConfigError for a name that is not known, or a setup that does not fit it."""
    maker = POLICIES.get(name)
    if maker is None:
        raise ConfigError(f"policy must be one of {', '.join(POLICIES)}, got {name!r}")
    dispatcher, controllers, roles = maker(setup)
    return PolicySet(name, dispatcher, controllers, tuple(roles), _length_classes(name, roles))


def _length_classes(name: str, roles: list[Role]) -> tuple[PrefillClass | None, ...]:
    """Only ``pla`` starts with pools, alternating over its prefill instances; one instance alone takes both."""
    prefills = [index for index, role in enumerate(roles) if role is not Role.DECODE]
    if name != "pla" or len(prefills) < 2:
        return ()
    classes: list[PrefillClass | None] = [None] * len(roles)
    for place, index in enumerate(prefills):
        classes[index] = PrefillClass.SHORT if place % 2 else PrefillClass.LONG
    return tuple(classes)
