"""A fleet policy in a package of its own: a request goes where the most KV memory is free.

    pip install ./examples/fleet_policy
    python -m pla_sglang.simulate --policy most-free-kv ...
    python -m pla_sglang.launch_router --policy most-free-kv ...

Its name stands in ``pyproject.toml``, as an entry point of the group ``pla_sglang.policies``.
"""

from pla_sglang.policy.baselines.dispatch import Pool, PoolDispatcher
from pla_sglang.policy.interface.fleet import InstanceView, RequestView
from pla_sglang.policy.interface.reasons import Reason
from pla_sglang.policy.registry import FleetPolicy, on_mixed_instances


class FreeKvReason(Reason):
    MOST_FREE = "example.most_free_kv"


def free_tokens(instance: InstanceView) -> int:
    """KV tokens that neither requests there nor prompts on their way to it will need."""
    return instance.kv_capacity_tokens - instance.kv_used_tokens - instance.queued_tokens


class MostFreeKv(PoolDispatcher):
    """The instance with the most free KV memory, the first of equals."""

    reason = FreeKvReason.MOST_FREE

    def choose_prefill(self, pool: Pool, request: RequestView) -> tuple[InstanceView, Reason]:
        return max(pool, key=free_tokens), self.reason

    def choose_decode(self, pool: Pool, request: RequestView) -> InstanceView:
        return max(pool, key=free_tokens)


# Both phases of a request on one instance, and no roles to change: any instance can do that, so it may run live.
POLICY = FleetPolicy(on_mixed_instances(lambda setup: MostFreeKv()), live=True, length_blind=True)
