"""What a request waits for at an engine that runs small prefills first: those that are no larger, and one under way.

The sums of an ``InstanceView`` say how much is queued, not how large each of it is. A policy knows that of the requests
that it has sent itself, from their dispatch to their first token or their end. Prefills of other senders count as if
they went first.

Sizes within a factor of two are one class, as in the engine (``pla/long_prompts.py``), and so is everything below
``SMALLEST_TOKENS``: short prompts go together. A prompt above the instance's chunk needs several passes, and the one
under way is finished before another such prompt begins, however small. So of what is larger, that one alone is ahead.
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
    """A prefill that was sent to an instance; ``size`` is its class, ``cut`` says that it needs several passes."""

    index: int
    size: int
    cut: bool
    new_tokens: int
    history_tokens: int

    def attention(self) -> int:
        """As in ``LoadAmounts.queued_attention``."""
        return self.new_tokens * (self.new_tokens + 2 * self.history_tokens)


class SizedBacklog:
    """Prefills that were sent and have no first token yet, as sums by instance and size.

    Invariant: every sum is that of the entries of ``_sent``; ``_under_way`` has one of the cut prompts of an instance
    as long as there is any.
    """

    def __init__(self) -> None:
        self._sent: dict[str, _Sent] = {}
        self._sums: dict[int, dict[int, LoadAmounts]] = {}
        self._cut: dict[int, dict[str, _Sent]] = {}  # by instance, in the order they were sent
        self._under_way: dict[int, str] = {}

    def __len__(self) -> int:
        return len(self._sent)

    def add(self, request: RequestView, instance: InstanceView) -> None:
        """``request`` goes to ``instance``, and to no other one any more."""
        self.remove(request)
        new_tokens = request.new_tokens(instance)
        history_tokens = request.history_tokens(instance)
        cut = _needs_passes(new_tokens, instance)
        sent = _Sent(instance.index, _size_of(new_tokens), cut, new_tokens, history_tokens)
        self._sent[request.rid] = sent
        if cut:
            self._cut.setdefault(sent.index, {})[request.rid] = sent
            self._under_way.setdefault(sent.index, request.rid)
        self._count(sent, 1)

    def remove(self, request: RequestView) -> None:
        """It has its first token, or has ended. Idempotent."""
        sent = self._sent.pop(request.rid, None)
        if sent is None:
            return
        self._count(sent, -1)
        if sent.cut:
            waiting = self._cut[sent.index]
            del waiting[request.rid]
            if self._under_way[sent.index] == request.rid:
                del self._under_way[sent.index]
                if waiting:  # the engine begins the smallest next
                    self._under_way[sent.index] = min(waiting, key=lambda rid: waiting[rid].size)

    def ahead_of(self, request: RequestView, instance: InstanceView) -> tuple[int, int, int, int]:
        """What ``request`` would wait for there: prefills, new tokens, attention, history tokens."""
        prefills, tokens = instance.queued_prefills, instance.queued_tokens
        attention, history_tokens = instance.queued_attention, instance.queued_history_tokens
        new_tokens = request.new_tokens(instance)
        own = _size_of(new_tokens)
        for size, larger in self._sums.get(instance.index, {}).items():
            if size > own:
                prefills -= larger.queued_prefills
                tokens -= larger.queued_tokens
                attention -= larger.queued_attention
                history_tokens -= larger.queued_history_tokens
        under_way = self._under_way.get(instance.index)
        if under_way is not None and _needs_passes(new_tokens, instance):
            first = self._sent[under_way]
            if first.size > own:
                prefills, tokens = prefills + 1, tokens + first.new_tokens
                attention += first.attention()
                history_tokens += first.history_tokens
        # The view may know of an end before its event comes.
        return max(0, prefills), max(0, tokens), max(0, attention), max(0, history_tokens)

    def _count(self, sent: _Sent, times: int) -> None:
        of_instance = self._sums.setdefault(sent.index, {})
        sums = of_instance.setdefault(sent.size, LoadAmounts())
        sums.queued_prefills += times
        sums.queued_tokens += times * sent.new_tokens
        sums.queued_attention += times * sent.attention()
        sums.queued_history_tokens += times * sent.history_tokens


def _size_of(new_tokens: int) -> int:
    return max(new_tokens, SMALLEST_TOKENS).bit_length()


def _needs_passes(new_tokens: int, instance: InstanceView) -> bool:
    """Whether the engine cuts it: it has more new tokens than a pass takes."""
    return new_tokens > (instance.chunk_max_tokens or CHUNK_TOKENS)
