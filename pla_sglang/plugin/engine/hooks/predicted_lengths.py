"""The functions that the seam table names, for scheduler processes with a length predictor.

The HTTP process has none of them. So SGLang refuses a request for hidden states there as it does without a predictor.
"""

from __future__ import annotations

import logging
from typing import Any

from pla_sglang.common.errors import ConfigError
from pla_sglang.common.series import LabelledSeries
from pla_sglang.plugin import config as pla_config
from pla_sglang.plugin.engine import predicted_lengths
from pla_sglang.plugin.engine.predicted_lengths import PredictedLengths

logger = logging.getLogger(__name__)

_lengths: PredictedLengths | None = None  # None before the scheduler is ready, and on ranks that do not report


def after_server_hidden_states_mode(mode: Any, *args: Any) -> Any:
    """Passes keep the last token's hidden state, which is there anyway; graphs are captured with it."""
    return max(mode, type(mode).LAST)


def after_forward_batch_generation(result: Any, worker: Any, batch: Any = None, *args: Any, **kwargs: Any) -> None:
    if _lengths is not None and batch is not None:
        _lengths.on_pass(batch, result)


def after_get_init_info(info: dict[str, Any], scheduler: Any) -> None:
    """The model is loaded. Only rank 0 predicts: all have the same states. Raises HostMismatchError."""
    global _lengths
    from sglang.srt.runtime_context import get_parallel

    from pla_patches.install import verify_this_process

    verify_this_process()
    if get_parallel().attn_tp_rank or get_parallel().attn_cp_rank:
        return
    config = pla_config.current()
    try:
        made = predicted_lengths.build(scheduler, config)
    except ConfigError as error:
        logger.warning("pla_sglang: %s is off: %s", predicted_lengths.FLAG, error)
        return
    if scheduler.metrics_collector_context.enable_metrics:
        made.attach(LabelledSeries(dict(scheduler.metrics_collector.labels)))
    _lengths = scheduler.pla_lengths = made
    logger.info(
        "pla_sglang: predicts lengths by %s each %d decode passes", config.length_predictor, config.length_steps
    )


def after_get_internal_state(output: Any, scheduler: Any, *args: Any, **kwargs: Any) -> Any:
    if _lengths is not None:
        output.internal_state.setdefault("pla", {})["length_predictor"] = _lengths.to_dict()
    return output
