"""Every function of the host that we enter: its path, and the names of its parameters as recorded.

``NEXT_HOST`` has those that SGLang 0.5.23 has otherwise, ``CONSTRUCTED`` the constructors that we call ourselves.
"""

from __future__ import annotations

from pla_patches.seam import Signature

_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler."
_POLICY = "sglang.srt.managers.schedule_policy."
_RECEIVER = "sglang.srt.managers.scheduler_components.request_receiver.SchedulerRequestReceiver."
_PREFILL = "sglang.srt.disaggregation.prefill.SchedulerDisaggregationPrefillMixin."
_NIXL = "sglang.srt.disaggregation.nixl.conn."
_COMMON = "sglang.srt.disaggregation.common.conn."
_SEND_QUEUE = "sglang.srt.disaggregation.prefill.PrefillBootstrapQueue."
_PREALLOC = "sglang.srt.disaggregation.decode.DecodePreallocQueue."
_TRANSFERS = "sglang.srt.disaggregation.decode.DecodeTransferQueue."
_CONTROLLER = "sglang.srt.managers.data_parallel_controller."
_ARGS = "sglang.srt.server_args.ServerArgs."
_HTTP = "sglang.srt.entrypoints.http_server."
_OPENAI = "sglang.srt.entrypoints.openai."

PARAMETERS = {
    _ARGS + "add_cli_args": "parser",
    _ARGS + "from_cli_args": "cls, args",
    _ARGS + "__repr__": "self",
    "sglang.srt.managers.tokenizer_manager.TokenizerManager.generate_request": "self, obj, request",
    "sglang.srt.managers.tokenizer_manager.TokenizerManager.resolved_config_dict": "self, base",
    "sglang.srt.managers.tokenizer_control_mixin.TokenizerControlMixin.get_internal_state": "self",
    "sglang.srt.managers.tokenizer_manager.TokenizerManager._create_tokenized_object": (
        "self, obj, input_text, input_ids, input_embeds, mm_inputs, token_type_ids"
    ),
    "sglang.srt.layers.logprob_processor.OutputLogprobProcessor.compute_logprobs": (
        "self, logprobs, top_logprobs_nums, token_ids_logprobs, batch_next_token_ids"
    ),
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
    _SEND_QUEUE + "finalize_bootstrap": "self, req",
    "sglang.srt.disaggregation.utils.MetadataBuffers.set_buf": "self, req",
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
    "sglang.srt.layers.sampler.apply_custom_logit_processor": "logits, sampling_batch_info, num_tokens_in_batch",
    "sglang.srt.constrained.reasoner_grammar_backend.ReasonerGrammarBackend.__init__": (
        "self, grammar_backend, reasoning_parser, tokenizer, enable_strict_thinking"
    ),
    "sglang.srt.distributed.bootstrap._resolve_dist_init_method": "server_args, dist_port",
    _NIXL + "NixlKVManager._start_bootstrap_thread": "self",
    _NIXL + "NixlKVManager._add_remote_peer": "self, decode_kv_args",
    _NIXL + "NixlKVManager._handle_abort_notification": "self, msg",
    "sglang.srt.managers.tokenizer_manager.TokenizerManager.init_disaggregation": "self, start_pd_bootstrap_service",
    "sglang.srt.managers.tokenizer_manager.TokenizerManager._handle_abort_finish_reason": "self, out, state, is_stream",
    "sglang.srt.managers.tokenizer_manager.TokenizerManager._send_one_request": "self, tokenized_obj",
    _OPENAI + "serving_chat.OpenAIServingChat._generate_chat_stream": "self, adapted_request, request, raw_request",
    _OPENAI + "serving_completions.OpenAIServingCompletion._generate_completion_stream": (
        "self, adapted_request, request, raw_request"
    ),
    _SEND_QUEUE + "ensure_metadata_buffer": "self, req",
    _PREALLOC + "pop_preallocated": "self, rids_to_check, pp_good_rids, pp_bad_rids",
    _PREALLOC + "_update_handshake_waiters": "self, rids_to_check, pp_good_rids, pp_bad_rids",
    _PREALLOC + "_pre_alloc": "self, req, prefix_indices, prefix_len, total_prefix_len",
    _PREALLOC + "_active_req_count": "self, extra_reserved_reqs",
    _PREALLOC + "_allocatable_token_budgets": (
        "self, retractable_tokens, count_retracted, extra_reserved_reqs, reserved_tokens, hicache_reserved_tokens"
    ),
    _PREALLOC + "_resolve_prefill_dp_rank": "self, req",
    _PREALLOC + "_ensure_prefill_info": "self, addr_to_reqs",
    _TRANSFERS + "_poll_with_metadata_gate": "self",
    _TRANSFERS + "_commit_transfer_to_req": "self, decode_req",
}

# Where SGLang 0.5.23 differs; None: it has nothing of the kind.
NEXT_HOST: dict[str, Signature | None] = {
    "sglang.srt.distributed.parallel_state.GroupCoordinator.__init__": Signature(
        "sglang.srt.distributed.parallel_state.GroupCoordinator.__init__",
        "self, group_ranks, local_rank, torch_distributed_backend, use_pynccl, use_mscclpp, use_custom_allreduce, "
        "use_torch_symm_mem_all_reduce, use_hpu_communicator, use_xpu_communicator, use_message_queue_broadcaster, "
        "group_name, gloo_timeout, recovered_rank, rank_offset, max_world_size",
    ),
    _PREFILL + "maybe_send_cached_prefix_chunk": Signature(
        _PREFILL + "maybe_send_cached_prefix_chunk", "self, req, allow_send"
    ),
    "sglang.srt.managers.tp_worker.TpModelWorker.forward_batch_generation": Signature(
        "sglang.srt.managers.tp_worker.TpModelWorker.forward_batch_generation",
        "self, batch, forward_batch, pp_proxy_tensors, is_verify, skip_attn_backend_init, capture_hidden_mode, "
        "return_kv_loc_plan",
    ),
    _NIXL + "NixlKVReceiver.send_metadata": Signature(
        _COMMON + "CommonKVReceiver.send_metadata",
        "self, kv_indices, aux_index, state_indices, decode_prefix_len, destination, device_kv_indices",
    ),
    _NIXL + "NixlKVReceiver.poll": Signature(_COMMON + "CommonKVReceiver.poll", "self"),
    _NIXL + "NixlKVSender.poll": Signature(_COMMON + "CommonKVSender.poll", "self"),
    _POLICY + "SchedulePolicy.calc_priority": Signature(
        _POLICY + "SchedulePolicy.calc_priority", "self, waiting_queue, running_batch, processed_tokens"
    ),
    _POLICY + "PrefillAdder.__init__": Signature(
        _POLICY + "PrefillAdder.__init__",
        "self, page_size, tree_cache, token_to_kv_pool_allocator, running_batch, new_token_ratio, "
        "rem_input_tokens, rem_chunk_tokens, num_mixed_decode_tokens, priority_scheduling_preemption_threshold, "
        "max_prefill_bs, max_running_requests, prefill_max_requests, prefill_delayer_single_pass, dllm_config, "
        "waiting_queue_len, prefill_tile_block_m",
    ),
    _SCHEDULER + "_can_schedule_lora_req": Signature(_SCHEDULER + "can_schedule_lora_req", "self, req, running_loras"),
    _SCHEDULER + "is_fully_idle": Signature(_SCHEDULER + "is_fully_idle", "self, for_health_check, ignore_waiting"),
    _CONTROLLER + "run_data_parallel_controller_process": Signature(
        _CONTROLLER + "run_data_parallel_controller_process",
        "server_args, port_args, pipe_writer, run_scheduler_process_func, prelaunched_schedulers",
    ),
}

# Of ``less.ends``: here, and in SGLang 0.5.23.
CONSTRUCTED = {
    _SEND_QUEUE + "__init__": (
        "self, token_to_kv_pool, draft_token_to_kv_pool, req_to_metadata_buffer_idx_allocator, metadata_buffers, "
        "tp_rank, tp_size, gpu_id, bootstrap_port, gloo_group, max_total_num_tokens, scheduler, pp_rank, pp_size, "
        "transfer_backend",
        "self, token_to_kv_pool, draft_token_to_kv_pool, req_to_metadata_buffer_idx_allocator, metadata_buffers, "
        "gpu_id, bootstrap_port, max_total_num_tokens, scheduler, scheduler_stage_metrics, transfer_backend",
    ),
    _PREALLOC + "__init__": (
        "self, req_to_token_pool, token_to_kv_pool_allocator, draft_token_to_kv_pool, "
        "req_to_metadata_buffer_idx_allocator, metadata_buffers, scheduler, transfer_queue, tree_cache, gloo_group, "
        "tp_rank, tp_size, dp_size, gpu_id, bootstrap_port, max_total_num_tokens, pp_rank, "
        "num_reserved_decode_tokens, transfer_backend",
        "self, req_to_token_pool, token_to_kv_pool_allocator, draft_token_to_kv_pool, "
        "req_to_metadata_buffer_idx_allocator, metadata_buffers, scheduler, transfer_queue, tree_cache, gpu_id, "
        "bootstrap_port, max_total_num_tokens, num_reserved_decode_tokens, transfer_backend",
    ),
    _TRANSFERS + "__init__": (
        "self, gloo_group, req_to_metadata_buffer_idx_allocator, tp_rank, metadata_buffers, scheduler, tree_cache",
        "self, req_to_metadata_buffer_idx_allocator, metadata_buffers, scheduler, tree_cache",
    ),
    "sglang.srt.disaggregation.utils.MetadataBuffers.__init__": (
        "self, size, hidden_size, hidden_states_dtype, max_top_logprobs_num, max_sampling_mask_tokens, "
        "custom_mem_pool, output_dsa_topk_indices_dim",
        "self, size, hidden_size, hidden_states_dtype, max_sampling_mask_tokens, max_top_logprobs_num, "
        "custom_mem_pool, output_dsa_topk_indices_dim, kv_checksum_enabled",
    ),
}
