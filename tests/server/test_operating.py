"""What people who run the server rely on: logs, deadlines, silence, TLS, traces."""

import json
import logging
import ssl
import subprocess
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn

from quire.engine.models import OneModel
from quire.server.app import create_app
from quire.server.logs import JsonLines
from quire.server.options import ServerOptions
from quire.server.serve import listen
from server.fake_service import FakeService
from server.running import running
from server.test_leaving import eventually


def lines(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    return [json.loads(JsonLines().format(record)) for record in caplog.records if record.name == "quire.access"]


def test_every_request_is_a_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "quire.access")
    with running(ServerOptions(access_log=True, api_key=["k"])) as server:
        server.http.headers["authorization"] = "Bearer k"
        server.complete(prompt=["a", "b"], max_tokens=3)
        server.http.post("/v1/completions", json={"prompt": "x", "stream": True}, headers={"x-request-id": "mine"})
        server.complete(prompt="!full")
        server.http.get("/nothing%0aINFO%20forged", headers={"authorization": ""})
        eventually(lambda: len(lines(caplog)) == 4)
    whole, streamed, full, unknown = lines(caplog)
    assert whole["model"] == "fake" and whole["tenant"] == "key-0" and whole["status"] == 200
    assert (whole["prompt_tokens"], whole["output_tokens"], whole["cached_tokens"]) == (4, 6, 8)
    assert whole["finish_reasons"] == ["stop", "stop"] and 0 < whole["ttft"] < whole["seconds"]
    assert streamed["request_id"] == "mine" and streamed["output_tokens"] > 10
    assert full["status"] == 429 and full["error"] == "queue_full"
    assert unknown["status"] == 401 and unknown["path"] == "/nothing%0aINFO%20forged"
    text = [record.getMessage() for record in caplog.records if record.name == "quire.access"]
    assert text[0].startswith("POST /v1/completions 200 request_id=") and "\n" not in "".join(text)


def test_json_lines_hold_tracebacks() -> None:
    try:
        raise ValueError("no")
    except ValueError:
        record = logging.getLogger("x").makeRecord("x", 40, "f", 1, "it %s", ("broke",), exc_info=True)
        record.exc_info = __import__("sys").exc_info()
    line = json.loads(JsonLines().format(record))
    assert line["message"] == "it broke" and "ValueError: no" in line["exception"] and line["time"].endswith("Z")


def test_a_request_has_the_time_it_asks_for_but_no_more_than_the_server_gives() -> None:
    with running(ServerOptions(request_timeout=5.0)) as server:
        times = []
        for headers in ({}, {"x-request-timeout": "2"}, {"x-request-timeout": "60"}):
            server.http.post("/v1/completions", json={"prompt": "x"}, headers=headers)
            times.append(server.service.seen[-1].timeout)
        assert 4 < times[0] <= 5 and 1 < times[1] <= 2 and 4 < times[2] <= 5
        for wrong in ("soon", "-1", "nan"):
            assert (
                server.http.post("/tokenize", json={"prompt": "x"}, headers={"x-request-timeout": wrong}).status_code
                == 400
            )


def test_a_silent_stream_is_kept_alive() -> None:
    with (
        running(ServerOptions(sse_keep_alive=0.02)) as server,
        server.http.stream("POST", "/v1/completions", json={"prompt": "!hang", "stream": True}) as response,
    ):
        seen = []
        for line in response.iter_lines():
            seen.append(line)
            if seen.count(": keep-alive") == 3:
                break
        assert sum(line.startswith("data:") for line in seen) == 2


def test_a_stream_that_talks_is_sent_no_comments() -> None:
    with running(ServerOptions(sse_keep_alive=10)) as server:
        assert ": keep-alive" not in server.complete(stream=True).text


def test_tls(tmp_path: Path) -> None:
    key, cert = tmp_path / "key.pem", tmp_path / "cert.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1", "-days", "2"]
    subprocess.run([*command, *names, "-keyout", key, "-out", cert], check=True, capture_output=True)
    listener = listen("127.0.0.1", 0)
    config = uvicorn.Config(
        create_app(OneModel(FakeService()), ServerOptions()),
        lifespan="off",
        ws="none",
        log_config=None,
        ssl_keyfile=str(key),
        ssl_certfile=str(cert),
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=lambda: server.run([listener]))
    thread.start()
    try:
        url = f"https://127.0.0.1:{listener.getsockname()[1]}"
        with httpx.Client(verify=ssl.create_default_context(cafile=cert)) as client:
            answer = client.post(f"{url}/v1/completions", json={"prompt": "x", "stream": True})
            assert "[DONE]" in answer.text
        with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
            httpx.get(f"{url}/health")
    finally:
        server.should_exit = server.force_exit = True
        thread.join()


def test_a_request_becomes_a_span(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("opentelemetry.sdk")
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    from quire.server import tracing

    spans = InMemorySpanExporter()
    monkeypatch.setattr("quire.server.app.tracer", lambda options: tracing.traced_by(SimpleSpanProcessor(spans)))
    trace, parent = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    with running() as server:
        body = {"prompt": "x", "max_tokens": 3}
        server.http.post("/v1/completions", json=body, headers={"traceparent": f"00-{trace}-{parent}-01"})
        server.http.get("/v1/models")
        eventually(lambda: spans.get_finished_spans())
    [span] = spans.get_finished_spans()
    assert span.name == "text_completion fake" and f"{span.context.trace_id:032x}" == trace
    assert span.parent is not None and f"{span.parent.span_id:016x}" == parent
    assert span.attributes is not None and span.attributes["gen_ai.usage.output_tokens"] == 3
    assert span.events[0].name == "first_token" and span.start_time < span.events[0].timestamp < span.end_time


def test_spans_are_off_unless_somebody_wants_them(monkeypatch: pytest.MonkeyPatch) -> None:
    from quire.server.tracing import tracer

    monkeypatch.delenv("OTEL_EXPORTER_OTLP_ENDPOINT", raising=False)
    assert tracer(ServerOptions()) is None
