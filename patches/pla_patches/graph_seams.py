"""Seams of our prefill graphs; part of the table in ``seams``."""

from __future__ import annotations

from pla_patches.seam import Group, Hook, Seam

_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler."
_GRAPHS = "pla_sglang.engine.graphs.handlers:"

GRAPHS = (
    Seam(
        "graph.prefill",
        Group.GRAPHS,
        "sglang.srt.model_executor.model_runner_components.cuda_graph_setup.capture_prefill_graph",
        Hook.AFTER,
        _GRAPHS + "after_capture_prefill_graph",
        "model_runner, eager_runner, force_for_draft_worker",
        "Our prefill graphs in front of SGLang's own, which serve everything outside our shapes.",
        "tests/graphs: token-identical answers, hits and fall-backs under the real scheduler",
        "When SGLang captures prefill graphs by tokens and request slots, and lazily.",
    ),
    Seam(
        "graph.idle",
        Group.GRAPHS,
        _SCHEDULER + "on_idle",
        Hook.AFTER,
        _GRAPHS + "after_on_idle",
        "self",
        "Missed shapes are captured when nobody waits.",
        "tests/graphs: lazy captures under the real scheduler",
        "As graph.prefill.",
    ),
    Seam(
        "graph.info",
        Group.GRAPHS,
        _SCHEDULER + "get_init_info",
        Hook.AFTER,
        _GRAPHS + "after_get_init_info",
        "self",
        "Say in /server_info whether our graphs serve, and start their series.",
        "tests/graphs: series follow the totals",
        "As graph.prefill.",
    ),
    Seam(
        "graph.state",
        Group.GRAPHS,
        _SCHEDULER + "get_internal_state",
        Hook.AFTER,
        _GRAPHS + "after_get_internal_state",
        "self, recv_req",
        "Hits, padding, captures and fall-backs by reason in /server_info.",
        "tests/graphs: state of the runner",
        "As graph.prefill.",
    ),
)
