"""Lets requests whose KV has arrived join the running batch, between two passes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from pla_sglang.fleet.stateless.host.calls import (
    Agree,
    answer_unjoined,
    build_received_batch,
    note_joining,
    release_kv,
)
from pla_sglang.fleet.stateless.transfer.legs import goes_on
from pla_sglang.plugin.engine.faults import Faults
from pla_sglang.plugin.engine.host.requests import (
    fail_with_next_step,
    kv_committed_len,
    pool_row,
    prefix_len,
    refresh_fill_ids,
    set_extend,
)
from pla_sglang.plugin.engine.penalties import count_again


def admit_received(
    scheduler: Any, reqs: Sequence[Any], running_batch: Any, faults: Faults, agree: Agree = lambda flags: flags
) -> Any:
    """The running batch with ``reqs``, whose KV and answer so far are here. Some may end with that.

    Nobody else knows of them. An exception with one ends that one; an exception with the batch of them, those that are
    not in the running batch by then.
    """
    fit = agree(_try_each(reqs, _prepare, faults))
    _end_unjoined(scheduler, [req for req, is_fit in zip(reqs, fit, strict=True) if not is_fit], faults)
    reqs = [req for req, is_fit in zip(reqs, fit, strict=True) if is_fit]
    if not reqs:
        return running_batch
    batch = _build_batch(scheduler, reqs, faults)
    if agree([batch is not None])[0]:  # else a rank would be alone with what all say together about the batch
        try:
            return _join(scheduler, batch, running_batch, faults, agree)
        except Exception:
            faults.note("admitting requests whose KV is here")
    running = set(map(id, running_batch.reqs))
    _end_unjoined(scheduler, [req for req in reqs if id(req) not in running], faults)
    return running_batch


def _try_each(reqs: Sequence[Any], step: Callable[[Any], object], faults: Faults) -> list[bool]:
    """Take ``step`` for each: with whom it did not raise."""
    raised: set[int] = set()
    faults.for_each(reqs, step, "admitting a request whose KV is here", lambda req: raised.add(id(req)))
    return [id(req) not in raised for req in reqs]


def _end_unjoined(scheduler: Any, unjoined: Sequence[Any], faults: Faults) -> None:
    faults.for_each(unjoined, lambda req: answer_unjoined(scheduler, req), "answering a request that could not join")
    holding = [req for req in unjoined if pool_row(req) is not None]
    faults.for_each(holding, lambda req: release_kv(scheduler, req, keep_prefix=False), "freeing its KV")


def _prepare(req: Any) -> None:
    note_joining([req])
    refresh_fill_ids(req)
    # Without the last token: its KV is computed by the first decode step.
    set_extend(req, prefix_len(req), kv_committed_len(req))
    if req.grammar is not None and goes_on(req):
        # The host's word for "its grammar has this token"; of its backends only xgrammar says it by itself.
        req.grammar.current_token = req.output_ids[-1]


def _build_batch(scheduler: Any, reqs: Sequence[Any], faults: Faults) -> Any:
    """None: that raised, on this rank."""
    try:
        batch = build_received_batch(scheduler, reqs)
        count_again(batch, steps_under_way=0)
    except Exception:
        faults.note("building a batch of requests whose KV is here")
        return None
    return batch


def _join(scheduler: Any, batch: Any, running_batch: Any, faults: Faults, agree: Agree) -> Any:
    """What SGLang's decode loop does in ``get_new_prebuilt_batch`` and ``process_batch_result_prebuilt``.

    These take the whole waiting queue and assert a decode instance.
    """
    reqs = list(batch.reqs)
    sound = agree(_try_each(reqs, lambda req: req.update_finish_state(), faults))
    for req, is_sound in zip(reqs, sound, strict=True):
        if not is_sound:
            req.finished_reason = None  # as on the ranks where it did not raise: all end it with its first step
            fail_with_next_step(req, "an exception in its instance")
        if req.finished():
            req.time_stats.set_completion_time()
            release_kv(scheduler, req)
    shown = [req for req in reqs if req.finished() or not goes_on(req)]
    scheduler.output_streamer.stream_output(shown, batch.return_logprob)
    batch.filter_batch()
    if batch.is_empty():
        return running_batch
    if running_batch.is_empty():
        return batch
    running_batch.merge_batch(batch)
    return running_batch
