"""``python -m pla_sglang.launch_cluster``: engines and a router on this machine, one command, one log, a clean stop.

    python -m pla_sglang.launch_cluster --prefill 1 --decode 1 --pla-emulate h100-llama3.1-8b-tp1 --pla-time-scale 4

What this command does not know goes to every engine. Engines run on the CPU platform; without a model they serve the
chain model (with --pla-emulate) or the embedded demo model.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import shlex
import signal
import sys
from pathlib import Path

from pla_sglang.cluster.children import ClusterError
from pla_sglang.cluster.lean import lean_environment
from pla_sglang.cluster.spec import KINDS, ROUTERS, ClusterConfig
from pla_sglang.cluster.supervisor import Supervisor, control
from pla_sglang.emulate.arguments import with_emulation
from pla_sglang.errors import PlaError
from pla_sglang.testing.server import free_port

EXIT_FAILED = 1
EXIT_BAD_ARGUMENTS = 2


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m pla_sglang.launch_cluster",
        description="Engines and a router on this machine. Unknown arguments go to every engine.",
        allow_abbrev=False,
    )
    for kind in KINDS:
        made.add_argument(f"--{kind}", type=int, default=0, metavar="N", help=f"number of {kind} instances")
        made.add_argument(f"--{kind}-args", default="", metavar="ARGS", help=f"further arguments of {kind} instances")
    made.add_argument("--router", choices=ROUTERS, default="sglang", help="what stands in front")
    made.add_argument("--policy", default="round_robin", help="policy of the router")
    made.add_argument("--router-port", type=int, help="default: a free port")
    made.add_argument("--router-args", default="", metavar="ARGS", help="further arguments of the router")
    made.add_argument("--host", default="127.0.0.1")
    made.add_argument("--state-file", type=Path, help="JSON description of what runs where; removed at the end")
    made.add_argument("--start-timeout-s", type=float, default=300.0)
    made.add_argument("--quiet", action="store_true", help="show the cluster's own lines only")
    made.add_argument("--restart", metavar="NAME", help="restart an instance of the cluster of --state-file")
    made.add_argument("--stop", action="store_true", help="stop the cluster of --state-file")
    return made


def config_of(options: argparse.Namespace, rest: list[str]) -> ClusterConfig:
    """Raises ConfigError."""
    return ClusterConfig(
        counts={kind: getattr(options, kind) for kind in KINDS},
        router=options.router,
        policy=options.policy,
        router_port=options.router_port,
        host=options.host,
        common=tuple(with_emulation(rest)),
        own={kind: tuple(shlex.split(getattr(options, f"{kind}_args"))) for kind in KINDS},
        router_extra=tuple(shlex.split(options.router_args)),
        start_timeout_s=options.start_timeout_s,
    )


async def run(config: ClusterConfig, options: argparse.Namespace) -> None:
    """Serve until a signal. Raises ClusterError."""

    def show(name: str, line: str) -> None:
        if not options.quiet or name == "cluster":
            print(f"[{name}] {line}", flush=True)

    lean = lean_environment([[*config.common, *config.own.get(kind, ())] for kind in KINDS if config.counts[kind]])
    supervisor = Supervisor(config, free_port=free_port, sink=show, environment=lean, state_file=options.state_file)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, supervisor.stop)
    with contextlib.suppress(asyncio.CancelledError):  # stopped while starting
        await supervisor.run()


def main(argv: list[str] | None = None) -> int:
    options, rest = parser().parse_known_args(sys.argv[1:] if argv is None else argv)
    try:
        if options.restart is not None or options.stop:
            if options.state_file is None:
                raise ClusterError("--restart and --stop need --state-file of the running cluster")
            answer = control(options.state_file, f"restart {options.restart}" if options.restart else "stop")
            print(answer)
            return EXIT_FAILED if answer.startswith("error") else 0
        config = config_of(options, rest)
    except PlaError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return EXIT_FAILED if isinstance(error, ClusterError) else EXIT_BAD_ARGUMENTS
    try:
        asyncio.run(run(config, options))
    except ClusterError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return EXIT_FAILED
    return 0


if __name__ == "__main__":
    sys.exit(main())
