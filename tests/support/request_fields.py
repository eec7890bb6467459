"""What fakes of a request have in place of the host's fields that versions of it name otherwise."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any


class RequestFields:
    """Each field under the name that each version gives it, so that one fake serves all.

    Set what a pass extends by ``plugin/engine/host/requests.py``'s ``set_extend``, and read it by its functions.
    """

    kv_committed_len = kv_allocated_len = 0
    req_pool_idx: int | None = None
    prefix_indices: range = range(0)
    prefix_len = 0
    extend_range: Any = None
    extend_end: int | None = None

    def __init__(self, **fields: Any) -> None:
        vars(self).update(fields)

    @property
    def kv(self) -> RequestFields:
        """KV has its fields on the request itself, or on an object of its own."""
        return self

    def set_cached(self, tokens: int) -> None:
        """So many at the front have KV in the prefix cache."""
        self.prefix_indices, self.prefix_len = range(tokens), tokens

    def set_extend_range(self, start: int, end: int) -> None:
        self.extend_range = SimpleNamespace(start=start, end=end)

    def refresh_fill_ids(self) -> None:
        """Prompt and answer so far are the tokens of its next pass: a fake counts none."""

    _refresh_fill_ids = refresh_fill_ids
