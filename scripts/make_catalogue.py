"""The seam table as a page for people. ``python scripts/make_catalogue.py [FILE]`` prints it, or writes it to FILE.

``patches/CATALOGUE.md`` is this script's output; a test keeps the two equal.
"""

from __future__ import annotations

import sys
from pathlib import Path

from pla_patches import host
from pla_patches.hosts import HOSTS, Host
from pla_patches.seam import Group, Subscriber
from pla_patches.table import SUBSCRIBERS

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
    Group.PREDICTOR: "`--pla-length-predictor` is given, in scheduler processes",
    Group.RUNNING: "`--prefill-disagg` is on or `--pla-stateless` is given, in scheduler processes",
    Group.STATELESS: "`--pla-stateless` is given, in scheduler processes",
    Group.STATELESS_HTTP: "the same, in the process that serves HTTP",
    Group.LAUNCHER: "under `python -m pla_sglang.launch_server` only",
}

_INTRODUCTION = """\
# Seams

Every place where pla_sglang enters SGLang, made from the tables in `pla_patches/table/` and the recorded hosts in
`pla_patches/hosts/` by `scripts/make_catalogue.py`. Supported hosts: {supported}. Recorded: {recorded}.

One hook of ours stands at each target and calls the subscribers that are active in the process, in the order given
here. Each is checked twice: before installation its target must exist with the parameters recorded here, and after it
the live function must be our hook, and the hook must call it. Any "no" ends the process with all reasons.
`tests/patches/test_patches.py` checks the same against the installed host, and that the host still looks each name up
where it is replaced. An "override" is a method of a class of ours that is derived from the host's: nothing is installed
for it.
"""


def render() -> str:
    """The page, with subscribers in the order of the record under a heading for each group."""
    keys = list(dict.fromkeys(key for known in HOSTS for key in known.targets))
    ordered = sorted(SUBSCRIBERS, key=lambda one: keys.index(one.key))
    supported, recorded = (
        ", ".join(f"sglang {version}" for version in versions)
        for versions in (host.SUPPORTED, [known.version for known in HOSTS])
    )
    parts = [_INTRODUCTION.format(supported=supported, recorded=recorded)]
    for group in Group:
        of_group = [one for one in ordered if one.group is group]
        if of_group:
            parts.append(f"## {group.value}: {len(of_group)} of {len(ordered)}\n\nInstalled when: {WHEN[group]}.\n")
            parts += [_render_entry(one) for one in of_group]
    return "\n".join(parts)


def _render_entry(subscriber: Subscriber) -> str:
    others = [one.id for one in SUBSCRIBERS if one.key == subscriber.key]
    lines = [
        ("key", f"`{subscriber.key}`"),
        *((f"sglang {known.version}", _render_place(known, subscriber)) for known in HOSTS),
        ("hook", f"{subscriber.hook.value}, `{subscriber.handler}`"),
        *([("order", ", ".join(others))] if len(others) > 1 else []),
        ("why", subscriber.why),
        ("verified by", subscriber.verify),
        ("can go", subscriber.goes_when),
    ]
    return f"### {subscriber.id}\n\n" + "\n".join(f"- {name}: {text}" for name, text in lines) + "\n"


def _render_place(known: Host, subscriber: Subscriber) -> str:
    """In full on the oldest host that has it; on a newer one only what differs from the host before."""
    if reason := known.absent.get(subscriber.id):
        return f"not installed. {reason}"
    there = known.targets[subscriber.key]
    older = [one.targets.get(subscriber.key) for one in HOSTS[: HOSTS.index(known)]]
    before = older[-1] if older else None
    if before == there:
        return "the same"
    if before is not None and before.target == there.target:
        return f"there, with `({there.parameters})`"
    return f"`{there.target}({there.parameters})`"


def main(arguments: list[str]) -> None:
    page = render()
    if arguments:
        Path(arguments[0]).write_text(page, encoding="utf-8")
    else:
        sys.stdout.write(page)


if __name__ == "__main__":
    main(sys.argv[1:])
