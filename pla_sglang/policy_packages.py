"""Fleet policies by name: those of the registry, and those that installed packages offer.

A package offers a policy by an entry point of the group ``pla_sglang.policies``: its name is that of the policy, its
object a ``registry.FleetPolicy``. Only the metadata of packages is read until a policy is asked for by its name.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Sequence
from importlib.metadata import EntryPoint, EntryPoints, entry_points
from typing import Any, ClassVar

from pla_sglang.common.checks import describe_allowed
from pla_sglang.common.cli import parse_pairs
from pla_sglang.common.errors import ConfigError, PlaError
from pla_sglang.policy import registry
from pla_sglang.policy.common.fleet_policy import NO_PLANNER
from pla_sglang.policy.interface.decisions import PolicySet
from pla_sglang.policy.interface.fleet import Role
from pla_sglang.policy.planners import with_planner
from pla_sglang.policy.registry import FleetPolicy, Setup
from pla_sglang.profiles.load import load_profile

GROUP = "pla_sglang.policies"
TRIAL_PROFILE = "h100-llama3.1-8b-tp1"


@dataclasses.dataclass(frozen=True, slots=True)
class PolicyName:
    """Names that ``--policy`` takes, as a ``checks.Rule``; ``live``: of the router, without those it cannot run."""

    problem: ClassVar[str] = "is not known"
    live: bool = False

    def allows(self, value: Any) -> bool:
        return value in self.words

    def __str__(self) -> str:
        return ", ".join(self.words)

    @property
    def words(self) -> list[str]:
        return [*(registry.live_policy_names() if self.live else registry.policy_names()), *installed_names()]


def installed_names() -> list[str]:
    """Names of the policies that other packages offer, sorted; without those that are ours too."""
    return sorted(_points(tuple(sys.path)).names - registry.POLICIES.keys())


def policy_names() -> list[str]:
    """All that can be built: the registry's, then those of other packages."""
    return [*registry.policy_names(), *installed_names()]


@functools.cache
def _points(path: tuple[str, ...]) -> EntryPoints:
    """Entry points of the packages on ``path``, which is ``sys.path``: reading them all takes 20 ms."""
    return entry_points(group=GROUP)


def find_policy(name: str) -> FleetPolicy:
    """Raises ConfigError: nobody has a policy of this name, two have one, or its package cannot be loaded."""
    points = tuple(_points(tuple(sys.path)).select(name=name))
    own = registry.POLICIES.get(name)
    owners = ["pla_sglang itself"] * (own is not None) + [package_of(point) for point in points]
    if len(owners) > 1:
        raise ConfigError(f"policy {name!r} is offered by {' and by '.join(owners)}; uninstall all but one")
    if own is not None:
        return own
    if not points:
        raise ConfigError(f"policy {name!r} is not known; {describe_allowed(name, policy_names())}")
    return _load(points[0])


def read_knobs(name: str, texts: Sequence[str], planner: str = NO_PLANNER) -> dict[str, float]:
    """``Setup.knobs`` from texts of the form PART.NAME=VALUE, for the policy of this ``name`` and a planner beside it.

    Raises ConfigError.
    """
    return parse_pairs("--policy-knob", texts, with_planner(find_policy(name), planner).find_knob)


def find_live_policy(name: str, knobs: Sequence[str] = (), planner: str = NO_PLANNER) -> FleetPolicy:
    """As ``find_policy``, for the router. One of another package, or with ``knobs`` (as in ``read_knobs``), is built
    once, so that mistakes are seen at the start. Raises ConfigError, also for one that stock instances cannot carry
    out."""
    policy = find_policy(name)
    if not policy.live:
        raise ConfigError(f"policy {name!r} is not for the router, as it is not marked live; simulate runs it")
    set_knobs = read_knobs(name, knobs, planner)
    if set_knobs or name not in registry.POLICIES:
        build(name, _trial_setup(knobs=set_knobs, planner=planner))
    return policy


def moves_requests(name: str, *, migrates: bool) -> bool:
    """True if the policy orders moves of running requests in a fleet of stateless instances; ``migrates``: the router
    can move them. Raises ConfigError as ``build``."""
    return build(name, _trial_setup(stateless=True, migrates=migrates, scales=False)).moves_requests()


def _trial_setup(**fields: Any) -> Setup:
    profile = load_profile(TRIAL_PROFILE)
    return Setup(profile, kv_capacity_tokens=profile.kv_capacity_tokens, ttft_slo_s=1.0, tpot_slo_s=0.1, **fields)


def build(name: str, setup: Setup) -> PolicySet:
    """Fresh objects for one run. Raises ConfigError: as ``find_policy``, or the policy cannot be made."""
    policy = find_policy(name)
    if name in registry.POLICIES:
        return registry.build_policy(name, policy, setup)
    (point,) = _points(tuple(sys.path)).select(name=name)
    try:
        built = registry.build_policy(name, policy, setup)
    except PlaError:
        raise
    except Exception as error:  # code of others may raise anything; the message says whose it is
        raise ConfigError(f"{_subject(point)} cannot be made: {type(error).__name__}: {error}") from error
    fault = _fault_of(built, setup)
    if fault:
        raise ConfigError(f"{_subject(point)} {fault}")
    return built


def package_of(point: EntryPoint) -> str:
    """Name and version of the package that has it."""
    return "a package without a name" if point.dist is None else f"package {point.dist.name} {point.dist.version}"


def _subject(point: EntryPoint) -> str:
    return f"policy {point.name!r} of {package_of(point)} ({point.value})"


def _load(point: EntryPoint) -> FleetPolicy:
    """Imports the package. Raises ConfigError."""
    try:
        offered = point.load()
    except Exception as error:  # of others, as in ``build``
        raise ConfigError(f"{_subject(point)} cannot be loaded: {type(error).__name__}: {error}") from error
    if not isinstance(offered, FleetPolicy):
        raise ConfigError(f"{_subject(point)} is a {type(offered).__name__}; allowed: a registry.FleetPolicy")
    return offered


def _fault_of(built: PolicySet, setup: Setup) -> str:
    """What drivers could not work with; empty: nothing."""
    for call in ("dispatch", "place_decode"):
        if not callable(getattr(built.dispatcher, call, None)):
            return f"has a dispatcher of type {type(built.dispatcher).__name__}, without {call}()"
    for controller in built.controllers:
        if not callable(getattr(controller, "tick", None)) or not hasattr(controller, "interval_s"):
            return f"has a controller of type {type(controller).__name__}, without tick() and interval_s"
    if len(built.roles) != setup.instances or not all(isinstance(role, Role) for role in built.roles):
        return f"gives the roles {list(built.roles)!r}; allowed: one Role for each of {setup.instances} instances"
    return ""
