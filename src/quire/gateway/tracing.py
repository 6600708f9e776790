"""OpenTelemetry: a span for each request, below the client's and above the worker's. An optional dependency,
imported only if used."""

import asyncio
import os
import time
from typing import Any

from quire import __version__
from quire.core.errors import Unsupported
from quire.gateway.exchange_record import ExchangeRecord
from quire.gateway.usage import TokenUsage

VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")


def gateway_tracer(endpoint: str | None) -> "GatewayTracer | None":
    """None unless the configuration or OpenTelemetry's own environment variables name an endpoint."""
    if not endpoint and not any(os.environ.get(name) for name in VARIABLES):
        return None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise Unsupported("spans need OpenTelemetry", "pip install 'quire[otel]'") from error
    return GatewayTracer(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))


class GatewayTracer:
    def __init__(self, processor: Any) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        service = os.environ.get("OTEL_SERVICE_NAME", "quire-gateway")
        resource = Resource.create({"service.name": service, "service.version": __version__})
        self._provider = TracerProvider(resource=resource)
        self._provider.add_span_processor(processor)
        self._source = self._provider.get_tracer("quire.gateway", __version__)
        self._propagator = TraceContextTextMapPropagator()

    def begin(self, record: ExchangeRecord) -> None:
        """Workers get the span as their parent."""
        from opentelemetry.trace import SpanKind, set_span_in_context

        names = ("traceparent", "tracestate")
        given = {name: record.request.header(name.encode()) for name in names}
        record.clock_offset = time.time_ns() - int(asyncio.get_running_loop().time() * 1e9)
        record.span = self._source.start_span(
            f"{record.request.method} {record.request.path}",
            context=self._propagator.extract({name: value for name, value in given.items() if value}),
            kind=SpanKind.SERVER,
            start_time=_at(record, record.began),
        )
        carrier: dict[str, str] = {}
        self._propagator.inject(carrier, context=set_span_in_context(record.span))
        record.trace_headers = [(name.encode(), value.encode("latin-1")) for name, value in carrier.items()]

    def end(self, record: ExchangeRecord, worker: str, usage: TokenUsage, now: float) -> None:
        from opentelemetry.trace import Status, StatusCode

        span = record.span
        span.set_attributes(
            {
                "http.request.method": record.request.method,
                "url.path": record.request.path,
                "http.response.status_code": record.status,
                "gen_ai.request.model": record.facts.model or "",
                "gen_ai.response.model": record.model or "",
                "gen_ai.usage.input_tokens": usage.prompt,
                "gen_ai.usage.output_tokens": usage.output,
                "gen_ai.usage.cached_tokens": usage.cached,
                "enduser.id": record.tenant.name,
                "quire.request.id": record.id,
                "quire.worker": worker,
                "quire.attempts": record.num_attempts,
                "quire.queue_seconds": record.queue_seconds,
                "quire.predicted_hit": record.context.predicted_hit,
            }
        )
        if record.first_token is not None:
            span.add_event("first_token", timestamp=_at(record, record.first_token))
        if record.error:
            span.set_attribute("error.type", record.error)
        if record.status >= 500:
            span.set_status(Status(StatusCode.ERROR, record.error))
        span.end(_at(record, now))

    def close(self) -> None:
        """Send what is left."""
        self._provider.shutdown()


def _at(record: ExchangeRecord, loop_time: float) -> int:
    """A moment by the clock of spans, which may be set while the request runs: its own times stay in order."""
    return record.clock_offset + int(loop_time * 1e9)
