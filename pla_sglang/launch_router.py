"""``python -m pla_sglang.launch_router``: one HTTP address in front of SGLang instances.

    python -m pla_sglang.launch_router --worker http://127.0.0.1:30001 --worker http://127.0.0.1:30002 --port 30000

Which instances prefill, decode or do both, it asks them. Flags of the policy and of the instances belong to the control
plane (``pla_sglang/router/control``); those below are the relays'.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from typing import Any

from pla_sglang.errors import ConfigError
from pla_sglang.policy.checks import require
from pla_sglang.router.children import EXIT_BAD_ARGUMENTS, Stop, run, seeded, settle, until_first
from pla_sglang.router.config import RelayConfig
from pla_sglang.router.links import STREAM, ZMQ
from pla_sglang.router.supervisor import supervise

MAX_RELAYS = 64
CARRIERS = {"unix": STREAM, "zmq": ZMQ}
HELP = {
    "host": "where to listen",
    "port": "where to listen; 0: a free port, which is printed",
    "api_key": "clients must send it as bearer token",
    "admin_key": "needed for /workers and /pla/*; without it, the key of clients is",
    "access_log": "off, - (stderr) or a file: one JSON object a request",
}


def add_relay_arguments(parser: argparse.ArgumentParser) -> None:
    """One flag for each field of ``RelayConfig``."""
    group = parser.add_argument_group("front and relays")
    group.add_argument(
        "--relay-workers", type=int, default=0, metavar="N", help="processes on the port; 0: all in one process"
    )
    group.add_argument(
        "--relay-wire",
        choices=sorted(CARRIERS),
        default="unix",
        help="between relays and control (%(default)s)",
    )
    for field in dataclasses.fields(RelayConfig):
        flag = "--" + field.name.replace("_", "-")
        kind = type(field.default)
        group.add_argument(
            flag, type=kind, default=field.default, help=HELP.get(field.name, f"default {field.default}")
        )


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is to be started. ``relays`` 0: all in one process. ``carrier``: see ``links.py``."""

    config: RelayConfig
    relays: int
    carrier: str
    control_arguments: list[str]


def relay_config(options: argparse.Namespace) -> RelayConfig:
    """Raises ConfigError."""
    require("--relay-workers", options.relay_workers, 0, MAX_RELAYS)
    return RelayConfig(**{field.name: getattr(options, field.name) for field in dataclasses.fields(RelayConfig)})


def parse(argv: list[str]) -> Plan:
    """Flags that are not the relays' are the control plane's. Raises ConfigError."""
    parser = argparse.ArgumentParser(prog="python -m pla_sglang.launch_router", allow_abbrev=False, add_help=False)
    add_relay_arguments(parser)
    if {"-h", "--help"} & set(argv):
        from pla_sglang.router import control

        whole = argparse.ArgumentParser(prog="python -m pla_sglang.launch_router", description=__doc__)
        add_relay_arguments(whole)
        control.add_arguments(whole)
        whole.parse_args(argv)
    options, rest = parser.parse_known_args(argv)
    return Plan(relay_config(options), options.relay_workers, CARRIERS[options.relay_wire], rest)


async def together(config: RelayConfig, control_arguments: list[str]) -> int:
    """Relay and control plane on one event loop. Raises ConfigError and OSError."""
    from pla_sglang.router import control
    from pla_sglang.router.relay import Relay

    parser = argparse.ArgumentParser(prog="python -m pla_sglang.launch_router", allow_abbrev=False)
    control.add_arguments(parser)
    plane = control.build(parser.parse_args(control_arguments))
    stop = Stop(watch_stdin=False)
    await plane.start()
    relay = Relay(config, number=0, say=plane.hear, rng=seeded(), now_s=time.monotonic)
    try:
        await relay.start()
        plane.attach(0, relay)
        announce(config, relay.port, 0)
        settle()
        await stop.asked.wait()
        await until_first(relay.drain(), stop.forced.wait())
    finally:
        await relay.stop()
        await plane.stop()
    return 0


async def apart(plan: Plan) -> int:
    """Raises OSError where the port is taken."""
    from pla_sglang.router.relay import listening_socket

    if plan.config.port:
        listening_socket(plan.config.host, plan.config.port).close()  # another router there would share its port
    # Held, not listening: the relays share the port with it, nobody else can take it, and port 0 becomes a number.
    holder = listening_socket(plan.config.host, plan.config.port, shared=True)
    try:
        config = dataclasses.replace(plan.config, port=holder.getsockname()[1])
        announce(config, config.port, plan.relays)
        return await supervise(config, plan.relays, plan.control_arguments, carrier=plan.carrier)
    finally:
        holder.close()


def announce(config: RelayConfig, port: int, relays: int) -> None:
    how = f"{relays} relay process(es) and a control process" if relays else "one process"
    print(f"pla_sglang: router on http://{config.host}:{port}, {how}", flush=True)


def main(argv: list[str] | None = None) -> int:
    try:
        plan = parse(sys.argv[1:] if argv is None else argv)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return EXIT_BAD_ARGUMENTS
    work: Any = apart(plan) if plan.relays else together(plan.config, plan.control_arguments)
    return run(work)


if __name__ == "__main__":
    sys.exit(main())
