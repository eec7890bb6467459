"""SGLang 0.5.17. Signatures by ``scripts/record_host.py``, ``ABSENT`` by hand."""

from __future__ import annotations

from pla_patches.hosts.signature import Signature

VERSION = "0.5.17"

TARGETS = {
    "server_args.add_cli_args": Signature(
        "sglang.srt.server_args.ServerArgs.add_cli_args",
        "parser",
    ),
    "server_args.from_cli_args": Signature(
        "sglang.srt.server_args.ServerArgs.from_cli_args",
        "cls, args",
    ),
    "server_args.repr": Signature(
        "sglang.srt.server_args.ServerArgs.__repr__",
        "self",
    ),
    "tokenizer_manager.generate_request": Signature(
        "sglang.srt.managers.tokenizer_manager.TokenizerManager.generate_request",
        "self, obj, request",
    ),
    "server_info.arguments": Signature(
        "sglang.srt.managers.tokenizer_manager.TokenizerManager.resolved_config_dict",
        "self, base",
    ),
    "tokenizer_control.get_internal_state": Signature(
        "sglang.srt.managers.tokenizer_control_mixin.TokenizerControlMixin.get_internal_state",
        "self",
    ),
    "tokenizer_manager.create_tokenized_object": Signature(
        "sglang.srt.managers.tokenizer_manager.TokenizerManager._create_tokenized_object",
        "self, obj, input_text, input_ids, input_embeds, mm_inputs, token_type_ids",
    ),
    "logprob_processor.compute_logprobs": Signature(
        "sglang.srt.layers.logprob_processor.OutputLogprobProcessor.compute_logprobs",
        "self, logprobs, top_logprobs_nums, token_ids_logprobs, batch_next_token_ids",
    ),
    "http_server.setup_and_run_http_server": Signature(
        "sglang.srt.entrypoints.http_server._setup_and_run_http_server",
        "server_args, tokenizer_manager, template_manager, port_args, scheduler_infos, subprocess_watchdog, "
        "execute_warmup_func, launch_callback",
    ),
    "http_server.launch_server": Signature(
        "sglang.srt.entrypoints.http_server.launch_server",
        "server_args, init_tokenizer_manager_func, run_scheduler_process_func, run_detokenizer_process_func, "
        "execute_warmup_func, launch_callback",
    ),
    "kv_manager.init": Signature(
        "sglang.srt.disaggregation.nixl.conn.NixlKVManager.__init__",
        "self, args, disaggregation_mode, server_args, is_mla_backend",
    ),
    "group_coordinator.init": Signature(
        "sglang.srt.distributed.parallel_state.GroupCoordinator.__init__",
        "self, group_ranks, local_rank, torch_distributed_backend, use_pynccl, use_pymscclpp, use_custom_allreduce, "
        "use_torch_symm_mem_all_reduce, use_hpu_communicator, use_xpu_communicator, use_npu_communicator, "
        "use_message_queue_broadcaster, group_name, gloo_timeout, recovered_rank, rank_offset, max_world_size",
    ),
    "prefill_mixin.maybe_send_cached_prefix_chunk": Signature(
        "sglang.srt.disaggregation.prefill.SchedulerDisaggregationPrefillMixin.maybe_send_cached_prefix_chunk",
        "self, req",
    ),
    "tp_worker.forward_batch_generation": Signature(
        "sglang.srt.managers.tp_worker.TpModelWorker.forward_batch_generation",
        "self, batch, forward_batch, pp_proxy_tensors, is_verify, skip_attn_backend_init, capture_hidden_mode",
    ),
    "forward_batch.get_server_return_hidden_states_mode": Signature(
        "sglang.srt.model_executor.forward_batch_info.get_server_return_hidden_states_mode",
        "server_args",
    ),
    "batch_result.copy_to_cpu": Signature(
        "sglang.srt.managers.utils.GenerationBatchResult.copy_to_cpu",
        "self, return_logprob, return_hidden_states",
    ),
    "kv_receiver.send_metadata": Signature(
        "sglang.srt.disaggregation.nixl.conn.NixlKVReceiver.send_metadata",
        "self, kv_indices, aux_index, state_indices, decode_prefix_len",
    ),
    "kv_receiver.poll": Signature(
        "sglang.srt.disaggregation.nixl.conn.NixlKVReceiver.poll",
        "self",
    ),
    "kv_sender.poll": Signature(
        "sglang.srt.disaggregation.nixl.conn.NixlKVSender.poll",
        "self",
    ),
    "scheduler.on_idle": Signature(
        "sglang.srt.managers.scheduler.Scheduler.on_idle",
        "self",
    ),
    "scheduler.get_init_info": Signature(
        "sglang.srt.managers.scheduler.Scheduler.get_init_info",
        "self",
    ),
    "scheduler.get_internal_state": Signature(
        "sglang.srt.managers.scheduler.Scheduler.get_internal_state",
        "self, recv_req",
    ),
    "scheduler.init_schedule_policy": Signature(
        "sglang.srt.managers.scheduler.Scheduler.init_schedule_policy",
        "self",
    ),
    "scheduler.get_new_batch_prefill_raw": Signature(
        "sglang.srt.managers.scheduler.Scheduler._get_new_batch_prefill_raw",
        "self, prefill_delayer_single_pass, running_batch",
    ),
    "schedule_policy.calc_priority": Signature(
        "sglang.srt.managers.schedule_policy.SchedulePolicy.calc_priority",
        "self, waiting_queue, running_batch",
    ),
    "prefill_adder.init": Signature(
        "sglang.srt.managers.schedule_policy.PrefillAdder.__init__",
        "self, page_size, tree_cache, token_to_kv_pool_allocator, running_batch, new_token_ratio, rem_input_tokens, "
        "rem_chunk_tokens, num_mixed_decode_tokens, priority_scheduling_preemption_threshold, max_prefill_bs, "
        "max_running_requests, prefill_max_requests, prefill_delayer_single_pass, dllm_config, waiting_queue_len",
    ),
    "prefill_adder.add_chunked_req": Signature(
        "sglang.srt.managers.schedule_policy.PrefillAdder.add_chunked_req",
        "self, req",
    ),
    "batch.mix_with_running": Signature(
        "sglang.srt.managers.schedule_batch.ScheduleBatch.mix_with_running",
        "self, running_batch",
    ),
    "scheduler.can_schedule_lora_req": Signature(
        "sglang.srt.managers.scheduler.Scheduler._can_schedule_lora_req",
        "self, req, running_loras",
    ),
    "scheduler.add_request_to_queue": Signature(
        "sglang.srt.managers.scheduler.Scheduler._add_request_to_queue",
        "self, req, is_retracted",
    ),
    "scheduler.init_request_dispatcher": Signature(
        "sglang.srt.managers.scheduler.Scheduler.init_request_dispatcher",
        "self",
    ),
    "request_receiver.pull_raw_reqs": Signature(
        "sglang.srt.managers.scheduler_components.request_receiver.SchedulerRequestReceiver._pull_raw_reqs",
        "self",
    ),
    "prefill_mixin.process_prefill_chunk": Signature(
        "sglang.srt.disaggregation.prefill.SchedulerDisaggregationPrefillMixin.process_prefill_chunk",
        "self, last_batch, running_batch",
    ),
    "scheduler.run_batch": Signature(
        "sglang.srt.managers.scheduler.Scheduler.run_batch",
        "self, batch, pp_proxy_tensors",
    ),
    "scheduler.process_batch_result": Signature(
        "sglang.srt.managers.scheduler.Scheduler.process_batch_result",
        "self, batch, result",
    ),
    "scheduler.publish_load_snapshot": Signature(
        "sglang.srt.managers.scheduler.Scheduler.publish_load_snapshot",
        "self, force",
    ),
    "scheduler.set_internal_state": Signature(
        "sglang.srt.managers.scheduler.Scheduler.set_internal_state",
        "self, recv_req",
    ),
    "disaggregation.prepare_abort": Signature(
        "sglang.srt.disaggregation.utils.prepare_abort",
        "req, error_message, status_code",
    ),
    "bootstrap_queue.finalize_bootstrap": Signature(
        "sglang.srt.disaggregation.prefill.PrefillBootstrapQueue.finalize_bootstrap",
        "self, req",
    ),
    "metadata_buffers.set_buf": Signature(
        "sglang.srt.disaggregation.utils.MetadataBuffers.set_buf",
        "self, req",
    ),
    "cuda_graph_setup.capture_prefill_graph": Signature(
        "sglang.srt.model_executor.model_runner_components.cuda_graph_setup.capture_prefill_graph",
        "model_runner, eager_runner, force_for_draft_worker",
    ),
    "dp_controller.run_process": Signature(
        "sglang.srt.managers.data_parallel_controller.run_data_parallel_controller_process",
        "server_args, port_args, pipe_writer, run_scheduler_process_func",
    ),
    "dp_controller.init_dispatcher": Signature(
        "sglang.srt.managers.data_parallel_controller.DataParallelController.init_dispatcher",
        "self",
    ),
    "dp_controller.event_loop": Signature(
        "sglang.srt.managers.data_parallel_controller.DataParallelController.event_loop",
        "self",
    ),
    "scheduler.init_disaggregation": Signature(
        "sglang.srt.managers.scheduler.Scheduler.init_disaggregation",
        "self",
    ),
    "scheduler.get_next_batch_to_run": Signature(
        "sglang.srt.managers.scheduler.Scheduler.get_next_batch_to_run",
        "self, running_batch, last_batch",
    ),
    "scheduler.is_fully_idle": Signature(
        "sglang.srt.managers.scheduler.Scheduler.is_fully_idle",
        "self, for_health_check",
    ),
    "scheduler.abort_request": Signature(
        "sglang.srt.managers.scheduler.Scheduler.abort_request",
        "self, recv_req",
    ),
    "scheduler.pause_generation": Signature(
        "sglang.srt.managers.scheduler.Scheduler.pause_generation",
        "self, recv_req",
    ),
    "batch.cumulate_penalty_output_tokens": Signature(
        "sglang.srt.managers.schedule_batch.ScheduleBatch.cumulate_penalty_output_tokens",
        "self",
    ),
    "batch.prepare_for_extend": Signature(
        "sglang.srt.managers.schedule_batch.ScheduleBatch.prepare_for_extend",
        "self",
    ),
    "sampler.apply_custom_logit_processor": Signature(
        "sglang.srt.layers.sampler.apply_custom_logit_processor",
        "logits, sampling_batch_info, num_tokens_in_batch",
    ),
    "reasoner_grammar.init": Signature(
        "sglang.srt.constrained.reasoner_grammar_backend.ReasonerGrammarBackend.__init__",
        "self, grammar_backend, reasoning_parser, tokenizer, enable_strict_thinking",
    ),
    "distributed.resolve_dist_init_method": Signature(
        "sglang.srt.distributed.bootstrap._resolve_dist_init_method",
        "server_args, dist_port",
    ),
    "kv_manager.start_bootstrap_thread": Signature(
        "sglang.srt.disaggregation.nixl.conn.NixlKVManager._start_bootstrap_thread",
        "self",
    ),
    "kv_manager.add_remote_peer": Signature(
        "sglang.srt.disaggregation.nixl.conn.NixlKVManager._add_remote_peer",
        "self, decode_kv_args",
    ),
    "kv_manager.handle_abort_notification": Signature(
        "sglang.srt.disaggregation.nixl.conn.NixlKVManager._handle_abort_notification",
        "self, msg",
    ),
    "tokenizer_manager.init_disaggregation": Signature(
        "sglang.srt.managers.tokenizer_manager.TokenizerManager.init_disaggregation",
        "self, start_pd_bootstrap_service",
    ),
    "tokenizer_manager.handle_abort_finish_reason": Signature(
        "sglang.srt.managers.tokenizer_manager.TokenizerManager._handle_abort_finish_reason",
        "self, out, state, is_stream",
    ),
    "tokenizer_manager.send_one_request": Signature(
        "sglang.srt.managers.tokenizer_manager.TokenizerManager._send_one_request",
        "self, tokenized_obj",
    ),
    "serving_chat.generate_chat_stream": Signature(
        "sglang.srt.entrypoints.openai.serving_chat.OpenAIServingChat._generate_chat_stream",
        "self, adapted_request, request, raw_request",
    ),
    "serving_completion.generate_completion_stream": Signature(
        "sglang.srt.entrypoints.openai.serving_completions.OpenAIServingCompletion._generate_completion_stream",
        "self, adapted_request, request, raw_request",
    ),
    "prealloc_queue.pop_preallocated": Signature(
        "sglang.srt.disaggregation.decode.DecodePreallocQueue.pop_preallocated",
        "self, rids_to_check, pp_good_rids, pp_bad_rids",
    ),
    "prealloc_queue.update_handshake_waiters": Signature(
        "sglang.srt.disaggregation.decode.DecodePreallocQueue._update_handshake_waiters",
        "self, rids_to_check, pp_good_rids, pp_bad_rids",
    ),
    "prealloc_queue.pre_alloc": Signature(
        "sglang.srt.disaggregation.decode.DecodePreallocQueue._pre_alloc",
        "self, req, prefix_indices, prefix_len, total_prefix_len",
    ),
    "prealloc_queue.active_req_count": Signature(
        "sglang.srt.disaggregation.decode.DecodePreallocQueue._active_req_count",
        "self, extra_reserved_reqs",
    ),
    "prealloc_queue.allocatable_token_budgets": Signature(
        "sglang.srt.disaggregation.decode.DecodePreallocQueue._allocatable_token_budgets",
        "self, retractable_tokens, count_retracted, extra_reserved_reqs, reserved_tokens, hicache_reserved_tokens",
    ),
    "prealloc_queue.resolve_prefill_dp_rank": Signature(
        "sglang.srt.disaggregation.decode.DecodePreallocQueue._resolve_prefill_dp_rank",
        "self, req",
    ),
    "prealloc_queue.ensure_prefill_info": Signature(
        "sglang.srt.disaggregation.decode.DecodePreallocQueue._ensure_prefill_info",
        "self, addr_to_reqs",
    ),
    "transfer_queue.poll_with_metadata_gate": Signature(
        "sglang.srt.disaggregation.decode.DecodeTransferQueue._poll_with_metadata_gate",
        "self",
    ),
    "transfer_queue.commit_transfer_to_req": Signature(
        "sglang.srt.disaggregation.decode.DecodeTransferQueue._commit_transfer_to_req",
        "self, decode_req",
    ),
}

# Called by us.
CONSTRUCTED = {
    "bootstrap_queue.init": Signature(
        "sglang.srt.disaggregation.prefill.PrefillBootstrapQueue.__init__",
        "self, token_to_kv_pool, draft_token_to_kv_pool, req_to_metadata_buffer_idx_allocator, metadata_buffers, "
        "tp_rank, tp_size, gpu_id, bootstrap_port, gloo_group, max_total_num_tokens, scheduler, pp_rank, pp_size, "
        "transfer_backend",
    ),
    "prealloc_queue.init": Signature(
        "sglang.srt.disaggregation.decode.DecodePreallocQueue.__init__",
        "self, req_to_token_pool, token_to_kv_pool_allocator, draft_token_to_kv_pool, "
        "req_to_metadata_buffer_idx_allocator, metadata_buffers, scheduler, transfer_queue, tree_cache, gloo_group, "
        "tp_rank, tp_size, dp_size, gpu_id, bootstrap_port, max_total_num_tokens, pp_rank, "
        "num_reserved_decode_tokens, transfer_backend",
    ),
    "transfer_queue.init": Signature(
        "sglang.srt.disaggregation.decode.DecodeTransferQueue.__init__",
        "self, gloo_group, req_to_metadata_buffer_idx_allocator, tp_rank, metadata_buffers, scheduler, tree_cache",
    ),
    "metadata_buffers.init": Signature(
        "sglang.srt.disaggregation.utils.MetadataBuffers.__init__",
        "self, size, hidden_size, hidden_states_dtype, max_top_logprobs_num, max_sampling_mask_tokens, "
        "custom_mem_pool, output_dsa_topk_indices_dim",
    ),
}

# Subscribers that are not installed there, each with the reason.
ABSENT: dict[str, str] = {
    "guard.logged": "It logs what its arguments say of themselves.",
    "guard.end": "Its launcher kills itself with all its children.",
    "less.text": "Its detokenizer process loads no plugins.",
    "less.answers": "No thread of the host reads what senders say; only ours does.",
}
