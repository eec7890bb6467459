"""What the spans of a request say. Pure; ``tracing`` sends them, and is loaded where spans are wanted.

One span for the request as the router served it, and under it one for each stage of its time to the first token
(``explain``), end to end. No prompt, no answer, no key and no text of an instance is in them, and no tenant either: it
may be a hash of a key.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate, pairwise
from typing import NamedTuple, Protocol

from pla_sglang.errors import ConfigError
from pla_sglang.router.control.entries import End
from pla_sglang.router.control.explain import Story, stages
from pla_sglang.router.control.knobs import ControlKnobs
from pla_sglang.router.messages import Ask, Endpoint
from pla_sglang.router.request import ENDPOINTS

ROUTES = {endpoint: path for path, endpoint in ENDPOINTS.items()}
# gen_ai.operation.name of OpenTelemetry's semantic conventions; /generate takes a text and goes on with it
OPERATIONS = {
    Endpoint.GENERATE: "text_completion",
    Endpoint.COMPLETIONS: "text_completion",
    Endpoint.CHAT: "chat",
}
MEASURED = ("queue", "route")  # the other stages are split by a prediction, see ``explain``
# Neither the router nor an instance is to blame. OpenTelemetry: a server's span of a 4xx is no error.
NO_FAULT = frozenset({End.FINISHED.value, End.REFUSED.value, End.CLIENT_GONE.value})
Value = str | int | float | bool | tuple[str, ...]


class Tracing(Protocol):
    """Whoever makes spans of requests that have ended. Never raises, never waits."""

    def trace(self, ask: Ask, story: Story) -> None:
        """``ask.parent`` is not None, ``story.ended_s`` neither."""

    async def stop(self) -> None:
        """Send what is left, for a limited time."""


class Part(NamedTuple):
    """A stage as a span, in seconds of the monotonic clock."""

    name: str
    start_s: float
    end_s: float


def load_tracing(knobs: ControlKnobs, clock: Callable[[], float]) -> Tracing:
    """Raises ConfigError where OpenTelemetry is not installed."""
    try:
        from pla_sglang.router.control.tracing import OtlpTracing
    except ImportError as error:
        wanted = "opentelemetry-sdk opentelemetry-exporter-otlp-proto-grpc"
        raise ConfigError(f"--enable-trace needs OpenTelemetry ({error}); install it: pip install {wanted}") from None
    return OtlpTracing(knobs.trace_endpoint, policy=knobs.policy, clock=clock)


def name_of(ask: Ask) -> str:
    return f"POST {ROUTES[ask.endpoint]}"


def parts(story: Story) -> list[Part]:
    """The stages that took time, end to end from the arrival to the first token.

    Of a request that had no token: how far it came.
    """
    found = stages(story)
    if found is not None:
        ends_s = accumulate(found.values(), initial=story.arrived_s)
        names = (name.removesuffix("_s") for name in found)
        made = [Part(name, *span) for name, span in zip(names, pairwise(ends_s), strict=True)]
    else:
        over_s = story.arrived_s if story.ended_s is None else story.ended_s
        decided_s = over_s if story.decided_s is None else story.decided_s
        sent_s = over_s if story.sent_s is None else story.sent_s
        made = [Part("queue", story.arrived_s, decided_s), Part("route", decided_s, sent_s)]
    return [part for part in made if part.end_s > part.start_s]


def failed(story: Story) -> bool:
    return story.status >= 500 or story.end not in NO_FAULT


def attributes(ask: Ask, story: Story, policy: str) -> dict[str, Value]:
    """Names: OpenTelemetry's semantic conventions (``http.*``, ``gen_ai.*``), SGLang's own (``gen_ai.request.id``,
    ``gen_ai.latency.*``, in its ``SpanAttributes``), and ours (``pla.*``)."""
    told: dict[str, Value | None] = {
        "http.request.method": "POST",
        "http.route": ROUTES[ask.endpoint],
        "url.scheme": "http",
        "http.request.body.size": ask.body_bytes,
        "http.response.status_code": story.status or None,
        "error.type": story.end if failed(story) else None,
        "gen_ai.operation.name": OPERATIONS[ask.endpoint],
        "gen_ai.request.id": ask.rid,
        "gen_ai.request.max_tokens": ask.output_tokens,
        "gen_ai.latency.time_to_first_token": None if story.first_s is None else story.first_s - story.arrived_s,
        "pla.policy": policy,
        "pla.admission": story.admission,
        "pla.reason": story.reason or None,
        "pla.placement": story.placement or None,
        "pla.prefill": story.prefill,
        "pla.decode": story.decode,
        "pla.room": story.room,
        "pla.attempts": story.attempts,
        "pla.retries": tuple(former.why for former in story.former) or None,
        "pla.end": story.end,
        "pla.relay": ask.relay,
        "pla.input_tokens": story.input_tokens,
        "pla.input_tokens_exact": story.exact_tokens,
        "pla.cached_tokens": story.cached_tokens,
        "pla.slo_ttft_s": story.slo_ttft_s,
        "pla.predicted_ttft_s": story.predicted_ttft_s,
    }
    return {name: value for name, value in told.items() if value is not None}
