"""``python -m pla_sglang.launch_cluster``: engines and a router on this machine, one command, one log, a clean stop.

    python -m pla_sglang.launch_cluster --prefill 1 --decode 1 --pla-emulate h100-llama3.1-8b-tp1 --pla-time-scale 4
    python -m pla_sglang.launch_cluster --stateless 4 --policy arrow --pla-emulate h100-llama3.1-8b-tp1
    python -m pla_sglang.launch_cluster --stateless 4 --policy star --migration on --pla-emulate h100-llama3.1-8b-tp1

What this command does not know goes to every engine. Engines run on the CPU platform; without a model they serve the
chain model (with --pla-emulate) or the embedded demo model.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import shlex
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pla_sglang.common import cli, terminal
from pla_sglang.common.checks import KEY, Choice, Range, check_fields, knob
from pla_sglang.common.errors import ConfigError, PlaError
from pla_sglang.fleet.actuators.cluster_socket import require_state_file, send_command
from pla_sglang.fleet.actuators.interface import ActuatorError
from pla_sglang.fleet.actuators.ray_names import RayFleetName
from pla_sglang.fleet.cluster.children import ClusterError
from pla_sglang.fleet.cluster.lean import lean_environment
from pla_sglang.fleet.cluster.logs import is_poll
from pla_sglang.fleet.cluster.nodes import check_local_nodes, read_ray_needs
from pla_sglang.fleet.cluster.ports import free_port
from pla_sglang.fleet.cluster.ray_launcher import RayCluster, end_fleet
from pla_sglang.fleet.cluster.spec import (
    KINDS,
    MAX_INSTANCES,
    MOST_INSTANCES,
    ROUTERS,
    ClusterConfig,
    router_arguments,
)
from pla_sglang.fleet.cluster.stateless_flags import check_stateless_arguments
from pla_sglang.fleet.cluster.supervisor import Sink, Supervisor
from pla_sglang.fleet.cluster.tls import ClusterTls
from pla_sglang.fleet.router.tls import check_files
from pla_sglang.launch_server import own_arguments
from pla_sglang.plugin.config import check_texts
from pla_sglang.plugin.platform import value_of
from pla_sglang.plugin.start_checks import check_flags
from pla_sglang.sim.emulate.arguments import with_emulation

if TYPE_CHECKING:
    from pla_sglang.fleet.router.control.knobs import ControlKnobs

EXIT_FAILED = 1
LOCAL, RAY = "local", "ray"


@dataclasses.dataclass(frozen=True)
class LaunchConfig:
    """The command line. ``engine_args`` ends with the arguments that this command does not know."""

    unified: int = knob(0, "--unified", "number of unified instances", heading="instances")
    unified_args: str = knob("", "--unified-args ARGS", "further arguments of unified instances")
    prefill: int = knob(0, "--prefill", "number of prefill instances")
    prefill_args: str = knob("", "--prefill-args ARGS", "further arguments of prefill instances")
    decode: int = knob(0, "--decode", "number of decode instances")
    decode_args: str = knob("", "--decode-args ARGS", "further arguments of decode instances")
    stateless: int = knob(0, "--stateless", "number of stateless instances: either phase of any request")
    stateless_args: str = knob("", "--stateless-args ARGS", "further arguments of stateless instances")
    engine_args: str = knob("", "--engine-args ARGS", "further arguments of every instance; for files")
    router: str | None = knob(
        None,
        "--router NAME",
        f"what stands in front: {', '.join(ROUTERS)}; default: sglang, before stateless instances pla",
        heading="router",
    )
    policy: str = knob("round-robin", "--policy NAME", "policy of the router, with - or _")
    migration: str | None = knob(
        None, "--migration {off,on}", "of our router: running requests can move", allowed=Choice(("off", "on"))
    )
    standby: bool = knob(
        False,
        "--standby",
        "of our router: a second control process takes over; needs --router-args '--relay-workers N'",
    )
    router_port: int | None = knob(None, "--router-port", "default: a free port", allowed=Range(1, 65_535))
    router_args: str = knob("", "--router-args ARGS", "further arguments of the router")
    api_key: str = knob(
        "", "--api-key KEY", "of every engine", allowed=KEY, secret=True, variable="PLA_WORKER_API_KEY", heading="keys"
    )
    admin_api_key: str = knob(
        "", "--admin-api-key KEY", "of every engine", allowed=KEY, secret=True, variable="PLA_WORKER_ADMIN_KEY"
    )
    router_api_key: str = knob(
        "",
        "--router-api-key KEY",
        "of our router's clients; without it, that of the engines is",
        allowed=KEY,
        secret=True,
        variable="PLA_ROUTER_API_KEY",
    )
    router_admin_key: str = knob(
        "",
        "--router-admin-key KEY",
        "of our router's operators; without it, that of the engines is",
        allowed=KEY,
        secret=True,
        variable="PLA_ROUTER_ADMIN_KEY",
    )
    host: str = knob("127.0.0.1", "--host HOST", "where all of them listen", heading="cluster")
    state_file: Path | None = knob(None, "--state-file FILE", "JSON description of what runs where; removed at the end")
    start_timeout_s: float = knob(
        300.0, "--start-timeout-s", "until everything must be ready", allowed=Range(0, unit="s", above=True)
    )
    drain_s: float = knob(
        60.0,
        "--drain-s",
        "for a stateless instance that is restarted behind --migration on to hand its requests over",
        allowed=Range(0, unit="s"),
    )
    most_instances: int = knob(
        MOST_INSTANCES,
        "--most-instances",
        "together, where some are added; the start is not bound by it",
        allowed=Range(1, len(KINDS) * MAX_INSTANCES),
    )
    quiet: bool = knob(False, "--quiet", "show the cluster's own lines only")
    on: str = knob(
        LOCAL,
        "--on {local,ray}",
        "where instances are: processes of this machine, or actors of Ray; the router is here",
        allowed=Choice((LOCAL, RAY)),
        heading="Ray",
    )
    ray_address: str = knob("auto", "--ray-address ADDRESS", "HOST:PORT of Ray's head; auto: of the Ray that runs here")
    ray_fleet: str = knob("pla", "--ray-fleet NAME", "of the fleet in that Ray; several may be there")
    tls: ClusterTls = dataclasses.field(default_factory=ClusterTls)

    def __post_init__(self) -> None:
        check_fields(self)
        if self.on == RAY and self.tls.cert is not None:
            raise ConfigError("--ssl-certfile is not for --on ray: its instances are at addresses of other machines")

    def to_cluster(self) -> ClusterConfig:
        """Raises ConfigError."""
        router = self.router or ("pla" if self.stateless > 0 else "sglang")  # only ours tells them their peers
        moves = () if self.migration is None else ("--migration", self.migration)
        if moves and router != "pla":
            raise ConfigError(f"--migration {self.migration} is not for --router {router}; allowed: --router pla")
        standby = ("--standby",) if self.standby else ()
        if standby and router != "pla":
            raise ConfigError(f"--standby is not for --router {router}; allowed: --router pla")
        for flag, key in (("--router-api-key", self.router_api_key), ("--router-admin-key", self.router_admin_key)):
            if key and router != "pla":
                raise ConfigError(f"{flag} is not for --router {router}; allowed: --router pla")
        if self.on == RAY and router not in ("pla", "none"):
            raise ConfigError(f"--router {router} is not for --on ray, where addresses change; allowed: pla, none")
        return ClusterConfig(
            counts={kind: getattr(self, kind) for kind in KINDS},
            router=router,
            policy=self.policy,
            router_port=self.router_port,
            host=self.host,
            common=tuple(with_emulation(shlex.split(self.engine_args))),
            own={kind: tuple(shlex.split(getattr(self, f"{kind}_args"))) for kind in KINDS},
            router_extra=(*moves, *standby, *shlex.split(self.router_args)),
            start_timeout_s=self.start_timeout_s,
            most_instances=self.most_instances,
            tls=self.tls,
        )

    def name_ray_fleet(self) -> RayFleetName:
        """Raises ConfigError, also where Ray is not installed."""
        return RayFleetName(self.ray_address, self.ray_fleet)

    def key_variables(self) -> dict[str, str]:
        """The environment from which engines and our router take their keys: a command line can be read by everybody.

        The router asks its clients for a key wherever engines have one, which it adds to each request.
        """
        keys = dataclasses.replace(
            self,
            router_api_key=self.router_api_key or self.api_key,
            router_admin_key=self.router_admin_key or self.admin_api_key,
        )
        return {declared.knob.variable: value for declared, value in cli.values_of(keys) if declared.knob.secret}


def read_config(argv: Sequence[str] | None) -> cli.Parsed[LaunchConfig]:
    """Raises ConfigError."""
    parser = cli.make_parser(LaunchConfig, "launch_cluster", __doc__, allow_abbrev=False)
    orders = parser.add_mutually_exclusive_group()
    orders.add_argument("--restart", metavar="NAME", help="restart a member of the cluster of --state-file")
    orders.add_argument("--start-instance", metavar="KIND", help="add an instance to the cluster of --state-file")
    orders.add_argument("--remove-instance", metavar="NAME", help="take an instance out of the cluster of --state-file")
    orders.add_argument("--stop", action="store_true", help="stop the cluster of --state-file")
    return cli.parse(parser, argv, LaunchConfig, rest_flag="engine-args")


def read_order(options: argparse.Namespace) -> list[str]:
    """The command for a cluster that runs, in words; empty where one is to be started."""
    commands = {"restart": options.restart, "start": options.start_instance, "remove": options.remove_instance}
    named = [[command, name] for command, name in commands.items() if name is not None]
    return named[0] if named else ["stop"] if options.stop else []


@contextlib.contextmanager
def scaled_by_planner(config: ClusterConfig, options: LaunchConfig) -> Iterator[tuple[ClusterConfig, LaunchConfig]]:
    """Where our router has a planner and names no actuator, it scales this cluster: in Ray, or by a state file.

    The state file is in a folder that goes at the end where the command line names none.
    """
    given = {flag: value_of(config.router_extra, flag) for flag in ("--planner", "--actuator")}
    if config.router != "pla" or given["--planner"] in (None, "none") or given["--actuator"] is not None:
        yield config, options
        return
    if options.on == RAY:
        router_extra = (*config.router_extra, "--actuator", str(options.name_ray_fleet()))
        yield dataclasses.replace(config, router_extra=router_extra), options
        return
    with tempfile.TemporaryDirectory(prefix="pla_cluster.") as folder:
        file = (options.state_file or Path(folder) / "cluster.json").absolute()
        router_extra = (*config.router_extra, "--actuator", f"local:{file}")
        yield dataclasses.replace(config, router_extra=router_extra), dataclasses.replace(options, state_file=file)


def check_members(config: ClusterConfig) -> None:
    """What its members would refuse, seconds after their start. Raises ConfigError, which names the part."""
    check_files(config.tls, now_s=time.time())
    flags = [declared.knob.name for declared in cli.flags_of(LaunchConfig)]
    for kind in KINDS:
        if config.counts.get(kind):
            arguments = [*config.common, *config.own.get(kind, ())]
            check_flags(arguments, others=flags, whose=": neither of the cluster nor of its engines")
            check_texts(own_arguments([*arguments, *(("--pla-stateless",) if kind == "stateless" else ())]))
            if kind == "stateless":
                check_stateless_arguments(arguments)
    if config.router == "pla":
        try:
            read_router_knobs(config)
        except ConfigError as error:
            raise ConfigError(f"router: {error}") from None


def check_nodes(config: ClusterConfig, on: str) -> None:
    """Raises ConfigError for instances of several nodes where these are not, or cannot be."""
    for kind, count in config.counts.items():
        if count:
            (read_ray_needs if on == RAY else check_local_nodes)([*config.common, *config.own.get(kind, ())])


def read_router_knobs(config: ClusterConfig) -> ControlKnobs:
    """The knobs of our router, as it will read its command line. Raises ConfigError."""
    from pla_sglang.launch_router import read_config as read_router_config

    return read_router_config(router_arguments(config, [], port=1, metrics_port=1))[0].control


def with_load_reports(config: ClusterConfig, host: str = "127.0.0.1") -> ClusterConfig:
    """Where the router's policy moves requests, the engines report to it at ``host``: it knows of running ones from
    load reports.

    What the command line says of reports, at either end, stays as it is. Raises ConfigError.
    """
    engines = [argument for arguments in (config.common, *config.own.values()) for argument in arguments]
    given = any(argument.partition("=")[0] == "--pla-telemetry" for argument in engines)
    if config.router != "pla" or not config.counts.get("stateless") or given:
        return config
    from pla_sglang.policy_packages import moves_requests

    knobs = read_router_knobs(config)
    if knobs.telemetry or not moves_requests(knobs.policy, migrates=knobs.migrates):
        return config
    address = f"tcp://{host}:{free_port()}"
    return dataclasses.replace(
        config,
        common=(*config.common, "--pla-telemetry", address),
        router_extra=(*config.router_extra, "--telemetry", address),
    )


def make_environment(config: ClusterConfig, options: LaunchConfig) -> dict[str, str]:
    """Further variables of engines and router."""
    lean = lean_environment([[*config.common, *config.own.get(kind, ())] for kind in KINDS if config.counts[kind]])
    return lean | options.key_variables()


def make_sink(options: LaunchConfig) -> Sink:
    """One log, with the name of its source before each line."""

    def show(name: str, line: str) -> None:
        if name == "cluster" or not (options.quiet or is_poll(line)):
            with terminal.outlive_reader():
                print(f"[{name}] {line}", flush=True)

    return show


async def run(config: ClusterConfig, options: LaunchConfig) -> None:
    """Serve until a signal. Raises ClusterError."""
    supervisor = Supervisor(
        config,
        free_port=free_port,
        sink=make_sink(options),
        environment=make_environment(config, options),
        state_file=options.state_file,
        drain_s=options.drain_s if config.router == "pla" and read_router_knobs(config).migrates else 0.0,
    )
    await run_to_signal(supervisor)


async def run_to_signal(cluster: Supervisor | RayCluster) -> None:
    """Raises ClusterError."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, cluster.stop)
    with contextlib.suppress(asyncio.CancelledError):  # stopped while starting
        await cluster.run()


def run_on_ray(config: ClusterConfig, options: LaunchConfig) -> None:
    """The same in Ray. Raises ConfigError, ClusterError."""
    where = options.name_ray_fleet()
    from pla_sglang.fleet.cluster.ray_fleet import create_fleet, find_own_address

    config = with_load_reports(config, find_own_address())
    environment = make_environment(config, options)
    create_fleet(where, config, environment)

    async def serve() -> None:
        keys = options.router_admin_key or options.admin_api_key
        cluster = RayCluster(
            config,
            where,
            free_port=free_port,
            sink=make_sink(options),
            environment=environment,
            state_file=options.state_file,
            router_key=keys,
        )
        await run_to_signal(cluster)

    asyncio.run(serve())


def main(argv: Sequence[str] | None = None) -> int:
    try:
        parsed = read_config(argv)
        order = read_order(parsed.options)
        if order == ["stop"] and parsed.config.on == RAY:
            asyncio.run(end_fleet(parsed.config.name_ray_fleet()))
            return 0
        if order:
            if parsed.config.state_file is None:
                raise ConfigError("an order to a running cluster needs --state-file, the one of that cluster")
            print(send_command(parsed.config.state_file, order))
            return 0
        if parsed.config.state_file is not None:
            require_state_file("--state-file", parsed.config.state_file)
        with scaled_by_planner(parsed.config.to_cluster(), parsed.config) as (config, options):
            check_members(config)
            check_nodes(config, options.on)
            if options.on == RAY:
                run_on_ray(config, options)
            else:
                asyncio.run(run(with_load_reports(config), options))
    except PlaError as error:
        status = cli.report_error(error)
        return EXIT_FAILED if isinstance(error, (ActuatorError, ClusterError)) else status
    return 0


if __name__ == "__main__":
    sys.exit(main())
