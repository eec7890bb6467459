"""Knobs of what stands around the paper's policy."""

from __future__ import annotations

import dataclasses

from pla_sglang.common.checks import Range, check_fields, knob
from pla_sglang.policy.interface.prefill import WaitingView
from pla_sglang.policy.pla.long_prompts import LongKnobs
from pla_sglang.policy.pla.temporal import TemporalKnobs


@dataclasses.dataclass(frozen=True)
class SloKnobs:
    """How deadlines decide, and how decodes share passes with prefills. Of these, ``infeasible_age_s`` and
    ``fcfs_times`` have flags.

    Attributes:
        infeasible_age_s: so long after its arrival an infeasible request is deferred; None: deadlines do not decide.
        fcfs_times: an infeasible request is deferred for at most so many times what it would have waited in the order
            of arrival, or its TTFT target where that is longer; 0: for its age alone (``turns.py``). Off: at
            rates at which stock keeps 90 % it took up to 9 points from those in time, and had not stock's P99 TTFT.
        passed_share: of its slack at its arrival; so long those that need less KV cache pass a request that has no room
            for what comes from elsewhere. With 0.5 some that were passed were late where nobody else is (azure_conv).
        infeasible_times: an infeasible request counts as feasible after so many times that.
        slower: a prefill takes so many times what it would take alone, as decode steps fall between and passes end
            early for next tokens.
        most_planned: a plan over more requests would take longer than a pass may wait for it.
        overdue_share: of prefill time for overdue requests, while that serves all of them within their bound.
        lasting_share: what they get where it cannot, as under overload that lasts. With 0.05 half a point less is kept,
            and P99 TTFT is no better (bench/lab/docs/fleets.md).
        kv_share: of the KV cache, which infeasible requests leave free for feasible ones.
        decode_share: of the TPOT target, which decode steps must leave for infeasible ones to start. Steps get longer
            by those that start, and by the prefills that they share passes with.
        token_share: of the TPOT target, which a pass takes at most while all first tokens are in time at that pace.
        short_steps: where KV cache is short, a prefill is cut to the time of so many decode steps. With 3, half as many
            again were thrown out on mooncake (bench/lab/docs/rules.md).
        probe_passes: after so many passes without decodes, they join one to measure what they cost. Where joining takes
            twice as long as not, this takes 0.4 % of the device.
    """

    infeasible_age_s: float | None = knob(None, allowed=Range(0, above=True))
    fcfs_times: float = knob(0.0, allowed=Range(0))
    passed_share: float = knob(0.25, allowed=Range(0, 1))
    infeasible_times: float = knob(20.0, allowed=Range(1))
    slower: float = knob(1.2, allowed=Range(0, above=True))
    most_planned: int = knob(128, allowed=Range(0))
    overdue_share: float = knob(0.05, allowed=Range(0, 1))
    lasting_share: float = knob(0.02, allowed=Range(0, 1))
    kv_share: float = knob(0.2, allowed=Range(0, 1))
    decode_share: float = knob(0.4, allowed=Range(0, 1))
    token_share: float = knob(0.6, allowed=Range(0, 1, above=True))
    short_steps: int = knob(2, allowed=Range(1))
    probe_passes: int = knob(256, allowed=Range(1))

    def __post_init__(self) -> None:
        check_fields(self, "slo")

    def deferral_s(self, long_prompts: LongKnobs) -> float:
        """How long after its arrival an infeasible request is deferred; from then on it is overdue."""
        return max(long_prompts.max_age_s, self.infeasible_age_s or 0.0)

    def infeasible_end_s(self, long_prompts: LongKnobs) -> float:
        """How long after its arrival an infeasible request counts as feasible."""
        return self.infeasible_times * self.deferral_s(long_prompts)

    def age_bound_s(self, view: WaitingView, long_prompts: LongKnobs) -> float | None:
        """How long after its arrival ``view`` may be passed; None: as ``long_prompts`` say.

        Where deadlines decide, a target protects its request until it is infeasible; what then made it early would be
        device time taken from feasible ones. From when on it is overdue it has a share of its own.
        """
        if self.infeasible_age_s is None or view.deadline_s is None:
            return None
        deferral_s = self.deferral_s(long_prompts)
        return deferral_s if view.deadline_s - view.arrival_s > deferral_s else self.infeasible_end_s(long_prompts)


@dataclasses.dataclass(frozen=True)
class EnginePolicyKnobs(TemporalKnobs):
    """Knobs of an engine's policy: the paper's, and of what stands around it.

    Attributes:
        batch_timeout_s: of DOPD's batching alone (``combined/length_batched.py``).
    """

    slo: SloKnobs = dataclasses.field(default_factory=SloKnobs)
    batch_timeout_s: float = 0.1
