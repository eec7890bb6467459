"""Seams of scheduling, in scheduler processes."""

from __future__ import annotations

import functools

from pla_patches.seam import Group, Hook, subscribe

_HOOKS = "pla_sglang.plugin.engine.hooks.scheduler"

_subscribe = functools.partial(subscribe, module=_HOOKS, group=Group.SCHEDULER)

SCHEDULER = (
    _subscribe(
        id="sched.init",
        key="scheduler.init_schedule_policy",
        why="Verify all seams of the process, then attach the policy to its scheduler.",
        verify="tests/patches/test_patches.py; e2e: hooks in /server_info",
    ),
    _subscribe(
        id="sched.pass",
        key="scheduler.get_new_batch_prefill_raw",
        hook=Hook.AROUND,
        handler="around_prefill_pass",
        why="Opens and closes a scheduling pass; every event loop makes its prefill batches here.",
        verify="e2e: mixed load, aborts, KV pressure",
    ),
    _subscribe(
        id="sched.order",
        key="schedule_policy.calc_priority",
        why="Decision point: queue ordered, prefix matches fresh, grammar-ready requests included.",
        verify="e2e: mixed load; tests/plugin/test_engine_apply.py",
    ),
    _subscribe(
        id="sched.reserve",
        key="prefill_adder.init",
        handler="after_adder_init",
        why="Keep the parked chunk's future KV out of what short prompts may take; else the host runs out of memory.",
        verify="e2e: KV pressure",
        exit="When SGLang accounts for a parked chunk itself.",
    ),
    _subscribe(
        id="sched.mix",
        key="prefill_adder.add_chunked_req",
        hook=Hook.AROUND,
        why="Ablation --pla-mixing allow: the chunk leaves room for short prompts in its pass.",
        verify="e2e: ablation arms",
        exit="With the ablation.",
    ),
    _subscribe(
        id="sched.ride",
        key="batch.mix_with_running",
        why="A decode that sat out the pass before has no token under way; the host counts its prefix one too long.",
        verify="e2e: piggybacked decodes on the chain model, which checks positions",
        exit="With SGLang 0.5.17.",
    ),
    _subscribe(
        id="sched.lora",
        key="scheduler.can_schedule_lora_req",
        hook=Hook.AROUND,
        handler="around_can_schedule_lora",
        why="A parked chunk's LoRA adapter keeps its place in the adapter pool.",
        verify="tests/plugin/test_engine_apply.py",
    ),
    _subscribe(
        id="sched.enqueue",
        key="scheduler.add_request_to_queue",
        why="Stamp the arrival by the shared clock, for PD prefill before the handshake.",
        verify="e2e: mixed load, PD pair",
    ),
    _subscribe(
        id="sched.dispatch",
        key="scheduler.init_request_dispatcher",
        why="Handler of the clock message.",
        verify="e2e: mixed load",
        exit="When SGLang broadcasts a clock.",
    ),
    _subscribe(
        id="sched.clock",
        key="request_receiver.pull_raw_reqs",
        why="Rank 0's clock goes with the request broadcast, so all ranks decide alike.",
        verify="e2e: TP=2 on the CPU",
        exit="When SGLang broadcasts a clock.",
    ),
    _subscribe(
        id="sched.pd_chunk",
        key="prefill_mixin.process_prefill_chunk",
        hook=Hook.AROUND,
        why="PD prefill would insert a parked chunk's whole prefix into the radix cache in every pass.",
        verify="e2e: PD pair with a parked chunk",
        exit="When SGLang leaves a chunk alone that has computed nothing since.",
    ),
    _subscribe(
        id="sched.launch",
        key="scheduler.run_batch",
        hook=Hook.AROUND,
        why="Launch time of a pass, for the step model.",
        verify="tests/policy/test_step_fit.py; e2e: step_model_fits in /pla/state",
        exit="When SGLang exports per-pass device times.",
    ),
    _subscribe(
        id="sched.result",
        key="scheduler.process_batch_result",
        why="End of a pass, for the step model.",
        verify="as sched.launch",
        exit="as sched.launch",
    ),
    _subscribe(
        id="sched.load",
        key="scheduler.publish_load_snapshot",
        handler="after_publish_load",
        why="Queue gauges by class, refreshed when the host publishes its load.",
        verify="e2e: metrics, abort storm",
    ),
    _subscribe(
        id="sched.info",
        key="scheduler.get_init_info",
        why="Tell the front process that the seams are in place; shown in /server_info.",
        verify="tests/patches/test_patches.py; e2e: /server_info",
        exit="When SGLang reports failed hooks.",
    ),
    _subscribe(
        id="sched.state",
        key="scheduler.get_internal_state",
        why="State and counters in /server_info and /pla/state.",
        verify="e2e: /pla/state",
        exit="When plugins may add to the internal state.",
    ),
    _subscribe(
        id="sched.control",
        key="scheduler.set_internal_state",
        hook=Hook.AROUND,
        why="Run-time knobs, in one order on all ranks.",
        verify="e2e: knob change under load; tests/plugin/test_control.py",
        exit="When plugins may add control messages.",
    ),
)
