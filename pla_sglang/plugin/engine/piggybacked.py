"""What a prefill pass has to know of the running requests that may join it. Reads the host's running batch.

SGLang 0.5.17 lets running requests join a pass (``mix_with_running``) only where no request of either wants logprobs
or gives embeddings in place of tokens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

from pla_sglang.plugin.engine.host.requests import fail_with_next_step, kv_committed_len
from pla_sglang.plugin.engine.snapshot import tpot_target_s
from pla_sglang.policy.common.device_clock import DeviceClock
from pla_sglang.policy.interface.prefill import PassView

TOKENS_ATTRIBUTE = "pla_tokens"


@dataclasses.dataclass(slots=True)
class _Tokens:
    """TPOT target of one request, and when it had how many tokens as it was first seen running."""

    target_s: float | None
    seen_s: float
    seen_tokens: int


class NextTokenClock:
    """Next-token deadlines (docs/reference/policies/temporal.md): token g + 1 is due g targets after the first one,
    or one target after the last token if that is later. Counted from where a request was first seen, which is at its
    first token if prefills wait then; what it was early before is not held to its account.
    """

    def __init__(self, clock: DeviceClock, page_tokens: int) -> None:
        self._clock = clock
        self._page_tokens = page_tokens

    def add_to(
        self, view: PassView, reqs: Iterable[Any], begin_s: float, last_token_s: float, default_ms: float | None
    ) -> None:
        """What ``view`` has of running requests that may be piggybacked. One look at each of them; what is first seen
        is stamped.

        Args:
            begin_s: when the pass under decision begins.
            last_token_s: when they had or will have the last token that is decided already.
            default_ms: TPOT target of those that bring none.
        """
        context = new_pages = 0
        first_due_s: float | None = None
        least_target_s: float | None = None
        for req in reqs:
            committed = kv_committed_len(req)
            context += committed
            new_pages += committed % self._page_tokens == 0
            given = committed - len(req.origin_input_ids) + 1  # what is under way included
            tokens: _Tokens | None = getattr(req, TOKENS_ATTRIBUTE, None)
            if tokens is None:
                tokens = self._stamp(req, given, last_token_s, default_ms)
            if tokens.target_s is None:
                continue
            if least_target_s is None or tokens.target_s < least_target_s:
                least_target_s = tokens.target_s
            steps = given - tokens.seen_tokens + 1
            due_s, next_s = tokens.seen_s + steps * tokens.target_s, last_token_s + tokens.target_s
            if due_s < next_s:
                due_s = next_s
            if first_due_s is None or due_s < first_due_s:
                first_due_s = due_s
        view.context_tokens = context
        view.piggyback_kv_tokens = new_pages * self._page_tokens
        view.token_slack_s = None if first_due_s is None else first_due_s - begin_s
        view.tpot_target_s = least_target_s

    def _stamp(self, req: Any, given: int, last_token_s: float, default_ms: float | None) -> _Tokens:
        target_s = tpot_target_s(req, default_ms)
        if target_s is not None:
            target_s = self._clock.device_s(target_s)
        tokens = _Tokens(target_s, last_token_s, given)
        setattr(req, TOKENS_ATTRIBUTE, tokens)
        return tokens


def may_piggyback(running_batch: Any) -> bool:
    """Tells whether the host would let the running requests join a pass."""
    return not (running_batch.is_empty() or running_batch.return_logprob or running_batch.is_prefill_only)


def keeps_decodes_out(reqs: Iterable[Any]) -> bool:
    """Tells whether a pass with one of these would take no piggybacked decodes."""
    return any(req.return_logprob or req.input_embeds is not None for req in reqs)


def end_piggybacked(result: Any, batch: Any, piggybacked: Any) -> None:
    """Where they could not be placed: with the host's own place KV might be read that is not written."""
    for req in piggybacked.reqs:
        fail_with_next_step(req, "it could not be placed in a pass")


def set_piggybacked_prefixes(batch: Any, piggybacked: Any) -> None:
    """After ``mix_with_running``: each piggybacked decode's prefix is what it has in the KV cache before this pass.

    With overlap the host counts one token more than it knows of, the one under way. A request that sat out the pass
    before has none under way, and its prefix would be one too long: a wrong position, and KV read that is not written.
    """
    batch.prefix_lens[-len(piggybacked.reqs) :] = [kv_committed_len(req) - 1 for req in piggybacked.reqs]
