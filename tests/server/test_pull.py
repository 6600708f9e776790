"""Ollama's /api/pull, from a hub that is a directory, into a server that generates with what came."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import ollama
import pytest

from hub.fake_hub import REPO, Hub, fake_hub
from page.serving import served_many
from quire.client.pulls import source
from quire.server.options import ServerOptions
from server.running import running


@pytest.fixture(scope="module")
def hub(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hub]:
    with fake_hub(tiny_model) as hub, pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_ENDPOINT", hub.url)
        patch.setenv("HF_HOME", str(tmp_path_factory.mktemp("hf")))
        patch.delenv("HF_HUB_CACHE", raising=False)
        yield hub


def _until(holds: Callable[[], bool], otherwise: str) -> None:
    end = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < end, otherwise
        time.sleep(0.01)


def test_a_model_is_pulled_and_used(hub: Hub, tiny_model: Path) -> None:
    options = ServerOptions(allow_pull=True)
    with served_many(tiny_model, ["first"], 2, options) as server, ollama.Client(server.url) as client:
        hub.hangs.set()  # who leaves in the middle gives it up
        with server.http.stream("POST", "/api/pull", json={"model": REPO}) as leaving:
            lines = leaving.iter_lines()  # with the last reference to it, the connection would go
            next(line for line in lines if "total" in line)
            _until(lambda: len(hub.sent) > 0, "no download began")
        _until(lambda: hub.num_left > 0, "the download went on without anybody")
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
        for path in (str(tiny_model), "../..", "a/b:\0", "a/b:" + "x" * 2000):  # nothing of this machine is looked at
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
