"""``python -m pla_sglang.launch_router``: one HTTP address in front of SGLang instances.

    python -m pla_sglang.launch_router --worker http://127.0.0.1:30001 --worker http://127.0.0.1:30002 --port 30000
    python -m pla_sglang.launch_router --config router.yaml

Which instances prefill, decode or do both, it asks them. Each flag may stand in the file, without its dashes.
"""

from __future__ import annotations

import dataclasses
import os
import random
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from pla_sglang.common import cli
from pla_sglang.common.checks import Range, check_fields, knob
from pla_sglang.common.errors import ConfigError, PlaError
from pla_sglang.fleet.reserved import make_router_key
from pla_sglang.fleet.router.config import RelayConfig
from pla_sglang.fleet.router.control.knobs import ControlKnobs
from pla_sglang.fleet.router.control.requests.moves import LENGTHS, STATED
from pla_sglang.fleet.router.keys_file import KeysFile, read_keys
from pla_sglang.fleet.router.process.process_main import Stop, run_main, settle_memory, until_first
from pla_sglang.fleet.router.process.supervisor import supervise_processes
from pla_sglang.fleet.router.sgl_router_flags import translate_flags
from pla_sglang.fleet.router.tls import TlsContext, check_files
from pla_sglang.policy.registry import policy_names

MAX_RELAYS = 64
BENCH_VARIABLE = "PLA_BENCH"  # benches set it to 1 for what they start
POLICY_FLAGS = {  # flag -> policies of ours that read it
    "boundary": ("pla", "combined", "combined-roles"),
    **dict.fromkeys(("pressure-interval-ms", "pressure-cool-down-ms", "pressure-hysteresis"), ("pla",)),
}


@dataclasses.dataclass(frozen=True)
class RouterConfig:
    """A router: its processes and both planes."""

    relays: int = knob(
        0,
        "--relay-workers",
        "processes on the port; 0: one in all",
        allowed=Range(0, MAX_RELAYS),
        heading="processes",
    )
    standby: bool = knob(
        False,
        "--standby",
        "a second control process, which takes over within 2 s; needs --relay-workers",
    )
    relay: RelayConfig = dataclasses.field(default_factory=RelayConfig)
    control: ControlKnobs = dataclasses.field(default_factory=ControlKnobs)

    def __post_init__(self) -> None:
        check_fields(self)
        if self.standby and not self.relays:
            text = "--standby needs --relay-workers: control is a process of its own then"
            raise ConfigError(f"{text}; allowed with it: 1 to {MAX_RELAYS}")


def read_config(argv: Sequence[str] | None) -> tuple[RouterConfig, cli.Settings]:
    """Raises PlaError."""
    parser = cli.make_parser(RouterConfig, "launch_router", __doc__, allow_abbrev=False)
    arguments, notes = translate_flags(sys.argv[1:] if argv is None else argv)
    for note in notes:
        print(f"pla_sglang: {note}", file=sys.stderr, flush=True)
    parsed = cli.parse(parser, arguments, RouterConfig)
    refuse_contradictions(parsed.config.control.policy, cli.typed_flags(parsed.options))
    refuse_stated_lengths(parsed.config.control.moves.lengths, os.environ)
    return parsed.config, parsed.settings


def refuse_contradictions(policy: str, flags: set[str]) -> None:
    """``flags``: keys of those on the command line; a file may hold all of them. Raises ConfigError.

    A policy of another package may read all of them.
    """
    for key, readers in POLICY_FLAGS.items():
        if key in flags and policy in policy_names() and policy not in readers:
            raise ConfigError(f"--{key} is for --policy {', '.join(readers)}; {policy} does not read it")


def refuse_stated_lengths(lengths: str, environ: Mapping[str, str]) -> None:
    """Only a bench knows how long its answers will be; clients would move each other's requests by what they say.

    Raises ConfigError.
    """
    if lengths == STATED and environ.get(BENCH_VARIABLE) != "1":
        allowed = ", ".join(name for name in LENGTHS if name != STATED)
        raise ConfigError(f"--lengths {STATED} is for benches, which know their answers; allowed: {allowed}")


async def run_together(config: RouterConfig) -> int:
    """Relay and control plane on one event loop. Raises ConfigError and OSError."""
    from pla_sglang.fleet.router.control.control_plane import ControlPlane
    from pla_sglang.fleet.router.control.succession import Preparation
    from pla_sglang.fleet.router.relay.context import RelayContext
    from pla_sglang.fleet.router.relay.listener import listening_socket
    from pla_sglang.fleet.router.relay.server import Relay

    files = config.relay
    if files.port:
        listening_socket(files.host, files.port).close()  # told before any worker is
    prepared = Preparation(
        config.control,
        tls=TlsContext(files.worker_tls, now_s=time.time()),
        keys=None if files.keys_file is None else KeysFile(files.keys_file),
        scheme=files.tls.scheme,
    )
    plane = ControlPlane(config.control, prepared=prepared, router_key=make_router_key())
    stop = Stop(watch_stdin=False, pause_s=config.relay.drain_pause_s)
    await plane.start()
    relay = Relay(RelayContext(config.relay, number=0, send_to_control=plane.on_message, rng=random.SystemRandom()))
    try:
        await relay.start_serving()
        plane.attach_relay(0, relay)
        announce(config.relay, relay.listener.port, 0)
        settle_memory()
        await stop.asked.wait()
        relay.end_readiness()
        await stop.wait_pause()
        await until_first(relay.drain_requests(), stop.forced.wait())
    finally:
        await relay.stop_serving()
        await plane.stop()
    return 0


async def run_apart(config: RouterConfig, settings: cli.Settings) -> int:
    """Relays and control plane in processes of their own. Raises OSError where the port is taken."""
    from pla_sglang.fleet.router.relay.listener import listening_socket

    host, port, relays = config.relay.host, config.relay.port, config.relays
    if port:
        listening_socket(host, port).close()  # another router there would share its port
    # Held, not listening: the relays share the port with it, nobody else can take it, and port 0 becomes a number.
    holder = listening_socket(host, port, shared=True)
    try:
        relay = dataclasses.replace(config.relay, port=holder.getsockname()[1])
        announce(relay, relay.port, relays)
        return await supervise_processes(relay, relays, settings, standby=config.standby)
    finally:
        holder.close()


def announce(config: RelayConfig, port: int, relays: int) -> None:
    how = f"{relays} relay process(es) and a control process" if relays else "one process"
    scheme = "http" if config.tls.cert is None else "https"
    print(f"pla_sglang: router on {scheme}://{config.host}:{port}, {how}", flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    try:
        config, settings = read_config(argv)
        for files in (config.relay.tls, config.relay.worker_tls):
            check_files(files, now_s=time.time())
        if config.relay.keys_file is not None:
            read_keys(config.relay.keys_file)
    except PlaError as error:
        return cli.report_error(error)
    work: Any = run_apart(config, settings) if config.relays else run_together(config)
    return run_main(work)


if __name__ == "__main__":
    sys.exit(main())
