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

ROUTES = {endpoint: name for endpoint, (name, _) in BY_ENDPOINT.items()}
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
    return f"POST {ROUTES[record.ask.endpoint]}"


def parts(record: RequestRecord) -> list[Part]:
    """The stages that took time, end to end from the arrival to the first token.

    Of a request that had no token: how far it came.
    """
    hop, arrived_s = record.shown_hop, record.ask.arrived_s
    seconds = stages(record)
    if seconds is not None:
        ends_s = accumulate(seconds.values(), initial=arrived_s)
        names = (name.removesuffix("_s") for name in seconds)
        all_parts = [Part(name, *span) for name, span in zip(names, pairwise(ends_s), strict=True)]
    else:
        over_s = arrived_s if hop.ended_s is None else hop.ended_s
        decided_s = over_s if hop.assigned_s is None else hop.assigned_s
        sent_s = over_s if hop.sent_s is None else hop.sent_s
        all_parts = [Part("queue", arrived_s, decided_s), Part("route", decided_s, sent_s)]
    return [part for part in all_parts if part.end_s > part.start_s]


def failed(record: RequestRecord) -> bool:
    return record.status >= 500 or record.outcome not in NO_FAULT


def attributes(record: RequestRecord, policy: str) -> dict[str, Value]:
    """Names: OpenTelemetry's semantic conventions (``http.*``, ``gen_ai.*``), SGLang's own (``gen_ai.request.id``,
    ``gen_ai.latency.*``, in its ``SpanAttributes``), and ours (``pla.*``)."""
    hop, choice = record.shown_hop, record.shown_hop.choice
    end = None if record.outcome is None else record.outcome.label
    told: dict[str, Value | None] = {
        "http.request.method": "POST",
        "http.route": ROUTES[record.ask.endpoint],
        "url.scheme": "http",
        "http.request.body.size": record.ask.body_bytes,
        "http.response.status_code": record.status or None,
        "error.type": end if failed(record) else None,
        "gen_ai.operation.name": OPERATIONS[record.ask.endpoint],
        "gen_ai.request.id": record.rid,
        "gen_ai.request.max_tokens": record.view.output_tokens,
        "gen_ai.usage.output_tokens": record.output_tokens if record.exact_output else None,
        "gen_ai.latency.time_to_first_token": (
            None if hop.first_token_s is None else hop.first_token_s - record.ask.arrived_s
        ),
        "pla.policy": policy,
        "pla.admission": record.admission,
        "pla.reason": None if choice is None else choice.reason.value,
        "pla.placement": None if choice is None else choice.placement.value,
        "pla.prefill": None if choice is None else choice.prefill.name,
        "pla.decode": None if choice is None else choice.decode.name,
        "pla.room": hop.room,
        "pla.attempts": record.hop.attempts,
        "pla.hops": len(record.hops) if len(record.hops) > 1 else None,
        "pla.retries": tuple(former.why for former in record.former) or None,
        "pla.end": end,
        "pla.relay": record.relay,
        "pla.input_tokens": record.prompt.tokens,
        "pla.input_tokens_exact": record.prompt.exact,
        "pla.cached_tokens": hop.cached_tokens,
        "pla.slo_ttft_s": record.ttft_slo_s,
        "pla.predicted_ttft_s": hop.predicted_ttft_s,
    }
    return {name: value for name, value in told.items() if value is not None}
