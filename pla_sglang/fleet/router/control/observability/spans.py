"""What the spans of a request say. Pure; ``tracing`` sends them, and is loaded where spans are wanted.

One span for the request as the router served it, and under it one for each stage of its time to the first token
(``explain``), end to end. No prompt, no answer, no key and no text of an instance is in them, and no tenant either: it
may be a hash of a key.
"""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import NamedTuple

from pla_sglang.fleet.router.control.observability.explain import stages
from pla_sglang.fleet.router.control.requests.request_record import RequestRecord
from pla_sglang.fleet.router.wire.inference import BY_ENDPOINT
from pla_sglang.fleet.router.wire.messages import Endpoint, Outcome

# gen_ai.operation.name of OpenTelemetry's semantic conventions; /generate takes a text and goes on with it
OPERATIONS = {
    Endpoint.GENERATE: "text_completion",
    Endpoint.COMPLETIONS: "text_completion",
    Endpoint.CHAT: "chat",
    Endpoint.INVOCATIONS: "chat",
    Endpoint.RESPONSES: "chat",
    Endpoint.MESSAGES: "chat",
    Endpoint.OLLAMA_CHAT: "chat",
    Endpoint.OLLAMA_GENERATE: "text_completion",
    Endpoint.EMBEDDINGS: "embeddings",
    Endpoint.ENCODE: "embeddings",
    # The conventions have no name for these; theirs may be any word.
    Endpoint.CLASSIFY: "classify",
    Endpoint.CLASSIFICATIONS: "classify",
    Endpoint.SCORE: "score",
    Endpoint.RERANK: "rerank",
}
MEASURED = ("queue", "route")  # the other stages are split by a prediction, see ``explain``
# Neither the router nor an instance is to blame. OpenTelemetry: a server's span of a 4xx is no error.
NO_FAULT = frozenset({Outcome.OK, Outcome.CLIENT_ERROR, Outcome.REFUSED, Outcome.CLIENT_GONE})
Value = str | int | float | bool | tuple[str, ...]


class Part(NamedTuple):
    """A stage as a span, in seconds of the monotonic clock."""

    name: str
    start_s: float
    end_s: float


def name_of(record: RequestRecord) -> str:
    return f"POST {BY_ENDPOINT[record.ask.endpoint].name}"


def parts(record: RequestRecord) -> list[Part]:
    """The stages that took time, end to end from the arrival to the first token.

    Of a request that had no token: how far it came.
    """
    attempt, arrived_s = record.shown_attempt, record.ask.arrived_s
    seconds = stages(record)
    if seconds is not None:
        ends_s = accumulate(seconds.values(), initial=arrived_s)
        names = (name.removesuffix("_s") for name in seconds)
        all_parts = [Part(name, *span) for name, span in zip(names, pairwise(ends_s), strict=True)]
    else:
        over_s = arrived_s if attempt.ended_s is None else attempt.ended_s
        decided_s = over_s if attempt.assigned_s is None else attempt.assigned_s
        sent_s = over_s if attempt.sent_s is None else attempt.sent_s
        all_parts = [Part("queue", arrived_s, decided_s), Part("route", decided_s, sent_s)]
    return [part for part in all_parts if part.end_s > part.start_s]


def failed(record: RequestRecord) -> bool:
    return record.end is None or record.end.status >= 500 or record.end.outcome not in NO_FAULT


def attributes(record: RequestRecord, policy: str, scheme: str) -> dict[str, Value]:
    """Names: OpenTelemetry's semantic conventions (``http.*``, ``gen_ai.*``), SGLang's own (``gen_ai.request.id``,
    ``gen_ai.latency.*``, in its ``SpanAttributes``), and ours (``pla.*``)."""
    attempt, end = record.shown_attempt, record.end
    placement, choice = attempt.placement, attempt.choice
    label = None if end is None else end.outcome.label
    told: dict[str, Value | None] = {
        "http.request.method": "POST",
        "http.route": BY_ENDPOINT[record.ask.endpoint].name,
        "url.scheme": scheme,
        "http.request.body.size": record.ask.body_bytes,
        "http.response.status_code": None if end is None else end.status or None,
        "error.type": label if failed(record) else None,
        "gen_ai.operation.name": OPERATIONS[record.ask.endpoint],
        "gen_ai.request.id": record.rid,
        "gen_ai.request.max_tokens": record.view.output_tokens,
        "gen_ai.usage.output_tokens": end.output_tokens if end is not None and end.exact_tokens else None,
        "gen_ai.latency.time_to_first_token": (
            None if attempt.first_token_s is None else attempt.first_token_s - record.ask.arrived_s
        ),
        "pla.policy": policy,
        "pla.admission": record.admission,
        "pla.reason": None if choice is None else choice.reason.value,
        "pla.placement": None if choice is None else choice.placement.value,
        "pla.prefill": None if choice is None else choice.prefill.name,
        "pla.decode": None if choice is None else choice.decode.name,
        "pla.room": attempt.room,
        "pla.attempts": len(record.attempts),
        "pla.causes": tuple(one.cause for one in record.attempts[1:]) or None,
        "pla.end": label,
        "pla.relay": record.relay,
        "pla.input_tokens": record.prompt.tokens,
        "pla.input_tokens_exact": record.prompt.exact,
        "pla.cached_tokens": 0 if placement is None else placement.cached_tokens,
        "pla.slo_ttft_s": record.ttft.slo_s,
        "pla.predicted_ttft_s": None if placement is None else placement.predicted_ttft_s,
    }
    return {name: value for name, value in told.items() if value is not None}
