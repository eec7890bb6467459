"""The seam table as a page for people. ``python scripts/make_catalogue.py [FILE]`` prints it, or writes it to FILE.

``patches/CATALOGUE.md`` is this script's output; a test keeps the two equal.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from pla_patches import host
from pla_patches.hosts import HOSTS
from pla_patches.hosts.signature import Signature
from pla_patches.seam import Group, Subscriber
from pla_patches.table import SUBSCRIBERS

_INTRODUCTION = """\
# Seams

Every place where pla_sglang enters SGLang, made by `scripts/make_catalogue.py` from `pla_patches/table/` and the
recorded hosts in `pla_patches/hosts/`. Supported: {supported}. Recorded: {recorded}.

Before installation each target must exist with the parameters recorded here. Afterwards the live function must be our
hook, and the hook must call the subscriber. Any "no" ends the process with all reasons. `tests/patches/test_patches.py`
checks the same against the installed host, and that the host still looks each name up where it is replaced. An
"override" is a method of a class of ours that is derived from the host's: nothing is installed for it.

## When they are active, and when they can go

| group | subscribers | installed with | can go |
|---|---|---|---|
{groups}

## Functions of SGLang, and who is called there, in this order

A version of SGLang is named where the function is not as on the version before, an exit where it is not the group's.
"""


def render() -> str:
    """The page: the groups, then each function of the host with its subscribers."""
    supported, recorded = (
        ", ".join(f"sglang {version}" for version in versions)
        for versions in (host.SUPPORTED, [known.version for known in HOSTS])
    )
    counts = Counter(one.group for one in SUBSCRIBERS)
    groups = "\n".join(f"| {group.value} | {counts[group]} | {group.when} | {group.exit} |" for group in Group)
    parts = [_INTRODUCTION.format(supported=supported, recorded=recorded, groups=groups)]
    for key in dict.fromkeys(key for known in HOSTS for key in known.targets):
        if subscribers := [one for one in SUBSCRIBERS if one.key == key]:
            lines = [*_list_places(key), *map(_describe, subscribers)]
            parts.append(f"### {key}\n\n" + "\n".join(lines) + "\n")
    return "\n".join(parts)


def _list_places(key: str) -> Iterator[str]:
    """A line for each host where the function is not as on the one before."""
    before: Signature | None = None
    for known in HOSTS:
        there = known.targets.get(key)
        if there is None:
            yield f"- {known.version}: none"
        elif before is not None and before.target == there.target and before != there:
            yield f"- {known.version}: `({there.parameters})`"
        elif before != there:
            yield f"- {known.version}: `{there.target}({there.parameters})`"
        before = there


def _describe(one: Subscriber) -> str:
    absent = "".join(f" Not on {known.version}: {known.absent[one.id]}" for known in HOSTS if one.id in known.absent)
    leaves = "" if one.exit is None else f" Can go: {one.exit}"
    who = f"**{one.id}** ({one.group.value}), {one.hook.value} `{one.handler}`"
    return f"- {who}: {one.why}{absent}{leaves} *{one.verify}*"


def main(arguments: list[str]) -> None:
    page = render()
    if arguments:
        Path(arguments[0]).write_text(page, encoding="utf-8")
    else:
        sys.stdout.write(page)


if __name__ == "__main__":
    main(sys.argv[1:])
