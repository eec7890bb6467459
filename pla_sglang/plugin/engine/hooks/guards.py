"""The functions that the seam table names, for what one request must not do to a scheduler; in its process."""

from __future__ import annotations

from typing import Any


def after_compute_logprobs(result: Any, processor: Any, logprobs: Any, *args: Any, **kwargs: Any) -> None:
    """For a request that asks for no token ids SGLang has an empty list, where it wants a tensor for each."""
    values = result.token_ids_logprobs_val
    if values is not None:
        empty = logprobs.new_empty(0)
        result.token_ids_logprobs_val = [empty if isinstance(value, list) else value for value in values]
