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


_FIELDS = ForwardBatch.__dataclass_fields__
_REAL_TOKENS = next(name for name in ("global_num_token_non_padded_cpu", "num_token_non_padded_cpu") if name in _FIELDS)

if "kv_loc_plan" in _FIELDS:

    def make_forward_batch(runner: Any, tokens: int, **fields: Any) -> ForwardBatch:
        """A forward batch over buffers of our own, as graphs are captured and replayed with, all of whose ``tokens``
        count as real; ``fields`` as the host names them.

        KV is written to the slots that ``out_cache_loc`` names, which are numbers of the pool of ``runner``, as a live
        batch's are.
        """
        batch = ForwardBatch(**{_REAL_TOKENS: tokens}, **fields)
        runner.kv_index_translator.bind_runner_slots(batch)
        return batch

else:

    def make_forward_batch(runner: Any, tokens: int, **fields: Any) -> ForwardBatch:
        return ForwardBatch(**{_REAL_TOKENS: tokens}, **fields)
