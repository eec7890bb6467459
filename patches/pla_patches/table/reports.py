"""Seams of load reports, in scheduler processes."""

from __future__ import annotations

import functools

from pla_patches.seam import Group, Hook, subscribe

_HOOKS = "pla_sglang.plugin.engine.hooks.load_report"

_subscribe = functools.partial(subscribe, module=_HOOKS, group=Group.TELEMETRY, verify="tests/load/test_probe.py")

REPORTS = (
    _subscribe(
        id="tele.ready",
        key="scheduler.get_init_info",
        why="The scheduler is ready: verify the seams of the process, connect, start to report.",
        verify="tests/load; e2e: spatial server",
    ),
    _subscribe(
        id="tele.received",
        key="request_receiver.pull_raw_reqs",
        why="Count requests as they come in, so that a router knows which of its own a report includes.",
        verify="tests/load; e2e: spatial server",
    ),
    _subscribe(
        id="tele.launch",
        key="scheduler.run_batch",
        hook=Hook.BEFORE,
        why="What is under way, and since when.",
    ),
    _subscribe(
        id="tele.launched",
        key="scheduler.run_batch",
        why="A CPU computes in the launch; a report is due, as the queue is shorter now.",
    ),
    _subscribe(
        id="tele.result",
        key="scheduler.process_batch_result",
        why="Step times, token intervals, TTFT; a report is due after a pass.",
    ),
    _subscribe(
        id="tele.idle",
        key="scheduler.on_idle",
        why="A sign of life while nothing runs.",
        verify="tests/load/test_probe.py; e2e: spatial server",
    ),
    _subscribe(
        id="tele.error",
        key="disaggregation.prepare_abort",
        why="Requests that end badly, by kind.",
    ),
    _subscribe(
        id="tele.state",
        key="scheduler.get_internal_state",
        why="How many reports were sent and dropped, in /server_info and /pla/state.",
        verify="e2e: spatial server",
    ),
)
