"""An OpenTelemetry collector: takes spans over OTLP (gRPC), decodes them and keeps them."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as service
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import (
    TraceServiceServicer,
    add_TraceServiceServicer_to_server,
)
from opentelemetry.proto.common.v1.common_pb2 import AnyValue


@dataclass(frozen=True)
class Seen:
    """One span as it was received; ids in hex, as in a traceparent."""

    name: str
    trace: str
    id: str
    parent: str
    kind: int
    start_ns: int
    end_ns: int
    status: int
    attributes: dict[str, Any]
    resource: dict[str, Any]


@dataclass
class Collector(TraceServiceServicer):
    port: int = 0
    spans: list[Seen] = field(default_factory=list)

    def Export(self, request: Any, context: Any) -> Any:
        for group in request.resource_spans:
            resource = {one.key: value_of(one.value) for one in group.resource.attributes}
            for scope in group.scope_spans:
                self.spans += [seen(span, resource) for span in scope.spans]
        return service.ExportTraceServiceResponse()

    def trees(self) -> dict[str, tuple[Seen, list[Seen]]]:
        """By ``gen_ai.request.id``: the request's span, and those below it in order of time. Complete ones only: the
        request's own span is sent last."""
        whole = [span for span in list(self.spans) if "gen_ai.request.id" in span.attributes]
        return {
            one.attributes["gen_ai.request.id"]: (
                one,
                sorted((span for span in list(self.spans) if span.parent == one.id), key=lambda span: span.start_ns),
            )
            for one in whole
        }


@contextmanager
def collector() -> Iterator[Collector]:
    server = grpc.server(ThreadPoolExecutor(2))
    made = Collector()
    add_TraceServiceServicer_to_server(made, server)
    made.port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield made
    finally:
        server.stop(0).wait()


def seen(span: Any, resource: dict[str, Any]) -> Seen:
    return Seen(
        name=span.name,
        trace=span.trace_id.hex(),
        id=span.span_id.hex(),
        parent=span.parent_span_id.hex(),
        kind=span.kind,
        start_ns=span.start_time_unix_nano,
        end_ns=span.end_time_unix_nano,
        status=span.status.code,
        attributes={one.key: value_of(one.value) for one in span.attributes},
        resource=resource,
    )


def value_of(value: AnyValue) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [value_of(one) for one in value.array_value.values]
    return getattr(value, kind)
