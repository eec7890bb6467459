"""A server that ends with the process which starts it: ``python -m pla_sglang.fleet.cluster.tied PARENT MODULE ...``.

The kernel kills it when PARENT, a process id, is gone, however that was. SGLang's processes end with their first.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import NoReturn

from pla_sglang.fleet.cluster.zygote import die_with_parent, run_engine

ENGINE = "pla_sglang.launch_server"
FORKS = "--fork-workers"


def start_tied(
    module: str, argv: Sequence[str], environment: Mapping[str, str], *, forks_workers: bool = False
) -> subprocess.Popen[bytes]:
    """``python -m module argv``, in a session of its own, its output in a pipe.

    Only the main thread may call it: the kernel takes the end of a thread for that of the parent. ``forks_workers``:
    of an engine, which starts sooner then; a CUDA context would not survive it.
    """
    return subprocess.Popen(
        [
            sys.executable,
            "-m",
            "pla_sglang.fleet.cluster.tied",
            str(os.getpid()),
            FORKS if forks_workers else module,
            *argv,
        ],
        env={**os.environ, **environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def main(arguments: Sequence[str]) -> NoReturn:
    parent, module, *argv = arguments
    die_with_parent(int(parent))
    if module == FORKS:
        sys.exit(run_engine(argv))
    os.execv(sys.executable, [sys.executable, "-m", module, *argv])


if __name__ == "__main__":
    main(sys.argv[1:])
