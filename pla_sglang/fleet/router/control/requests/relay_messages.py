"""What a relay is told of a request: where it goes, or why it is refused."""

from __future__ import annotations

from pla_sglang.fleet.router.control.requests.request_record import Attempt, RequestRecord
from pla_sglang.fleet.router.control.workers.table import Worker
from pla_sglang.fleet.router.wire import messages as m
from pla_sglang.fleet.router.wire.inference import BY_ENDPOINT, PATHS
from pla_sglang.policy.admission import AdmissionReason, Verdict

_STATUS = {
    AdmissionReason.DUPLICATE: 409,
    AdmissionReason.NO_INSTANCE: 503,
    AdmissionReason.SAMPLES: 400,
    AdmissionReason.ALL_FULL: 503,
    AdmissionReason.RETRY_BUDGET: 503,
    AdmissionReason.UNIFIED_ONLY: 501,
    AdmissionReason.SESSIONS: 400,
    AdmissionReason.OTHER_MODEL: 400,
    AdmissionReason.NO_ADAPTER: 400,
    AdmissionReason.OVER_CONTEXT: 400,
    AdmissionReason.FAULT: 500,
}
_TEXT = {
    AdmissionReason.OPEN_LIMIT: "too many requests are open; try again later",
    AdmissionReason.QUEUE_LIMIT: "too many requests are waiting; try again later",
    AdmissionReason.TTFT_LIMIT: "the first token would come too late; try again later",
    AdmissionReason.TENANT_LIMIT: "the tenant has used its prefill time; try again later",
    AdmissionReason.DUPLICATE: "a request with this id is open",
    AdmissionReason.NO_INSTANCE: "no instance is ready",
    AdmissionReason.ALL_FULL: "every instance is full",
    AdmissionReason.RETRY_BUDGET: "the instance is full, and too many requests are retried already",
    AdmissionReason.FAULT: "the router has failed on this request; its log says why",
    AdmissionReason.UNIFIED_ONLY: "{path} needs a unified or stateless instance, of which there is none; a pair serves "
    + ", ".join(name for name, path in PATHS.items() if path.pairs),
    AdmissionReason.SAMPLES: "n > 1 is not served by a prefill and decode pair; send n requests, or a batch of prompts",
    AdmissionReason.SESSIONS: "session_params are not served by a prefill and decode pair; send the whole conversation",
    AdmissionReason.OTHER_MODEL: "{path} is served by no instance here: {needs}",
    AdmissionReason.NO_ADAPTER: "no instance serves LoRA adapters, which lora_path names; leave it out",
    AdmissionReason.OVER_CONTEXT: "the prompt has {tokens} tokens, more than the context of every instance",
}


def assign_message(
    record: RequestRecord, attempt: Attempt, source: Worker | None, *, reason: str, held_tokens: int | None = None
) -> m.Assign:
    """``source``: whose KV cache goes to the attempt's decode instance; None: nobody's. ``held_tokens``: as in
    ``Assign``."""
    assert attempt.decode is not None
    rid, number, decode = record.rid, attempt.number, attempt.decode.number
    if source is None:
        return m.Assign(rid, number, decode, reason=reason, held_tokens=held_tokens)
    assert attempt.room is not None and source.description is not None
    return m.Assign(
        rid,
        number,
        decode,
        source.number,
        bootstrap_host=source.address.host,
        bootstrap_port=source.description.bootstrap_port or 0,
        bootstrap_room=attempt.room,
        reason=reason,
        held_tokens=held_tokens,
    )


def refuse_message(ask: m.Ask, verdict: Verdict, *, over: int = 0, text: str = "") -> m.Refuse:
    """``over``: number of the attempt that the question named; 0: none. ``text``: says more than the reason alone."""
    reason = verdict.reason
    path = BY_ENDPOINT[ask.endpoint]
    needs = "it needs an embedding model (--is-embedding)" if path.embeds else "it needs a model that generates"
    tokens = str(ask.input_tokens)
    text = text or _TEXT[reason].replace("{path}", path.name).replace("{needs}", needs).replace("{tokens}", tokens)
    return m.Refuse(ask.rid, _STATUS.get(reason, 429), reason.value, text, verdict.retry_after_s, over)
