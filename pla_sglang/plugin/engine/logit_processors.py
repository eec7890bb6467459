"""What a custom logit processor reads of an answer is the same beside others as alone.

SGLang 0.5.17 gives it the request, and with it the tokens that are known by then. With the overlap schedule the last
one is not, as its pass is still under way; it is where a prefill of others ran in between, or where the grammar of
somebody in the pass makes the host sample late. Here what a request on its own would not know yet is hidden.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from pla_sglang.plugin.engine.host.requests import kv_committed_len

Early = tuple[Any, int]  # a request, and how many tokens of its answer the processor is to see


def find_early_tokens(info: Any, *, overlap: bool) -> list[Early]:
    """Requests of a pass that know more than they would alone. ``info``: the host's sampling information."""
    asking = [params["__req__"] for params in info.custom_params if params and "__req__" in params]
    seen = [(req, count_known_tokens(req, overlap=overlap)) for req in asking if req.custom_logit_processor]
    return [(req, tokens) for req, tokens in seen if tokens < len(req.output_ids)]


def count_known_tokens(req: Any, *, overlap: bool) -> int:
    """Tokens of the answer before the pass under way samples its next one. A grammar of its own makes the host wait."""
    late = int(overlap and req.grammar is None)
    return max(0, kv_committed_len(req) - len(req.origin_input_ids) - late)


@contextlib.contextmanager
def hidden(early: Sequence[Early]) -> Iterator[None]:
    """Sampling happens on the scheduler's thread, so nobody else looks meanwhile."""
    whole = [(req, req.output_ids) for req, _ in early]
    for req, tokens in early:
        req.output_ids = req.output_ids[:tokens]
    try:
        yield
    finally:
        for req, output_ids in whole:
            req.output_ids = output_ids
