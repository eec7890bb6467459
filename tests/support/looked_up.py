"""Where the host looks up each function that a seam replaces, and how it is written there."""

from __future__ import annotations

_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler."
_CONTROLLER = "sglang.srt.managers.data_parallel_controller.DataParallelController."
_PREALLOC = "sglang.srt.disaggregation.decode.DecodePreallocQueue."
_PASS = _SCHEDULER + "_get_new_batch_prefill_raw"

# subscriber -> where the host looks the name up at run time, and how it is written there; on the oldest host
LOOKED_UP = {
    "cli.add": ("sglang.srt.server_args.prepare_server_args", "ServerArgs.add_cli_args"),
    "cli.parse": ("sglang.srt.server_args.prepare_server_args", "ServerArgs.from_cli_args"),
    "cpu.nixl_dram": ("sglang.srt.disaggregation.utils.get_kv_class", "NixlKVManager"),
    "cpu.nixl_rest": ("sglang.srt.disaggregation.utils.get_kv_class", "NixlKVManager"),
    "cpu.collectives": ("sglang.srt.distributed.parallel_state.init_model_parallel_group", "GroupCoordinator"),
    "cpu.pd_early_send": (_SCHEDULER + "run_batch", "self.maybe_send_cached_prefix_chunk"),
    "cpu.reasoning": (
        "sglang.srt.constrained.base_grammar_backend.create_grammar_backend",
        "ReasonerGrammarBackend",
    ),
    "emu.forward": (_SCHEDULER + "run_batch", "self.model_worker.forward_batch_generation"),
    "emu.ready": (_SCHEDULER + "run_batch", "batch_result.copy_to_cpu"),
    "emu.idle": (_SCHEDULER + "event_loop_overlap", "self.on_idle"),
    "emu.kv_size": (
        "sglang.srt.disaggregation.decode.DecodePreallocQueue.pop_preallocated",
        "decode_req.kv_receiver.send_metadata",
    ),
    "emu.kv_poll": ("sglang.srt.disaggregation.utils._poll_with_failure_injection", "poller.poll"),
    "emu.kv_send_poll": ("sglang.srt.disaggregation.utils._poll_with_failure_injection", "poller.poll"),
    "emu.info": ("sglang.srt.managers.scheduler.run_scheduler_process", "scheduler.get_init_info"),
    "emu.state": (_SCHEDULER + "init_request_dispatcher", "self.get_internal_state"),
    "guard.request": (
        "sglang.srt.entrypoints.openai.serving_completions.OpenAIServingCompletion._handle_non_streaming_request",
        "self.tokenizer_manager.generate_request",
    ),
    "guard.repr": ("sglang.srt.entrypoints.engine.Engine._launch_subprocesses", "server_args"),  # f"{server_args=}"
    "guard.arguments": (
        "sglang.srt.entrypoints.http_server.server_info",
        "_global_state.tokenizer_manager.resolved_config_dict",
    ),
    "guard.states": (
        "sglang.srt.entrypoints.http_server.server_info",
        "_global_state.tokenizer_manager.get_internal_state",
    ),
    "guard.message": (
        "sglang.srt.managers.tokenizer_manager.TokenizerManager._tokenize_one_request",
        "self._create_tokenized_object",
    ),
    "guard.logprobs": (
        "sglang.srt.layers.sampler.Sampler.forward",
        "self.output_logprob_processor.compute_logprobs",
    ),
    "front.request": (
        "sglang.srt.entrypoints.http_server.generate_request",
        "_global_state.tokenizer_manager.generate_request",
    ),
    "front.serve": ("sglang.srt.entrypoints.http_server.launch_server", "_setup_and_run_http_server"),
    "sched.init": (_SCHEDULER + "__init__", "self.init_schedule_policy"),
    "sched.pass": (_SCHEDULER + "get_new_batch_prefill", "self._get_new_batch_prefill_raw"),
    "sched.order": (_PASS, "self.policy.calc_priority"),
    "sched.reserve": (_PASS, "PrefillAdder"),
    "sched.mix": (_PASS, "adder.add_chunked_req"),
    "sched.ride": (_PASS, "new_batch.mix_with_running"),
    "sched.lora": (_PASS, "self._can_schedule_lora_req"),
    "sched.enqueue": (_SCHEDULER + "handle_generate_request", "self._add_request_to_queue"),
    "sched.dispatch": (_SCHEDULER + "__init__", "self.init_request_dispatcher"),
    "sched.clock": (
        "sglang.srt.managers.scheduler_components.request_receiver.SchedulerRequestReceiver.recv_requests",
        "self._pull_raw_reqs",
    ),
    "sched.pd_chunk": (
        "sglang.srt.disaggregation.prefill.SchedulerDisaggregationPrefillMixin.get_next_disagg_prefill_batch_to_run",
        "self.process_prefill_chunk",
    ),
    "run.penalties": (
        "sglang.srt.managers.schedule_batch.ScheduleBatch.prepare_for_decode",
        "self.cumulate_penalty_output_tokens",
    ),
    "run.penalties_again": (_PASS, "new_batch.prepare_for_extend"),
    "run.processors": ("sglang.srt.layers.sampler.Sampler._preprocess_logits", "apply_custom_logit_processor"),
    "sched.launch": (_SCHEDULER + "event_loop_overlap", "self.run_batch"),
    "sched.result": (_SCHEDULER + "event_loop_normal", "self.process_batch_result"),
    "sched.load": (_SCHEDULER + "process_batch_result", "self.publish_load_snapshot"),
    "sched.info": ("sglang.srt.managers.scheduler.run_scheduler_process", "scheduler.get_init_info"),
    "sched.state": (_SCHEDULER + "init_request_dispatcher", "self.get_internal_state"),
    "sched.control": (_SCHEDULER + "init_request_dispatcher", "self.set_internal_state"),
    "pred.capture": (
        "sglang.srt.model_executor.runner.base_runner.BaseRunner.__init__",
        "get_server_return_hidden_states_mode",
    ),
    "pred.forward": (_SCHEDULER + "run_batch", "self.model_worker.forward_batch_generation"),
    "pred.ready": ("sglang.srt.managers.scheduler.run_scheduler_process", "scheduler.get_init_info"),
    "pred.state": (_SCHEDULER + "init_request_dispatcher", "self.get_internal_state"),
    "tele.ready": ("sglang.srt.managers.scheduler.run_scheduler_process", "scheduler.get_init_info"),
    "tele.received": (
        "sglang.srt.managers.scheduler_components.request_receiver.SchedulerRequestReceiver.recv_requests",
        "self._pull_raw_reqs",
    ),
    "tele.launch": (_SCHEDULER + "event_loop_overlap", "self.run_batch"),
    "tele.launched": (_SCHEDULER + "event_loop_normal", "self.run_batch"),
    "tele.result": (_SCHEDULER + "event_loop_normal", "self.process_batch_result"),
    "tele.idle": (_SCHEDULER + "event_loop_normal", "self.on_idle"),
    "tele.error": (_SCHEDULER + "abort_request", "prepare_abort"),
    "tele.state": (_SCHEDULER + "init_request_dispatcher", "self.get_internal_state"),
    "pools.entry": (
        "sglang.srt.entrypoints.engine.Engine._launch_scheduler_processes",
        "run_data_parallel_controller_process",
    ),
    "dpc.dispatch": (_CONTROLLER + "__init__", "self.init_dispatcher"),
    "dpc.turns": (
        "sglang.srt.managers.data_parallel_controller.run_data_parallel_controller_process",
        "controller.event_loop",
    ),
    "graph.prefill": (
        "sglang.srt.model_executor.model_runner_components.cuda_graph_setup.capture_cuda_graphs",
        "capture_prefill_graph",
    ),
    "graph.idle": (_SCHEDULER + "event_loop_overlap", "self.on_idle"),
    "graph.info": ("sglang.srt.managers.scheduler.run_scheduler_process", "scheduler.get_init_info"),
    "graph.state": (_SCHEDULER + "init_request_dispatcher", "self.get_internal_state"),
    "emu.parse": ("sglang.srt.server_args.prepare_server_args", "ServerArgs.from_cli_args"),
    "less.parse": ("sglang.srt.server_args.prepare_server_args", "ServerArgs.from_cli_args"),
    "less.ends": (_SCHEDULER + "__init__", "self.init_disaggregation"),
    "less.dispatch": (_SCHEDULER + "__init__", "self.init_request_dispatcher"),
    "less.enqueue": (_SCHEDULER + "handle_generate_request", "self._add_request_to_queue"),
    "less.pump": (_SCHEDULER + "event_loop_overlap", "self.get_next_batch_to_run"),
    "less.result": (_SCHEDULER + "event_loop_normal", "self.process_batch_result"),
    "less.idle": (_SCHEDULER + "on_idle", "self.is_fully_idle"),
    "less.abort": (_SCHEDULER + "init_request_dispatcher", "self.abort_request"),
    "less.pause": (_SCHEDULER + "init_request_dispatcher", "self.pause_generation"),
    "less.reserve": (_PASS, "PrefillAdder"),
    "less.lora": (_PASS, "self._can_schedule_lora_req"),
    "less.lora_turn": (_PASS, "self._can_schedule_lora_req"),
    "less.ride": (_PASS, "new_batch.mix_with_running"),
    "less.meet": ("sglang.srt.distributed.bootstrap.init_torch_distributed", "_resolve_dist_init_method"),
    "less.inbox": ("sglang.srt.disaggregation.nixl.conn.NixlKVManager.__init__", "self._start_bootstrap_thread"),
    "less.register": (
        "sglang.srt.disaggregation.nixl.conn.NixlKVManager._start_bootstrap_thread",
        "self._add_remote_peer",
    ),
    "less.abort_ack": (
        "sglang.srt.disaggregation.nixl.conn.NixlKVManager._start_bootstrap_thread",
        "self._handle_abort_notification",
    ),
    "queue.prefix": (
        "sglang.srt.disaggregation.prefill.PrefillBootstrapQueue.pop_bootstrapped",
        "self.finalize_bootstrap",
    ),
    "queue.said": (
        "sglang.srt.disaggregation.prefill.SchedulerDisaggregationPrefillMixin.send_kv_chunk",
        "self.disagg_metadata_buffers.set_buf",
    ),
    "queue.pop": (
        "sglang.srt.disaggregation.decode.SchedulerDisaggregationDecodeMixin.process_decode_queue",
        "self.disagg_decode_prealloc_queue.pop_preallocated",
    ),
    "queue.handshake": (_PREALLOC + "pop_preallocated", "self._update_handshake_waiters"),
    "queue.alloc": (_PREALLOC + "pop_preallocated", "self._pre_alloc"),
    "queue.active": (_PREALLOC + "_active_reserved_tokens", "self._active_req_count"),
    "queue.budget": (_PREALLOC + "pop_preallocated", "self._allocatable_token_budgets"),
    "queue.dp_rank": (_PREALLOC + "add", "self._resolve_prefill_dp_rank"),
    "queue.peers": (_PREALLOC + "_resolve_pending_reqs", "self._ensure_prefill_info"),
    "queue.poll": (
        "sglang.srt.disaggregation.decode.DecodeTransferQueue.pop_transferred",
        "self._poll_with_metadata_gate",
    ),
    "queue.commit": (
        "sglang.srt.disaggregation.decode.DecodeTransferQueue.pop_transferred",
        "self._commit_transfer_to_req",
    ),
    "less.info": ("sglang.srt.managers.scheduler.run_scheduler_process", "scheduler.get_init_info"),
    "less.state": (_SCHEDULER + "init_request_dispatcher", "self.get_internal_state"),
    "less.bootstrap": (
        "sglang.srt.managers.tokenizer_manager.TokenizerManager.__init__",
        "self.init_disaggregation",
    ),
    "less.text": (
        "sglang.srt.managers.detokenizer_manager.DetokenizerManager.handle_batch_token_id_out",
        "self._decode_batch_token_id_output",
    ),
    "less.request": (
        "sglang.srt.entrypoints.http_server.generate_request",
        "_global_state.tokenizer_manager.generate_request",
    ),
    "less.status": (
        "sglang.srt.managers.tokenizer_manager.TokenizerManager._wait_one_response",
        "self._handle_abort_finish_reason",
    ),
    "less.serve": ("sglang.srt.entrypoints.http_server.launch_server", "_setup_and_run_http_server"),
    "hop.chat": (
        "sglang.srt.entrypoints.openai.serving_chat.OpenAIServingChat._handle_streaming_request",
        "self._generate_chat_stream",
    ),
    "hop.completions": (
        "sglang.srt.entrypoints.openai.serving_completions.OpenAIServingCompletion._handle_streaming_request",
        "self._generate_completion_stream",
    ),
    "hop.chunks": (
        "sglang.srt.entrypoints.openai.serving_chat.OpenAIServingChat._generate_chat_stream",
        "self.tokenizer_manager.generate_request",
    ),
    "hop.prompt": (
        "sglang.srt.managers.tokenizer_manager.TokenizerManager.generate_request",
        "self._send_one_request",
    ),
    "hop.serve": ("sglang.srt.entrypoints.http_server.launch_server", "_setup_and_run_http_server"),
    "launch.ready": ("sglang.launch_server.run_server", "launch_server"),
    "launch.serve": ("sglang.srt.entrypoints.http_server.launch_server", "_setup_and_run_http_server"),
}

# What differs on a newer host.
LOOKED_UP_0_5_23 = {
    "guard.end": (
        "sglang.srt.entrypoints.http_server._setup_and_run_http_server",
        "tokenizer_manager.set_server_stop_hook",
    ),
    "guard.logged": ("sglang.srt.entrypoints.engine.Engine._launch_subprocesses", "_server_args_for_logging"),
    "emu.kv_size": (_PREALLOC + "_send_kv_metadata", "decode_req.kv_receiver.send_metadata"),
    "guard.arguments": ("sglang.srt.entrypoints.http_server.server_info", "build_server_info"),
    "front.request": (
        "sglang.srt.entrypoints.http_server.serve_generate_request",
        "_global_state.tokenizer_manager.generate_request",
    ),
    "sched.reserve": (_SCHEDULER + "get_prefill_adder_class", "PrefillAdder"),
    "sched.lora": (_PASS, "self.can_schedule_lora_req"),
    "sched.enqueue": (_SCHEDULER + "_handle_generate_request", "self._add_request_to_queue"),
    "less.enqueue": (_SCHEDULER + "_handle_generate_request", "self._add_request_to_queue"),
    "less.reserve": (_SCHEDULER + "get_prefill_adder_class", "PrefillAdder"),
    "less.lora": (_PASS, "self.can_schedule_lora_req"),
    "less.lora_turn": (_PASS, "self.can_schedule_lora_req"),
    "less.answers": (
        "sglang.srt.disaggregation.nixl.conn.NixlKVManager.__init__",
        "self._start_decode_listener_thread",
    ),
    "less.meet": ("sglang.srt.distributed.bootstrap.init_parallel_runtime", "_resolve_dist_init_method"),
    "less.request": (
        "sglang.srt.entrypoints.http_server.serve_generate_request",
        "_global_state.tokenizer_manager.generate_request",
    ),
    "queue.said": (
        "sglang.srt.disaggregation.prefill.SchedulerDisaggregationPrefillMixin._send_kv_chunk",
        "self.disagg_metadata_buffers.set_buf",
    ),
}


def look_ups_on(version: str) -> dict[str, tuple[str, str]]:
    """Of every subscriber on a recorded host."""
    return {**LOOKED_UP, **(LOOKED_UP_0_5_23 if version == "0.5.23" else {})}
