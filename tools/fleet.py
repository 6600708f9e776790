"""A fleet on this machine, without containers: a gateway, two engines, Redis and Prometheus where they are installed.

    make fleet                                  the default model, until Ctrl-C; prints what to open
    make fleet MODEL=qwen2.5-0.5b
    python tools/fleet.py --check               ask it something, look whether metrics arrive, and end
    python tools/fleet.py -- --threads 1        what follows -- are flags of `quire serve`

Everything listens on this machine alone. Configurations and logs are in a temporary folder, removed at the end."""

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).parents[1]
SECONDS_TO_START = 300.0  # the first time, the model is downloaded
SECONDS_TO_SHOW = 30.0  # until what was asked is in Prometheus
# Metrics that this fleet does not have: its engines have no GPUs and no keys of their own.
WITHOUT_DATA = ("quire_gpu_", "quire_tenant_", "quire_kv_transfer_")
PACKAGES = {"redis": "redis-server", "prometheus": "prometheus"}  # of Debian and Ubuntu
CHECK_KEY = "check"
HEADERS = {"content-type": "application/json", "authorization": f"Bearer {CHECK_KEY}"}
QUIRE = [sys.executable, "-m", "quire.cli.main"]


@dataclass(frozen=True)
class Ports:
    """All from one number on, so that several fleets can run beside each other."""

    base: int

    gateway = property(lambda self: self.base)
    admin = property(lambda self: self.base + 1)
    redis = property(lambda self: self.base + 2)
    prometheus = property(lambda self: self.base + 3)

    def engine(self, number: int) -> int:
        return self.base + 10 + 10 * number

    def events(self, number: int) -> tuple[str, str]:
        first = self.engine(number) + 1
        return f"tcp://127.0.0.1:{first}", f"tcp://127.0.0.1:{first + 1}"


class Part:
    """One process of the fleet."""

    def __init__(self, name: str, command: list[str], folder: Path) -> None:
        self.name, self.log = name, folder / f"{name}.log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, cwd=folder, start_new_session=True)

    def check(self) -> None:
        if self.process.poll() is not None:
            lines = self.log.read_text(errors="replace").splitlines()[-20:]
            raise SystemExit("\n".join([f"{self.name} has ended with {self.process.returncode}:", *lines]))

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)

    def wait(self) -> None:
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


def gateway_config(ports: Ports, model: str, num_engines: int, has_events: bool, has_redis: bool, key: str = "") -> str:
    """`key`: the only one, with a budget; without one, everyone may ask."""
    lines = [f"port = {ports.gateway}", f"admin_port = {ports.admin}", 'policy = "cache_aware"']
    if has_redis:
        lines += ["[redis]", f'url = "redis://127.0.0.1:{ports.redis}/0"']
    if key:
        lines += ["[[keys]]", 'name = "check"', f'key = "{key}"', "monthly_budget = 1.0"]
    lines += ["[models.fleet]", f'targets = [{{model = "{served_name(model)}"}}]']
    lines += [f'[models."{served_name(model)}"]', "price = {prompt = 0.1, cached = 0.05, output = 0.2}"]
    if has_events:
        lines += [f"tokenizer = {json.dumps(model)}"]
    for number in range(num_engines):
        lines += ["[[workers]]", f'name = "engine-{number}"', f'url = "http://127.0.0.1:{ports.engine(number)}"']
        if has_events:
            events, replay = ports.events(number)
            lines += [f'kv_events = "{events}"', f'kv_replay = "{replay}"']
    return "\n".join(lines) + "\n"


def served_name(model: str) -> str:
    return Path(model).name.lower()


def prometheus_config(ports: Ports, num_engines: int) -> str:
    engines = [f"127.0.0.1:{ports.engine(number)}" for number in range(num_engines)]
    config = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(path) for path in sorted((ROOT / "deploy" / "prometheus").glob("*alerts.yml"))],
        "scrape_configs": [
            {"job_name": "quire", "static_configs": [{"targets": engines}]},
            {"job_name": "quire-gateway", "static_configs": [{"targets": [f"127.0.0.1:{ports.admin}"]}]},
        ],
    }
    return json.dumps(config, indent=2)  # which is YAML, too


def engine_command(ports: Ports, number: int, model: str, has_events: bool, flags: list[str]) -> list[str]:
    command = [*QUIRE, "serve", model, "--port", str(ports.engine(number)), "--served-model-name", served_name(model)]
    command += ["--kv-disk-path", "blocks", "--kv-disk-size", "1", "--kv-disk-write-policy", "write_through"]
    if has_events:
        events, replay = ports.events(number)
        config = {"enable_kv_cache_events": True, "endpoint": events, "replay_endpoint": replay}
        command += ["--kv-events-config", json.dumps(config)]
    return [*command, *flags]


@contextmanager
def fleet(ports: Ports, model: str, num_engines: int, flags: list[str], key: str = "") -> Iterator[dict[str, Part]]:
    """Started, and ready. What is not installed is left out."""
    redis, prometheus = shutil.which("redis-server"), shutil.which("prometheus")
    has_events = find_spec("zmq") is not None
    parts: dict[str, Part] = {}
    with tempfile.TemporaryDirectory(prefix="quire-fleet-") as name:
        folder = Path(name)
        try:
            for number in range(num_engines):
                command = engine_command(ports, number, model, has_events, flags)
                parts[f"engine-{number}"] = Part(f"engine-{number}", command, folder)
            if redis:
                command = [redis, "--port", str(ports.redis), "--bind", "127.0.0.1", "--save", ""]
                parts["redis"] = Part("redis", command, folder)
            config = gateway_config(ports, model, num_engines, has_events, bool(redis), key)
            (folder / "gateway.toml").write_text(config)
            parts["gateway"] = Part("gateway", [*QUIRE, "gateway", "--config", "gateway.toml"], folder)
            if prometheus:
                (folder / "prometheus.yml").write_text(prometheus_config(ports, num_engines))
                listen = f"--web.listen-address=127.0.0.1:{ports.prometheus}"
                command = [prometheus, "--config.file=prometheus.yml", "--storage.tsdb.path=data", listen]
                parts["prometheus"] = Part("prometheus", command, folder)
            wait_until_ready(parts, ports, num_engines)
            yield parts
        finally:
            for part in reversed(parts.values()):
                part.stop()
            for part in parts.values():
                part.wait()


def wait_until_ready(parts: dict[str, Part], ports: Ports, num_engines: int) -> None:
    end, shown = time.monotonic() + SECONDS_TO_START, -1
    while (ready := num_ready(ports)) < num_engines:
        for part in parts.values():
            part.check()
        if ready != shown:
            print(f"{ready} of {num_engines} engines are ready", file=sys.stderr, flush=True)
            shown = ready
        if time.monotonic() > end:
            raise SystemExit(f"{ready} of {num_engines} engines were ready within {SECONDS_TO_START:.0f} s")
        time.sleep(0.2)


def num_ready(ports: Ports) -> int:
    try:
        workers = get(f"http://127.0.0.1:{ports.admin}/workers")["workers"]
    except OSError:
        return 0
    return sum(worker["state"] == "ready" for worker in workers)


def get(url: str, body: dict[str, object] | None = None) -> dict[str, list[dict[str, object]]]:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, HEADERS)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)  # type: ignore[no-any-return]


def what_to_open(parts: dict[str, Part], ports: Ports) -> str:
    lines = [
        ("chat", f"http://127.0.0.1:{ports.engine(0)}/"),
        ("the fleet", f"http://127.0.0.1:{ports.admin}/"),
        ("workers", f"curl http://127.0.0.1:{ports.admin}/workers"),
        ("metrics", f"curl http://127.0.0.1:{ports.admin}/metrics"),
    ]
    if "prometheus" in parts:
        lines.append(("Prometheus", f"http://127.0.0.1:{ports.prometheus}/alerts"))
    body = json.dumps({"model": "fleet", "max_tokens": 32, "messages": [{"role": "user", "content": "Hello"}]})
    asked = f"-H 'Content-Type: application/json' -d '{body}'"
    lines.append(("ask", f"curl http://127.0.0.1:{ports.gateway}/v1/chat/completions {asked}"))
    missing = [f"{each} (apt install {package})" for each, package in PACKAGES.items() if each not in parts]
    if find_spec("zmq") is None:
        missing.append("pyzmq (KV events: pip install 'quire[events]')")
    if missing:
        lines.append(("left out", f"{', '.join(missing)}: not installed"))
    return "\n".join(f"{name + ':':12} {what}" for name, what in lines)


def check(parts: dict[str, Part], ports: Ports) -> None:
    """Raises SystemExit unless the fleet answers, its metrics arrive, and every panel of the dashboards shows some."""
    asked: dict[str, object] = {"model": "fleet", "max_tokens": 4, "messages": [{"role": "user", "content": "Hello"}]}
    for _ in range(4):
        answer = get(f"http://127.0.0.1:{ports.gateway}/v1/chat/completions", asked)
        print(f"answered: {answer['choices'][0]['message']['content']!r}")  # type: ignore[index]
    if "prometheus" in parts:
        if promtool := shutil.which("promtool"):
            folder = parts["prometheus"].log.parent
            print(
                subprocess.check_output([promtool, "check", "config", "prometheus.yml"], cwd=folder, text=True).strip()
            )
        for query in ("quire_gateway_requests_total", "quire_gateway_worker_ready == 1", "quire_num_requests_running"):
            wait_for_data(ports, query)
        if "redis" in parts:
            wait_for_data(ports, "quire_gateway_redis_away == 0")
        check_dashboards(ports)


def ask_in_every_way(ports: Ports, turn: int) -> None:
    """So that every metric of gateway and engines moves: streams, a prompt that is cached, and mistakes."""
    text = f"Tell me about the number {turn}. " + "It may be a long story of the sea. " * 20
    asked: dict[str, object] = {"model": "fleet", "max_tokens": 8, "messages": [{"role": "user", "content": text}]}
    unknown = {**asked, "model": "none"}
    engine = ports.engine(turn % 2)
    for port, body in ((ports.gateway, asked), (ports.gateway, {**asked, "stream": True}), (engine, unknown)):
        ask(port, body)
    ask(ports.gateway, unknown)


def ask(port: int, body: dict[str, object]) -> None:
    url, data = f"http://127.0.0.1:{port}/v1/chat/completions", json.dumps(body).encode()
    try:
        with urllib.request.urlopen(urllib.request.Request(url, data, HEADERS), timeout=60) as answer:
            answer.read()
    except urllib.error.HTTPError as error:
        if error.code != 404:  # of a model that is not there
            raise


def dashboard_queries() -> list[str]:
    files = sorted((ROOT / "deploy" / "grafana").glob("*.json"))
    found = [each for file in files for each in re.findall(r'"expr": ("(?:[^"\\]|\\.)*")', file.read_text())]
    return [json.loads(each).replace("$__rate_interval", "10s").replace("$model", ".*") for each in found]


def check_dashboards(ports: Ports) -> None:
    """Every query of the dashboards is one that Prometheus takes, and has data once requests of all kinds came."""
    queries = dashboard_queries()
    waiting = [query for query in queries if not any(name in query for name in WITHOUT_DATA)]
    end, turn = time.monotonic() + SECONDS_TO_SHOW, 0
    while waiting and time.monotonic() < end:
        ask_in_every_way(ports, turn)
        waiting = [query for query in waiting if not series(ports, query)]
        turn += 1
    for query in queries:
        series(ports, query)  # those without data are good queries, too
    if waiting:
        raise SystemExit("\n  ".join(["queries of dashboards without data:", *waiting]))
    print(
        f"{len(queries)} queries of dashboards are good; all that need no GPU, no keys and no prefill engines have data"
    )


def series(ports: Ports, query: str) -> list[dict[str, object]]:
    url = f"http://127.0.0.1:{ports.prometheus}/api/v1/query?query={urllib.parse.quote(query)}"
    return get(url)["data"]["result"]  # type: ignore[call-overload, no-any-return]


def wait_for_data(ports: Ports, query: str) -> None:
    end = time.monotonic() + SECONDS_TO_SHOW
    while time.monotonic() < end:
        try:
            found = series(ports, query)
        except urllib.error.URLError:
            found = []
        if found:
            print(f"{query}: {len(found)} series")
            return
        time.sleep(0.2)
    raise SystemExit(f"Prometheus has no data for {query}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--engines", type=int, default=2)
    parser.add_argument("--port", type=int, default=8080, help="of the gateway; the others follow it (default: 8080)")
    parser.add_argument("--check", action="store_true", help="ask something, look at the metrics, and end")
    given = sys.argv[1:]
    own = given.index("--") if "--" in given else len(given)
    args = parser.parse_args(given[:own])
    threads = str(max((os.cpu_count() or 2) // args.engines, 1))
    flags = given[own + 1 :] or ["--threads", threads, "--kv-cache-memory-bytes", "256MiB"]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    ports = Ports(args.port)
    try:
        with fleet(ports, args.model, args.engines, flags, CHECK_KEY if args.check else "") as parts:
            print(what_to_open(parts, ports), flush=True)
            if args.check:
                check(parts, ports)
                return
            while True:
                for part in parts.values():
                    part.check()
                time.sleep(0.5)
    except KeyboardInterrupt:
        print("the fleet has ended", file=sys.stderr)


if __name__ == "__main__":
    main()
