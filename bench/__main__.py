"""``python -m bench``: lists every bench; ``python -m bench NAME ...`` runs one with its own flags."""

from __future__ import annotations

import difflib
import sys

from bench.harness.catalogue import BENCHES
from pla_sglang.common.terminal import run_to_end

ROOMS = {
    "compare": "against stock SGLang and its routers",
    "check": "the exit status is the result",
    "cost": "what a part costs",
    "gpu": "on a GPU",
    "harness": "tools",
    "lab": "papers, fleets, baselines; a user needs none of them",
}


def print_list() -> None:
    """One line a bench: name, usual time, what it needs, what it shows; grouped by folder."""
    width = max(map(len, BENCHES))
    print("python -m bench NAME [--help]")
    for room, purpose in ROOMS.items():
        print(f"\n{room}: {purpose}")
        for bench in BENCHES.values():
            if bench.module.startswith(f"{room}."):
                print(f"  {bench.name:<{width}}  {bench.duration:<11} {bench.needs:<22} {bench.read_summary()}")


def main(argv: list[str]) -> int:
    """Exit status of the bench; 2 for a name that is not known."""
    if not argv or argv[0] in ("-h", "--help"):
        print_list()
        return 0
    name, *arguments = argv
    if name not in BENCHES:
        close = difflib.get_close_matches(name, BENCHES, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"allowed: {', '.join(BENCHES)}"
        print(f"bench: {name!r} is not known; {hint}", file=sys.stderr)
        return 2
    return BENCHES[name].main(arguments)


if __name__ == "__main__":
    sys.exit(run_to_end("bench", lambda: main(sys.argv[1:])))
