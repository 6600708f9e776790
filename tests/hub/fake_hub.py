"""As much of the Hugging Face hub as its library needs to download one repository, `owner/tiny`, from a directory."""

import hashlib
import json
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"
REPO = "owner/tiny"


class Hub(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.folder = folder
        self.lies = False  # about digests
        self.hangs = threading.Event()  # in the middle of files, until it is cleared
        self.sent: list[str] = []  # names of files
        self.num_left = 0  # downloads that their client gave up

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def entry(self, file: Path) -> dict[str, object]:
        digest = "0" * 64 if self.lies else hashlib.sha256(file.read_bytes()).hexdigest()
        size = file.stat().st_size
        large = file.suffix in (".safetensors", ".gguf", ".bin")
        lfs = {"oid": digest, "sha256": digest, "size": size, "pointerSize": 130}
        return {"size": size, "oid": hashlib.sha1(file.read_bytes()).hexdigest()} | ({"lfs": lfs} if large else {})


class _Handler(BaseHTTPRequestHandler):
    server: Hub

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        files = {
            file.relative_to(self.server.folder).as_posix(): file
            for file in sorted(self.server.folder.rglob("*"))
            if file.is_file()
        }
        if path in (f"/api/models/{REPO}", f"/api/models/{REPO}/revision/main"):
            siblings = [{"rfilename": name, **self.server.entry(file)} for name, file in files.items()]
            self._json({"id": REPO, "sha": COMMIT, "siblings": siblings})
        elif path == f"/api/models/{REPO}/tree/{COMMIT}":
            self._json([{"type": "file", "path": name, **self.server.entry(file)} for name, file in files.items()])
        elif path.startswith(f"/{REPO}/resolve/"):
            name = path.removeprefix(f"/{REPO}/resolve/").partition("/")[2]
            self._file(name, files[name])
        else:
            self.send_response(404)
            self.send_header("X-Error-Code", "RepoNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()

    def _json(self, value: object) -> None:
        body = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def _file(self, name: str, file: Path) -> None:
        body = file.read_bytes()
        digest = hashlib.sha256(body).hexdigest()
        part = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if part is not None:
            body = body[int(part[1]) : int(part[2]) + 1]
        self.send_response(200 if part is None else 206)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("ETag", f'"{digest}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.end_headers()
        if self.command != "GET":
            return
        try:
            self.server.sent.append(name if part is None else f"the beginning of {name}")
            self.wfile.write(body[: len(body) // 2])
            while self.server.hangs.is_set():
                time.sleep(0.02)
                self.wfile.write(b"")
                self.connection.settimeout(0.001)
                try:
                    if self.connection.recv(1) == b"":
                        raise ConnectionResetError
                except TimeoutError:
                    continue
                finally:
                    self.connection.settimeout(None)
            self.wfile.write(body[len(body) // 2 :])
        except ConnectionError:
            self.server.num_left += 1

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def fake_hub(folder: Path) -> Iterator[Hub]:
    with Hub(folder) as hub:
        thread = threading.Thread(target=hub.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield hub
        finally:
            hub.hangs.clear()
            hub.shutdown()
            thread.join()
