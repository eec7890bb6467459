"""One scheduler's prefill policy: turns the host's scheduling passes into policy calls and back.

Times here are those of the device (``device_clock.py``), from the tick on which rank 0 tells the others its time.

Owned by the scheduler it is attached to; everything runs on the scheduler's thread.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence
from typing import Any

import msgspec

from pla_sglang.load.report import ClassQueue
from pla_sglang.plugin.config import DOPD, PlaConfig
from pla_sglang.plugin.engine import apply, snapshot
from pla_sglang.plugin.engine.backlog import sum_class_queue
from pla_sglang.plugin.engine.clock import PlaTick
from pla_sglang.plugin.engine.hold import HeldPass, hold_after
from pla_sglang.plugin.engine.host.arguments import resolve
from pla_sglang.plugin.engine.pass_timer import PassTimer, computes_in_launch, make_marks
from pla_sglang.plugin.engine.piggybacked import NextTokenClock, keeps_decodes_out, may_piggyback
from pla_sglang.plugin.engine.queue_views import QueueViews
from pla_sglang.plugin.engine.step_measurement import StepMeasurement
from pla_sglang.plugin.engine.telemetry import LONG, SHORT, Telemetry
from pla_sglang.plugin.temporal_knobs import DEPTH_WITHOUT_GRAPHS, EngineLimits, temporal_knobs
from pla_sglang.policy.common.device_clock import DeviceClock
from pla_sglang.policy.common.step_model import CPU_START, GPU_START, StepModel
from pla_sglang.policy.engine_policies import make_engine_policy
from pla_sglang.policy.interface.prefill import PassDecision, PassView, WaitingView
from pla_sglang.policy.slo.mixed_batches import MixedBatchModel

HOLD_NAP_S = 2e-4
HOLD_PUBLISH_S = 0.05
TYPICAL_SHORT_TOKENS = 32


class PrefillAdapter:
    """Temporal disaggregation of one scheduler."""

    def __init__(self, scheduler: Any, config: PlaConfig) -> None:
        self.scheduler = scheduler
        self.config = config
        timer = PassTimer(synchronous=computes_in_launch(scheduler.device, config), marks=make_marks(scheduler))
        start = CPU_START if timer.synchronous else GPU_START
        self.clock = DeviceClock(config.time_scale)
        knobs = temporal_knobs(config, _read_limits(scheduler))
        self.policy = make_engine_policy(knobs, start, length_batched=config.prefill_disagg == DOPD)
        self.steps = StepMeasurement(scheduler, start, timer, self.clock)
        self.telemetry = Telemetry(self.clock)
        self.views = QueueViews(
            self._make_view,
            on_arrival=lambda view: self.policy.on_arrival(view, self.now_s),
            match=functools.partial(snapshot.match_prefix, scheduler),
        )
        self.context: apply.PassContext | None = None  # set only within a prefill pass
        self.now_s = self.decode_step_s = 0.0  # of rank 0, as last broadcast
        self.changes = 0
        self._hold: HeldPass | None = None  # the last pass was held back
        self._published_s = 0.0
        self._decoded = True  # a decode step may have run since the last decision
        self._decoded_s = 0.0
        self._pass_end_s = 0.0  # of the pass launched last, as predicted
        self._piggybacked = NextTokenClock(self.clock, scheduler.page_size)
        self._queue_shown: dict[str, ClassQueue] | None = None

    def on_host_complete(self) -> None:
        """The host's ``__init__`` has finished; its chunk grid is now known."""
        self.policy.set_knobs(temporal_knobs(self.config, _read_limits(self.scheduler)))

    def set_config(self, config: PlaConfig) -> None:
        """Change knobs between two passes. The order of broadcast requests makes this the same pass on all ranks."""
        knobs = temporal_knobs(config, _read_limits(self.scheduler))
        self.config = config
        self.policy.set_knobs(knobs)
        self.changes += 1
        self._hold = None

    # -- the clock -----------------------------------------------------------------------------------------------

    def make_tick(self) -> PlaTick:
        """Rank 0 only."""
        steps = self.steps
        now_s = self.clock.device_s(time.perf_counter())
        return PlaTick(
            now_s=now_s,
            decode_step_s=steps.decode_step_s,
            model=steps.take_new_model(),
            mixed_model=steps.take_new_mixed_model(),
        )

    def on_tick(self, tick: PlaTick) -> None:
        self.now_s, self.decode_step_s = tick.now_s, tick.decode_step_s
        if tick.model:
            self.policy.set_model(StepModel.from_floats(tick.model))
        if tick.mixed_model:
            self.policy.set_mixed_model(MixedBatchModel(*tick.mixed_model))

    def wants_tick(self) -> bool:
        scheduler = self.scheduler
        transfers = (
            getattr(scheduler, "disagg_prefill_bootstrap_queue", None),
            getattr(scheduler, "disagg_decode_prealloc_queue", None),
        )
        return bool(
            scheduler.waiting_queue
            or scheduler.chunked_req is not None
            or scheduler.grammar_manager.grammar_queue
            or any(queue is not None and queue.queue for queue in transfers)
        )

    # -- a request enters the queue ------------------------------------------------------------------------------

    def on_queued(self, req: Any) -> None:
        self.views.add_request(req)

    def _make_view(self, req: Any) -> WaitingView:
        view = snapshot.make_view(req, self.now_s, self.config.slo_ttft_ms, self.clock)
        view.seen = view.resumed  # a request that comes back is no new arrival
        return view

    # -- one scheduling pass -------------------------------------------------------------------------------------

    def run_pass(self, original: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Around the host's prefill function, which returns ``(batch or None, running_batch)``."""
        scheduler = self.scheduler
        running_batch = kwargs["running_batch"] if "running_batch" in kwargs else args[-1]
        if self._hold is not None and self._hold.lasts(scheduler, running_batch, self.now_s):
            self._wait_out_hold(running_batch)
            return None, running_batch
        self._hold = None
        self.steps.begin_scheduling()
        chunk_size = scheduler.chunked_prefill_size
        self.context = context = apply.PassContext(
            running_batch, running_batch.batch_is_full, mixes=scheduler.is_mixed_chunk
        )
        batch = None
        try:
            result = original(scheduler, *args, **kwargs)
            batch = result[0]
        finally:
            self.context = None
            apply.leave_pass(context, scheduler, chunk_size, batch)
        # Without a prefill the host decodes.
        self._decoded = self._decoded or batch is None or batch.forward_mode.is_mixed()
        if context.decision is not None:
            self._account_pass(context, batch)
        else:
            self._on_undecided()
        self.views.remove_places(context.places, chunk=scheduler.chunked_req)
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
            self.views.forget_requests()

    def on_ordered(self, queue: list[Any]) -> None:
        """The host has ordered its queue and refreshed prefix matches: decide, and show it only what was selected."""
        context = self.context
        if context is None:
            return
        started_s = time.perf_counter()
        by_host = snapshot.host_matches(self.scheduler, queue)
        views = self.views.list_views(queue, by_host=by_host, tree_stamp=snapshot.tree_stamp(self.scheduler))
        chunk = self.scheduler.chunked_req
        chunk_view = None if chunk is None else self.views.find_view(chunk)
        decode_wait_s = self._decode_wait_s(context.running_batch)
        context.view = snapshot.pass_view(self.scheduler, context.running_batch, views, chunk_view, decode_wait_s)
        context.view.decode_step_s = self.decode_step_s
        if context.mixes and may_piggyback(context.running_batch):
            self._add_piggybacked(context.view, context.running_batch)
        context.decision = self.policy.decide(context.view, self.now_s)
        matches_changed = self.views.refresh_matches(context.decision.selected)
        if matches_changed or self._decodes_stay_out(context.view, context.decision):
            context.decision = self.policy.decide(context.view, self.now_s)
        selected_tokens = sum(chosen.new_tokens for chosen in context.decision.selected)
        context.held_tokens = self.views.waiting_tokens - selected_tokens
        apply.enter_pass(context, self.scheduler, queue)
        self.telemetry.hook_s += time.perf_counter() - started_s

    def _add_piggybacked(self, view: PassView, running_batch: Any) -> None:
        scheduler = self.scheduler
        # With overlap the pass before is still under way when the next one is decided.
        begin_s = max(self.now_s, self._pass_end_s) if scheduler.enable_overlap else self.now_s
        last_token_s = self.now_s - view.decode_wait_s if view.decode_wait_s > 0 else begin_s
        self._piggybacked.add_to(view, running_batch.reqs, begin_s, last_token_s, self.config.slo_tpot_ms)
        view.can_piggyback = True
        view.pass_budget_tokens = max(1, min(view.pass_budget_tokens, scheduler.max_prefill_tokens - view.running))

    def _decodes_stay_out(self, view: PassView, decision: PassDecision) -> bool:
        """Tells whether the host would take no piggybacked decodes into the pass that was decided. Then ``view`` says
        so from now on."""
        chunk = () if view.chunk is None else (view.chunk.handle,)
        if not view.can_piggyback or not keeps_decodes_out([*(chosen.handle for chosen in decision.selected), *chunk]):
            return False
        view.can_piggyback = False
        return True

    def _account_pass(self, context: apply.PassContext, batch: Any) -> None:
        decision, view = context.decision, context.view
        assert decision is not None and view is not None
        admitted = self._admitted_requests(decision, view, batch)
        self.policy.on_pass(decision, view, admitted, self.now_s)
        if context.mixes:
            began_s = max(self.now_s, self._pass_end_s) if self.scheduler.enable_overlap else self.now_s
            self._pass_end_s = began_s + self.policy.predict_s(decision, view, admitted)
        begun = [one for one in admitted if one is not view.chunk]
        mixed = self._is_mixed(begun, admitted, batch)
        self.telemetry.on_pass(decision, begun, batch, self.now_s, mixed=mixed)
        if batch is None:
            self._hold = hold_after(decision, self.scheduler, view.running, self.now_s)
        elif batch.prefill_stats is not None:
            batch.prefill_stats.num_pending_tokens += context.held_tokens

    def _is_mixed(self, begun: Sequence[WaitingView], admitted: Sequence[WaitingView], batch: Any) -> bool:
        """Tells whether prefills of both classes ran, or one that nobody has chosen."""
        if batch is None:
            return False
        short_prompts, long_prompts = self.policy.prefills.classify(begun)
        apart = not short_prompts or (
            not long_prompts and len(begun) == len(admitted)
        )  # a chunk that went on is a long
        return not apart or snapshot.prefill_count(batch) > len(admitted)

    @staticmethod
    def _admitted_requests(decision: PassDecision, view: PassView, batch: Any) -> tuple[WaitingView, ...]:
        """Whom of the chosen the host really admitted, and the chunk that went on."""
        if batch is None:
            return ()
        ran = set(map(id, batch.reqs))
        return tuple(chosen for chosen, _ in decision.list_parts(view.chunk) if id(chosen.handle) in ran)

    # -- holding without spinning --------------------------------------------------------------------------------

    def _wait_out_hold(self, running_batch: Any) -> None:
        self.telemetry.passes_skipped += 1
        self._decoded = True
        if snapshot.device_idle(self.scheduler, running_batch):
            time.sleep(HOLD_NAP_S)
        self._publish_load()

    def _publish_load(self) -> None:
        """The host publishes its load after prefills; a hold has none, and a router must not see stale figures."""
        if self.clock.wall_s(self.now_s - self._published_s) >= HOLD_PUBLISH_S:
            self._published_s = self.now_s
            self.scheduler.publish_load_snapshot(force=True)

    # -- queue gauges --------------------------------------------------------------------------------------------

    def publish_queue(self) -> None:
        """Whenever the host publishes its load: queue length and tokens by class, when they changed."""
        if not self.telemetry.exports:
            return
        queue = self._queue_by_class()
        if queue != self._queue_shown:
            self._queue_shown = queue
            self.telemetry.set_queue(queue)

    def _queue_by_class(self) -> dict[str, ClassQueue]:
        short_prompts, long_prompts = self.policy.prefills.classify(
            [self.views.find_view(req) for req in self.scheduler.waiting_queue]
        )
        return {SHORT: sum_class_queue(short_prompts), LONG: sum_class_queue(long_prompts)}

    # -- state for people ----------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Plain values only (it travels as msgpack)."""
        policy, scheduler = self.policy.prefills, self.scheduler
        return {
            "config": self.config.to_dict(),
            "config_changes": self.changes,
            "boundary_tokens": policy.boundary.tokens(0),
            "boundary_tokens_at_8k_history": policy.boundary.tokens(8192),
            "window_ms": policy.awd.window_s * 1e3,
            "depth": policy.awd.depth,
            "short_rate_per_s": policy.short_rate.per_second(self.now_s),
            "step_model": policy.model.to_dict(),
            "step_model_fits": self.steps.to_dict(),
            "queue": {cls: msgspec.structs.asdict(queue) for cls, queue in self._queue_by_class().items()},
            "chunk_remaining_tokens": (
                0 if scheduler.chunked_req is None else snapshot.chunk_remaining_tokens(scheduler.chunked_req)
            ),
            **self.telemetry.to_dict(),
        }


def _read_limits(scheduler: Any) -> EngineLimits:
    chunk_tokens = scheduler.chunked_prefill_size
    return EngineLimits(
        pass_tokens=chunk_tokens or scheduler.max_prefill_tokens,
        chunk_tokens=chunk_tokens,
        page_tokens=scheduler.page_size,
        grid_tokens=apply.chunk_grid_tokens(scheduler),
        depth_max=captured_depth(resolve(scheduler.server_args), scheduler.max_running_requests),
        layout=snapshot.graph_layout(scheduler),
    )


def captured_depth(server_args: Any, max_running_requests: int) -> int:
    """D of AWD (PLA-Serve Algorithm 1, line 1): requests of a typical short length that fit the largest captured shape.

    SGLang captures prefill graphs by total token count, so a shape holds any mix of lengths up to its size.
    """
    prefill = getattr(getattr(server_args, "cuda_graph_config", None), "prefill", None)
    # Token counts of captured prefill graphs.
    sizes = [] if str(getattr(prefill, "backend", "disabled")) == "disabled" else getattr(prefill, "bs", None)
    depth = max(map(int, sizes)) // TYPICAL_SHORT_TOKENS if sizes else DEPTH_WITHOUT_GRAPHS
    return max(1, min(depth, max_running_requests))
