"""How an engine's policy is made: the paper's, with what stands around it."""

from __future__ import annotations

from pla_sglang.policy.combined.length_batched import LengthBatchedPolicy
from pla_sglang.policy.common.step_model import StepModel
from pla_sglang.policy.interface.prefill import EnginePolicy
from pla_sglang.policy.slo.knobs import EnginePolicyKnobs
from pla_sglang.policy.slo.mixed_batches import START, MixedBatches, MixedBatchModel
from pla_sglang.policy.slo.policy import SloPolicy
from pla_sglang.policy.slo.reservation import ReservationOrder


def make_engine_policy(
    knobs: EnginePolicyKnobs, model: StepModel, mixed_model: MixedBatchModel = START, *, length_batched: bool = False
) -> MixedBatches:
    """``length_batched``: prefills are batched by DOPD's Algorithm 1, not by PLA-Serve.

    ``model``, ``mixed_model``: what prefill passes and the decodes beside them take.
    """
    prefills = LengthBatchedPolicy(knobs, model) if length_batched else SloPolicy(knobs, model)
    return MixedBatches(prefills, knobs.slo, mixed_model)


def find_reservations(policy: EnginePolicy) -> ReservationOrder | None:
    """By what ``policy`` orders requests that wait for room for their KV; None: first come, first served."""
    prefills = policy.prefills if isinstance(policy, MixedBatches) else policy
    return prefills.reservations if isinstance(prefills, SloPolicy) else None
