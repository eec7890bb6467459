"""Python's warnings go into a file: SGLang's imports make the same few in each process of a server.

A process that SGLang spawns imports the main module first, so ``follow_parent`` runs in it before SGLang's imports do.
Log records and errors are no such warnings: they reach the terminal as ever.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import warnings
from typing import Any

VARIABLE = "SGLANG_PLA_WARNINGS_FILE"  # for the processes that this one starts


def keep_warnings() -> None:
    """From here on, in this process and those it starts. Where no file can be made, they stay on the terminal."""
    try:
        descriptor, path = tempfile.mkstemp(prefix="pla_sglang_warnings.", suffix=".log")
    except OSError as error:
        os.environ.pop(VARIABLE, None)  # a file that this process's own parent keeps is no place for them either
        print(f"pla_sglang: Python's warnings stay here, as no file can be made for them: {error}", flush=True)
        return
    os.close(descriptor)
    os.environ[VARIABLE] = path
    print(f"pla_sglang: Python's warnings go to {path}", flush=True)
    follow_parent()


def follow_parent() -> None:
    """Without effect where the parent keeps none."""
    if not os.path.isfile(os.environ.get(VARIABLE, "")):
        return
    show = warnings.showwarning

    def write(message: Any, category: type[Warning], filename: str, lineno: int, *rest: Any, **more: Any) -> None:
        text = f"[{os.getpid()}] {warnings.formatwarning(message, category, filename, lineno)}"
        with contextlib.suppress(OSError, KeyError), open(os.environ[VARIABLE], "a", encoding="utf-8") as file:
            file.write(text)
            return
        show(message, category, filename, lineno, *rest, **more)

    warnings.showwarning = write
