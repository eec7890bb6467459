"""A request of the scheduler: which of its tokens a pass extends, what KV it holds, and how a pass ends it."""

from __future__ import annotations

import operator
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

from sglang.srt.managers.schedule_batch import FINISH_ABORT, Req, ReqKvInfo

kv_committed_len: Callable[[Any], int]  # tokens whose KV is written, or will be by the pass under way
pool_row: Callable[[Any], int | None]  # in the host's table of requests; None: it holds no KV

if "kv_committed_len" in ReqKvInfo.__dataclass_fields__:
    kv_committed_len = operator.attrgetter("kv.kv_committed_len")
    pool_row = operator.attrgetter("kv.req_pool_idx")
else:
    kv_committed_len = operator.attrgetter("kv_committed_len")
    pool_row = operator.attrgetter("req_pool_idx")

if hasattr(Req, "set_extend_range"):

    def extend_end(req: Any) -> int | None:
        """Where the extend pass of ``req`` that was prepared last ends in its tokens; None: there was none."""
        return None if req.extend_range is None else req.extend_range.end

    def prefix_len(req: Any) -> int:
        """Tokens at the front whose KV such a pass finds."""
        return len(req.prefix_indices)

    def set_extend(req: Any, start: int, end: int) -> None:
        """The next such pass of ``req`` extends its tokens from ``start`` to ``end``."""
        req.set_extend_range(start, end)

else:

    def extend_end(req: Any) -> int | None:
        end: int | None = req.extend_end
        return end

    def prefix_len(req: Any) -> int:
        return int(req.prefix_len)

    def set_extend(req: Any, start: int, end: int) -> None:
        req.prefix_len, req.extend_end = start, end


if hasattr(Req, "refresh_fill_ids"):

    def refresh_fill_ids(req: Any) -> None:
        """Prompt and answer so far are the tokens of its next pass."""
        req.refresh_fill_ids()

else:

    def refresh_fill_ids(req: Any) -> None:
        req._refresh_fill_ids()


def may_load_adapter(scheduler: Any, req: Any, in_use: set[str | None]) -> bool:
    """Tells whether the adapter of ``req`` has a place beside those ``in_use``: the host's word, our seams at it
    included."""
    ask = getattr(scheduler, "can_schedule_lora_req", None) or scheduler._can_schedule_lora_req
    return bool(ask(req, in_use))


def fail_with_next_step(req: Any, reason: str) -> None:
    """End a request whose pass cannot be right any more, when that is processed. Its KV is nothing for others."""
    req.to_finish = req.to_finish or FINISH_ABORT(reason, HTTPStatus.INTERNAL_SERVER_ERROR)
    req.skip_radix_cache_insert = True
