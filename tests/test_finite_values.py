"""Every number that a user can set is finite: infinite values and what no double holds are refused by name."""

from __future__ import annotations

import pytest

from pla_sglang.common.checks import Declared, Range, require
from pla_sglang.common.cli import flags_of, parse_one
from pla_sglang.common.errors import ConfigError
from pla_sglang.doctor import DoctorConfig
from pla_sglang.launch_cluster import LaunchConfig
from pla_sglang.launch_router import RouterConfig
from pla_sglang.plugin.config import PlaConfig
from pla_sglang.profile import ProfileConfig
from pla_sglang.simulate import SimulateConfig

COMMANDS = (SimulateConfig, RouterConfig, LaunchConfig, DoctorConfig, ProfileConfig, PlaConfig)
NOT_FINITE = ("inf", "-inf", "Infinity", "nan", "1e999", "1" + "0" * 400)


def numbers_of(config: type) -> list[Declared]:
    return [declared for declared in flags_of(config) if declared.base in (int, float)]


@pytest.mark.parametrize("text", NOT_FINITE)
@pytest.mark.parametrize(
    ("config", "declared"),
    [
        pytest.param(config, one, id=f"{config.__name__}:{one.knob.name}")
        for config in COMMANDS
        for one in numbers_of(config)
    ],
)
def test_every_flag_is_finite(config: type, declared: Declared, text: str) -> None:
    with pytest.raises(ConfigError, match=rf"{declared.knob.name} .*allowed"):
        parse_one(declared.knob.name, text, declared)


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan"), 10**400])
def test_ranges_and_requirements_are_finite(value: float) -> None:
    assert not Range().allows(value)
    assert not Range(0).allows(value)
    with pytest.raises(ConfigError, match=r"x .*; allowed: at least 0"):
        require("x", value, 0)
