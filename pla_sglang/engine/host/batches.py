"""Batches that we make ourselves."""

from __future__ import annotations

import inspect
from typing import Any

from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.model_executor.forward_batch_info import ForwardBatch

if "server_args" in inspect.signature(ScheduleBatch.process_prebuilt).parameters:

    def process_prebuilt(scheduler: Any, batch: Any) -> None:
        """The host's part for a batch whose KV and first tokens are here."""
        batch.process_prebuilt(scheduler.server_args, scheduler.future_map)

else:

    def process_prebuilt(scheduler: Any, batch: Any) -> None:
        batch.process_prebuilt(scheduler.future_map)


def make_forward_batch(tokens: int, **fields: Any) -> ForwardBatch:
    """A forward batch of ``tokens``, padding included; ``fields`` as the host names them."""
    if "num_token_non_padded_cpu" in ForwardBatch.__dataclass_fields__:
        fields["num_token_non_padded_cpu"] = tokens
    return ForwardBatch(**fields)
