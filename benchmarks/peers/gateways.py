"""Other gateways, from the package index, before one worker that serves the model `m`."""

import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

from benchmarks.processes import Running

SECONDS_TO_START = 120.0
# No list of prices from elsewhere, and no keys: no gateway has any here.
ENVIRONMENT = {
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "LITELLM_LOG": "ERROR",
    "LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY": "true",
}

Command = Callable[[str, str, int, int, Path], list[str]]  # program, worker, port, another port, a folder


def _litellm(program: str, worker: str, port: int, _: int, folder: Path) -> list[str]:
    served = {"model": "openai/m", "api_base": f"{worker}/v1", "api_key": "none"}
    config = {"model_list": [{"model_name": "m", "litellm_params": served}], "litellm_settings": {"telemetry": False}}
    (folder / "litellm.yaml").write_text(json.dumps(config))  # which is YAML, too
    return [program, "--config", str(folder / "litellm.yaml"), "--host", "127.0.0.1", "--port", str(port)]


def _router(program: str, worker: str, port: int, metrics: int, _: Path) -> list[str]:
    words = ["launch"] if Path(program).name == "smg" else []
    words += ["--host", "127.0.0.1", "--port", str(port), "--worker-urls", worker, "--policy", "round_robin"]
    return [program, *words, "--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics)]


GATEWAYS: dict[str, Command] = {"litellm": _litellm, "vllm-router": _router, "smg": _router}


def wait_until_it_answers(url: str, body: bytes, process: Running) -> float:
    """-> seconds from its start to its first answer"""
    assert urlsplit(url).hostname == "127.0.0.1"
    headers = {"content-type": "application/json"}
    while time.perf_counter() < process.started + SECONDS_TO_START:
        process.check()
        request = urllib.request.Request(f"{url}/v1/chat/completions", body, headers)
        try:
            with urllib.request.urlopen(request, timeout=5):
                return time.perf_counter() - process.started
        except OSError:
            time.sleep(0.005)
    raise SystemExit(f"it did not answer within {SECONDS_TO_START:.0f} s:\n{process.said()}")
