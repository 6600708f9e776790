"""What people who run the server rely on: logs, deadlines, silence, TLS, traces."""

import gzip
import json
import logging
import re
import ssl
import subprocess
import threading
from dataclasses import fields
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from starlette.datastructures import Headers

from quire.client.one_model import OneModel
from quire.core.errors import QuireError
from quire.engine.options import EngineOptions
from quire.server.access.keys import KeyRing
from quire.server.app import create_app
from quire.server.http.listen import Listener, open_listener, reload
from quire.server.http.tcp_socket import bind, listen
from quire.server.observe.logs import JsonLines
from quire.server.observe.metrics import Metrics
from quire.server.options import ServerOptions
from quire.server.serve import configuration
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
        late = server.http.post("/v1/completions", json={"prompt": "x"}, headers={"x-request-timeout": "1e-9"})
        assert late.status_code == 504 and "deadline of the request" in late.json()["error"]["message"]
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


def certificate(folder: Path, name: str = "localhost") -> dict[str, str]:
    key, cert = folder / "key.pem", folder / "cert.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    names = ["-subj", f"/CN={name}", "-addext", "subjectAltName=IP:127.0.0.1", "-days", "2"]
    subprocess.run([*command, *names, "-keyout", key, "-out", cert], check=True, capture_output=True)
    return {"ssl_keyfile": str(key), "ssl_certfile": str(cert)}


def shown(port: int) -> bytes:
    """The certificate that the server shows."""
    return ssl.get_server_certificate(("127.0.0.1", port)).encode()


def test_tls_and_a_certificate_that_is_renewed(tmp_path: Path) -> None:
    options = ServerOptions(**certificate(tmp_path))
    service = FakeService()
    metrics = Metrics()
    config = configuration(create_app(OneModel(service), options, metrics), options, metrics)
    config.load()
    server, listener = uvicorn.Server(config), listen(bind("127.0.0.1", 0))
    thread = threading.Thread(target=lambda: server.run([listener]))
    thread.start()
    try:
        port = listener.getsockname()[1]
        url, first = f"https://127.0.0.1:{port}", Path(options.ssl_certfile or "")
        with httpx.Client(verify=ssl.create_default_context(cafile=first)) as client:
            answer = client.post(f"{url}/v1/completions", json={"prompt": "x", "stream": True})
            assert "[DONE]" in answer.text
            with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
                httpx.get(f"{url}/health")
            assert shown(port) == first.read_bytes()
            certificate(tmp_path, "renewed")
            reload(Listener(KeyRing(), listener), options, config.ssl)
            assert shown(port) == first.read_bytes() and client.get(f"{url}/health").status_code == 200
            good = first.read_bytes()
            first.write_text("nonsense")
            reload(Listener(KeyRing(), listener), options, config.ssl)
            assert shown(port) == good, "what was there stays"
    finally:
        server.should_exit = server.force_exit = True
        thread.join()


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"ssl_certfile": "/nowhere.pem"}, r"cannot use /nowhere.pem for TLS: No such file"),
        ({"ssl_certfile": __file__}, r"cannot use .*test_operating.py for TLS: .*PEM"),
        ({"ssl_keyfile": "key.pem"}, r"ssl_keyfile is given, and no ssl_certfile"),
        ({"keys_file": "/nowhere.json"}, r"cannot read /nowhere.json"),
        ({"host": "192.0.2.1"}, r"cannot listen on 192.0.2.1:8000"),
    ],
)
def test_what_is_wrong_is_told_before_a_model_is_loaded(options: dict[str, str], problem: str) -> None:
    with pytest.raises(QuireError, match=problem):
        open_listener(ServerOptions(**options))


def test_a_request_becomes_a_span(monkeypatch: pytest.MonkeyPatch) -> None:
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    from quire.server.observe import tracing

    spans = InMemorySpanExporter()
    monkeypatch.setattr("quire.server.app.tracer", lambda options: tracing.traced_by(SimpleSpanProcessor(spans)))
    trace, parent = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    with running() as server:
        body = {"prompt": "x", "max_tokens": 3}
        server.http.post("/v1/completions", json=body, headers={"traceparent": f"00-{trace}-{parent}-01"})
        server.http.get("/v1/models")
        eventually(lambda: len(spans.get_finished_spans()) == 4)
    *phases, span = spans.get_finished_spans()
    assert [phase.name for phase in phases] == ["queue", "prefill", "decode"]
    assert all(phase.parent is not None and phase.parent.span_id == span.context.span_id for phase in phases)
    moments = [span.start_time, *(moment for phase in phases for moment in (phase.start_time, phase.end_time))]
    assert moments == sorted(moments, key=lambda moment: moment or 0), "one after the other"
    assert phases[2].attributes is not None and phases[2].attributes["quire.output_tokens"] == 3
    assert span.name == "text_completion fake" and f"{span.context.trace_id:032x}" == trace
    assert span.parent is not None and f"{span.parent.span_id:016x}" == parent
    assert span.attributes is not None and span.attributes["gen_ai.usage.output_tokens"] == 3
    assert span.events[0].name == "first_token" and span.start_time < span.events[0].timestamp < span.end_time


def test_spans_reach_a_collector(monkeypatch: pytest.MonkeyPatch) -> None:
    from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as service

    came: list[tuple[str, str]] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            body = gzip.decompress(body) if self.headers.get("content-encoding") == "gzip" else body
            sent = service.ExportTraceServiceRequest.FromString(body)
            came.extend(
                (self.path, span.name) for of in sent.resource_spans for s in of.scope_spans for span in s.spans
            )
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")  # ms
    with HTTPServer(("127.0.0.1", 0), Collector) as collector:
        thread = threading.Thread(target=collector.serve_forever)
        thread.start()
        endpoint = f"http://127.0.0.1:{collector.server_port}/v1/traces"
        with running(ServerOptions(otlp_traces_endpoint=endpoint)) as server:
            server.chat()
            server.complete(prompt="!full")
            eventually(lambda: len(came) == 5)
        collector.shutdown()
        thread.join()
    names = ["queue", "prefill", "decode", "chat fake", "text_completion fake"]
    assert came == [("/v1/traces", name) for name in names], "what was refused had no steps"


def test_spans_are_off_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    from quire.server.observe.tracing import tracer

    monkeypatch.delenv("OTEL_EXPORTER_OTLP_ENDPOINT", raising=False)
    assert tracer(ServerOptions()) is None


OPERATING = Path(__file__).parents[2] / "docs" / "operating.md"


def test_the_page_names_flags_that_exist() -> None:
    known = {f"--{spec.name.replace('_', '-')}" for kind in (ServerOptions, EngineOptions) for spec in fields(kind)}
    named = set(re.findall(r"`(--[a-z-]+)", OPERATING.read_text()))
    assert len(named) > 20 and named <= known | {"--log-format"}, named - known


def test_the_keys_of_the_page_can_be_read(tmp_path: Path) -> None:
    [example] = re.findall(r"```toml\n(.*?)```", OPERATING.read_text(), re.DOTALL)
    file = tmp_path / "keys.toml"
    file.write_text(example)
    found = KeyRing([], str(file)).find(Headers({"x-api-key": "password"}))
    assert found is not None and found.name == "nightly" and found.models == {"embed"}
