"""Why a prefill batch ran, or did not run, in one of our graphs. Exactly one for each batch; counted in metrics."""

from __future__ import annotations

import enum


class GraphReason(enum.Enum):
    REPLAYED = "replayed"
    # the batch has no shape
    EMPTY = "empty"
    LONG_REQUEST = "long_request"  # a request has more new tokens than the graphs were captured for
    TOO_MANY_TOKENS = "too_many_tokens"
    TOO_MANY_REQUESTS = "too_many_requests"
    # the shape has no graph
    NOT_CAPTURED = "not_captured"
    CAPTURE_FAILED = "capture_failed"
    # the batch needs what a captured forward pass does not do
    NOT_PLAIN_PREFILL = "not_plain_prefill"  # mixed with decoding, target verify, split prefill
    EMBEDDINGS = "embeddings"  # input embeddings instead of token ids
    MULTIMODAL = "multimodal"
    HIDDEN_STATES = "hidden_states"
    LORA = "lora"
    SPECULATIVE = "speculative"
    DATA_PARALLEL = "data_parallel"


class CaptureReason(enum.Enum):
    """Why a shape is captured now, or why none is."""

    EXPECTED = "expected"  # at start, by expected hits
    MISSED_IDLE = "missed_idle"  # it was asked for, and the device has nothing to do
    MISSED_OFTEN = "missed_often"  # it was asked for so often that a pause of one capture pays
    TIME_BUDGET = "time_budget"
    MEMORY_BUDGET = "memory_budget"
    NOTHING_WANTED = "nothing_wanted"
