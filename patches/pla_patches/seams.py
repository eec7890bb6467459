"""The table of every place where pla_sglang enters SGLang. ``CATALOGUE.md`` is made from it."""

from __future__ import annotations

from pla_patches.seam import Group, Hook, Seam

_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler."
_POLICY = "sglang.srt.managers.schedule_policy."
_PD = "sglang.srt.disaggregation.prefill.SchedulerDisaggregationPrefillMixin."
_RECEIVER = "sglang.srt.managers.scheduler_components.request_receiver.SchedulerRequestReceiver."
_ENGINE = "pla_sglang.engine.handlers:"
_FRONT = "pla_sglang.engine.frontend:"

CLI = (
    Seam(
        "cli.add",
        Group.CLI,
        "sglang.srt.server_args.ServerArgs.add_cli_args",
        Hook.AFTER,
        _FRONT + "after_add_cli_args",
        "parser",
        "Our flags in SGLang's own parser, so every launcher and --config file knows them.",
        "tests/test_config.py; e2e: flags through all three launchers",
        "When SGLang lets plugins declare flags.",
    ),
    Seam(
        "cli.parse",
        Group.CLI,
        "sglang.srt.server_args.ServerArgs.from_cli_args",
        Hook.AROUND,
        _FRONT + "around_from_cli_args",
        "cls, args",
        "Check our values alone and against SGLang's resolved arguments; hand them to child processes.",
        "tests/test_config.py, tests/test_compat.py",
        "When SGLang lets plugins declare flags.",
    ),
)

_EMULATE = "pla_sglang.emulate.handlers:"

# A newer host is measured against on the same emulated device; its scheduling stays its own (bench.frontier).
_PEERS = ("0.5.17", "0.5.23")

EMULATE = (
    Seam(
        "emu.forward",
        Group.EMULATE,
        "sglang.srt.managers.tp_worker.TpModelWorker.forward_batch_generation",
        Hook.AROUND,
        _EMULATE + "around_forward",
        "self, batch, forward_batch, pp_proxy_tensors, is_verify, skip_attn_backend_init, capture_hidden_mode",
        "Each forward pass occupies the emulated device for the time of its batch.",
        "tests/emulate; e2e: step times through HTTP",
        "With the emulation.",
        _PEERS,
    ),
    Seam(
        "emu.ready",
        Group.EMULATE,
        "sglang.srt.managers.utils.GenerationBatchResult.copy_to_cpu",
        Hook.AFTER,
        _EMULATE + "after_copy_to_cpu",
        "self, return_logprob, return_hidden_states",
        "A result is ready when the emulated device is done; the host waits for it where it waits for a GPU's.",
        "as emu.forward",
        "With the emulation.",
        _PEERS,
    ),
    Seam(
        "emu.idle",
        Group.EMULATE,
        _SCHEDULER + "on_idle",
        Hook.AFTER,
        _EMULATE + "after_on_idle",
        "self",
        "Tell a device that waits for work from one that waits for the host.",
        "tests/emulate",
        "With the emulation.",
        _PEERS,
    ),
    Seam(
        "emu.kv_size",
        Group.EMULATE,
        "sglang.srt.disaggregation.nixl.conn.NixlKVReceiver.send_metadata",
        Hook.AFTER,
        _EMULATE + "after_send_metadata",
        "self, kv_indices, aux_index, state_indices, decode_prefix_len",
        "How many KV pages a transfer will bring.",
        "e2e: KV bandwidth",
        "With the emulation.",
    ),
    Seam(
        "emu.kv_poll",
        Group.EMULATE,
        "sglang.srt.disaggregation.nixl.conn.NixlKVReceiver.poll",
        Hook.AROUND,
        _EMULATE + "around_receiver_poll",
        "self",
        "A transfer is complete once the emulated link has carried it, and fails where it is to.",
        "e2e: KV bandwidth, failed transfers",
        "With the emulation.",
    ),
    Seam(
        "emu.kv_send_poll",
        Group.EMULATE,
        "sglang.srt.disaggregation.nixl.conn.NixlKVSender.poll",
        Hook.AROUND,
        _EMULATE + "around_sender_poll",
        "self",
        "A transfer fails at the prefill instance where it is to.",
        "e2e: failed transfers",
        "With the emulation.",
    ),
    Seam(
        "emu.info",
        Group.EMULATE,
        _SCHEDULER + "get_init_info",
        Hook.AFTER,
        _EMULATE + "after_get_init_info",
        "self",
        "Say in the log and in /server_info that this is no GPU.",
        "e2e: /server_info",
        "With the emulation.",
        _PEERS,
    ),
    Seam(
        "emu.state",
        Group.EMULATE,
        _SCHEDULER + "get_internal_state",
        Hook.AFTER,
        _EMULATE + "after_get_internal_state",
        "self, recv_req",
        "Step errors and host overhead in /server_info.",
        "e2e: /server_info",
        "With the emulation.",
        _PEERS,
    ),
)

FRONTEND = (
    Seam(
        "front.request",
        Group.FRONTEND,
        "sglang.srt.managers.tokenizer_manager.TokenizerManager.generate_request",
        Hook.BEFORE,
        _FRONT + "before_generate_request",
        "self, obj, request",
        "TTFT target from a header or custom_params; a bad one is refused as SGLang refuses bad parameters.",
        "e2e: SLO header tests",
        "When SGLang carries a TTFT target per request.",
    ),
    Seam(
        "front.serve",
        Group.FRONTEND,
        "sglang.srt.entrypoints.http_server._setup_and_run_http_server",
        Hook.BEFORE,
        _FRONT + "before_run_http_server",
        "server_args, tokenizer_manager, template_manager, port_args, scheduler_infos, subprocess_watchdog, "
        "execute_warmup_func, launch_callback",
        "Refuse to serve beside a scheduler without our seams; add /pla routes.",
        "tests/test_patches.py; e2e: /pla/state, /pla/config",
        "When plugins may add routes and SGLang reports failed hooks.",
    ),
)

SCHEDULER = (
    Seam(
        "sched.init",
        Group.SCHEDULER,
        _SCHEDULER + "init_schedule_policy",
        Hook.AFTER,
        _ENGINE + "after_init_schedule_policy",
        "self",
        "Verify all seams of the process, then attach the policy to its scheduler.",
        "tests/test_patches.py; e2e: hooks in /server_info",
        "With the scheduler seams.",
    ),
    Seam(
        "sched.pass",
        Group.SCHEDULER,
        _SCHEDULER + "_get_new_batch_prefill_raw",
        Hook.AROUND,
        _ENGINE + "around_prefill_pass",
        "self, prefill_delayer_single_pass, running_batch",
        "Opens and closes a scheduling pass; every event loop makes its prefill batches here.",
        "e2e: mixed load, aborts, KV pressure",
        "When SGLang has a pluggable prefill policy that may hold and park.",
    ),
    Seam(
        "sched.order",
        Group.SCHEDULER,
        _POLICY + "SchedulePolicy.calc_priority",
        Hook.AFTER,
        _ENGINE + "after_calc_priority",
        "self, waiting_queue, running_batch",
        "Decision point: queue ordered, prefix matches fresh, grammar-ready requests included.",
        "e2e: mixed load; tests/test_engine_apply.py",
        "As sched.pass.",
    ),
    Seam(
        "sched.reserve",
        Group.SCHEDULER,
        _POLICY + "PrefillAdder.__init__",
        Hook.AFTER,
        _ENGINE + "after_adder_init",
        "self, page_size, tree_cache, token_to_kv_pool_allocator, running_batch, new_token_ratio, rem_input_tokens, "
        "rem_chunk_tokens, num_mixed_decode_tokens, priority_scheduling_preemption_threshold, max_prefill_bs, "
        "max_running_requests, prefill_max_requests, prefill_delayer_single_pass, dllm_config, waiting_queue_len",
        "Keep the parked chunk's future KV out of what shorts may take; else the host runs out of memory.",
        "e2e: KV pressure",
        "When SGLang accounts for a parked chunk itself.",
    ),
    Seam(
        "sched.mix",
        Group.SCHEDULER,
        _POLICY + "PrefillAdder.add_chunked_req",
        Hook.AROUND,
        _ENGINE + "around_add_chunked_req",
        "self, req",
        "Ablation --pla-mixing allow: the chunk leaves room for shorts in its pass.",
        "e2e: ablation arms",
        "With the ablation.",
    ),
    Seam(
        "sched.lora",
        Group.SCHEDULER,
        _SCHEDULER + "_can_schedule_lora_req",
        Hook.AROUND,
        _ENGINE + "around_can_schedule_lora",
        "self, req, running_loras",
        "A parked chunk's LoRA adapter keeps its place in the adapter pool.",
        "tests/test_engine_apply.py",
        "As sched.pass.",
    ),
    Seam(
        "sched.enqueue",
        Group.SCHEDULER,
        _SCHEDULER + "_add_request_to_queue",
        Hook.AFTER,
        _ENGINE + "after_add_request_to_queue",
        "self, req, is_retracted",
        "Stamp the arrival by the shared clock, for PD prefill before the handshake.",
        "e2e: mixed load, PD pair",
        "As sched.pass.",
    ),
    Seam(
        "sched.dispatch",
        Group.SCHEDULER,
        _SCHEDULER + "init_request_dispatcher",
        Hook.AFTER,
        _ENGINE + "after_init_request_dispatcher",
        "self",
        "Handler of the clock message.",
        "e2e: mixed load",
        "When SGLang broadcasts a clock.",
    ),
    Seam(
        "sched.clock",
        Group.SCHEDULER,
        _RECEIVER + "_pull_raw_reqs",
        Hook.AFTER,
        _ENGINE + "after_pull_raw_reqs",
        "self",
        "Rank 0's clock rides the request broadcast, so all ranks decide alike.",
        "e2e: TP=2 on the CPU",
        "When SGLang broadcasts a clock.",
    ),
    Seam(
        "sched.pd_chunk",
        Group.SCHEDULER,
        _PD + "process_prefill_chunk",
        Hook.AROUND,
        _ENGINE + "around_process_prefill_chunk",
        "self, last_batch, running_batch",
        "PD prefill would insert a parked chunk's whole prefix into the radix cache in every pass.",
        "e2e: PD pair with a parked chunk",
        "SGLang 0.5.23 marks a processed chunk itself.",
    ),
    Seam(
        "sched.launch",
        Group.SCHEDULER,
        _SCHEDULER + "run_batch",
        Hook.AROUND,
        _ENGINE + "around_run_batch",
        "self, batch, pp_proxy_tensors",
        "Launch time of a pass, for the step model.",
        "tests/test_fit.py; e2e: step_model_fits in /pla/state",
        "When SGLang exports per-pass device times.",
    ),
    Seam(
        "sched.result",
        Group.SCHEDULER,
        _SCHEDULER + "process_batch_result",
        Hook.AFTER,
        _ENGINE + "after_process_batch_result",
        "self, batch, result",
        "End of a pass, for the step model.",
        "as sched.launch",
        "as sched.launch",
    ),
    Seam(
        "sched.load",
        Group.SCHEDULER,
        _SCHEDULER + "publish_load_snapshot",
        Hook.AFTER,
        _ENGINE + "after_publish_load",
        "self, force",
        "Queue gauges by class, refreshed when the host publishes its load.",
        "e2e: metrics, abort storm",
        "As sched.pass.",
    ),
    Seam(
        "sched.info",
        Group.SCHEDULER,
        _SCHEDULER + "get_init_info",
        Hook.AFTER,
        _ENGINE + "after_get_init_info",
        "self",
        "Tell the front process that the seams are in place; shown in /server_info.",
        "tests/test_patches.py; e2e: /server_info",
        "When SGLang reports failed hooks.",
    ),
    Seam(
        "sched.state",
        Group.SCHEDULER,
        _SCHEDULER + "get_internal_state",
        Hook.AFTER,
        _ENGINE + "after_get_internal_state",
        "self, recv_req",
        "State and counters in /server_info and /pla/state.",
        "e2e: /pla/state",
        "When plugins may add to the internal state.",
    ),
    Seam(
        "sched.control",
        Group.SCHEDULER,
        _SCHEDULER + "set_internal_state",
        Hook.AROUND,
        _ENGINE + "around_set_internal_state",
        "self, recv_req",
        "Run-time knobs, in one order on all ranks.",
        "e2e: knob change under load; tests/test_control.py",
        "When plugins may add control messages.",
    ),
)

LAUNCHER = (
    Seam(
        "launch.ready",
        Group.LAUNCHER,
        "sglang.srt.entrypoints.http_server.launch_server",
        Hook.BEFORE,
        "pla_sglang.launch_server:before_launch",
        "server_args, init_tokenizer_manager_func, run_scheduler_process_func, run_detokenizer_process_func, "
        "execute_warmup_func, launch_callback",
        "Print a request that works once the server is ready.",
        "e2e: make serve prints a curl line",
        "Cosmetic; whenever it is in the way.",
    ),
)


def table() -> tuple[Seam, ...]:
    """All seams. The CPU platform declares its own beside its code."""
    from pla_patches.graph_seams import GRAPHS
    from pla_patches.pool_seams import CONTROLLER, POOLS, TELEMETRY
    from pla_sglang.platform.seams import CPU

    return (*CLI, *CPU, *EMULATE, *FRONTEND, *SCHEDULER, *GRAPHS, *TELEMETRY, *POOLS, *CONTROLLER, *LAUNCHER)


def of_group(group: Group) -> tuple[Seam, ...]:
    return tuple(seam for seam in table() if seam.group is group)
