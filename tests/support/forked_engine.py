"""A server that a zygote has forked: ``support.forked_engine ENVIRONMENT MODULE ARGUMENTS...``.

ENVIRONMENT is a JSON object of what this server's environment has besides the zygote's; null removes a variable. The
server is what ``python -m MODULE ARGUMENTS...`` would be, but for the imports that its processes share.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from pla_sglang.cluster.forking import fork_workers
from pla_sglang.cluster.zygote import run_engine, run_module

OURS = "pla_sglang.launch_server"


def main(arguments: Sequence[str]) -> int:
    environment, module, *rest = arguments
    changes = json.loads(environment)
    for name, value in changes.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    _customize_site(changes)
    if module == OURS:
        return run_engine(rest)
    fork_workers()
    return run_module(module, rest)


def _customize_site(changes: Mapping[str, str | None]) -> None:
    """What a fresh interpreter runs of its PYTHONPATH; the processes forked from here share it."""
    for folder in (changes.get("PYTHONPATH") or "").split(os.pathsep):
        site = Path(folder) / "sitecustomize.py"
        if folder and site.is_file():
            runpy.run_path(str(site))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
