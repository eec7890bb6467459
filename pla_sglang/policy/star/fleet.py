"""STAR by name, with and without predicted lengths."""

from __future__ import annotations

from collections.abc import Mapping

from pla_sglang.policy.common.dispatch import least_tokens
from pla_sglang.policy.common.fleet_policy import Built, FleetPolicy, Setup
from pla_sglang.policy.star.horizon import HorizonKnobs
from pla_sglang.policy.star.policy import StarKnobs, StarRescheduler
from pla_sglang.policy.star.select import SelectKnobs

KNOBS: Mapping[str, tuple[type, ...]] = {"star": (StarKnobs, SelectKnobs, HorizonKnobs)}


def make_controller(setup: Setup, *, predict: bool = True, balance: bool = True) -> StarRescheduler:
    """``predict``: by a horizon, not by the present load alone. Without ``balance`` a request moves only where the
    cache of its instance will be full before its end.
    """
    knobs = StarKnobs(
        setup.tune("star", HorizonKnobs() if predict else HorizonKnobs(steps=0)),
        setup.tune("star", SelectKnobs(migrate_base_s=setup.move_pause_s)),
        interval_s=setup.move_interval_s,
        rest_s=setup.move_rest_s,
    )
    knobs = setup.tune("star", knobs)
    return StarRescheduler(knobs, setup.client_gain(balance=balance))


def _make(setup: Setup, *, predict: bool = True) -> Built:
    return least_tokens(), (make_controller(setup, predict=predict),), setup.split()


POLICIES: Mapping[str, FleetPolicy] = {
    "star": FleetPolicy(_make, live=True, fixed_split=True, migrates=True),
    "star-no-prediction": FleetPolicy(
        lambda setup: _make(setup, predict=False), live=True, fixed_split=True, migrates=True
    ),
}
