"""``pla-sglang doctor``: what works on this machine, and what to do about the rest.

    pla-sglang doctor                 a table; SGLang is imported where it is installed, which takes a while
    pla-sglang doctor --for router    exit status 1 unless all that a command needs is there
    pla-sglang doctor --json          one JSON object
    pla-sglang doctor --host-wheel sglang-X.whl    whether our hooks fit a version of SGLang that is not installed

Exit status: 0, also where something is not installed; 1 when something that is installed does not work, what
--for names lacks something, or the wheel does not fit; 2 for a bad value or file.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import re
import socket
import sys
import warnings
from collections.abc import Callable, Sequence
from enum import Enum
from importlib import metadata, util
from pathlib import Path
from typing import NamedTuple

from pla_patches import host, verify
from pla_patches.hosts import HOSTS, Host, nearest
from pla_patches.sources import Difference, Sources, compare
from pla_patches.table import SUBSCRIBERS, table
from pla_sglang.common import cli, terminal
from pla_sglang.common.checks import Choice, Range, check_fields, knob
from pla_sglang.common.errors import ConfigError
from pla_sglang.plugin.platform import PLATFORM_NAME, is_active

EXIT_FAULTS = 1
OURS = "pla-sglang"
DEFAULT_PORT = 30_000
PLUGIN = ("sglang.srt.plugins", "pla_sglang")
LEAST_MEMORY_GIB = (
    3.0  # an emulated prefill and decode instance with a router: docs/benchmarks/cost.md, "cluster_start"
)
MEMORY_FILE = Path("/proc/meminfo")
# Rows that a command needs, by the command.
NEEDS = {
    "serve": ("Python", "SGLang", "plugin", "seams", "platform", "memory"),
    "router": ("Python", "packages of router", "port"),
    "cluster": ("Python", "packages of router", "SGLang", "plugin", "seams", "platform", "NIXL", "memory"),
    "simulate": ("Python", "packages of sim"),
}


class Status(Enum):
    WORKS = "works"
    LACKING = "lacking"
    FAULTY = "faulty"


class Diagnosis(NamedTuple):
    """``remedy``: what to do; empty where nothing is to be done."""

    status: Status
    detail: str
    remedy: str = ""


@dataclasses.dataclass(frozen=True)
class DoctorConfig:
    """The command line."""

    command: str | None = knob(
        None, "--for COMMAND", f"one that must work: {', '.join(NEEDS)}", allowed=Choice(tuple(NEEDS))
    )
    port: int = knob(DEFAULT_PORT, "--port", "that must be free", allowed=Range(1, 65_535))
    json: bool = knob(False, "--json", "one JSON object instead of the table")
    host_wheel: Path | None = knob(
        None,
        "--host-wheel FILE",
        "only this: what a wheel of SGLang, or a folder with one, has otherwise",
    )

    def __post_init__(self) -> None:
        check_fields(self)


def check_python() -> Diagnosis:
    version = ".".join(map(str, sys.version_info[:3]))
    if (3, 11) <= sys.version_info[:2] < (3, 14):
        return Diagnosis(Status.WORKS, version)
    return Diagnosis(Status.FAULTY, version, "use Python 3.11, 3.12 or 3.13")


def check_packages(extra: str) -> Diagnosis:
    """Those that ``extra`` of our own metadata names."""
    remedy = f"pip install '{OURS}[{extra}]'"
    try:
        requirements = metadata.requires(OURS) or []
    except metadata.PackageNotFoundError:
        return Diagnosis(Status.FAULTY, f"{OURS} is importable, but not installed", remedy)
    wanted = [text for text in requirements if "extra ==" not in text or re.search(rf"extra == .{extra}\b", text)]
    names = [re.split(r"[\s;=<>!~\[]", text)[0] for text in wanted]
    missing = [name for name in names if installed_version(name) is None]
    if missing:
        return Diagnosis(Status.LACKING, f"missing: {', '.join(missing)}", remedy)
    return Diagnosis(Status.WORKS, f"all {len(names)} installed")


def installed_version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def check_sglang() -> Diagnosis:
    reasons = host.version_reasons()
    if not reasons:
        return Diagnosis(Status.WORKS, str(host.installed_version()))
    status = Status.LACKING if host.installed_version() is None else Status.FAULTY
    return Diagnosis(status, reasons[0], f"pip install '{OURS}[engine]'")


def check_plugin() -> Diagnosis:
    """SGLang finds us by our entry point, and only there."""
    group, name = PLUGIN
    if any(point.name == name for point in metadata.entry_points(group=group)):
        return Diagnosis(Status.WORKS, f"entry point {name} of {group}")
    return Diagnosis(
        Status.FAULTY, f"no entry point {name} of {group}", f"pip install {OURS}, or make setup in a checkout"
    )


def check_seams() -> Diagnosis:
    """Imports what the seam table names, of SGLang and of ours."""
    if host.installed_version() is None:
        return Diagnosis(Status.LACKING, "SGLang is not installed")
    seams = table()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # SGLang tells on import what it cannot do without a GPU
        reasons = host.version_reasons() + verify.host_reasons(seams)
    if reasons:
        remedy = f"use sglang {' or '.join(host.SUPPORTED)}: this one differs from what the plugin was tested with"
        return Diagnosis(Status.FAULTY, f"{len(reasons)} do not fit, such as {reasons[0]}", remedy)
    return Diagnosis(Status.WORKS, f"{len(seams)} functions of SGLang are as recorded")


def check_gpu() -> Diagnosis:
    if util.find_spec("torch") is None:
        return Diagnosis(Status.LACKING, "torch is not installed")
    import torch

    if not torch.cuda.is_available():
        remedy = "none needed: --pla-emulate PROFILE takes the time of a GPU; small models run on the CPU"
        return Diagnosis(Status.LACKING, f"torch {torch.__version__} finds none", remedy)
    devices = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    names = [f"{device.name} {device.total_memory / 2**30:.0f} GiB" for device in devices]
    return Diagnosis(Status.WORKS, ", ".join(names))


def check_platform() -> Diagnosis:
    """Who runs models in a server that is started without further flags."""
    if host.installed_version() is None:
        return Diagnosis(Status.LACKING, "SGLang is not installed")
    try:
        ours = is_active()
    except ConfigError as error:
        return Diagnosis(Status.FAULTY, str(error), "unset the variable")
    return Diagnosis(Status.WORKS, f"{PLATFORM_NAME}, ours for the CPU" if ours else "SGLang's own choice")


def check_nixl() -> Diagnosis:
    """What moves KV between prefill and decode instances; its libraries must load."""
    version, remedy = installed_version("nixl"), f"pip install '{OURS}[pd]'"
    if version is None:
        return Diagnosis(Status.LACKING, "not installed: no prefill and decode instances", remedy)
    try:
        import nixl._api  # noqa: F401
    except (ImportError, OSError) as error:
        return Diagnosis(Status.FAULTY, f"{version} cannot be imported: {error}", remedy)
    return Diagnosis(Status.WORKS, version)


def check_port(port: int) -> Diagnosis:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do
        try:
            probe.bind(("", port))
        except OSError as error:
            return Diagnosis(Status.LACKING, f"{port}: {error.strerror}", "start with another --port")
    return Diagnosis(Status.WORKS, f"{port} is free")


def check_memory(file: Path = MEMORY_FILE) -> Diagnosis:
    """``file``: as Linux writes it, in KiB."""
    try:
        rows = dict(re.findall(r"^(\w+):\s+(\d+) kB$", file.read_text(encoding="ascii"), re.MULTILINE))
        available_gib, total_gib = (int(rows[name]) / 2**20 for name in ("MemAvailable", "MemTotal"))
    except (OSError, KeyError):
        return Diagnosis(Status.LACKING, f"{file} does not say", "")
    detail = f"{available_gib:.1f} of {total_gib:.1f} GiB available"
    if available_gib >= LEAST_MEMORY_GIB:
        return Diagnosis(Status.WORKS, detail)
    return Diagnosis(
        Status.LACKING, detail, f"free some: four emulated engines with a router take {LEAST_MEMORY_GIB:g} GiB"
    )


def examine_machine(config: DoctorConfig) -> dict[str, Diagnosis]:
    """Every row, in the order in which one depends on the other."""
    rows: dict[str, Callable[[], Diagnosis]] = {
        "Python": check_python,
        "packages of router": lambda: check_packages("router"),
        "packages of sim": lambda: check_packages("sim"),
        "packages of report": lambda: check_packages("report"),
        "SGLang": check_sglang,
        "plugin": check_plugin,
        "seams": check_seams,
        "GPU": check_gpu,
        "platform": check_platform,
        "NIXL": check_nixl,
        "port": lambda: check_port(config.port),
        "memory": check_memory,
    }
    return {name: check() for name, check in rows.items()}


def list_lacking(findings: dict[str, Diagnosis], command: str | None) -> list[str]:
    """Rows that make the exit status 1."""
    needed = NEEDS[command] if command else ()
    return [
        name
        for name, finding in findings.items()
        if finding.status is Status.FAULTY or (finding.status is Status.LACKING and name in needed)
    ]


def describe_unneeded(findings: dict[str, Diagnosis]) -> str:
    """What is lacking where nothing that is asked for needs it."""
    names = [name for name, finding in findings.items() if finding.status is Status.LACKING]
    return f"; lacking, for what needs it: {', '.join(names)}" if names else ": all that is looked at works"


def print_table(findings: dict[str, Diagnosis]) -> None:
    """With rich where it is installed; the extra of the router does not bring it."""
    if util.find_spec("rich") is None:
        for name, finding in findings.items():
            print(f"{name:<19} {finding.status.value:<7} {finding.detail}")
            if finding.remedy:
                print(f"{'':<19} {'':<7} -> {finding.remedy}")
        return
    from rich.table import Table
    from rich.text import Text

    from pla_sglang.common.console import TableConsole

    colours = {Status.WORKS: "green", Status.LACKING: "yellow", Status.FAULTY: "red"}
    shown = Table(title="pla-sglang on this machine")
    for column in ("what", "status", "found", "remedy"):
        shown.add_column(column)
    for name, finding in findings.items():
        status = Text(finding.status.value, style=colours[finding.status])
        shown.add_row(Text(name), status, Text(finding.detail), Text(finding.remedy))
    TableConsole().print(shown)


def examine_wheel(file: Path, *, as_json: bool) -> int:
    """Print what a host that is not installed has otherwise than the nearest recorded one; the exit status.

    Raises ConfigError for a file that is no wheel of SGLang.
    """
    sources = Sources(file)
    known = nearest(sources.version)
    differences = compare(sources, known)
    if as_json:
        print(json.dumps(_describe_wheel(sources.version, known, differences)))
        return EXIT_FAULTS if differences else 0
    for one in differences:
        print(f"{one.how:<10} {one.key} ({', '.join(_users_of(one.key, known))})\n{'':<10} {one}")
    print(f"fits       {', '.join(_fitting(known, differences))}")
    if known.absent:
        print(f"left out   {', '.join(known.absent)}, as on {known.version}")
    counts = [
        f"{len(compare(sources, one))} of {len(one.signatures)} differ from {one.version}"
        for one in sorted(HOSTS, key=lambda one: one != known)
    ]
    print(f"sglang {sources.version}: of the functions that we enter {'; '.join(counts)}")
    return EXIT_FAULTS if differences else 0


def _describe_wheel(version: str, known: Host, differences: list[Difference]) -> dict[str, object]:
    return {
        "works": not differences,
        "host": version,
        "supported": version in host.SUPPORTED,
        "compared_with": known.version,
        "fit": _fitting(known, differences),
        "differ": [
            {"key": one.key, "how": one.how, "subscribers": _users_of(one.key, known), "detail": str(one)}
            for one in differences
        ],
    }


def _fitting(known: Host, differences: list[Difference]) -> list[str]:
    differing = {one.key for one in differences}
    return [key for key in known.signatures if key not in differing]


def _users_of(key: str, known: Host) -> list[str]:
    """Subscribers; of a constructor that we call, ``less.ends``."""
    users = [one.id for one in SUBSCRIBERS if one.key == key and one.id not in known.absent]
    return users or ["less.ends"]


def main(argv: Sequence[str] | None = None) -> int:
    return terminal.run_to_end("doctor", functools.partial(run_command, argv))


def run_command(argv: Sequence[str] | None) -> int:
    try:
        config = cli.parse(cli.make_parser(DoctorConfig, "doctor", __doc__), argv, DoctorConfig).config
        if config.host_wheel is not None:
            return examine_wheel(config.host_wheel, as_json=config.json)
    except ConfigError as error:
        return cli.report_error(error)
    if sys.stderr.isatty() and host.installed_version() is not None:
        print("importing SGLang, to check what the plugin needs of it", file=sys.stderr, flush=True)
    findings = examine_machine(config)
    lacks = list_lacking(findings, config.command)
    if config.json:
        rows = {name: {**finding._asdict(), "status": finding.status.value} for name, finding in findings.items()}
        print(json.dumps({"works": not lacks, "lacks": lacks, "checks": rows}))
        return EXIT_FAULTS if lacks else 0
    print_table(findings)
    where = f" for {config.command}" if config.command else ""
    print(f"not in order{where}: {', '.join(lacks)}" if lacks else f"in order{where}{describe_unneeded(findings)}")
    return EXIT_FAULTS if lacks else 0


if __name__ == "__main__":
    sys.exit(main())
