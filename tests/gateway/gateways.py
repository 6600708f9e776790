"""`quire gateway` as a process, and small upstream servers in a thread that do what a test wants."""

import json
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import httpx

SECONDS = 30  # that anything may take


@dataclass
class RunningGateway:
    process: subprocess.Popen[str]
    url: str
    admin: str
    http: httpx.Client
    said: list[str]  # lines of its log
    was_killed: bool = False

    def kill(self) -> None:
        """As a machine that goes down."""
        self.was_killed = True
        self.process.kill()

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def workers(self) -> dict[str, dict[str, object]]:
        return {worker["name"]: worker for worker in self.http.get(f"{self.admin}/workers").json()["workers"]}

    def chat(self, model: str | None = "m", content: str = "Hello", **body: object) -> httpx.Response:
        headers = body.pop("headers", {})
        named = {} if model is None else {"model": model}
        asked = {**named, "messages": [{"role": "user", "content": content}], **body}
        return self.http.post(f"{self.url}/v1/chat/completions", json=asked, headers=headers)  # type: ignore[arg-type]

    def metric(self, name: str, *labels: str) -> float:
        lines = self.http.get(f"{self.admin}/metrics").text.splitlines()
        fitting = [line for line in lines if line.split("{")[0].split(" ")[0] == f"quire_gateway_{name}"]
        return sum(float(line.split()[-1]) for line in fitting if all(label in line for label in labels))


@contextmanager
def gateway(config: str = "", *flags: str, folder: Path | None = None) -> Iterator[RunningGateway]:
    """With a configuration file if there is one in `config`, which is written to `folder`."""
    command = [sys.executable, "-m", "quire.cli.main", "gateway", "--port", "0", "--admin-port", "0", *flags]
    if config:
        assert folder is not None
        (folder / "gateway.toml").write_text(config)
        command += ["--config", str(folder / "gateway.toml")]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    said: list[str] = []
    for line in process.stderr:
        said.append(line)
        if line.strip().startswith("curl"):
            break
    addresses = re.findall(r"https?://[\d.]+:\d+", "".join(said[-2:]))
    assert len(addresses) == 2, "".join(said)
    rest = threading.Thread(target=lambda: said.extend(process.stderr or ()), daemon=True)
    rest.start()
    try:
        with httpx.Client(timeout=SECONDS) as http:
            running = RunningGateway(process, addresses[0], addresses[1], http, said)
            yield running
    finally:
        process.terminate()
        status = process.wait(SECONDS)
        rest.join()
        process.stderr.close()
    assert status == 0 or running.was_killed, "".join(said)
    assert not any("Traceback" in line for line in said), "".join(said)


def wait_for(met: Callable[[], object], seconds: float = SECONDS) -> None:
    end = time.monotonic() + seconds
    while not met():
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.01)


@dataclass
class Asked:
    """A request that an upstream got."""

    head: bytes
    body: bytes

    @property
    def line(self) -> str:
        return self.head.split(b"\r\n")[0].decode()

    @property
    def headers(self) -> list[tuple[str, str]]:
        lines = self.head.decode("latin-1").split("\r\n")[1:]
        return [(name.lower(), value.strip()) for name, _, value in (line.partition(":") for line in lines if line)]

    @property
    def json(self) -> dict[str, object]:
        return json.loads(self.body)  # type: ignore[no-any-return]


Script = Callable[[socket.socket, Asked], bool]  # -> whether the connection stays open


@dataclass
class Upstream:
    """A server of OpenAI's API: `script` answers what is posted. Health checks are answered as `healthy` says."""

    script: Script
    model: str = "m"
    healthy: bool = True
    resumes: bool = False  # as Quire's servers do
    asked: list[Asked] = field(default_factory=list)
    probes: dict[str, bytes] = field(default_factory=dict)  # other answers, by path
    listener: socket.socket | None = None  # of another host

    def __post_init__(self) -> None:
        self._listener = self.listener or socket.create_server(("127.0.0.1", 0), backlog=128)
        host, self.port = self._listener.getsockname()[:2]
        self.url = f"http://{host}:{self.port}"
        self._connections: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for connection in self._connections:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                self._connections.append(connection)
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with suppress(OSError), connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while (asked := read_request(connection)) is not None:
                if asked.line.startswith("GET"):
                    connection.sendall(self._probe(asked.line.split()[1]))
                else:
                    self.asked.append(asked)
                    if not self.script(connection, asked):
                        return

    def _probe(self, path: str) -> bytes:
        if not self.healthy:
            return response(b"{}", status=503)
        if path in self.probes:
            return self.probes[path]
        if path == "/v1/models":
            return response(json.dumps({"object": "list", "data": [{"id": self.model, "object": "model"}]}).encode())
        if path == "/ready" and self.resumes:
            return response(b"{}", extra="x-quire-resume: 1\r\n")
        return response(b"{}", status=200 if path == "/health" else 404)


def read_request(connection: socket.socket) -> Asked | None:
    data = b""
    while b"\r\n\r\n" not in data:
        more = connection.recv(65536)
        if not more:
            return None
        data += more
    head, _, body = data.partition(b"\r\n\r\n")
    match = re.search(rb"content-length: (\d+)", head, re.IGNORECASE)
    while match and len(body) < int(match[1]):
        body += connection.recv(1 << 20)
    return Asked(head, body)


def response(body: bytes, status: int = 200, media_type: str = "application/json", extra: str = "") -> bytes:
    head = f"HTTP/1.1 {status} X\r\nContent-Type: {media_type}\r\nContent-Length: {len(body)}\r\n{extra}\r\n"
    return head.encode() + body


def completion(model: str = "m", text: str = "Hi", prompt: int = 5, output: int = 2) -> bytes:
    usage = {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output}
    choices = [{"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}]
    return json.dumps(
        {"id": "c", "object": "chat.completion", "model": model, "choices": choices, "usage": usage}
    ).encode()


def answers(text: str = "Hi", prompt: int = 5, output: int = 2) -> Script:
    def script(connection: socket.socket, asked: Asked) -> bool:
        connection.sendall(response(completion(text=text, prompt=prompt, output=output)))
        return True

    return script


SSE_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def event(text: str) -> bytes:
    return b"data: " + json.dumps({"choices": [{"index": 0, "delta": {"content": text}}]}).encode() + b"\n\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def streams(*texts: str, usage: bool = True) -> Script:
    def script(connection: socket.socket, asked: Asked) -> bool:
        events = [event(text) for text in texts]
        if usage and b"include_usage" in asked.body:
            counts = {"prompt_tokens": 7, "completion_tokens": len(texts)}
            events.append(b"data: " + json.dumps({"choices": [], "usage": counts}).encode() + b"\n\n")
        events.append(b"data: [DONE]\n\n")
        connection.sendall(SSE_HEAD + b"".join(map(chunk, events)) + b"0\r\n\r\n")
        return True

    return script


@contextmanager
def upstreams(*scripts: Script, model: str = "m") -> Iterator[list[Upstream]]:
    made = [Upstream(script, model) for script in scripts]
    try:
        yield made
    finally:
        for upstream in made:
            upstream.close()
