"""What can be seen of an engine from outside: its view, its token intervals, its running requests, as of now."""

from __future__ import annotations

from pla_sglang.load.prefix_index import PrefixIndex
from pla_sglang.policy.interface.fleet import InstanceView
from pla_sglang.sim.core.decoding import Decoding
from pla_sglang.sim.core.pool import KvPool
from pla_sglang.sim.core.prefill import PrefillQueue
from pla_sglang.sim.core.request import SimRequest


class InstanceReport:
    """Brings one ``InstanceView`` up to date. Settles nothing, so that looking changes nothing."""

    def __init__(self, view: InstanceView, queue: PrefillQueue, decoding: Decoding, pool: KvPool) -> None:
        self._view = view
        self._queue = queue
        self._decoding = decoding
        self._pool = pool
        self._known_cache: PrefixIndex | None = None  # None: all of the pool is known

    def know_cache_by(self, index: PrefixIndex) -> None:
        """The view says of the prefix cache what ``index`` knows, from now on."""
        self._known_cache = index

    def update(self, grown_tokens: int = 0) -> None:
        """Decode figures of the view; ``grown_tokens`` were added by steps that are not settled yet."""
        view, decoding = self._view, self._decoding
        running, joining = decoding.running, decoding.joining
        view.running = len(running) + len(joining)
        view.context_tokens = running.context_tokens + grown_tokens
        for request in joining:
            view.context_tokens += request.context_tokens
        view.kv_used_tokens = self._pool.used_tokens + grown_tokens
        if self._known_cache is not None:
            self._known_cache.show_cache(view)
            return
        view.kv_cached_tokens = self._pool.idle_tokens
        view.evicted_next_s = self._pool.evicted_next_s

    def sync(self, now_s: float) -> None:
        """The whole view as of now."""
        view, decoding, queue = self._view, self._decoding, self._queue
        self.update(decoding.steps_now(now_s) * len(decoding.running))
        heads = [waiting.arrival_s for waiting in queue.waiting[:1]]
        if queue.chunk is not None:
            heads.append(queue.chunk.arrival_s)
        view.prefill_age_s = now_s - min(heads) if heads else 0.0
        meter = decoding.meter
        if decoding.segment is not None:
            ended_s = decoding.start_s + decoding.segment.end_s(decoding.steps_now(now_s))
            meter.busy.add(decoding.start_s, ended_s)
        view.utilisation = meter.busy.share(now_s)
        view.ttft_ratio = meter.ttft_ratios.mean(now_s)

    def note_ttft(self, ratio: float, now_s: float) -> None:
        """A first token has come at ``ratio`` times its target."""
        self._decoding.meter.ttft_ratios.add(ratio, now_s)
        self._view.ttft_ratio = self._decoding.meter.ttft_ratios.mean(now_s)

    def interval_s(self, now_s: float) -> float | None:
        """Mean token interval since the last call; None without tokens."""
        decoding = self._decoding
        if decoding.segment is None:
            return decoding.meter.interval_s()
        steps = decoding.steps_now(now_s)
        return decoding.meter.interval_s(steps, decoding.start_s + decoding.segment.end_s(steps))

    def rows(self, now_s: float) -> list[tuple[SimRequest, int, int]]:
        """Running requests with their KV tokens and their answer tokens now."""
        steps, running = self._decoding.steps_now(now_s), self._decoding.running
        done = [(request, running.done_of(request, steps)) for request in running.members]
        return [(request, request.input_tokens + tokens - 1, tokens) for request, tokens in done]
