"""OpenTelemetry: a span for each request that reached a model, and below it one for each phase of its steps. An
optional dependency, imported only if used."""

import os
import time
from collections.abc import Callable, Iterator
from typing import Any

from starlette.datastructures import Headers

from quire import __version__
from quire.core.errors import Unsupported
from quire.core.records import RequestRecord
from quire.server.access.request_context import RequestContext
from quire.server.options import ServerOptions

Trace = Callable[[RequestContext, Headers, int], None]

_OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/responses": "chat",
    "/v1/messages": "chat",
    "/api/chat": "chat",
    "/v1/completions": "text_completion",
    "/api/generate": "text_completion",
    "/generate": "text_completion",
    "/generate_stream": "text_completion",
    "/v1/embeddings": "embeddings",
    "/api/embed": "embeddings",
}


def tracer(options: ServerOptions) -> Trace | None:
    """None unless the option or OpenTelemetry's own environment variables name an endpoint."""
    variables = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
    if not options.otlp_traces_endpoint and not any(os.environ.get(name) for name in variables):
        return None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise Unsupported("spans need OpenTelemetry", "pip install 'quire[otel]'") from error
    return traced_by(BatchSpanProcessor(OTLPSpanExporter(endpoint=options.otlp_traces_endpoint)))


def traced_by(processor: Any) -> Trace:
    """Spans with OpenTelemetry's attributes of generative models, below the `traceparent` of the request."""
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    service = os.environ.get("OTEL_SERVICE_NAME", "quire")
    provider = TracerProvider(resource=Resource.create({"service.name": service, "service.version": __version__}))
    provider.add_span_processor(processor)
    source, parent = provider.get_tracer("quire", __version__), TraceContextTextMapPropagator()

    def trace(context: RequestContext, headers: Headers, status: int) -> None:
        now, wall = time.monotonic(), time.time_ns()

        def nanoseconds(moment: float) -> int:
            return wall - int((now - moment) * 1e9)

        operation = _OPERATIONS.get(context.path, "generate_content")
        span = source.start_span(
            f"{operation} {context.model}",
            context=parent.extract(headers),
            kind=SpanKind.SERVER,
            start_time=nanoseconds(context.began),
            attributes=_attributes(context, operation, status),
        )
        if context.first_token is not None:
            span.add_event("first_token", timestamp=nanoseconds(context.first_token))
        below = set_span_in_context(span)
        for name, begin, end, attributes in (phase for record in context.records for phase in phases(record)):
            child = source.start_span(name, context=below, start_time=nanoseconds(begin), attributes=attributes)
            child.end(nanoseconds(end))
        if status >= 500:
            span.set_status(Status(StatusCode.ERROR, context.error))
        span.end(wall)

    return trace


def phases(record: RequestRecord) -> Iterator[tuple[str, float, float, dict[str, Any]]]:
    """Name, begin, end and attributes: the wait for its first step, the steps of its prompt, those of its output."""
    computed = record.num_prompt_tokens - record.num_cached_tokens
    prompt = {
        "quire.request.id": record.id,
        "quire.computed_tokens": computed,
        "quire.cached_tokens": record.num_cached_tokens,
    }
    if record.admitted is not None:
        yield "queue", record.arrival, record.admitted, {"quire.request.id": record.id}
    if record.admitted is not None and record.first_token is not None:
        yield "prefill", record.admitted, record.first_token, prompt
    if record.first_token is not None and record.last_token is not None:
        output = {"quire.request.id": record.id, "quire.output_tokens": record.num_output_tokens}
        yield "decode", record.first_token, record.last_token, output


def _attributes(context: RequestContext, operation: str, status: int) -> dict[str, Any]:
    attributes: dict[str, Any] = {
        "gen_ai.provider.name": "quire",
        "gen_ai.system": "quire",  # its older name
        "gen_ai.operation.name": operation,
        "gen_ai.request.model": context.model,
        "gen_ai.response.model": context.model,
        "gen_ai.response.id": context.id,
        "gen_ai.usage.input_tokens": context.prompt_tokens,
        "gen_ai.usage.output_tokens": context.output_tokens,
        "gen_ai.response.finish_reasons": context.finish_reasons,
        "gen_ai.usage.cached_tokens": context.cached_tokens,
        "http.request.method": context.method,
        "url.path": context.path,
        "http.response.status_code": status,
        "client.address": context.client,
    }
    if context.tenant:
        attributes["enduser.id"] = context.tenant
    if context.first_token is not None:
        attributes["gen_ai.latency.time_to_first_token"] = context.first_token - context.began
    if context.error:
        attributes["error.type"] = context.error
    return attributes
