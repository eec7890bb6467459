"""Spans to an OpenTelemetry collector (OTLP over gRPC). The only module that imports OpenTelemetry.

When a request has ended, its record goes into the queue of the SDK's batch processor. Spans are made of it on that
processor's thread, just before they are sent: made on the event loop they would cost it more than the request did
(0.28 ms by the SDK's tracer, 7 spans). Where the collector is slow or away the oldest records are lost; nobody waits.
"""

from __future__ import annotations

import asyncio
import random
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags

from pla_sglang.fleet.router.control.observability.spans import MEASURED, Part, attributes, failed, name_of, parts
from pla_sglang.fleet.router.control.requests.request_record import RequestRecord

SERVICE = "pla-sglang-router"
SCOPE = InstrumentationScope("pla_sglang.fleet.router")
QUEUE_REQUESTS = 4096
BATCH_REQUESTS = 16  # about a hundred spans; SGLang sends 64 at a time
DELAY_MS = 500  # as SGLang
EXPORT_TIMEOUT_S = 10.0  # of one batch, attempts included
FLUSH_S = 2.0  # at the end; less than the launcher waits for the control process
# How long the exporter's thread may hold the interpreter while the event loop wants it; Python's own value: 5 ms.
SWITCH_S = 0.0005
# The collector is named by its address, as instances are: a proxy of the environment has no part in it.
CHANNEL_OPTIONS = (("grpc.enable_http_proxy", 0),)
SAMPLED = TraceFlags(TraceFlags.SAMPLED)


class _Ended(ReadableSpan):
    """A request in the processor's queue. ``shift_ns``: from the monotonic clock to that of the world."""

    def __init__(self, record: RequestRecord, shift_ns: int) -> None:
        super().__init__("", _ANY, resource=_NOTHING)
        self.record, self.shift_ns = record, shift_ns


_ANY = SpanContext(1, 1, is_remote=False, trace_flags=SAMPLED)  # the processor looks at the flags
_NOTHING = Resource({})


class _Unfolding(SpanExporter):
    """Makes the spans of requests, and hands them to the exporter. Runs on the processor's thread."""

    def __init__(self, exporter: OTLPSpanExporter, policy: str, scheme: str, rng: random.Random) -> None:
        self._exporter, self._policy, self._scheme, self._rng = exporter, policy, scheme, rng
        self._resource = Resource.create({SERVICE_NAME: SERVICE})

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        made = [span for one in spans if isinstance(one, _Ended) for span in self._spans(one)]
        return self._exporter.export(made)

    def shutdown(self) -> None:
        self._exporter.shutdown()

    def _spans(self, ended: _Ended) -> list[ReadableSpan]:
        """The stages first: who has the request's own span has all. Its id was told to instances already."""
        record = ended.record
        assert record.ask.parent is not None
        _, trace, own, _ = record.ask.trace.split("-")
        trace_id = int(trace, 16)
        context = SpanContext(trace_id, int(own, 16), is_remote=False, trace_flags=SAMPLED)
        made = []
        for part in parts(record):
            below = SpanContext(trace_id, self._rng.getrandbits(64) or 1, is_remote=False, trace_flags=SAMPLED)
            split = None if part.name in MEASURED else {"pla.split": "predicted"}
            made.append(self._span(ended, part, below, context, attributes=split))
        above = None
        if record.ask.parent:
            above = SpanContext(trace_id, int(record.ask.parent, 16), is_remote=True, trace_flags=SAMPLED)
        arrived_s, ended_s = record.ask.arrived_s, record.present.ended_s
        end_s = arrived_s if ended_s is None else max(arrived_s, ended_s)
        label = None if record.end is None else record.end.outcome.label
        whole = self._span(
            ended,
            Part(name_of(record), arrived_s, end_s),
            context,
            above,
            kind=SpanKind.SERVER,
            status=Status(StatusCode.ERROR, label) if failed(record) else Status(),
            attributes=attributes(record, self._policy, self._scheme),
        )
        return [*made, whole]

    def _span(
        self, ended: _Ended, part: Part, context: SpanContext, parent: SpanContext | None, **more: Any
    ) -> ReadableSpan:
        return ReadableSpan(
            part.name,
            context,
            parent,
            self._resource,
            start_time=round(part.start_s * 1e9) + ended.shift_ns,
            end_time=round(part.end_s * 1e9) + ended.shift_ns,
            instrumentation_scope=SCOPE,
            **more,
        )


class OtlpTracing:
    """Exports the spans of one event loop.

    Args:
        scheme: by which clients come.
        clock: monotonic seconds, that of records.
    """

    def __init__(self, endpoint: str, *, policy: str, scheme: str, clock: Callable[[], float]) -> None:
        self._clock = clock
        sys.setswitchinterval(min(SWITCH_S, sys.getswitchinterval()))
        self._exporter = OTLPSpanExporter(
            endpoint,
            insecure=True,
            timeout=EXPORT_TIMEOUT_S,
            channel_options=CHANNEL_OPTIONS,  # type: ignore[arg-type] # declared as text; gRPC wants a number
        )
        self._processor = BatchSpanProcessor(
            _Unfolding(self._exporter, policy, scheme, random.SystemRandom()),
            max_queue_size=QUEUE_REQUESTS,
            schedule_delay_millis=DELAY_MS,
            max_export_batch_size=BATCH_REQUESTS,
        )

    def trace(self, record: RequestRecord) -> None:
        """``record`` has ended, and its ``ask.parent`` is not None. Never raises, never waits."""
        shift_ns = time.time_ns() - round(self._clock() * 1e9)  # each time anew: the world's clock may be set
        self._processor.on_end(_Ended(record, shift_ns))

    async def stop(self) -> None:
        """What has not been sent after ``FLUSH_S`` is lost."""
        flush = threading.Thread(target=self._processor.shutdown, name="pla-trace-flush", daemon=True)
        flush.start()
        end_s = self._clock() + FLUSH_S
        while flush.is_alive() and self._clock() < end_s:
            await asyncio.sleep(0.01)
        if flush.is_alive():
            self._exporter.shutdown()  # ends its attempt, and with it the thread
