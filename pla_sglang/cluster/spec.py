"""What a cluster consists of, checked before anything starts."""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Callable, Mapping, Sequence

from pla_sglang.errors import ConfigError

KINDS = ("unified", "prefill", "decode")
ROUTERS = ("sglang", "mini-lb", "pla", "none")
ROUTER_MODULES = {
    "sglang": "sglang_router.launch_router",
    "mini-lb": "sglang_router.launch_router",
    "pla": "pla_sglang.launch_router",
}
POLICIES = ("random", "round_robin", "cache_aware", "power_of_two", "bucket", "manual")
MAX_INSTANCES = 64
TRANSFER = ("--disaggregation-transfer-backend", "nixl")


@dataclasses.dataclass(frozen=True)
class ClusterConfig:
    """What the command line asks for.

    Raises:
        ConfigError: names the option, its value and what is allowed.
    """

    counts: Mapping[str, int]  # instances by kind
    router: str = "sglang"
    policy: str = "round_robin"
    router_port: int | None = None
    host: str = "127.0.0.1"
    common: tuple[str, ...] = ()  # arguments of every engine
    own: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)  # further ones by kind
    router_extra: tuple[str, ...] = ()
    start_timeout_s: float = 300.0

    def __post_init__(self) -> None:
        for kind, count in self.counts.items():
            if kind not in KINDS:
                raise ConfigError(f"kind {kind!r} is not known; allowed: {', '.join(KINDS)}")
            if not 0 <= count <= MAX_INSTANCES:
                raise ConfigError(f"--{kind} {count} is out of range; allowed: 0 to {MAX_INSTANCES}")
        if self.router not in ROUTERS:
            raise ConfigError(f"--router {self.router!r} is not known; allowed: {', '.join(ROUTERS)}")
        if self.router == "sglang" and self.policy == "bucket" and self.counts.get("unified"):
            raise ConfigError("--policy 'bucket' is not for unified instances, but for prefill and decode ones")
        if self.router == "sglang" and self.policy not in POLICIES:
            raise ConfigError(f"--policy {self.policy!r} is not known; allowed: {', '.join(POLICIES)}")
        self._check_mix()
        if self.router != "none":
            self._check_router()
        for argument in self.common:
            if argument.split("=")[0] in ("--port", "--host", "--disaggregation-mode"):
                raise ConfigError(f"{argument} is set for each instance by the cluster")

    def _check_mix(self) -> None:
        total = sum(self.counts.values())
        if total == 0:
            raise ConfigError("a cluster needs an instance: --unified N, or --prefill N --decode N")
        pair = [self.counts.get(kind, 0) for kind in ("prefill", "decode")]
        if self.router == "none":
            return
        if (pair[0] == 0) != (pair[1] == 0):
            raise ConfigError(f"--prefill {pair[0]} --decode {pair[1]}: a router needs at least one of each")
        if pair[0] and self.counts.get("unified", 0) and self.router != "pla":
            raise ConfigError("SGLang's router cannot mix unified instances with others; allowed: --router pla")

    def _check_router(self) -> None:
        module = ROUTER_MODULES[self.router]
        if importlib.util.find_spec(module.partition(".")[0]) is None or importlib.util.find_spec(module) is None:
            raise ConfigError(f"--router {self.router} needs the module {module}, which is not installed")


@dataclasses.dataclass(frozen=True)
class InstanceSpec:
    """One engine: its ports stay the same over restarts."""

    name: str
    kind: str
    host: str
    port: int
    bootstrap_port: int | None
    argv: tuple[str, ...]

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"


def instances(config: ClusterConfig, free_port: Callable[[], int]) -> list[InstanceSpec]:
    """The engines of a cluster, with ports from ``free_port``; prefill first, as a decode instance looks for them."""
    made = []
    for kind in ("prefill", "decode", "unified"):
        for index in range(config.counts.get(kind, 0)):
            port = free_port()
            bootstrap = free_port() if kind == "prefill" else None
            argv = ["--host", config.host, "--port", str(port)]
            if kind != "unified":
                argv += ["--disaggregation-mode", kind, *TRANSFER]
            if bootstrap is not None:
                argv += ["--disaggregation-bootstrap-port", str(bootstrap)]
            argv += [*config.common, *config.own.get(kind, ())]
            made.append(InstanceSpec(f"{kind}-{index}", kind, config.host, port, bootstrap, tuple(argv)))
    return made


def router_arguments(config: ClusterConfig, engines: Sequence[InstanceSpec], port: int, metrics_port: int) -> list[str]:
    """What the router in front of ``engines`` is called with."""
    command = ["--host", config.host, "--port", str(port)]
    if config.router == "pla":
        workers = [part for one in engines for part in ("--worker", one.url)]
        # SGLang's router writes round_robin, ours round-robin: both are understood
        return [*command, *workers, "--policy", config.policy.replace("_", "-"), *config.router_extra]
    if config.router == "mini-lb":
        command.append("--mini-lb")
    else:
        # SGLang's router knows bucket for prefill instances only, and wants another policy for the decode instances.
        bucket = ["--policy", "round_robin", "--prefill-policy", "bucket"]
        command += bucket if config.policy == "bucket" else ["--policy", config.policy]
        command += ["--prometheus-port", str(metrics_port), "--log-level", "warn"]
        command += ["--worker-startup-check-interval", "1"]  # it looks every 30 s by default
    unified = [one.url for one in engines if one.kind == "unified"]
    if unified:
        return [*command, "--worker-urls", *unified, *config.router_extra]
    command.append("--pd-disaggregation")
    for one in engines:
        command += ["--" + one.kind, one.url, *([str(one.bootstrap_port)] if one.bootstrap_port else [])]
    return [*command, *config.router_extra]
