"""Gets us into SGLang's data-parallel controller process, which loads no plugins, or loads them by itself, and
is ready before its ranks report.

The server starts that process with a function as its target. A spawned process looks its target up by module and name,
so a hook around the function, which keeps the host's name, would be gone on the other side. A class in its place is
found under its own name, here. (A forked process, as in a cluster on this machine, calls the same object.)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

REPORTS_WITHIN_S = 60.0

# In a list, so that SGLang's hook registry, which replaces the function wherever a module names it, leaves this one.
_HOST: list[Callable[..., Any]] = []


def host_entry() -> Callable[..., Any]:
    """SGLang's function."""
    if not _HOST:
        from sglang.srt.managers import data_parallel_controller

        _HOST.append(data_parallel_controller.run_data_parallel_controller_process)
    return _HOST[0]


class ControllerProcess:
    """``ControllerProcess(...)`` is a call of SGLang's entry function, plugins loaded, that reports our seams."""

    def __init__(self, server_args: Any, port_args: Any, pipe_writer: Any, *args: Any, **kwargs: Any) -> None:
        from sglang.srt.plugins import load_plugins

        from pla_patches.install import enter_controller

        run = host_entry()
        enter_controller()
        load_plugins()
        run(server_args, port_args, _ReadyPipe(pipe_writer), *args, **kwargs)


class _ReadyPipe:
    """The pipe on which the controller says once that it is ready. It is when every rank reports its load."""

    def __init__(self, pipe: Any) -> None:
        self._pipe = pipe

    def send(self, info: dict[str, Any]) -> None:
        """Raises HostMismatchError when our seams are not in effect or a rank does not report."""
        from pla_sglang.plugin.engine.hooks.dp_controller import ready_info

        self._pipe.send({**info, "pla": ready_info(REPORTS_WITHIN_S)})


host_entry()  # before any hook is applied: afterwards the host's module names our class
