"""Lets requests whose KV has arrived join the running batch, between two passes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pla_sglang.engine.penalties import count_again
from pla_sglang.engine.stateless.faults import Faults
from pla_sglang.engine.stateless.host import answer_unjoined, build_received_batch, note_joining, release_kv
from pla_sglang.engine.stateless.legs import goes_on


def admit_received(scheduler: Any, reqs: Sequence[Any], running_batch: Any, faults: Faults) -> Any:
    """The running batch with ``reqs``, whose KV and answer so far are here. Some may end with that.

    Nobody else knows of them: an exception ends those that are not in the running batch by then.
    """
    try:
        return _join(scheduler, reqs, running_batch)
    except Exception:
        faults.note("admitting requests whose KV is here")
    running = set(map(id, running_batch.reqs))
    unjoined = [req for req in reqs if id(req) not in running]
    faults.for_each(unjoined, lambda req: answer_unjoined(scheduler, req), "answering a request that could not join")
    holding = [req for req in unjoined if req.req_pool_idx is not None]
    faults.for_each(holding, lambda req: release_kv(scheduler, req, keep_prefix=False), "freeing its KV")
    return running_batch


def _join(scheduler: Any, reqs: Sequence[Any], running_batch: Any) -> Any:
    """What SGLang's decode loop does in ``get_new_prebuilt_batch`` and ``process_batch_result_prebuilt``.

    These take the whole waiting queue and assert a decode instance.
    """
    note_joining(reqs)
    for req in reqs:
        req._refresh_fill_ids()
        # Without the last token: its KV is computed by the first decode step.
        req.set_extend_range(len(req.prefix_indices), req.kv_committed_len)
        if req.grammar is not None and goes_on(req):
            # The host's word for "its grammar has this token"; of its backends only xgrammar says it by itself.
            req.grammar.current_token = req.output_ids[-1]
    batch = build_received_batch(scheduler, reqs)
    count_again(batch, steps_under_way=0)
    for req in reqs:
        req.update_finish_state()
        if req.finished():
            req.time_stats.set_completion_time()
            release_kv(scheduler, req)
    shown = [req for req in batch.reqs if req.finished() or not goes_on(req)]
    scheduler.output_streamer.stream_output(shown, batch.return_logprob)
    batch.filter_batch()
    if batch.is_empty():
        return running_batch
    if running_batch.is_empty():
        return batch
    running_batch.merge_batch(batch)
    return running_batch
