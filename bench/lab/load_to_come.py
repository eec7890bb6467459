"""Where a decode starts, by the load that is there now and to come (STAR section 3: "predicted output length").

The paper sends a request by its lengths and the load of the instances; its own code by the load alone. What a request
adds itself is the same wherever it goes. So its own length does not matter, but what is left of those that run does: an
instance whose requests are about to end has room, one that holds as many tokens of long answers will not.
"""

from __future__ import annotations

import numpy as np

from pla_sglang.policy.common.dispatch import Pool, PoolDispatcher, unfinished_tokens
from pla_sglang.policy.interface.decisions import Placement
from pla_sglang.policy.interface.fleet import FleetView, InstanceView, RequestView
from pla_sglang.policy.interface.reasons import FleetReason, Reason
from pla_sglang.policy.star.horizon import Horizon, summaries


class LeastLoadToCome(PoolDispatcher):
    """Least tokens now and over the horizon, by eq. 4's weights; prefills go where the fewest tokens are unfinished.

    What is on its way to an instance is taken to last. Where no length is known the tokens of now decide.
    """

    reason = FleetReason.LEAST_TOKENS

    def __init__(self, horizon: Horizon) -> None:
        self._horizon = horizon

    def choose_prefill(self, pool: Pool, request: RequestView) -> tuple[InstanceView, Reason]:
        return self.choose_decode(pool, request), self.reason

    def choose_decode(self, pool: Pool, request: RequestView) -> InstanceView:
        return min(pool, key=unfinished_tokens)

    def place_decode(self, request: RequestView, fleet: FleetView, now_s: float) -> Placement:
        pool, source = fleet.decode_capable(), request.prefilled_on
        batches = [fleet.decodes(instance) for instance in pool]
        stays = source is not None and source in pool
        if stays or not any(np.isfinite(batch.remaining).any() for batch in batches):
            return super().place_decode(request, fleet, now_s)
        loads = [
            float(report.loads[0]) + report.weighted + 2 * instance.waiting_decode_tokens + instance.queued_tokens
            for instance, report in zip(pool, summaries(batches, self._horizon), strict=True)
        ]
        return Placement(pool[loads.index(min(loads))], self.reason)
