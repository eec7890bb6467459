"""The arms of ``bench.spatial``: engines and the router before them, in both forms of the pools.

===================  ============================================  =====================================================
arm                  layout dp: one server, N data-parallel ranks  layout pd: P prefill and D decode instances
===================  ============================================  =====================================================
``spatial``          pools of ranks                                pools of prefill instances in our router
``temporal``         temporal ranks, round robin                   temporal prefill instances, our router, minimal load
``dp``               stock, round robin over the ranks             stock, SGLang's router, round robin
``router:POLICY``    N stock servers, SGLang's router              stock, SGLang's router
===================  ============================================  =====================================================

SGLang's router has ``bucket`` for prefill instances only.
"""

from __future__ import annotations

import dataclasses

from bench.pooling.work import BOUNDARY_TOKENS
from bench.replaying.layouts import PD_POLICIES, UNIFIED_POLICIES
from pla_sglang.errors import ConfigError

SPATIAL, TEMPORAL, PLAIN, ROUTER = "spatial", "temporal", "dp", "router:"
BUCKET = f"{ROUTER}bucket"
RANKS, PAIRS = "dp", "pd"
LAYOUTS = (RANKS, PAIRS)
DEFAULT_ARMS = {
    RANKS: (SPATIAL, TEMPORAL, PLAIN, "router:power_of_two", "router:cache_aware"),
    PAIRS: (SPATIAL, TEMPORAL, PLAIN, "router:power_of_two", "router:cache_aware", BUCKET),
}
TEMPORAL_FLAGS = ("--prefill-disagg", "temporal", "--pla-boundary", str(BOUNDARY_TOKENS))


@dataclasses.dataclass(frozen=True, slots=True)
class Router:
    """``kind`` and ``policy`` as ``launch_cluster`` names them, and further arguments."""

    kind: str
    policy: str
    flags: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Setting:
    """What all arms share; times of device.

    Attributes:
        prefill, decode: instances of layout ``pd``; ``prefill`` is the number of ranks of layout ``dp``.
        interval_s, cool_down_s: of the pressure controller.

    Raises:
        ConfigError: a value out of range.
    """

    layout: str = PAIRS
    profile: str = "h100-llama3.1-8b-tp1"
    time_scale: float = 8.0
    slo_ttft_s: float = 0.4
    prefill: int = 4
    decode: int = 2
    interval_s: float = 0.5
    cool_down_s: float = 2.0

    def __post_init__(self) -> None:
        if self.layout not in LAYOUTS:
            raise ConfigError(f"--layout {self.layout!r} is not known; allowed: {', '.join(LAYOUTS)}")
        for name in ("time_scale", "slo_ttft_s", "interval_s"):
            value = getattr(self, name)
            if not value > 0:
                raise ConfigError(f"{name} {value} is out of range; allowed: above 0")
        if self.prefill < 2 or self.decode < 1:
            raise ConfigError(f"--prefill {self.prefill}, --decode {self.decode}; allowed: from 2, from 1")

    def scaled_ms(self, seconds: float) -> str:
        """Device seconds as milliseconds of this machine, for a flag."""
        return f"{seconds * self.time_scale * 1e3:g}"


def check(arm: str, setting: Setting) -> None:
    """Raises ConfigError for an arm that the layout does not have."""
    policies = PD_POLICIES if setting.layout == PAIRS else UNIFIED_POLICIES
    known = [SPATIAL, TEMPORAL, PLAIN, *(ROUTER + policy for policy in policies)]
    if arm not in known:
        raise ConfigError(f"arm {arm!r} is not known in layout {setting.layout}; allowed: {', '.join(known)}")


def engine_arguments(arm: str, setting: Setting, telemetry: str) -> list[str]:
    """Of ``launch_cluster``, without a router. Arms with the same arguments can be measured on the same engines.

    ``telemetry``: an address for load reports. Raises ConfigError, see ``check``.
    """
    check(arm, setting)
    common = ["--router", "none", "--pla-emulate", setting.profile, "--pla-time-scale", f"{setting.time_scale:g}"]
    common += ["--quiet", "--incremental-streaming-output", "--log-level", "warning"]
    if setting.layout == PAIRS:
        fleet = ["--prefill", str(setting.prefill), "--decode", str(setting.decode)]
        if not is_ours(arm):
            return [*fleet, *common]
        target = setting.scaled_ms(setting.slo_ttft_s)
        prefill = " ".join((*TEMPORAL_FLAGS, "--pla-slo-ttft-ms", target))
        return [*fleet, *common, "--prefill-args", prefill, "--pla-telemetry", telemetry]
    return [*_ranks(arm, setting), *common]


def _ranks(arm: str, setting: Setting) -> list[str]:
    ranks = str(setting.prefill)
    if arm.startswith(ROUTER):
        return ["--unified", ranks]
    one = ["--unified", "1", "--dp-size", ranks, "--load-balance-method", "round_robin"]
    if arm == PLAIN:
        return one
    ours = ["--pla-boundary", str(BOUNDARY_TOKENS), "--pla-slo-ttft-ms", setting.scaled_ms(setting.slo_ttft_s)]
    if arm == TEMPORAL:
        return [*one, "--prefill-disagg", "temporal", *ours]
    period = ["--pla-pressure-interval-ms", setting.scaled_ms(setting.interval_s)]
    pause = ["--pla-pressure-cool-down-ms", setting.scaled_ms(setting.cool_down_s)]
    return [*one, "--prefill-disagg", "spatial", *ours, *period, *pause]


def is_ours(arm: str) -> bool:
    return arm in (SPATIAL, TEMPORAL)


def router_of(arm: str, setting: Setting, telemetry: str) -> Router | None:
    """What stands before the engines of ``arm``; None: the one server itself."""
    if setting.layout == RANKS and not arm.startswith(ROUTER):
        return None
    if not is_ours(arm):
        return Router("sglang", "round_robin" if arm == PLAIN else arm.removeprefix(ROUTER))
    flags = ["--boundary", str(BOUNDARY_TOKENS), "--slo-ttft-ms", setting.scaled_ms(setting.slo_ttft_s)]
    flags += ["--telemetry", telemetry]
    if arm == SPATIAL:
        flags += ["--pressure-interval-ms", setting.scaled_ms(setting.interval_s)]
        flags += ["--pressure-cool-down-ms", setting.scaled_ms(setting.cool_down_s)]
    return Router("pla", "pla" if arm == SPATIAL else "minimal-load", tuple(flags))
