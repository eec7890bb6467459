"""Signatures of one version of SGLang, as the module of data that ``pla_patches.hosts`` has for it.

    python scripts/record_host.py WHEEL                print what differs from the nearest recorded version
    python scripts/record_host.py WHEEL --write        write patches/pla_patches/hosts/vX_Y_Z.py too

WHEEL: a wheel of sglang, or a folder where one is unpacked. Nothing is imported or installed. What has gone is left
out of the module: say in ``ABSENT`` why its subscribers are not needed there, or record where it is now. ``ABSENT`` is
taken from the nearest version. Exit status: 1 where something has gone, 2 for a bad file.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path

from pla_patches.hosts import HOSTS, Host, nearest
from pla_patches.hosts.signature import Signature
from pla_patches.sources import Difference, Sources, compare
from pla_sglang.common.errors import ConfigError

FOLDER = Path(__file__).resolve().parent.parent / "patches" / "pla_patches" / "hosts"
LINE = 120


def record(sources: Sources, known: Host) -> tuple[Host, list[Difference]]:
    """What ``sources`` have for the keys of ``known``, and how that differs from it."""
    differences = compare(sources, known)
    changed = {one.key: one.found for one in differences}

    def of(recorded: Mapping[str, Signature]) -> dict[str, Signature]:
        now = {key: changed.get(key, there) for key, there in recorded.items()}
        return {key: there for key, there in now.items() if there is not None}

    return Host(sources.version, of(known.targets), of(known.constructed), known.absent), differences


def render(host: Host) -> str:
    """The module of data, formatted as the formatter leaves it."""
    lines = [
        f'"""SGLang {host.version}. Signatures by ``scripts/record_host.py``, ``ABSENT`` by hand."""',
        "",
        "from __future__ import annotations",
        "",
        "from pla_patches.hosts.signature import Signature",
        "",
        f'VERSION = "{host.version}"',
        "",
        *_render_signatures("TARGETS", host.targets),
        "",
        "# Called by us.",
        *_render_signatures("CONSTRUCTED", host.constructed),
        "",
        "# Subscribers that are not installed there, each with the reason.",
    ]
    if not host.absent:
        return "\n".join([*lines, "ABSENT: dict[str, str] = {}", ""])
    rows = [f'    "{name}": "{reason}",' for name, reason in host.absent.items()]
    return "\n".join([*lines, "ABSENT: dict[str, str] = {", *rows, "}", ""])


def _render_signatures(name: str, signatures: Mapping[str, Signature]) -> list[str]:
    lines = [f"{name} = {{"]
    for key, there in signatures.items():
        lines += [f'    "{key}": Signature(', f'        "{there.target}",']
        lines += _render_text(there.parameters, " " * 8)
        lines += ["    ),"]
    return [*lines, "}"]


def _render_text(text: str, indent: str) -> list[str]:
    """As one literal, or as several that fit their lines."""
    room = LINE - len(indent) - len('"",')
    parts: list[str] = [""]
    for word in text.split(", "):
        added = word if not parts[-1] else f"{parts[-1]}, {word}"
        if len(added) > room - len(", ") and parts[-1]:
            parts[-1] += ", "
            parts.append(word)
        else:
            parts[-1] = added
    return [f'{indent}"{part}"' for part in parts[:-1]] + [f'{indent}"{parts[-1]}",']


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--write", action="store_true", help="write the module")
    parser.add_argument("--against", choices=[one.version for one in HOSTS], help="default: the nearest version")
    options = parser.parse_args(argv)
    try:
        sources = Sources(options.wheel)
        host, differences = record(sources, nearest(options.against or sources.version))
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for difference in differences:
        print(f"{difference.how:<10} {difference.key}: {difference}")
    print(f"{len(host.targets) + len(host.constructed)} functions recorded, {len(differences)} differ")
    if options.write:
        (FOLDER / f"v{host.version.replace('.', '_')}.py").write_text(render(host), encoding="utf-8")
    return int(any(one.found is None for one in differences))


if __name__ == "__main__":
    sys.exit(main())
