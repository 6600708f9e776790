"""Ollama's /api/pull, from a hub that is a directory, into a server that generates with what came."""

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import ollama
import pytest
import uvicorn

from engine.fake_hub import REPO, Hub, fake_hub
from quire.engine.many_models import ManyModels
from quire.engine.options import EngineOptions
from quire.engine.pulls import source
from quire.server.app import create_app
from quire.server.doors import bind, listen
from quire.server.metrics import Metrics
from quire.server.options import ServerOptions
from quire.server.serve import configuration
from server.running import running


@pytest.fixture(scope="module")
def hub(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hub]:
    with fake_hub(tiny_model) as hub, pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_ENDPOINT", hub.url)
        patch.setenv("HF_HOME", str(tmp_path_factory.mktemp("hf")))
        patch.delenv("HF_HUB_CACHE", raising=False)
        yield hub


@contextmanager
def many_models(tiny_model: Path) -> Iterator[str]:
    """The address of a server with one model, that may fetch others."""
    listener = listen(bind("127.0.0.1", 0))
    options = ServerOptions(allow_pull=True)
    servers: list[uvicorn.Server] = []
    begun = threading.Event()

    async def main() -> None:
        engine = EngineOptions(model=str(tiny_model), threads=1)
        try:
            async with ManyModels({"first": engine}, 2) as models:
                metrics = Metrics()
                app = create_app(models, options, metrics)
                servers.append(uvicorn.Server(configuration(app, options, metrics)))
                begun.set()
                await servers[0].serve([listener])
        finally:
            begun.set()

    thread = threading.Thread(target=lambda: asyncio.run(main()))
    thread.start()
    begun.wait()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        servers[0].should_exit = servers[0].force_exit = True
        thread.join()


def test_a_model_is_pulled_and_used(hub: Hub, tiny_model: Path) -> None:
    with many_models(tiny_model) as address, ollama.Client(address) as client:
        hub.hangs.set()  # who leaves in the middle gives it up
        with httpx.stream("POST", f"{address}/api/pull", json={"model": REPO}) as leaving:
            next(line for line in leaving.iter_lines() if "total" in line)
        end = time.monotonic() + 20
        while not hub.num_left:
            assert time.monotonic() < end, "the download went on without anybody"
            time.sleep(0.01)
        hub.hangs.clear()

        told = list(client.pull(REPO, stream=True))
        assert [told[0].status, told[-1].status] == ["pulling manifest", "success"]
        last = [progress for progress in told if progress.total][-1]
        assert last.completed == last.total and last.digest is not None and last.digest.startswith("sha256:")
        assert last.status == f"pulling {last.digest[7:19]}"

        assert {model.model for model in client.list().models} == {"first", REPO}
        asked = {"options": {"num_predict": 4, "temperature": 0}, "raw": True}
        answers = [client.generate(name, "Words", **asked).response for name in ("first", f"{REPO}:latest")]
        assert answers[0] == answers[1] and answers[0]
        assert client.pull(REPO).status == "success"
        with pytest.raises(ollama.ResponseError, match="no repository owner/nobody"):
            list(client.pull("owner/nobody", stream=True))
        for path in (str(tiny_model), "../.."):  # nothing of this machine is ever looked at
            with pytest.raises(ollama.ResponseError, match="owner/name") as caught:
                client.pull(path)
            assert caught.value.status_code == 404


def test_without_the_flag_nothing_is_fetched() -> None:
    with running() as server, ollama.Client(server.url) as client:
        with pytest.raises(ollama.ResponseError, match="--allow-pull") as caught:
            client.pull("llama3.2-1b")
        assert caught.value.status_code == 403
        assert [progress.status for progress in client.pull("fake", stream=True)][-1] == "success"


@pytest.mark.parametrize(
    ("name", "means"),
    [
        ("smollm2:360m", "smollm2-360m"),
        ("hf.co/Qwen/Qwen2.5-0.5B-Instruct-GGUF:Q4_K_M", "Qwen/Qwen2.5-0.5B-Instruct-GGUF:Q4_K_M"),
        ("owner/smollm2:360m", "owner/smollm2:360m"),
    ],
)
def test_names_as_ollama_has_them(name: str, means: str) -> None:
    assert source(name) == means
