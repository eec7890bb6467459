"""How long a request waits at an engine that runs small prefills first: only for those that are no larger.

The sums of an ``InstanceView`` say how much is queued, not how large each of it is. A policy knows that of the requests
that it has sent itself, from their dispatch to their first token or their end. Prefills of other senders count as if
they went first.

Sizes within a factor of two are one class, as in the engine (``pla/long_prompts.py``), and so is everything below
``SMALLEST_TOKENS``: short prompts go together. So is everything above the instance's chunk: of prompts that need
several passes none overtakes the one under way, however large that is.
"""

from __future__ import annotations

import dataclasses

from pla_sglang.policy.interface.fleet import InstanceView, LoadAmounts, RequestView

# What is shorter goes in one pass: its tokens take hardly more time than the pass itself. Half and twice as much moved
# no share in target by more than 0.7 points (five named workloads, short spans; half on eleven, longer: 0.3).
SMALLEST_TOKENS = 255
CHUNK_TOKENS = 4096  # that of the recommended form, for instances that do not say theirs


@dataclasses.dataclass(slots=True, frozen=True)
class _Sent:
    """A prefill that was sent to an instance; ``size`` is its class."""

    index: int
    size: int
    new_tokens: int
    history_tokens: int


class SizedBacklog:
    """Prefills that were sent and have no first token yet, as sums by instance and size.

    Invariant: every sum is that of the entries of ``_sent``.
    """

    def __init__(self) -> None:
        self._sent: dict[str, _Sent] = {}
        self._sums: dict[int, dict[int, LoadAmounts]] = {}

    def __len__(self) -> int:
        return len(self._sent)

    def add(self, request: RequestView, instance: InstanceView) -> None:
        """``request`` goes to ``instance``, and to no other one any more."""
        self.remove(request)
        new_tokens = request.new_tokens(instance)
        sent = _Sent(instance.index, _size_of(new_tokens, instance), new_tokens, request.history_tokens(instance))
        self._sent[request.rid] = sent
        self._count(sent, 1)

    def remove(self, request: RequestView) -> None:
        """It has its first token, or has ended. Idempotent."""
        sent = self._sent.pop(request.rid, None)
        if sent is not None:
            self._count(sent, -1)

    def ahead_of(self, request: RequestView, instance: InstanceView) -> tuple[int, int, int, int]:
        """What ``request`` would wait for there: prefills, new tokens, attention, history tokens."""
        prefills, tokens = instance.queued_prefills, instance.queued_tokens
        attention, history_tokens = instance.queued_attention, instance.queued_history_tokens
        own = _size_of(request.new_tokens(instance), instance)
        for size, larger in self._sums.get(instance.index, {}).items():
            if size > own:
                prefills -= larger.queued_prefills
                tokens -= larger.queued_tokens
                attention -= larger.queued_attention
                history_tokens -= larger.queued_history_tokens
        # The view may know of an end before its event comes.
        return max(0, prefills), max(0, tokens), max(0, attention), max(0, history_tokens)

    def _count(self, sent: _Sent, times: int) -> None:
        of_instance = self._sums.setdefault(sent.index, {})
        sums = of_instance.setdefault(sent.size, LoadAmounts())
        new, history = sent.new_tokens, sent.history_tokens
        sums.queued_prefills += times
        sums.queued_tokens += times * new
        sums.queued_attention += times * new * (new + 2 * history)
        sums.queued_history_tokens += times * history


def _size_of(new_tokens: int, instance: InstanceView) -> int:
    return min(max(new_tokens, SMALLEST_TOKENS), instance.chunk_max_tokens or CHUNK_TOKENS).bit_length()
