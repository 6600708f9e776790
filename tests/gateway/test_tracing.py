"""Spans of the gateway, at a real collector: below the client's, above the worker's."""

import gzip
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from gateway.gateways import Asked, answers, gateway, response, upstreams, wait_for
from quire.server.options import ServerOptions
from server.running import running as running_server

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, list[Any]]]:
    """Its address, and the spans that came."""
    from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as service

    came: list[Any] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            body = gzip.decompress(body) if self.headers.get("content-encoding") == "gzip" else body
            sent = service.ExportTraceServiceRequest.FromString(body)
            came.extend(span for of in sent.resource_spans for scope in of.scope_spans for span in scope.spans)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")  # ms
    with HTTPServer(("127.0.0.1", 0), Collector) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/v1/traces", came
        server.shutdown()
        thread.join()


def attributes(span: Any) -> dict[str, Any]:
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in span.attributes}


def test_a_request_is_a_span_between_client_and_worker(collector: tuple[str, list[Any]], tmp_path: Path) -> None:
    endpoint, came = collector
    with upstreams(answers(prompt=5, output=2)) as (one,):
        config = f'otlp_traces_endpoint = "{endpoint}"\n[[workers]]\nname = "w"\nurl = "{one.url}"\n'
        with gateway(config, folder=tmp_path) as running:
            running.chat(headers={"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "vendor=1"})
            running.chat()
            wait_for(lambda: len(came) == 2)
        first, second = (dict(asked.headers)["traceparent"].split("-") for asked in one.asked)
        states = [dict(asked.headers).get("tracestate") for asked in one.asked]
    spans = {span.span_id.hex(): span for span in came}
    assert spans.keys() == {first[2], second[2]} and first[1] == TRACE != second[1] and states == ["vendor=1", None]
    span = spans[first[2]]
    assert span.parent_span_id.hex() == PARENT and span.name == "POST /v1/chat/completions"
    shown = attributes(span)
    assert shown["quire.worker"] == "w" and shown["gen_ai.usage.output_tokens"] == 2 and shown["quire.attempts"] == 1
    [event] = span.events
    first_token = event.time_unix_nano  # the clock of the loop has whole milliseconds
    assert event.name == "first_token" and span.start_time_unix_nano <= first_token <= span.end_time_unix_nano


def test_a_trace_goes_from_the_client_to_the_steps(collector: tuple[str, list[Any]], tmp_path: Path) -> None:
    endpoint, came = collector
    with running_server(ServerOptions(otlp_traces_endpoint=endpoint)) as server:
        config = f'otlp_traces_endpoint = "{endpoint}"\n[[workers]]\nurl = "{server.url}"\n'
        with gateway(config, folder=tmp_path) as running:
            answer = running.chat("fake", max_tokens=3, headers={"traceparent": f"00-{TRACE}-{PARENT}-01"})
            assert answer.status_code == 200, answer.text
            wait_for(lambda: len(came) == 5)
    parents = {span.name: span.parent_span_id.hex() for span in came}
    ids = {span.name: span.span_id.hex() for span in came}
    assert {span.trace_id.hex() for span in came} == {TRACE}
    assert parents["POST /v1/chat/completions"] == PARENT
    assert parents["chat fake"] == ids["POST /v1/chat/completions"]
    assert {name for name, parent in parents.items() if parent == ids["chat fake"]} == {"queue", "prefill", "decode"}


def test_what_fails_is_an_error(collector: tuple[str, list[Any]], tmp_path: Path) -> None:
    endpoint, came = collector

    def broken(connection: Any, asked: Asked) -> bool:
        connection.sendall(response(b"{}", status=500))
        return True

    with upstreams(broken) as (one,):
        config = f'otlp_traces_endpoint = "{endpoint}"\n[[workers]]\nurl = "{one.url}"\n'
        with gateway(config, folder=tmp_path) as running:
            assert running.chat().status_code == 500
    [span] = came  # what was left is sent at the end
    assert span.status.code == 2 and attributes(span)["http.response.status_code"] == 500


def test_what_is_refused_is_a_span_too(collector: tuple[str, list[Any]], tmp_path: Path) -> None:
    """It began, and never ended: a client over its limits saw nothing in its traces."""
    endpoint, came = collector
    key = '[[keys]]\nname = "k"\nkey = "secret"\nrequests_per_minute = 1\n'
    with upstreams(answers()) as (one,):
        config = f'otlp_traces_endpoint = "{endpoint}"\n{key}[[workers]]\nurl = "{one.url}"\n'
        with gateway(config, folder=tmp_path) as running:
            headers = {"authorization": "Bearer secret"}
            assert [running.chat(headers=headers).status_code for _ in range(2)] == [200, 429]
    shown = [attributes(span) for span in came]
    assert [each["http.response.status_code"] for each in shown] == [200, 429]
    assert shown[1]["error.type"] == "rate_limit_exceeded"


def test_without_a_collector_the_clients_span_is_passed_on(tmp_path: Path) -> None:
    with upstreams(answers()) as (one,), gateway("", "--worker", one.url, folder=tmp_path) as running:
        running.chat(headers={"traceparent": f"00-{TRACE}-{PARENT}-01"})
        assert dict(one.asked[0].headers)["traceparent"] == f"00-{TRACE}-{PARENT}-01"
