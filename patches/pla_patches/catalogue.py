"""The seam table as a page for people. ``python -m pla_patches.catalogue [FILE]`` prints it, or writes it to FILE.

``patches/CATALOGUE.md`` is this module's output; a test keeps the two equal.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

from pla_patches import host
from pla_patches.seam import Group, Seam
from pla_patches.seams import table

WHEN = {
    Group.CLI: "always, in every process that loads plugins",
    Group.CPU: "the CPU platform is active",
    Group.EMULATE: "`--pla-emulate` is given, in scheduler processes",
    Group.FRONTEND: "`--prefill-disagg` is on, in the process that serves HTTP",
    Group.SCHEDULER: "`--prefill-disagg` is on, in scheduler processes",
    Group.TELEMETRY: "load reports go to a router or to the server's own pool controller, in scheduler processes",
    Group.POOLS: "`--prefill-disagg spatial --dp-size N`, in the process that serves HTTP",
    Group.CONTROLLER: "the same, in the data-parallel controller process",
    Group.GRAPHS: "`--pla-graph-layout` is on, in scheduler processes",
    Group.LAUNCHER: "under `python -m pla_sglang.launch_server` only",
}

_INTRODUCTION = """\
# Seams

Every place where pla_sglang enters SGLang, made from the table in `pla_patches/seams.py` by
`python -m pla_patches.catalogue`. Supported hosts: {hosts}.

Each seam is checked twice: before installation its target must exist with the parameters recorded here, and after it
the live function must be ours. Any "no" ends the process with all reasons. `tests/test_patches.py` checks the same
against the installed host, and that the host still looks each name up where it is replaced.
"""


def render(seams: Iterable[Seam]) -> str:
    """The page, with seams in the order of the table under a heading for each group."""
    seams = tuple(seams)
    hosts = ", ".join(f"sglang {version}" for version in host.SUPPORTED)
    parts = [_INTRODUCTION.format(hosts=hosts)]
    for group in Group:
        of_group = [seam for seam in seams if seam.group is group]
        if of_group:
            parts.append(f"## {group.value}: {len(of_group)} of {len(seams)}\n\nInstalled when: {WHEN[group]}.\n")
            parts += [_entry(seam) for seam in of_group]
    return "\n".join(parts)


def _entry(seam: Seam) -> str:
    lines = (
        ("target", f"`{seam.target}({seam.parameters})`"),
        ("hook", f"{seam.hook.value}, `{seam.handler}`"),
        ("why", seam.why),
        ("verified by", seam.verify),
        ("can go", seam.exit),
        ("recorded on", ", ".join(seam.host_versions)),
    )
    return f"### {seam.id}\n\n" + "\n".join(f"- {name}: {text}" for name, text in lines) + "\n"


def main(arguments: list[str]) -> None:
    page = render(table())
    if arguments:
        Path(arguments[0]).write_text(page, encoding="utf-8")
    else:
        sys.stdout.write(page)


if __name__ == "__main__":
    main(sys.argv[1:])
