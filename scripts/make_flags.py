"""Every flag of our commands as a page. ``python scripts/make_flags.py [FILE]`` prints it, or writes it to FILE.

``docs/reference/flags.md`` is this script's output; a test keeps the two equal.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from pathlib import Path

from pla_sglang.common.checks import Declared, Range, plain
from pla_sglang.common.cli import flags_of, typed
from pla_sglang.doctor import DoctorConfig
from pla_sglang.launch_cluster import LaunchConfig
from pla_sglang.launch_router import RouterConfig
from pla_sglang.plugin.config import PlaConfig
from pla_sglang.policy_packages import PolicyName
from pla_sglang.predictor.__main__ import EvaluateConfig, TrainConfig
from pla_sglang.predictor.collect import CollectConfig
from pla_sglang.profile import ProfileConfig
from pla_sglang.simulate import SimulateConfig

COMMANDS: dict[str, tuple[type, str]] = {
    "serve": (PlaConfig, "Besides every flag of SGLang. [What they do together](../guide/one-server.md#which-flags)"),
    "router": (RouterConfig, "[The router](router.md), [its control plane](control.md)"),
    "cluster": (LaunchConfig, "What it does not know goes to every engine. [A cluster](cluster.md)"),
    "simulate": (SimulateConfig, "[The simulator](simulator.md)"),
    "profile": (ProfileConfig, "[Profiles](emulation.md#profiles)"),
    "predictor collect": (CollectConfig, "What it does not know goes to SGLang. [The length predictor](predictor.md)"),
    "predictor train": (TrainConfig, "[What is trained](predictor.md#what-is-trained)"),
    "predictor evaluate": (EvaluateConfig, "[Its figures](predictor.md#figures)"),
    "doctor": (DoctorConfig, "[Commands](server.md#commands)"),
}
LISTED = {  # flags whose help ends with a list that stands on another page, or in the column before
    "--profile": "step times: a path, or [one](emulation.md#profiles) that `simulate --help` lists",
    "--trace-kind": "[format](workloads.md#formats); default: found out from the file",
    "--engine": "[order](policies/fleet.md#orders-in-an-engine) of prefills in an engine",
}
NO_LIMIT = 3600  # a bound from here on only keeps out nonsense; the message of a value beyond says it
INTRODUCTION = """\
# Flags

Every flag of our [commands](server.md#commands), as `--flag` = `default`; what is allowed, but for wide bounds. Each
may stand in a file of `--config` (of the cluster: `--cluster-config`), without its dashes; `--print-config` prints such
a file. Each flag of a key, such as `--api-key`, has one that ends in `-file` beside it: [keys](server.md#keys).
"""


def render() -> str:
    """The page: a heading for each command, a table for each group of its flags."""
    parts = [INTRODUCTION]
    for name, (config, text) in COMMANDS.items():
        parts.append(f"## {name}\n\n{text}.\n")
        parts.append("\n".join(_table_lines(config)) + "\n")
    return "\n".join(parts)


def _table_lines(config: type) -> Iterator[str]:
    yield "| flag | what |"
    yield "| --- | --- |"
    for declared in flags_of(config):
        knob = declared.knob
        if knob.name.endswith("-file") and knob.name.removesuffix("-file") in knob.help:
            continue  # of a key: the introduction tells of all
        if knob.heading:
            yield f"| **{_cell(knob.heading)}** |"
        values = "; ".join(filter(None, (f"`{knob.name}`{_default(declared)}", _allowed(declared))))
        yield f"| {values} | {_tell(declared)} |"


def _tell(declared: Declared) -> str:
    """The help, but of lists that stand elsewhere a link."""
    knob = declared.knob
    if isinstance(knob.allowed, PolicyName):
        return "where requests go"
    if knob.name in LISTED and "," in knob.help:
        return LISTED[knob.name]
    return _cell(knob.help)


def _default(declared: Declared) -> str:
    """What follows the flag."""
    default = declared.field.default
    if default is dataclasses.MISSING:
        return ", needed"
    if declared.base is bool:
        return ", on" if default else ""
    if default is None and declared.knob.none:
        return f" = `{declared.knob.none}`"
    if default in (None, "", ()):
        return ""
    shown = typed(default, declared)
    values = shown if isinstance(shown, list) else [shown]
    return " = `" + ",".join(_cell(plain(value)) for value in values) + "`"


def _allowed(declared: Declared) -> str:
    knob = declared.knob
    if declared.base is bool:
        return ""
    if isinstance(knob.allowed, PolicyName):  # its words depend on what is installed
        return "[policies](policies/fleet.md)"
    is_wide = isinstance(knob.allowed, Range) and knob.allowed.high >= NO_LIMIT
    rule = "" if knob.allowed is None or is_wide or knob.secret else str(knob.allowed)
    return _cell(f"{rule}, or {knob.none}" if rule and knob.none else rule)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def main(arguments: list[str]) -> None:
    page = render()
    if arguments:
        Path(arguments[0]).write_text(page, encoding="utf-8")
    else:
        sys.stdout.write(page)


if __name__ == "__main__":
    main(sys.argv[1:])
