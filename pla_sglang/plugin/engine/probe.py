"""Measures one scheduler and pushes reports of it. Everything runs on the scheduler's thread.

Only rank 0 of a tensor-parallel group has a probe: the others hold the same requests.
"""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec

from pla_sglang.load.report import MOST_STEPS, Backlog, FittedPasses, PassTiming, PassTotals, Report
from pla_sglang.load.sockets import Pusher
from pla_sglang.load.window import SIGNAL_WINDOW_S, BusyShare, WindowMean
from pla_sglang.plugin.config import PlaConfig
from pla_sglang.plugin.engine import backlog
from pla_sglang.plugin.engine.fleet_part import fleet_part
from pla_sglang.plugin.engine.pass_timer import PassTimer, computes_in_launch, make_marks
from pla_sglang.plugin.engine.request_rows import FindRest, RowCadence
from pla_sglang.plugin.engine.snapshot import attention_of, context_tokens, prefill_count, slo_s
from pla_sglang.plugin.engine.step_measurement import UNMIXED_STRIDE
from pla_sglang.plugin.engine.token_intervals import TokenIntervals
from pla_sglang.policy.common.device_clock import DeviceClock
from pla_sglang.policy.common.step_fit import StepSample
from pla_sglang.policy.common.step_model import CPU_START, GPU_START
from pla_sglang.policy.interface.prefill import PrefillClass
from pla_sglang.policy.slo.decode_fit import MixedBatchSample
from pla_sglang.policy.slo.pass_fits import PassFits

LEAST_INTERVAL_S = 0.02
HEARTBEAT_S = 0.5  # without any change
COST_SHARE = 0.02  # of the scheduler's time that making reports may take


@dataclasses.dataclass(frozen=True, slots=True)
class Identity:
    """Who reports."""

    instance: str
    dp_rank: int
    dp_size: int
    disaggregation: str


class Probe:
    """Counts and averages of one scheduler, and when to send them.

    Args:
        clock: monotonic; for tests.
    """

    def __init__(
        self, scheduler: Any, config: PlaConfig, identity: Identity, pushers: Sequence[Pusher], clock: Any = None
    ) -> None:
        self.scheduler = scheduler
        self.config = config
        self.identity = identity
        self.pushers = tuple(pushers)
        self.received = 0
        self.sequence = 0
        self.errors: Counter[str] = Counter()
        window_s = SIGNAL_WINDOW_S * config.time_scale  # as long for the device, however slow it is
        self.busy = BusyShare(window_s)
        self.report_s = 0.0  # spent on reports since the start
        self.rows = RowCadence()
        self._decodes_here = identity.disaggregation != "prefill"
        self._clock = clock or time.perf_counter
        synchronous = computes_in_launch(scheduler.device, config)
        self._timer = PassTimer(synchronous=synchronous, clock=self._clock, marks=make_marks(scheduler))
        self._started_s = time.time()
        self._steps: list[PassTiming] = []  # since the last report
        self._last_extend = _ExtendRequests()
        self._decode_steps = WindowMean(window_s)
        self._intervals = TokenIntervals(window_s)
        self._ttft_ratio = WindowMean(window_s)
        # Where our scheduling measures its passes, they are not fitted twice.
        start = CPU_START if synchronous else GPU_START
        self._fits = None if hasattr(scheduler, "pla") else PassFits(start)
        self._device_clock = DeviceClock(config.time_scale)
        self._decoded = 0
        self._changed = True
        self._next_s = 0.0
        self._heartbeat_s = 0.0

    # -- what happens ------------------------------------------------------------------------------------------------

    def on_received(self, requests: int) -> None:
        self.received += requests
        self._changed = self._changed or requests > 0

    def on_error(self, kind: str) -> None:
        self.errors[kind] += 1
        self._changed = True

    def on_launch(self, batch: Any) -> None:
        self._last_extend = _ExtendRequests.of(batch)
        self._timer.begin_launch(_Launched(_work(batch), self._last_extend.prefills))

    def on_launched(self, result: Any) -> None:
        """The host has launched what ``on_launch`` saw, with this ``result`` to come."""
        now_s = self._timer.end_launch(result)
        self._changed = True
        self.maybe_send(now_s)

    def on_result(self, batch: Any) -> None:
        """The result of the oldest launch has been processed."""
        now_s = self._clock()
        measured = self._timer.end_pass(now_s)
        if measured is not None:
            self.busy.add(measured.launched_s, measured.end_s)
            self._account(batch, measured.note.work, measured.device_s, now_s)
        self._changed = True
        self.maybe_send(now_s)

    def on_idle(self) -> None:
        self._intervals.on_idle()
        self._last_extend = _ExtendRequests()
        self.maybe_send(self._clock())

    def _account(self, batch: Any, work: PassTiming | None, duration_s: float, now_s: float) -> None:
        if self._fits is not None:
            self._fit_pass(self._fits, batch, work, self._device_clock.device_s(duration_s))
        if work is not None:
            self._steps.append(msgspec.structs.replace(work, duration_s=max(0.0, duration_s)))
            requests = _ExtendRequests.of(batch)
            self._intervals.on_decoded(len(requests.piggybacked), now_s)
            first = [req for req in requests.prefills if len(req.output_ids) == 1 and not req.retracted_stain]
            for req in first:
                self._on_first_token(req, now_s)
            if self._decodes_here:
                decodes_here = fleet_part(self.scheduler).decodes_here
                self._intervals.on_first_tokens(sum(not req.finished() and decodes_here(req) for req in first), now_s)
        elif batch.forward_mode.is_decode() and batch.reqs:
            self._decode_steps.add(duration_s, now_s)
            self._intervals.on_decoded(len(batch.reqs), now_s)

    def _fit_pass(self, fits: PassFits, batch: Any, work: PassTiming | None, pass_s: float) -> None:
        if work is not None:
            amounts = (work.new_tokens, work.history_tokens, float(work.attention))
            if work.riders:
                context = sum(batch.prefix_lens[work.requests :]) + work.riders
                fits.observe_mixed(MixedBatchSample(*amounts, work.riders, context, pass_s))
            else:
                fits.observe_prefill(StepSample(*amounts, pass_s))
        elif batch.forward_mode.is_decode() and batch.reqs:
            self._decoded += 1
            if self._decoded % UNMIXED_STRIDE == 0:
                fits.observe_decode(len(batch.reqs), context_tokens(batch), pass_s)

    def _on_first_token(self, req: Any, now_s: float) -> None:
        target_s = slo_s(req, self._default_slo_ms())
        if target_s is not None:
            self._ttft_ratio.add((now_s - backlog.read_arrival_s(req)) / target_s, now_s)

    def _default_slo_ms(self) -> float | None:
        """Target of requests that bring none; it may change at run time where our scheduling is on."""
        adapter = getattr(self.scheduler, "pla", None)
        config = self.config if adapter is None else adapter.config
        return config.pool_slo_ttft_ms if config.controller_folder is not None else config.slo_ttft_ms

    # -- reports -----------------------------------------------------------------------------------------------------

    def maybe_send(self, now_s: float) -> None:
        """At most every ``LEAST_INTERVAL_S``, seldom without a change, and less often where a report costs much."""
        if now_s < self._next_s or not (self._changed or now_s >= self._heartbeat_s):
            return
        report = self.report(now_s)
        for pusher in self.pushers:
            pusher.send(report)
        self._steps.clear()
        self._changed = False
        spent_s = self._clock() - now_s
        self.report_s += spent_s
        self._next_s = now_s + max(LEAST_INTERVAL_S, spent_s / COST_SHARE)
        self._heartbeat_s = now_s + HEARTBEAT_S

    def report(self, now_s: float) -> Report:
        """The state now. Takes the next sequence number."""
        self.sequence += 1
        scheduler, running = self.scheduler, backlog.list_decoding(self.scheduler, self._joining())
        decodes, decode_tokens = backlog.count_decode_waiting(scheduler)
        fleet, adapter = fleet_part(scheduler), getattr(scheduler, "pla", None)
        return Report(
            instance=self.identity.instance,
            dp_rank=self.identity.dp_rank,
            dp_size=self.identity.dp_size,
            started_s=self._started_s,
            sequence=self.sequence,
            received=self.received,
            backlog=backlog.sum_backlog(scheduler, self._in_flight()),
            prefill_age_s=backlog.measure_oldest_s(scheduler, now_s),
            running=len(running),
            context_tokens=sum(len(req.origin_input_ids) + len(req.output_ids) for req in running),
            waiting_decodes=decodes,
            waiting_decode_tokens=decode_tokens,
            kv_used_tokens=backlog.count_kv_used_tokens(scheduler),
            kv_capacity_tokens=scheduler.max_total_num_tokens,
            passes=PassTotals.of(self._steps),
            steps=tuple(self._steps[-MOST_STEPS:]),
            decode_step_s=self._decode_steps.mean(now_s),
            token_interval_s=self._intervals.mean(now_s),
            ttft_ratio=self._ttft_ratio.mean(now_s),
            utilisation=self.busy.share(now_s),
            errors=dict(self.errors),
            legs=fleet.describe_load(),
            requests=self.rows.take_rows(running, fleet.list_paused(), now_s, self._find_rest()),
            **describe_steps(self._fits if adapter is None else adapter.steps.fits),
            **self._scheduling(),
        )

    def _find_rest(self) -> FindRest | None:
        lengths = getattr(self.scheduler, "pla_lengths", None)
        return None if lengths is None else lengths.find_rest_tokens

    def _scheduling(self) -> dict[str, Any]:
        """Fields that only an instance with our scheduling has."""
        adapter = getattr(self.scheduler, "pla", None)
        if adapter is None:
            return {}
        classes, roles = backlog.group_by_class(self.scheduler), self.scheduler.pla_roles
        return {
            "role": roles.role,
            "draining": bool(roles.draining(req.rid for req in backlog.iterate_unfinished(self.scheduler))),
            "boundary_tokens": adapter.policy.prefills.boundary.tokens(0),
            "short": backlog.sum_class_queue(classes[PrefillClass.SHORT]),
            "long": backlog.sum_class_queue(classes[PrefillClass.LONG]),
        }

    def _joining(self) -> list[Any]:
        """Requests of the last extend pass that decode and are not in the running batch before the host's next pass:
        the piggybacked decodes, and, once its result is processed, those whose prefill it has completed."""
        last = self._last_extend
        if not self._decodes_here or self._timer.notes_in_flight():
            return list(last.piggybacked)
        return [*last.piggybacked, *(req for req in last.prefills if req is not self.scheduler.chunked_req)]

    def _in_flight(self) -> Backlog:
        """A request with several chunks in flight, or one beside its rest, is one prefill."""
        launched = self._timer.notes_in_flight()
        work = PassTotals.of(note.work for note in launched if note.work is not None)
        requests = [id(req) for note in launched for req in note.prefills]
        repeated = len(requests) - len(set(requests) - {id(self.scheduler.chunked_req)})
        return Backlog(work.requests - repeated, work.new_tokens, work.attention, work.history_tokens)

    def state(self) -> dict[str, Any]:
        """For /pla/state."""
        return {
            "instance": self.identity.instance,
            "reports": self.sequence,
            "report_s": self.report_s,
            "passes": self._timer.passes,
            "pass_gap_s": self._timer.gap_s,
            "rows": self.rows.to_dict(),
            "addresses": [pusher.address for pusher in self.pushers],
            "dropped": [pusher.dropped for pusher in self.pushers],
        }


def describe_steps(fits: PassFits | None) -> dict[str, Any]:
    """Fields of a report: what passes take, and from how many that is known."""
    if fits is None:
        return {}
    prefills, decodes = fits.prefills, fits.decodes
    return {
        "step_model": prefills.model.to_floats(),
        "decode_model": dataclasses.astuple(decodes.model),
        "fitted": FittedPasses(prefills.passes, decodes.decodes, decodes.mixed),
    }


@dataclasses.dataclass(frozen=True, slots=True)
class _ExtendRequests:
    """The requests of an extend pass, as its batch had them when it was launched; none of a decode step."""

    prefills: Sequence[Any] = ()
    piggybacked: Sequence[Any] = ()  # decodes of a mixed pass

    @classmethod
    def of(cls, batch: Any) -> _ExtendRequests:
        if not batch.forward_mode.is_extend() or not batch.extend_lens:
            return cls()
        count = prefill_count(batch)
        return cls(batch.reqs[:count], batch.reqs[count:])


@dataclasses.dataclass(frozen=True, slots=True)
class _Launched:
    """A pass whose result has not been processed: what it prefills, None for a decode step, and for which requests."""

    work: PassTiming | None
    prefills: Sequence[Any]


def _work(batch: Any) -> PassTiming | None:
    """What a batch prefills; None for a decode step."""
    if not batch.forward_mode.is_extend() or not batch.extend_lens:
        return None
    count = prefill_count(batch)
    new_tokens, history_tokens = sum(batch.extend_lens[:count]), sum(batch.prefix_lens[:count])
    piggybacked = len(batch.extend_lens) - count
    return PassTiming(new_tokens, attention_of(batch), history_tokens, count, 0.0, piggybacked)
