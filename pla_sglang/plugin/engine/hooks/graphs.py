"""The functions that the seam table names, for scheduler processes with prefill graphs of ours."""

from __future__ import annotations

import logging
from typing import Any

from pla_graphs.recorder import CaptureError
from pla_sglang.common.series import LabelledSeries
from pla_sglang.plugin import config as pla_config
from pla_sglang.plugin.engine.graphs.metrics import GraphSeries
from pla_sglang.plugin.engine.graphs.runner import GraphRunner

logger = logging.getLogger(__name__)

PUBLISH_EVERY = 50  # idle rounds between two updates of the series

_runner: GraphRunner | None = None
_refused: list[str] = []
_series: GraphSeries | None = None
_idle_rounds = 0


def after_capture_prefill_graph(capture: Any, *args: Any, **kwargs: Any) -> Any:
    """Put our runner in front of the host's. Where that cannot be: one warning, and the host's own serves."""
    global _runner, _refused
    from pla_patches.install import verify_this_process
    from pla_sglang.plugin.engine.graphs import build

    verify_this_process()
    model_runner = kwargs["model_runner"] if "model_runner" in kwargs else args[0]
    config = pla_config.current()
    stock = getattr(capture, "runner", None)
    reasons = build.reasons_against(model_runner, config) if stock is not None else ["no prefill runner of the host"]
    if not reasons:
        try:
            _runner = build.build_runner(model_runner, stock, kwargs["eager_runner"], config)
        except (CaptureError, build.NoGainError) as error:
            reasons = [str(error)]
    if _runner is None:
        _refused = reasons
        level = logging.INFO if config.graph_layout == build.AUTO else logging.WARNING
        logger.log(level, "pla_sglang: no prefill graphs of ours, SGLang's own serve: %s", "; ".join(reasons))
        return None
    state, times = _runner.state(), _runner.host_times
    logger.info(
        "pla_sglang: prefill graphs %s: %d of %d shapes in %.2f s and %.3f GiB (%s), the rest when asked for%s",
        build.layout_name(config),
        len(state["captured"]),
        state["shapes"],
        state["capture_s"],
        state["memory_bytes"] / build.GIB,
        state["start_ended_by"],
        "" if times is None else "; a pass takes the host {ours:g} ms, SGLang's own {sglang:g}".format(**times.to_ms()),
    )
    return type(capture)(
        runner=_runner,
        memory_phase=capture.memory_phase,
        memory_usage_gb=capture.memory_usage_gb + state["memory_bytes"] / build.GIB,
        capture_time=capture.capture_time + state["capture_s"],
    )


def after_on_idle(result: Any, scheduler: Any) -> None:
    """Captures wait for a moment in which nobody waits for them."""
    global _idle_rounds
    if _runner is None or not scheduler.is_fully_idle() or scheduler.waiting_queue:
        return
    _runner.on_idle()
    _idle_rounds += 1
    if _series is not None and _idle_rounds % PUBLISH_EVERY == 0:
        _series.update(_runner.cache)


def after_get_init_info(info: dict[str, Any], scheduler: Any) -> dict[str, Any]:
    global _series
    if _runner is not None and scheduler.metrics_collector_context.enable_metrics:
        labels = dict(scheduler.metrics_collector.labels)
        _series = GraphSeries(LabelledSeries(labels))
    info["pla_graphs"] = {"layout": pla_config.current().graph_layout, "refused": _refused}
    return info


def after_get_internal_state(output: Any, scheduler: Any, *args: Any, **kwargs: Any) -> Any:
    if _runner is None:
        state: dict[str, Any] = {"layout": "off", "refused": _refused}
    else:
        state = {"layout": pla_config.current().graph_layout, "refused": [], **_runner.state()}
        if _series is not None:
            _series.update(_runner.cache)
    output.internal_state["pla_graphs"] = state
    return output
