"""The members of a cluster, checked before the start."""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Callable, Mapping, Sequence

from pla_sglang.common.checks import Choice, Rule, require
from pla_sglang.common.errors import ConfigError
from pla_sglang.fleet.cluster.tls import ClusterTls
from pla_sglang.policy_packages import PolicyName

KINDS = ("unified", "prefill", "decode", "stateless")
ROUTERS = ("sglang", "mini-lb", "pla", "none")
ROUTER_MODULES = {
    "sglang": "sglang_router.launch_router",
    "mini-lb": "sglang_router.launch_router",
    "pla": "pla_sglang.launch_router",
}
POLICIES = ("random", "round-robin", "cache-aware", "power-of-two", "bucket", "manual")  # of SGLang's router
MAX_INSTANCES = 64
# Together, where some are added: an emulated engine takes 0.6 GiB, and 8 s of the others' cores while it starts.
MOST_INSTANCES = 16
WHOLE = frozenset({"unified", "stateless"})  # kinds that can serve a request alone
# A file of flags may say any of the others.
RENDEZVOUS_FLAGS = ("--nccl-port", "--dist-init-addr", "--dp-size", "--data-parallel-size", "--config")
TRANSFER_FLAG, TRANSFER_BACKEND = "--disaggregation-transfer-backend", "nixl"


@dataclasses.dataclass(frozen=True)
class ClusterConfig:
    """The cluster described by the command line.

    Raises:
        ConfigError: names the option, its value and what is allowed.
    """

    counts: Mapping[str, int]  # instances by kind
    router: str = "sglang"
    policy: str = "round-robin"  # with - or _, as our router and SGLang's write it
    router_port: int | None = None
    host: str = "127.0.0.1"
    common: tuple[str, ...] = ()  # arguments of every engine
    own: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)  # further ones by kind
    router_extra: tuple[str, ...] = ()
    start_timeout_s: float = 300.0
    most_instances: int = MOST_INSTANCES  # together, once some were added; the start is not bound by it
    tls: ClusterTls = ClusterTls()  # noqa: RUF009 - frozen

    def __post_init__(self) -> None:
        for kind, count in self.counts.items():
            if kind not in KINDS:
                raise ConfigError(f"kind {kind!r} is not known; allowed: {', '.join(KINDS)}")
            require(f"--{kind}", count, 0, MAX_INSTANCES)
        if self.router not in ROUTERS:
            raise ConfigError(f"--router {self.router!r} is not known; allowed: {', '.join(ROUTERS)}")
        if self.router == "sglang" and self.policy == "bucket" and self.counts.get("unified"):
            raise ConfigError("--policy 'bucket' is not for unified instances, but for prefill and decode ones")
        of_router: dict[str, Rule] = {"sglang": Choice(POLICIES), "pla": PolicyName(live=True)}
        policies = of_router.get(self.router)
        if policies is not None and not policies.allows(self.policy.replace("_", "-")):
            raise ConfigError(f"--policy {self.policy!r} is not known; allowed: {policies}")
        self._check_mix()
        if self.router != "none":
            self._check_router()
        for argument in self.common:
            if argument.split("=")[0] in ("--port", "--host", "--disaggregation-mode", "--pla-stateless"):
                raise ConfigError(f"{argument} is set for each instance by the cluster")
        for argument in (*self.common, *(argument for own in self.own.values() for argument in own)):
            if argument.startswith("--ssl-cert"):  # then the cluster would ask by plain HTTP whether it is ready
                raise ConfigError(f"{argument} is for all members: give it to the cluster, not to some engines")
        if self.tls.cert is not None and self.router not in ("pla", "none"):
            raise ConfigError(f"--ssl-certfile is not for --router {self.router}; allowed: --router pla or none")

    def _check_mix(self) -> None:
        if not any(self.counts.values()):
            raise ConfigError("a cluster needs an instance: --unified N, --stateless N, or --prefill N --decode N")
        pair = [self.counts.get(kind, 0) for kind in ("prefill", "decode")]
        if self.router == "none":
            return
        if self.counts.get("stateless", 0):
            if self.router != "pla":  # only ours tells them their peers
                count = self.counts["stateless"]
                raise ConfigError(f"--stateless {count} needs a router that knows them; allowed: --router pla or none")
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
class EngineSpec:
    """One engine: its HTTP port stays the same over restarts."""

    name: str
    kind: str
    host: str
    port: int
    bootstrap_port: int | None
    argv: tuple[str, ...]
    scheme: str = "http"

    @property
    def url(self) -> str:
        return f"{self.scheme}://{self.host}:{self.port}"


def instances(config: ClusterConfig, free_port: Callable[[], int]) -> list[EngineSpec]:
    """The engines of a cluster, with ports from ``free_port``; prefill first, as a decode instance looks for them."""
    made: list[EngineSpec] = []
    for kind in ("prefill", "decode", "unified", "stateless"):
        made += [new_instance(config, kind, index, free_port) for index in range(config.counts.get(kind, 0))]
    return made


def new_instance(config: ClusterConfig, kind: str, index: int, free_port: Callable[[], int]) -> EngineSpec:
    """The ``index``-th instance of its kind, with the arguments of all others of the kind and ports of its own."""
    port = free_port()
    bootstrap = free_port() if kind in ("prefill", "stateless") else None
    return _instance(config, f"{kind}-{index}", kind, port, bootstrap)


def at_new_bootstrap_port(spec: EngineSpec, config: ClusterConfig, port: int) -> EngineSpec:
    """A prefill instance for its next start: decode instances know nothing of its bootstrap server yet."""
    return _instance(config, spec.name, spec.kind, spec.port, port)


def with_own_rendezvous(argv: Sequence[str], free_port: Callable[[], int]) -> tuple[str, ...]:
    """The arguments for one start, with a port for the rendezvous of torch (``--nccl-port``).

    SGLang would take one from the range of outgoing connections before it listens there, and one of those gets in
    between now and then. Each start has a port of its own, as the one before may still be held. The ranks of
    ``--dp-size`` would share the flag and cannot share the port, so they are left alone; so is who has said where.
    """
    names = [part.partition("=")[0] for part in argv if part.startswith("--")]
    if any(flag.startswith(name) for name in names for flag in RENDEZVOUS_FLAGS):  # SGLang takes beginnings, too
        return tuple(argv)
    return (*argv, "--nccl-port", str(free_port()))


def _instance(config: ClusterConfig, name: str, kind: str, port: int, bootstrap: int | None) -> EngineSpec:
    argv = ["--host", config.host, "--port", str(port)]
    if kind == "stateless":
        argv += ["--pla-stateless", TRANSFER_FLAG, TRANSFER_BACKEND]
    elif kind != "unified":
        argv += ["--disaggregation-mode", kind, TRANSFER_FLAG, TRANSFER_BACKEND]
    if bootstrap is not None:
        argv += ["--disaggregation-bootstrap-port", str(bootstrap)]
    argv += [*config.tls.engine_arguments(), *config.common, *config.own.get(kind, ())]
    return EngineSpec(name, kind, config.host, port, bootstrap, tuple(argv), config.tls.scheme)


def router_arguments(config: ClusterConfig, engines: Sequence[EngineSpec], port: int, metrics_port: int) -> list[str]:
    """The arguments of the router in front of ``engines``."""
    command = ["--host", config.host, "--port", str(port)]
    if config.router == "pla":
        workers = [part for engine in engines for part in ("--worker", engine.url)]
        policy = ["--policy", config.policy.replace("_", "-")]
        return [*command, *workers, *policy, *config.tls.router_arguments(), *config.router_extra]
    if config.router == "mini-lb":
        command.append("--mini-lb")
    else:
        # SGLang's router knows bucket for prefill instances only, and wants another policy for the decode instances.
        bucket = ["--policy", "round_robin", "--prefill-policy", "bucket"]
        command += bucket if config.policy == "bucket" else ["--policy", config.policy.replace("-", "_")]
        command += ["--prometheus-port", str(metrics_port), "--log-level", "warn"]
        command += ["--worker-startup-check-interval", "1"]  # it looks every 30 s by default
    unified = [engine.url for engine in engines if engine.kind == "unified"]
    if unified:
        return [*command, "--worker-urls", *unified, *config.router_extra]
    command.append("--pd-disaggregation")
    for engine in engines:
        command += ["--" + engine.kind, engine.url, *([str(engine.bootstrap_port)] if engine.bootstrap_port else [])]
    return [*command, *config.router_extra]
