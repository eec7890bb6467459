"""Every function of the host that we enter: its path, and the names of its parameters as recorded."""

from __future__ import annotations

_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler."
_POLICY = "sglang.srt.managers.schedule_policy."
_RECEIVER = "sglang.srt.managers.scheduler_components.request_receiver.SchedulerRequestReceiver."
_PREFILL = "sglang.srt.disaggregation.prefill.SchedulerDisaggregationPrefillMixin."
_NIXL = "sglang.srt.disaggregation.nixl.conn."
_CONTROLLER = "sglang.srt.managers.data_parallel_controller."
_ARGS = "sglang.srt.server_args.ServerArgs."
_HTTP = "sglang.srt.entrypoints.http_server."
_OPENAI = "sglang.srt.entrypoints.openai."

PARAMETERS = {
    _ARGS + "add_cli_args": "parser",
    _ARGS + "from_cli_args": "cls, args",
    "sglang.srt.managers.tokenizer_manager.TokenizerManager.generate_request": "self, obj, request",
    _HTTP + "_setup_and_run_http_server": (
        "server_args, tokenizer_manager, template_manager, port_args, scheduler_infos, subprocess_watchdog, "
        "execute_warmup_func, launch_callback"
    ),
    _HTTP + "launch_server": (
        "server_args, init_tokenizer_manager_func, run_scheduler_process_func, run_detokenizer_process_func, "
        "execute_warmup_func, launch_callback"
    ),
    _NIXL + "NixlKVManager.__init__": "self, args, disaggregation_mode, server_args, is_mla_backend",
    "sglang.srt.distributed.parallel_state.GroupCoordinator.__init__": (
        "self, group_ranks, local_rank, torch_distributed_backend, use_pynccl, use_pymscclpp, "
        "use_custom_allreduce, use_torch_symm_mem_all_reduce, use_hpu_communicator, use_xpu_communicator, "
        "use_npu_communicator, use_message_queue_broadcaster, group_name, gloo_timeout, recovered_rank, "
        "rank_offset, max_world_size"
    ),
    _PREFILL + "maybe_send_cached_prefix_chunk": "self, req",
    "sglang.srt.managers.tp_worker.TpModelWorker.forward_batch_generation": (
        "self, batch, forward_batch, pp_proxy_tensors, is_verify, skip_attn_backend_init, capture_hidden_mode"
    ),
    "sglang.srt.managers.utils.GenerationBatchResult.copy_to_cpu": "self, return_logprob, return_hidden_states",
    _NIXL + "NixlKVReceiver.send_metadata": "self, kv_indices, aux_index, state_indices, decode_prefix_len",
    _NIXL + "NixlKVReceiver.poll": "self",
    _NIXL + "NixlKVSender.poll": "self",
    _SCHEDULER + "on_idle": "self",
    _SCHEDULER + "get_init_info": "self",
    _SCHEDULER + "get_internal_state": "self, recv_req",
    _SCHEDULER + "init_schedule_policy": "self",
    _SCHEDULER + "_get_new_batch_prefill_raw": "self, prefill_delayer_single_pass, running_batch",
    _POLICY + "SchedulePolicy.calc_priority": "self, waiting_queue, running_batch",
    _POLICY + "PrefillAdder.__init__": (
        "self, page_size, tree_cache, token_to_kv_pool_allocator, running_batch, new_token_ratio, "
        "rem_input_tokens, rem_chunk_tokens, num_mixed_decode_tokens, priority_scheduling_preemption_threshold, "
        "max_prefill_bs, max_running_requests, prefill_max_requests, prefill_delayer_single_pass, dllm_config, "
        "waiting_queue_len"
    ),
    _POLICY + "PrefillAdder.add_chunked_req": "self, req",
    "sglang.srt.managers.schedule_batch.ScheduleBatch.mix_with_running": "self, running_batch",
    _SCHEDULER + "_can_schedule_lora_req": "self, req, running_loras",
    _SCHEDULER + "_add_request_to_queue": "self, req, is_retracted",
    _SCHEDULER + "init_request_dispatcher": "self",
    _RECEIVER + "_pull_raw_reqs": "self",
    _PREFILL + "process_prefill_chunk": "self, last_batch, running_batch",
    _SCHEDULER + "run_batch": "self, batch, pp_proxy_tensors",
    _SCHEDULER + "process_batch_result": "self, batch, result",
    _SCHEDULER + "publish_load_snapshot": "self, force",
    _SCHEDULER + "set_internal_state": "self, recv_req",
    "sglang.srt.disaggregation.utils.prepare_abort": "req, error_message, status_code",
    "sglang.srt.model_executor.model_runner_components.cuda_graph_setup.capture_prefill_graph": (
        "model_runner, eager_runner, force_for_draft_worker"
    ),
    _CONTROLLER + "run_data_parallel_controller_process": (
        "server_args, port_args, pipe_writer, run_scheduler_process_func"
    ),
    _CONTROLLER + "DataParallelController.init_dispatcher": "self",
    _CONTROLLER + "DataParallelController.event_loop": "self",
    _SCHEDULER + "init_disaggregation": "self",
    _SCHEDULER + "get_next_batch_to_run": "self, running_batch, last_batch",
    _SCHEDULER + "is_fully_idle": "self, for_health_check",
    _SCHEDULER + "abort_request": "self, recv_req",
    _SCHEDULER + "pause_generation": "self, recv_req",
    "sglang.srt.managers.schedule_batch.ScheduleBatch.cumulate_penalty_output_tokens": "self",
    "sglang.srt.managers.schedule_batch.ScheduleBatch.prepare_for_extend": "self",
    _NIXL + "NixlKVManager._handle_abort_notification": "self, msg",
    "sglang.srt.managers.tokenizer_manager.TokenizerManager.init_disaggregation": "self, start_pd_bootstrap_service",
    "sglang.srt.managers.tokenizer_manager.TokenizerManager._handle_abort_finish_reason": "self, out, state, is_stream",
    "sglang.srt.managers.tokenizer_manager.TokenizerManager._send_one_request": "self, tokenized_obj",
    _OPENAI + "serving_chat.OpenAIServingChat._generate_chat_stream": "self, adapted_request, request, raw_request",
    _OPENAI + "serving_completions.OpenAIServingCompletion._generate_completion_stream": (
        "self, adapted_request, request, raw_request"
    ),
}
