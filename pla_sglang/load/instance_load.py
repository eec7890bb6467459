"""The total load of one instance, from the reports of its ranks."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable

from pla_sglang.load.report import Report
from pla_sglang.policy.common.device_clock import DeviceClock
from pla_sglang.policy.interface.decisions import MeasuredPass, PrefillSample
from pla_sglang.policy.interface.fleet import InstanceView, LoadAmounts


@dataclasses.dataclass(slots=True)
class InstanceLoad:
    """The figures of one instance, from the reports of its ranks or from a poll. ``None``: unknown from this source."""

    amounts: LoadAmounts
    received: int | None = None  # requests that the instance has received since its start
    kv_used_tokens: int = 0
    kv_capacity_tokens: int | None = None
    token_interval_s: float | None = None
    utilisation: float | None = None
    prefill_age_s: float | None = None
    ttft_ratio: float | None = None


def combine_ranks(reports: Collection[Report]) -> InstanceLoad:
    """The load of one instance from the last report of each rank: sums, and means of averages."""
    amounts = LoadAmounts()
    for report in reports:
        add_report(amounts, report)
    return InstanceLoad(
        amounts=amounts,
        received=sum(report.received for report in reports),
        kv_used_tokens=sum(report.kv_used_tokens for report in reports),
        kv_capacity_tokens=sum(report.kv_capacity_tokens for report in reports) or None,
        token_interval_s=_mean((report.token_interval_s, max(1, report.running)) for report in reports),
        utilisation=sum(report.utilisation for report in reports) / len(reports),
        prefill_age_s=max(report.prefill_age_s for report in reports),
        ttft_ratio=_mean((report.ttft_ratio, 1) for report in reports),
    )


def add_report(total: LoadAmounts, report: Report) -> None:
    """Adds the sums of one rank."""
    backlog = report.backlog
    total.queued_prefills += backlog.prefills
    total.queued_tokens += backlog.tokens
    total.queued_attention += backlog.attention
    total.queued_history_tokens += backlog.history_tokens
    total.running += report.running
    total.context_tokens += report.context_tokens
    total.waiting_decodes += report.waiting_decodes
    total.waiting_decode_tokens += report.waiting_decode_tokens


def _mean(weighted: Iterable[tuple[float | None, int]]) -> float | None:
    """None without a value."""
    known = [(value, weight) for value, weight in weighted if value is not None]
    total = sum(weight for _, weight in known)
    return sum(value * weight for value, weight in known) / total if total else None


def prefill_sample(view: InstanceView, report: Report, clock: DeviceClock) -> PrefillSample | None:
    """The sums of the prefill passes since the previous report, by the clock of the device; None without any."""
    passes = report.passes
    if not passes.passes:
        return None
    return PrefillSample(
        instance=view,
        new_tokens=passes.new_tokens,
        attention=passes.attention,
        history_tokens=passes.history_tokens,
        requests=passes.requests,
        duration_s=clock.device_s(passes.duration_s),
        steps=tuple(
            MeasuredPass(
                step.new_tokens,
                step.attention,
                step.history_tokens,
                clock.device_s(step.duration_s),
                step.requests,
            )
            for step in report.steps
            if not step.riders
        ),
    )
