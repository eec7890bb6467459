"""Limits of one simulated engine."""

from __future__ import annotations

import dataclasses
import enum

from pla_sglang.common.checks import Range, check_fields, knob, require


class AnswerCaching(enum.Enum):
    """What becomes of the KV of an answer in a conversation when its request ends."""

    DROPPED = "dropped"  # the next turn computes it again
    KEPT = "kept"  # in the prefix cache where prompt and answer were computed (SGLang's cache_finished_req)
    RETURNED = "returned"  # in that of the instance of the prefill, at once, wherever and whether it was decoded


@dataclasses.dataclass(frozen=True)
class EngineKnobs:
    """Limits of one engine, as SGLang has them.

    Attributes:
        chunk_tokens: new tokens of one prefill pass at most (``--chunked-prefill-size``).
        slots: requests in the running batch at most (``--max-running-requests``).
        mixed: decodes join prefill passes (``--enable-mixed-chunk``; what vLLM does).
        decode_interval: after a prefill pass come that many decode steps before the next one, while anything runs
            (``--prefill-decode-interval``).
        growth_start, growth_least, growth_decay_steps: share of the running requests' limits that admission counts
            on (SGLang's new-token ratio): it falls linearly from start to least over that many decode steps, and rises
            to what was observed when a request is retracted.
        limit_clip_tokens: of what a request may still get, admission counts this much at most
            (``SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION``).
        reserve_by_lengths: admission takes what is predicted of an answer for its limit, without the clip.
        answers: of traces that name the blocks of answers (``Trace.answer_ids``). SGLang's decode instances have no
            prefix cache, so a split fleet keeps answers as RETURNED only if something brings them back. Then the
            answer is as long as the trace's ids say, also where ``output_tokens`` were cut to those of a prefill.
        lose_all: where memory runs out all running requests lose their KV and are computed again, as STAR's paper has
            it of the engines it ran (its Issue 1); else one at a time, until the rest has room.

    Raises:
        ConfigError: a value is out of range.
    """

    chunk_tokens: int = knob(8192, allowed=Range(1))
    slots: int = knob(1024, allowed=Range(1))
    mixed: bool = False
    decode_interval: int = knob(0, allowed=Range(0))
    growth_start: float = knob(0.7, allowed=Range(0, 1))
    growth_least: float = 0.098
    growth_decay_steps: int = knob(600, allowed=Range(1))
    limit_clip_tokens: int = knob(4096, allowed=Range(1))
    reserve_by_lengths: bool = False
    answers: AnswerCaching = AnswerCaching.DROPPED
    lose_all: bool = False

    def __post_init__(self) -> None:
        check_fields(self)
        require("growth_least", self.growth_least, 0, self.growth_start)
