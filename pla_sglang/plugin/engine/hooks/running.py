"""The functions that the seam table names, for running requests that may sit out passes: in schedulers.

A request is answered as if it were alone. Where that cannot be done it is answered as the host would: no exception of
ours ends a scheduler.
"""

from __future__ import annotations

from typing import Any

from pla_sglang.plugin.engine.faults import Faults
from pla_sglang.plugin.engine.logit_processors import Early, find_early_tokens, hidden
from pla_sglang.plugin.engine.penalties import count_again, count_due_tokens

faults = Faults()  # of this process


def _leave_to_host(original: Any, *args: Any, **kwargs: Any) -> Any:
    return original(*args, **kwargs)


@faults.guard("counting penalties", otherwise=_leave_to_host)
def around_cumulate_penalties(original: Any, batch: Any) -> None:
    count_due_tokens(original, batch)


@faults.guard("counting penalties again")
def after_prepare_for_extend(result: Any, batch: Any) -> None:
    """Requests that have a part of their answer before they are prefilled: redone ones, and retracted ones."""
    count_again(batch, steps_under_way=1)


def around_apply_custom_logit_processor(original: Any, logits: Any, info: Any, *args: Any, **kwargs: Any) -> None:
    with hidden(_find_early(info)):
        original(logits, info, *args, **kwargs)


@faults.guard("hiding tokens from logit processors", otherwise=lambda info: [])
def _find_early(info: Any) -> list[Early]:
    from sglang.srt.runtime_context import get_schedule

    return find_early_tokens(info, overlap=not get_schedule().disable_overlap_schedule)
