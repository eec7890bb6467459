"""Seams of a server with a short and a long pool."""

from __future__ import annotations

import functools

from pla_patches.seam import Group, Hook, Subscriber, subscribe

_HOOKS = "pla_sglang.plugin.engine.hooks.dp_controller"

_subscribe = functools.partial(subscribe, module=_HOOKS)

POOLS = (
    Subscriber(
        id="pools.entry",
        group=Group.POOLS,
        key="dp_controller.run_process",
        hook=Hook.REPLACE,
        handler="pla_sglang.plugin.engine.hooks.dp_entry:ControllerProcess",
        why="Tells the process that it is the controller, loads plugins, and is ready when every rank has reported.",
        verify="tests/patches/test_pool_patches.py; e2e: spatial server",
    ),
    _subscribe(
        id="dpc.dispatch",
        group=Group.CONTROLLER,
        key="dp_controller.init_dispatcher",
        why="Verify the seams of the process, then dispatch by length; see role changes on their way to the ranks.",
        verify="tests/plugin/pools; e2e: spatial server",
    ),
    _subscribe(
        id="dpc.turns",
        group=Group.CONTROLLER,
        key="dp_controller.event_loop",
        hook=Hook.BEFORE,
        why="Between two messages: read load reports, ask the pressure controller, wait without spinning.",
        verify="tests/plugin/pools; e2e: spatial server",
    ),
)
