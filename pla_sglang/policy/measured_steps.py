"""Step times of one instance, from the passes that it has measured itself.

Arrow times each instance at the launch of a cluster (section 5.3), DOPD looks such tables up (V-D). An engine fits what
its passes take while it serves, and reports it. What it has not measured enough of is the profile's.

Step times in use are kept while what was measured agrees with them: a profile that is right is right beyond the sizes
that were served so far, and a fit is not. So they change seldom, and whoever derives something from them may keep it.
Instances that agree have the same: fits of equal devices differ by what each was sent, and a choice of the fastest
would send all to the one that was lucky.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from pla_sglang.policy.common.step_model import StepModel
from pla_sglang.policy.interface.fleet import InstanceView
from pla_sglang.policy.interface.step_times import StepTimes
from pla_sglang.policy.slo.mixed_batches import MixedBatchModel

ENOUGH = 32  # passes behind a fit: by then outliers were looked for twice (``FitKnobs.refit_every``)
APART = 0.05  # between measured times and those in use; fits of a known device were up to 3 % off
# Where they are compared. Prefill passes of one request by new and history tokens; decode steps by batch and context.
PREFILLS = ((512, 0), (2048, 0), (512, 4096))
DECODES = ((8, 8_000), (32, 48_000))


@dataclasses.dataclass(frozen=True, slots=True)
class MeasuredSteps:
    """Fitted models of both phases; ``profile`` stands in where one is None.

    Passes with piggybacked decodes take both models: what decodes add is fitted beside the model of prefills.
    """

    profile: StepTimes
    prefill: StepModel | None = None
    decode: MixedBatchModel | None = None

    def prefill_s(self, new_tokens: float, attention: float, history_tokens: float, requests: int) -> float:
        if self.prefill is None:
            return self.profile.prefill_s(new_tokens, attention, history_tokens, requests)
        return self.prefill.step_s(new_tokens, history_tokens, attention) if new_tokens > 0 else 0.0

    def decode_s(self, batch: int, context_tokens: float) -> float:
        if self.decode is None:
            return self.profile.decode_s(batch, context_tokens)
        return self.decode.decode_s(batch, context_tokens) if batch > 0 else 0.0

    def mixed_s(
        self,
        new_tokens: float,
        attention: float,
        history_tokens: float,
        requests: int,
        batch: int,
        context_tokens: float,
    ) -> float:
        if self.prefill is None or self.decode is None:
            return self.profile.mixed_s(new_tokens, attention, history_tokens, requests, batch, context_tokens)
        joint_s = self.prefill.step_s(new_tokens + batch, history_tokens, attention)
        return max(joint_s + self.decode.added_s(batch, context_tokens), self.decode.decode_s(batch, context_tokens))


def differ(one: StepTimes, other: StepTimes) -> bool:
    """Some pass of a usual size takes a share of ``APART`` longer or shorter by ``one`` than by ``other``."""
    for new, history in PREFILLS:
        attention = new * (new + 2 * history)
        if _apart(one.prefill_s(new, attention, history, 1), other.prefill_s(new, attention, history, 1)):
            return True
    return any(_apart(one.decode_s(*at), other.decode_s(*at)) for at in DECODES)


def _apart(one_s: float, other_s: float) -> bool:
    return abs(one_s - other_s) > APART * other_s


class InstanceSteps:
    """What is known of the step times of one instance. Sets its view's ``steps``.

    Args:
        profile: what stands in for what was not measured.
        name: of the profile.
        own: the profile is this instance's, and not that of the whole fleet, which policies have already.
        peers: the instances of the fleet, whose step times it has where they agree with what it has measured.
    """

    def __init__(
        self,
        view: InstanceView,
        profile: StepTimes,
        name: str,
        *,
        own: bool = False,
        peers: Sequence[InstanceView] = (),
    ) -> None:
        self.view = view
        self._own = own
        self._peers = peers
        self.prefills = self.decodes = 0  # passes that were measured; 0: too few of them
        self._profile = profile
        self._name = name
        if own:
            view.steps = profile

    def learn(self, prefill: StepModel, decode: MixedBatchModel, *, prefills: int, decodes: int) -> bool:
        """Takes the models that the instance has fitted to so many passes; True where its step times are others now.

        Models that give no duration for a usual pass are left out, whoever has sent them.
        """
        measured = MeasuredSteps(
            self._profile,
            prefill if prefills >= ENOUGH and _times_prefills(prefill) else None,
            decode if decodes >= ENOUGH and _times_decodes(decode) else None,
        )
        self.prefills = 0 if measured.prefill is None else prefills
        self.decodes = 0 if measured.decode is None else decodes
        if not differ(measured, self.view.steps or self._profile):
            return False
        self.view.steps = self._find_alike(measured)
        return True

    def _find_alike(self, measured: MeasuredSteps) -> StepTimes | None:
        """The first that agree with ``measured``, of the profile and those in use elsewhere; without any, these."""
        if not differ(measured, self._profile):
            return self._profile if self._own else None
        profile = self.view.profile  # stands in for what was not measured, so it has to be the same
        others = (peer.steps for peer in self._peers if peer is not self.view and peer.profile == profile)
        return next((steps for steps in others if steps is not None and not differ(measured, steps)), measured)

    @property
    def source(self) -> tuple[bool, bool, bool]:
        """If prefill passes, and decode steps, were measured, and if these times are in use instead of a profile."""
        return self.prefills > 0, self.decodes > 0, isinstance(self.view.steps, MeasuredSteps)

    def describe(self) -> str:
        """For people: which times were measured, and by how many passes."""
        if not self.prefills and not self.decodes:
            return f"profile {self._name}, not measured"
        agrees = "" if isinstance(self.view.steps, MeasuredSteps) else f", as profile {self._name} has them"
        measured = f"measured ({self.prefills} prefill passes, {self.decodes} decode steps)"
        missing = [what for what, passes in (("prefill", self.prefills), ("decode", self.decodes)) if not passes]
        return measured + agrees + (f"; {missing[0]}: profile {self._name}" if missing else "")


def _times_prefills(model: StepModel) -> bool:
    return _are_coefficients(model.to_floats()) and all(model.step_s(*at) > 0 for at in PREFILLS)


def _times_decodes(model: MixedBatchModel) -> bool:
    return _are_coefficients(dataclasses.astuple(model)) and all(model.decode_s(*at) > 0 for at in DECODES)


def _are_coefficients(values: tuple[float, ...]) -> bool:
    return all(math.isfinite(value) and value >= 0 for value in values)
