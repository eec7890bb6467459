"""SGLang starts its workers by "spawn": each imports all modules again. In a forked engine they are forked instead.

SGLang sets the start method while it launches, so the setter itself is replaced, in this process only. Engines of a
cluster run on the CPU; a CUDA context would not survive a fork.

A forked process has all that its zygote has imported, several thousand modules. SGLang searches them for other names of
each function that a plugin wraps, which took half of an engine's start. That is left out where there are none.
"""

from __future__ import annotations

import multiprocessing
import os
from typing import Any


def fork_workers() -> None:
    """From now on every ``multiprocessing.Process`` of this process is a fork."""
    _search_for_functions_only()
    set_method = multiprocessing.set_start_method

    def always_fork(method: Any, force: bool = False) -> None:
        set_method("fork", force=True)

    multiprocessing.set_start_method = always_fork
    always_fork("fork")
    os.register_at_fork(after_in_child=_load_plugins_again)


def _load_plugins_again() -> None:
    """A worker has other seams than the process that forked it: let SGLang's loader run once more in it."""
    from sglang.srt import plugins

    plugins._plugins_loaded = False


def _search_for_functions_only() -> None:
    """``from MODULE import NAME`` makes other names of functions. The methods that plugins wrap have none."""
    from sglang.srt.plugins import hook_registry

    search = hook_registry._propagate_patch

    def search_for_functions(original: object, wrapped: object, owner: object) -> int:
        return 0 if isinstance(owner, type) else search(original, wrapped, owner)

    hook_registry._propagate_patch = search_for_functions
