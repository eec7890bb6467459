"""One scheduler's prefill policy: turns the host's scheduling passes into policy calls and back.

Owned by the scheduler it is attached to; everything runs on the scheduler's thread.
"""

from __future__ import annotations

import dataclasses
import time
from collections import deque
from typing import Any

from pla_graphs.captured import captured_depth
from pla_sglang.config import PlaConfig
from pla_sglang.engine import apply, snapshot
from pla_sglang.engine.clock import PlaTick, pack_model, unpack_model
from pla_sglang.engine.queue_views import QueueViews
from pla_sglang.engine.telemetry import Telemetry
from pla_sglang.policy.awd import AwdKnobs
from pla_sglang.policy.boundary import CPU_START, GPU_START
from pla_sglang.policy.fit import StepFit
from pla_sglang.policy.longs import LongKnobs
from pla_sglang.policy.temporal import TemporalKnobs, TemporalPolicy
from pla_sglang.policy.types import Action, PassDecision, PassView, PrefillClass, WaitingView

HOLD_NAP_S = 2e-4
HOLD_RECHECK_S = 0.02  # a hold that waits for freed memory looks again this often
HOLD_PUBLISH_S = 0.05
AGE_MARGIN = 1.5  # the step model errs, and decode steps fall between the chunks of an aged long
DECODE_WEIGHT = 0.3  # of the latest decode step in the running mean
MOST_CUTS = 8  # a long's chunk never gets smaller than this part of the configured one


@dataclasses.dataclass(slots=True)
class _Hold:
    """The last pass held back; until something changes the next ones need not ask again."""

    release_s: float
    waiting: int
    last: Any
    running: int


@dataclasses.dataclass(slots=True)
class _Launch:
    """When a batch was launched, how long its launch took, and its scheduling before that."""

    at_s: float
    synchronous_s: float
    scheduling_s: float


class PrefillAdapter:
    """Temporal disaggregation of one scheduler."""

    def __init__(self, scheduler: Any, config: PlaConfig) -> None:
        self.scheduler = scheduler
        self.config = config
        self._synchronous = scheduler.device == "cpu" and config.emulate is None  # an emulated device is asynchronous
        start = CPU_START if self._synchronous else GPU_START
        self.policy = TemporalPolicy(self._knobs(config), start)
        self.fit = StepFit(start)
        self.telemetry = Telemetry()
        self.views = QueueViews(self._make_view, self._on_arrival, self._match_prefix)
        self.context: apply.PassContext | None = None  # set only within a prefill pass
        self.now_s = self.decode_step_s = 0.0  # of rank 0, as last broadcast
        self.changes = 0
        self._model_to_send: tuple[float, ...] = ()
        self._hold: _Hold | None = None
        self._launched: deque[_Launch] = deque()  # batches in flight
        self._pass_started_s = 0.0  # the last scheduling pass
        self._last_done_s = 0.0
        self._measured_decode_s = 0.0  # this rank's own; rank 0's is broadcast
        self._published_s = 0.0
        self._decoded = True  # a decode step may have run since the last decision
        self._decoded_s = 0.0
        self._queue_shown: dict[PrefillClass, tuple[int, int]] | None = None

    def _knobs(self, config: PlaConfig) -> TemporalKnobs:
        scheduler = self.scheduler
        cap = scheduler.chunked_prefill_size
        chunk = config.long_chunk_tokens or cap
        if chunk is not None and cap is not None:
            chunk = min(chunk, cap)
        budget = cap or scheduler.max_prefill_tokens
        return TemporalKnobs(
            boundary_tokens=config.boundary_tokens,
            boundary_cap_tokens=budget,
            awd=AwdKnobs(
                wait_min_s=config.wait_min_ms / 1e3,
                wait_max_s=config.wait_max_ms / 1e3,
                depth_max=captured_depth(scheduler.server_args, scheduler.max_running_requests),
            ),
            longs=LongKnobs(
                max_age_s=config.long_max_age_ms / 1e3,
                margin=AGE_MARGIN,
                chunk_max_tokens=chunk,
                chunk_min_tokens=max(scheduler.page_size, config.long_chunk_min_tokens or (chunk or 0) // MOST_CUTS, 1),
                grid_tokens=apply.chunk_grid_tokens(scheduler),
                least_remaining=config.long_order == "least-remaining",
            ),
            mix=config.mixing == "allow",
            decode_gap_s=config.decode_gap_ms / 1e3,
        )

    def on_host_complete(self) -> None:
        """The host's ``__init__`` has gone on since ours and knows its grid for chunks now."""
        self.policy.set_knobs(self._knobs(self.config))

    def set_config(self, config: PlaConfig) -> None:
        """Change knobs between two passes. The order of broadcast requests makes this the same pass on all ranks."""
        knobs = self._knobs(config)
        self.config = config
        self.policy.set_knobs(knobs)
        self.changes += 1
        self._hold = None

    # -- the clock -----------------------------------------------------------------------------------------------

    def make_tick(self) -> PlaTick:
        """Rank 0 only."""
        model, self._model_to_send = self._model_to_send, ()
        return PlaTick(now_s=time.perf_counter(), decode_step_s=self._measured_decode_s, model=model)

    def on_tick(self, tick: PlaTick) -> None:
        self.now_s, self.decode_step_s = tick.now_s, tick.decode_step_s
        if tick.model:
            self.policy.set_model(unpack_model(tick.model))

    def wants_tick(self) -> bool:
        scheduler = self.scheduler
        bootstrap = getattr(scheduler, "disagg_prefill_bootstrap_queue", None)
        return bool(
            scheduler.waiting_queue
            or scheduler.chunked_req is not None
            or scheduler.grammar_manager.grammar_queue
            or (bootstrap is not None and bootstrap.queue)
        )

    # -- a request enters the queue ------------------------------------------------------------------------------

    def on_queued(self, req: Any) -> None:
        self.views.add(req)

    def _make_view(self, req: Any) -> WaitingView:
        view = snapshot.make_view(req, self.now_s, self.config.slo_ttft_ms)
        view.seen = view.resumed  # a request that comes back is no new arrival
        return view

    def _on_arrival(self, view: WaitingView) -> None:
        self.policy.on_arrival(view, self.now_s)

    def _match_prefix(self, req: Any) -> None:
        snapshot.match_prefix(self.scheduler, req)

    # -- one scheduling pass -------------------------------------------------------------------------------------

    def run_pass(self, original: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Around the host's prefill function, which returns ``(batch or None, running_batch)``."""
        scheduler = self.scheduler
        running_batch = kwargs["running_batch"] if "running_batch" in kwargs else args[-1]
        if self._hold is not None and self._still_holding(running_batch):
            return None, running_batch
        self._hold = None
        self._pass_started_s = time.perf_counter()
        chunk_size = scheduler.chunked_prefill_size
        self.context = context = apply.PassContext(running_batch, running_batch.batch_is_full)
        batch = None
        try:
            result = original(scheduler, *args, **kwargs)
            batch = result[0]
        finally:
            self.context = None
            apply.leave(context, scheduler, chunk_size, batch)
        self._decoded = self._decoded or batch is None  # without a prefill the host decodes
        if context.decision is not None:
            self._account(context, batch)
        else:
            self._on_undecided()
        self.views.leave(context.places)
        return result

    def _decode_wait_s(self, running_batch: Any) -> float:
        """Since when running requests have gone without a decode step, by the shared clock."""
        if self._decoded or running_batch.is_empty():
            self._decoded = False
            self._decoded_s = self.now_s
        return self.now_s - self._decoded_s

    def _on_undecided(self) -> None:
        """The host had nothing to schedule. An open hold ends here uncounted, and finished requests can be let go."""
        self.telemetry.end_hold()
        if not self.scheduler.waiting_queue:
            self.views.clear()

    def on_ordered(self, queue: list[Any]) -> None:
        """The host has ordered its queue and refreshed prefix matches: decide, and show it only what was selected."""
        context = self.context
        if context is None:
            return
        started_s = time.perf_counter()
        by_host = snapshot.host_matches(self.scheduler, queue)
        views = self.views.of_queue(queue, by_host=by_host, tree_stamp=snapshot.tree_stamp(self.scheduler))
        chunk = self.scheduler.chunked_req
        chunk_view = None if chunk is None else self.views.get(chunk)
        decode_wait_s = self._decode_wait_s(context.running_batch)
        context.view = snapshot.pass_view(self.scheduler, context.running_batch, views, chunk_view, decode_wait_s)
        context.view.decode_step_s = self.decode_step_s
        context.decision = self.policy.decide(context.view, self.now_s)
        if self.views.refresh(context.decision.selected):
            context.decision = self.policy.decide(context.view, self.now_s)
        selected_tokens = sum(chosen.new_tokens for chosen in context.decision.selected)
        context.held_tokens = self.views.waiting_tokens - selected_tokens
        apply.enter(context, self.scheduler, queue)
        self.telemetry.hook_s += time.perf_counter() - started_s

    def _account(self, context: apply.PassContext, batch: Any) -> None:
        decision, view = context.decision, context.view
        assert decision is not None and view is not None
        admitted = self._admitted(decision, view, batch)
        self.policy.on_pass(decision, view, admitted, self.now_s)
        self.telemetry.on_pass(decision, admitted, batch, self.now_s)
        if batch is None:
            self._remember_hold(decision, context)
        elif batch.prefill_stats is not None:
            batch.prefill_stats.num_pending_tokens += context.held_tokens

    @staticmethod
    def _admitted(decision: PassDecision, view: PassView, batch: Any) -> tuple[WaitingView, ...]:
        """Whom of the chosen the host really admitted; a continued chunk is chosen without being selected."""
        if batch is None:
            return ()
        if decision.action is Action.LONG and not decision.selected:
            assert view.chunk is not None, "only a chunk advances without being selected"
            return (view.chunk,)
        ran = set(map(id, batch.reqs))
        return tuple(chosen for chosen in decision.selected if id(chosen.handle) in ran)

    # -- holding without spinning --------------------------------------------------------------------------------

    def _remember_hold(self, decision: PassDecision, context: apply.PassContext) -> None:
        scheduler, view = self.scheduler, context.view
        assert view is not None
        queue = scheduler.waiting_queue
        if not queue or scheduler.chunked_req is not None or scheduler.enable_hierarchical_cache:
            return
        if decision.action is not Action.HOLD and view.running == 0:
            return  # nothing will be freed, so only trying again can help
        release_s = self.now_s + HOLD_RECHECK_S if decision.release_s is None else decision.release_s
        self._hold = _Hold(release_s, len(queue), queue[-1], view.running)

    def _still_holding(self, running_batch: Any) -> bool:
        """Nothing has changed since the last pass held back, so the host need not match every prompt again."""
        hold, scheduler = self._hold, self.scheduler
        assert hold is not None
        queue = scheduler.waiting_queue
        if (
            len(queue) != hold.waiting
            or queue[-1] is not hold.last
            or scheduler.chunked_req is not None
            or scheduler.grammar_manager.has_waiting_grammars()
            or len(running_batch.reqs) != hold.running
            or self.now_s >= hold.release_s
        ):
            return False
        self.telemetry.passes_skipped += 1
        self._decoded = True
        if snapshot.device_idle(scheduler, running_batch):
            time.sleep(HOLD_NAP_S)
        self._publish_load()
        return True

    def _publish_load(self) -> None:
        """The host publishes its load after prefills; a hold has none, and a router must not see stale figures."""
        if self.now_s - self._published_s >= HOLD_PUBLISH_S:
            self._published_s = self.now_s
            self.scheduler.publish_load_snapshot(force=True)

    # -- measured step times (rank 0's count) --------------------------------------------------------------------

    def on_launch(self, original: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        launched_s = time.perf_counter()
        result = original(self.scheduler, *args, **kwargs)
        synchronous_s = time.perf_counter() - launched_s
        self._launched.append(_Launch(launched_s, synchronous_s, launched_s - self._pass_started_s))
        return result

    def on_result(self, batch: Any) -> None:
        """A batch's result has been processed: derive what the pass cost."""
        done_s = time.perf_counter()
        if not self._launched:
            return
        launch = self._launched.popleft()
        if batch.forward_mode.is_extend() and batch.extend_lens and not batch.forward_mode.is_mixed():
            changed = self.fit.observe(snapshot.step_sample(batch, *self._cost_s(launch, done_s)))
            if changed:
                self._model_to_send = pack_model(self.fit.model)
        elif batch.forward_mode.is_decode():
            device_s, _ = self._cost_s(launch, done_s)
            self._measured_decode_s += DECODE_WEIGHT * (device_s - self._measured_decode_s)
        self._last_done_s = done_s

    def _cost_s(self, launch: _Launch, done_s: float) -> tuple[float, float]:
        """What one more pass costs: the device's time, and the host's where the device waits for it.

        A CPU computes inside the launch; a GPU from the launch, or the end of the batch before, to the result.
        """
        overlap = self.scheduler.enable_overlap
        if self._synchronous:
            processing_s = 0.0 if overlap else done_s - launch.at_s - launch.synchronous_s
            return launch.synchronous_s, launch.scheduling_s + processing_s
        return done_s - max(launch.at_s, self._last_done_s), 0.0 if overlap else launch.scheduling_s

    # -- queue gauges --------------------------------------------------------------------------------------------

    def publish_queue(self) -> None:
        """Whenever the host publishes its load: queue length and tokens by class, when they changed."""
        if not self.telemetry.exports:
            return
        queue = self._queue_by_class()
        if queue == self._queue_shown:
            return
        self._queue_shown = queue
        for cls, (reqs, tokens) in queue.items():
            self.telemetry.on_queue(cls, reqs, tokens)

    def _queue_by_class(self) -> dict[PrefillClass, tuple[int, int]]:
        shorts, longs = self.policy.classify([self.views.get(req) for req in self.scheduler.waiting_queue])
        return {
            PrefillClass.SHORT: (len(shorts), sum(view.new_tokens for view in shorts)),
            PrefillClass.LONG: (len(longs), sum(view.new_tokens for view in longs)),
        }

    # -- state for people ----------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Plain values only (it travels as msgpack)."""
        policy, scheduler = self.policy, self.scheduler
        return {
            "config": self.config.to_dict(),
            "config_changes": self.changes,
            "boundary_tokens": policy.boundary.tokens(0),
            "boundary_tokens_at_8k_history": policy.boundary.tokens(8192),
            "window_ms": policy.awd.window_s * 1e3,
            "depth": policy.awd.depth,
            "short_rate_per_s": policy.short_rate.per_second(self.now_s),
            "step_model": dataclasses.asdict(policy.model),
            "step_model_fits": self.fits_and_error(),
            "queue": {
                cls.value: {"reqs": reqs, "tokens": tokens} for cls, (reqs, tokens) in self._queue_by_class().items()
            },
            "chunk_remaining_tokens": (
                0 if scheduler.chunked_req is None else snapshot.chunk_remaining_tokens(scheduler.chunked_req)
            ),
            **self.telemetry.to_dict(),
        }

    def fits_and_error(self) -> dict[str, Any]:
        return {"fits": self.fit.fits, "samples": len(self.fit), "mean_relative_error": self.fit.error}
