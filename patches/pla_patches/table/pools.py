"""Seams of a server with a short and a long pool."""

from __future__ import annotations

import functools

from pla_patches.seam import Group, Hook, Subscriber, subscribe

_CONTROLLER = "sglang.srt.managers.data_parallel_controller."
_HOOKS = "pla_sglang.engine.hooks.dp_controller"

_subscribe = functools.partial(subscribe, module=_HOOKS)

POOLS = (
    Subscriber(
        id="pools.entry",
        group=Group.POOLS,
        target=_CONTROLLER + "run_data_parallel_controller_process",
        hook=Hook.REPLACE,
        handler="pla_sglang.engine.pools.entry:ControllerProcess",
        why="SGLang 0.5.17 loads no plugins in the data-parallel controller; this entry does, then calls the host's.",
        verify="tests/test_pool_patches.py; e2e: spatial server",
        exit="SGLang 0.5.23 loads plugins there.",
        next_host="It loads plugins: leave this row out.",
    ),
    _subscribe(
        id="dpc.dispatch",
        group=Group.CONTROLLER,
        target=_CONTROLLER + "DataParallelController.init_dispatcher",
        why="Verify the seams of the process, then dispatch by length; see role changes on their way to the ranks.",
        verify="tests/pools; e2e: spatial server",
        exit="When SGLang has pluggable load balancing.",
    ),
    _subscribe(
        id="dpc.turns",
        group=Group.CONTROLLER,
        target=_CONTROLLER + "DataParallelController.event_loop",
        hook=Hook.BEFORE,
        why="Between two messages: read load reports, ask the pressure controller, wait without spinning.",
        verify="tests/pools; e2e: spatial server",
        exit="As dpc.dispatch.",
    ),
)
