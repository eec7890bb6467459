"""What clients may read of an instance's answers about itself. Everything else is left out.

An instance puts all its arguments there, keys included (``/server_info`` of SGLang), and what a later version, a plugin
or a stock instance adds is unknown here. So members are let through by name: those that are known to be harmless and
that clients or tools of SGLang read. A member of a secret's name (``pla_sglang.common.secret_names``) is never let
through.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from pla_sglang.common.secret_names import hide_in_text, is_secret_name
from pla_sglang.fleet.router.http import responses

# Member -> None: a plain value or a list of them; a mapping: an object, or a list of objects, with such members.
Allowed = Mapping[str, "Allowed | None"]


def _plain(names: str) -> dict[str, Allowed | None]:
    return dict.fromkeys(names.split())


# Which model it is and what it can do: clients choose prompts, parsers and a tokenizer by it (sglang.bench_serving and
# bench_one_batch_server take tokenizer_path from here, SGLang's router the names of the model).
_MODEL = _plain(
    "model_path tokenizer_path tokenizer_mode served_model_name version weight_version revision dtype quantization "
    "kv_cache_dtype is_embedding context_length enable_multimodal reasoning_parser tool_call_parser enable_lora "
    "max_loras_per_batch max_lora_rank sampling_defaults"
)
# How much it takes: load clients bound their concurrency by it.
_LIMITS = _plain(
    "max_running_requests max_queued_requests max_total_tokens max_total_num_tokens max_prefill_tokens "
    "max_req_input_len chunked_prefill_size page_size mem_fraction_static "
    "effective_max_running_requests_per_dp stream_interval"
)
# How it is built and how it schedules: results of benches are kept with it.
_BUILD = _plain(
    "tp_size dp_size pp_size ep_size nnodes load_balance_method device attention_backend sampling_backend "
    "grammar_backend schedule_policy schedule_conservativeness disable_radix_cache disable_overlap_schedule "
    "disable_cuda_graph enable_mixed_chunk enable_dp_attention enable_metrics enable_cache_report disaggregation_mode "
    "speculative_algorithm speculative_num_steps speculative_eagle_topk speculative_num_draft_tokens"
)
# Figures of one scheduler, read by bench_serving, bench_one_batch_server and evaluations.
_FIGURES: dict[str, Allowed | None] = {
    **_plain("last_gen_throughput avg_spec_accept_length"),
    "memory_usage": _plain("weight kvcache token_capacity token_capacity_swa graph"),
}
# Of our plugin: which scheduling it is, and that a device is emulated. Peers and requests are not clients' business.
_OURS: dict[str, Allowed | None] = {
    "pla": {"hooks": None, "config": _plain("prefill_disagg boundary_tokens role stateless graph_layout")},
    "pla_graphs": _plain("layout"),
    "pla_emulation": _plain("profile time_scale steps busy_s host_overhead_share step_error_p50 step_error_p99"),
}
_PARTS = {**_MODEL, **_LIMITS, **_BUILD, **_OURS}
SERVER_INFO: Allowed = {**_PARTS, "internal_states": {**_PARTS, **_FIGURES}}

MODEL_INFO: Allowed = _plain(
    "model_path tokenizer_path is_generation preferred_sampling_params weight_version has_image_understanding "
    "has_audio_understanding model_type architectures"
)

_CARD = _plain("id object created owned_by root parent max_model_len")
MODELS: Allowed = {"object": None, "data": _CARD}

_ERROR = _plain("message type param code")
ERROR: Allowed = {**_plain("object message type param code detail"), "error": _ERROR}

FACTS: Mapping[str, Allowed] = {
    "/server_info": SERVER_INFO,
    "/get_server_info": SERVER_INFO,
    "/model_info": MODEL_INFO,
    "/get_model_info": MODEL_INFO,
    "/v1/models": MODELS,
}
MODEL: Allowed = _CARD  # of /v1/models/ID


def keep_allowed(value: Any, allowed: Allowed) -> Any:
    """The members of an object, or of each object of a list, that clients may read."""
    if isinstance(value, list):
        return [keep_allowed(each, allowed) for each in value if isinstance(each, dict)]
    kept = {}
    for name, inner in allowed.items():
        if name not in value or is_secret_name(name):
            continue
        of_member = value[name]
        if inner is None:
            if _is_plain(of_member):
                kept[name] = _without_secrets(of_member)
        elif isinstance(of_member, (dict, list)):
            kept[name] = keep_allowed(of_member, inner)
    return kept


def _is_plain(value: Any) -> bool:
    if isinstance(value, list):
        return all(not isinstance(each, (dict, list)) for each in value)
    return not isinstance(value, dict)


def _without_secrets(value: Any) -> Any:
    if isinstance(value, list):
        return [_without_secrets(each) for each in value]
    return hide_in_text(value) if isinstance(value, str) else value


def answer_about_instance(path: str, status: int, body: bytes) -> tuple[int, bytes]:
    """Status and body for the client, of an instance's answer to a GET of ``path``."""
    failed = status >= 400
    allowed = ERROR if failed else FACTS.get(path, MODEL)
    if status != 200 and (not failed or status not in responses.STATUS_LINES):
        return 502, responses.error_body(502, "upstream_answer", f"the instance answered with status {status}")
    try:
        parsed = msgspec.json.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        parsed = None
    if isinstance(parsed, dict):
        return status, msgspec.json.encode(keep_allowed(parsed, allowed))
    text = f"the instance answered with status {status}" if failed else "the instance's answer is no JSON object"
    return (status if failed else 502), responses.error_body(status if failed else 502, "upstream_answer", text)
