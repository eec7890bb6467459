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
    PADDING = "padding"  # the smallest shape that fits computes more than twice the tokens
    # the shape has no graph
    NOT_CAPTURED = "not_captured"
    CAPTURE_FAILED = "capture_failed"
    PLAN_FAILED = "plan_failed"  # there is one, and its attention could not be planned for this batch
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
    RETRIED_IDLE = "retried_idle"  # it failed, has been asked for often since, and the device has nothing to do
    MISSED_OFTEN = (
        "missed_often"  # it was asked for so often that a pause of one capture pays, and the pause is allowed
    )
    BUSY_BUDGET = "busy_budget"  # it was, but captures have paused serving for long enough in this minute
    TIME_BUDGET = "time_budget"
    MEMORY_BUDGET = "memory_budget"
    NOTHING_WANTED = "nothing_wanted"
    SESSION_FAILED = "session_failed"  # the host's capture context could not be opened or closed


class CaptureFailure(enum.Enum):
    """The step at which a capture failed; exactly one for each shape that was refused."""

    BATCH = "batch"  # the pretended batch
    PREPARE = "prepare"  # buffers of the attention backend
    PLAN = "plan"  # attention metadata of the shape
    WARM_UP = "warm_up"
    CAPTURE = "capture"
    SESSION = "session"
    OUT_OF_MEMORY = "out_of_memory"  # at any of these steps
    OTHER_RANK = "other_rank"  # it went well here
    OVER_BUDGET = "over_budget"  # it went well, and does not fit the memory budget even alone
