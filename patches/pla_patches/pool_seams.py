"""Seams of load reports and of a server with a short and a long pool; part of the table in ``seams``."""

from __future__ import annotations

from pla_patches.seam import Group, Hook, Seam

_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler."
_RECEIVER = "sglang.srt.managers.scheduler_components.request_receiver.SchedulerRequestReceiver."
_CONTROLLER = "sglang.srt.managers.data_parallel_controller.DataParallelController."
_REPORTS = "pla_sglang.engine.report_handlers:"
_POOLS = "pla_sglang.engine.pools.handlers:"

TELEMETRY = (
    Seam(
        "tele.ready",
        Group.TELEMETRY,
        _SCHEDULER + "get_init_info",
        Hook.AFTER,
        _REPORTS + "after_get_init_info",
        "self",
        "The scheduler is ready: verify the seams of the process, connect, start to report.",
        "tests/telemetry; e2e: spatial server",
        "When SGLang pushes its load to a router.",
    ),
    Seam(
        "tele.received",
        Group.TELEMETRY,
        _RECEIVER + "_pull_raw_reqs",
        Hook.AFTER,
        _REPORTS + "after_pull_raw_reqs",
        "self",
        "Count requests as they come in, so that a router knows which of its own a report includes.",
        "tests/telemetry; e2e: spatial server",
        "As tele.ready.",
    ),
    Seam(
        "tele.launch",
        Group.TELEMETRY,
        _SCHEDULER + "run_batch",
        Hook.BEFORE,
        _REPORTS + "before_run_batch",
        "self, batch, pp_proxy_tensors",
        "What is under way, and since when.",
        "tests/telemetry/test_probe.py",
        "As tele.ready.",
    ),
    Seam(
        "tele.launched",
        Group.TELEMETRY,
        _SCHEDULER + "run_batch",
        Hook.AFTER,
        _REPORTS + "after_run_batch",
        "self, batch, pp_proxy_tensors",
        "A CPU computes in the launch; a report is due, as the queue is shorter now.",
        "tests/telemetry/test_probe.py",
        "As tele.ready.",
    ),
    Seam(
        "tele.result",
        Group.TELEMETRY,
        _SCHEDULER + "process_batch_result",
        Hook.AFTER,
        _REPORTS + "after_process_batch_result",
        "self, batch, result",
        "Step times, token intervals, TTFT; a report is due after a pass.",
        "tests/telemetry/test_probe.py",
        "As tele.ready.",
    ),
    Seam(
        "tele.idle",
        Group.TELEMETRY,
        _SCHEDULER + "on_idle",
        Hook.AFTER,
        _REPORTS + "after_on_idle",
        "self",
        "A sign of life while nothing runs.",
        "tests/telemetry/test_probe.py; e2e: spatial server",
        "As tele.ready.",
    ),
    Seam(
        "tele.error",
        Group.TELEMETRY,
        "sglang.srt.disaggregation.utils.prepare_abort",
        Hook.AFTER,
        _REPORTS + "after_prepare_abort",
        "req, error_message, status_code",
        "Requests that end badly, by kind.",
        "tests/telemetry/test_probe.py",
        "As tele.ready.",
    ),
    Seam(
        "tele.state",
        Group.TELEMETRY,
        _SCHEDULER + "get_internal_state",
        Hook.AFTER,
        _REPORTS + "after_get_internal_state",
        "self, recv_req",
        "How many reports were sent and dropped, in /server_info and /pla/state.",
        "e2e: spatial server",
        "As tele.ready.",
    ),
)

POOLS = (
    Seam(
        "pools.entry",
        Group.POOLS,
        "sglang.srt.managers.data_parallel_controller.run_data_parallel_controller_process",
        Hook.REPLACE,
        "pla_sglang.engine.pools.entry:ControllerProcess",
        "server_args, port_args, pipe_writer, run_scheduler_process_func",
        "SGLang 0.5.17 loads no plugins in the data-parallel controller; this entry does, then calls the host's.",
        "tests/pools/test_entry.py; e2e: spatial server",
        "SGLang 0.5.23 loads plugins there.",
    ),
)

CONTROLLER = (
    Seam(
        "dpc.dispatch",
        Group.CONTROLLER,
        _CONTROLLER + "init_dispatcher",
        Hook.AFTER,
        _POOLS + "after_init_dispatcher",
        "self",
        "Verify the seams of the process, then dispatch by length; see role changes on their way to the ranks.",
        "tests/pools/test_handlers.py; e2e: spatial server",
        "When SGLang has pluggable load balancing.",
    ),
    Seam(
        "dpc.turns",
        Group.CONTROLLER,
        _CONTROLLER + "event_loop",
        Hook.BEFORE,
        _POOLS + "before_event_loop",
        "self",
        "Between two messages: read load reports, ask the pressure controller, wait without spinning.",
        "tests/pools/test_handlers.py; e2e: spatial server",
        "As dpc.dispatch.",
    ),
)
