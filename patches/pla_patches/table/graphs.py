"""Seams of our prefill graphs."""

from __future__ import annotations

import functools

from pla_patches.seam import Group, subscribe

_HOOKS = "pla_sglang.plugin.engine.hooks.graphs"

_subscribe = functools.partial(subscribe, module=_HOOKS, group=Group.GRAPHS)

GRAPHS = (
    _subscribe(
        id="graph.prefill",
        key="cuda_graph_setup.capture_prefill_graph",
        why="Our prefill graphs in front of SGLang's own, which serve everything outside our shapes.",
        verify="tests/graphs: token-identical answers, hits and fall-backs under the real scheduler",
    ),
    _subscribe(
        id="graph.idle",
        key="scheduler.on_idle",
        why="Missed shapes are captured when nobody waits.",
        verify="tests/graphs: lazy captures under the real scheduler",
    ),
    _subscribe(
        id="graph.info",
        key="scheduler.get_init_info",
        why="Say in /server_info whether our graphs serve, and start their series.",
        verify="tests/graphs: series follow the totals",
    ),
    _subscribe(
        id="graph.state",
        key="scheduler.get_internal_state",
        why="Hits, padding, captures and fall-backs by reason in /server_info.",
        verify="tests/graphs: state of the runner",
    ),
)
