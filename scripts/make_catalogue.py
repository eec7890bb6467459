"""The seam table as a page for people. ``python scripts/make_catalogue.py [FILE]`` prints it, or writes it to FILE.

``patches/CATALOGUE.md`` is this script's output; a test keeps the two equal.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

from pla_patches import host
from pla_patches.seam import Group, Seam, Subscriber
from pla_patches.table import table

WHEN = {
    Group.CLI: "always, in every process that loads plugins",
    Group.CPU: "the CPU platform is active",
    Group.EMULATE: "`--pla-emulate` is given, in scheduler processes",
    Group.GUARD: "in the process that serves HTTP, on a supported host",
    Group.GUARD_SCHEDULER: "in its child processes, on a supported host",
    Group.FRONTEND: "`--prefill-disagg` is on, in the process that serves HTTP",
    Group.SCHEDULER: "`--prefill-disagg` is on, in scheduler processes",
    Group.TELEMETRY: "load reports go to a router or to the server's own pool controller, in scheduler processes",
    Group.POOLS: "`--prefill-disagg spatial --dp-size N`, in the process that serves HTTP",
    Group.CONTROLLER: "the same, in the data-parallel controller process",
    Group.GRAPHS: "`--pla-graph-layout` is on, in scheduler processes",
    Group.RUNNING: "`--prefill-disagg` is on or `--pla-stateless` is given, in scheduler processes",
    Group.STATELESS: "`--pla-stateless` is given, in scheduler processes",
    Group.STATELESS_FRONT: "the same, in the process that serves HTTP",
    Group.LAUNCHER: "under `python -m pla_sglang.launch_server` only",
}

_INTRODUCTION = """\
# Seams

Every place where pla_sglang enters SGLang, made from the tables in `pla_patches/table/` by
`scripts/make_catalogue.py`. Supported hosts: {hosts}.

One hook of ours stands at each target and calls the subscribers that are active in the process, in the order given
here. Each is checked twice: before installation its target must exist with the parameters recorded here, and after it
the live function must be our hook, and the hook must call it. Any "no" ends the process with all reasons.
`tests/test_patches.py` checks the same against the installed host, and that the host still looks each name up where it
is replaced. An "override" is a method of a class of ours that is derived from the host's: nothing is installed for it.

What a port to sglang {next_host} has to know stands in each entry; `tests/test_next_host.py` compares the signatures
with its sources where they are given (`PLA_NEXT_SGLANG`).
"""


def render(seams: Iterable[Seam]) -> str:
    """The page, with subscribers in the order of the table under a heading for each group."""
    entries = [(seam, subscriber) for seam in seams for subscriber in seam.subscribers]
    hosts = ", ".join(f"sglang {version}" for version in host.SUPPORTED)
    parts = [_INTRODUCTION.format(hosts=hosts, next_host=host.NEXT)]
    for group in Group:
        of_group = [entry for entry in entries if entry[1].group is group]
        if of_group:
            parts.append(f"## {group.value}: {len(of_group)} of {len(entries)}\n\nInstalled when: {WHEN[group]}.\n")
            parts += [_render_entry(*entry) for entry in of_group]
    return "\n".join(parts)


def _render_entry(seam: Seam, subscriber: Subscriber) -> str:
    lines = [
        ("target", f"`{seam.target}({seam.parameters})`"),
        ("hook", f"{subscriber.hook.value}, `{subscriber.handler}`"),
        ("why", subscriber.why),
        ("verified by", subscriber.verify),
        ("can go", subscriber.goes_when),
        ("recorded on", ", ".join(subscriber.host_versions)),
    ]
    lines.append((f"in sglang {host.NEXT}", _render_next(seam, subscriber)))
    if len(seam.subscribers) > 1:
        lines.insert(2, ("order", ", ".join(other.id for other in seam.subscribers)))
    return f"### {subscriber.id}\n\n" + "\n".join(f"- {name}: {text}" for name, text in lines) + "\n"


def _render_next(seam: Seam, subscriber: Subscriber) -> str:
    there = seam.next_host
    if there is None:
        text = "nothing of this name."
    elif there.target != seam.target:
        text = f"`{there.target}({there.parameters})`."
    elif there.parameters != seam.parameters:
        text = f"same target, with `({there.parameters})`."
    else:
        text = "same target and parameters."
    return text if subscriber.next_host is None else f"{text} {subscriber.next_host}"


def main(arguments: list[str]) -> None:
    page = render(table())
    if arguments:
        Path(arguments[0]).write_text(page, encoding="utf-8")
    else:
        sys.stdout.write(page)


if __name__ == "__main__":
    main(sys.argv[1:])
