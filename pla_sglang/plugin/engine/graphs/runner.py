"""Our prefill runner, in front of the host's: short batches replay our graphs, everything else is the host's."""

from __future__ import annotations

import logging
from typing import Any

from pla_graphs.cache import Found, GraphCache
from pla_graphs.recorder import CaptureError
from pla_sglang.plugin.engine.graphs.compare import HostTimes
from pla_sglang.plugin.engine.graphs.host import CapturedForward
from pla_sglang.plugin.engine.graphs.refusals import of_batch
from pla_sglang.policy.pla.graphs.layouts import Layout
from pla_sglang.policy.pla.graphs.reasons import GraphReason

logger = logging.getLogger(__name__)


class GraphRunner:
    """Answers what the host asks of its prefill graph runner; what is not ours is passed on to that one.

    The host asks ``can_run_graph`` and, after a yes, ``execute`` with the same batch. ``stock`` is its own prefill
    runner, or its eager one, which never says yes. ``host_times``: where the start has compared.
    """

    def __init__(
        self, stock: Any, forward: CapturedForward, cache: GraphCache, host_times: HostTimes | None = None
    ) -> None:
        self.stock = stock
        self.cache = cache
        self._forward = forward
        self._asked: tuple[Any, Found] | None = None  # the batch of the last yes of ours
        self.host_times = host_times

    def __getattr__(self, name: str) -> Any:
        """Everything but replaying short batches, as votes among data-parallel ranks, is the host's."""
        return getattr(self.stock, name)

    @property
    def pla_layout(self) -> Layout:
        """Batching asks for it; see ``engine/snapshot.py``."""
        return self.cache.layout

    def can_run_graph(self, batch: Any) -> bool:
        found = self._find(batch)
        self._asked = None if found is None else (batch, found)
        return found is not None or bool(self.stock.can_run_graph(batch))

    def _find(self, batch: Any) -> Found | None:
        """The recording for this batch; None where it is not for us. All ranks ask alike, as they run alike batches."""
        reason = of_batch(batch)
        if reason is not None:
            self.cache.refuse(reason)
            return None
        found = self.cache.find(batch.extend_seq_lens_cpu)
        if found.recording is None:
            self.cache.capture_busy()  # of use to the next batch of this shape
            return None
        return found if self._load(batch, found) else None

    def _load(self, batch: Any, found: Found) -> bool:
        """Tells whether the batch is ready for its recording; if not, the host's runner takes it, and the graph
        goes."""
        assert found.bucket is not None
        try:
            self._forward.load(found.bucket, batch)
        except CaptureError as error:
            if (
                self._forward.ranks > 1
            ):  # the others replay: nothing that this rank could do would fit their collectives
                raise
            logger.warning("pla_graphs: %s cannot be replayed: %s", found.bucket.name, error, exc_info=True)
            self.cache.refuse(GraphReason.PLAN_FAILED)
            self.cache.discard(found.bucket, error.failure)
            return False
        return True

    def execute(self, batch: Any, **kwargs: Any) -> Any:
        asked, self._asked = self._asked, None
        if asked is None or asked[0] is not batch:
            return self.stock.execute(batch, **kwargs)
        found = asked[1]
        assert found.bucket is not None and found.recording is not None
        self.cache.counts.on_replay(found.bucket, len(batch.input_ids))
        return self._forward.replay(found.recording, batch, **kwargs)

    def on_idle(self) -> None:
        """Nothing runs or waits: capture a shape that was missed, if one was often enough."""
        self.cache.capture_idle()

    def state(self) -> dict[str, Any]:
        cache = self.cache
        return {
            **cache.counts.to_dict(),
            "captured": [bucket.name for bucket in cache.captured],
            "shapes": len(cache.layout.buckets()),
            "memory_bytes": cache.memory_bytes,
            "buffer_bytes": self._forward.fixed_bytes(),
            "attention_bytes": cache.attention_bytes,
            "start_ended_by": None if cache.stopped_by is None else cache.stopped_by.value,
            "host_ms_a_pass": None if self.host_times is None else self.host_times.to_ms(),
        }
