"""Repositories are pulled and checked. The hub is a server of this test; nothing uses the network."""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from engine.tiny_encoders import save_encoder
from hub.fake_hub import REPO, Hub, fake_hub
from hub.wheels import BODY
from quire import Embedder
from quire.core.errors import QuireError
from quire.hub.preflight import check_config
from quire.weights.sentence_modules import SentenceModules, read_sentence_modules
from weights.gguf_files import write_llama


def test_offline_the_hub_cache_is_used(tmp_path: Path) -> None:
    """In a process of its own: the hub's library reads its settings once, when it is imported."""
    repo = tmp_path / "hf" / "hub" / "models--owner--tiny"
    snapshot = repo / "snapshots" / "0123abc"
    snapshot.mkdir(parents=True)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("0123abc")
    (snapshot / "tiny-Q8_0.gguf").write_bytes(BODY)
    code = """
from quire.core.errors import UnknownModel
from quire.hub import cached_models, resolve_model
print(resolve_model('owner/tiny:Q8_0').path.name, resolve_model('owner/tiny').name, cached_models()[0].name)
try:
    resolve_model('owner/absent')
except UnknownModel as error:
    print(error.message.splitlines()[-1])
"""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    lines = done.stdout.splitlines()
    assert lines[:1] == ["tiny-Q8_0.gguf owner/tiny owner/tiny"], done.stderr
    assert "owner/absent is not in its cache" in lines[1]


LLAMA = {"architectures": ["LlamaForCausalLM"], "hidden_act": "silu", "hidden_size": 64, "intermediate_size": 64}
LLAMA |= {"num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 64, "max_position_embeddings": 64}
PULL = [sys.executable, "-m", "quire.client.pull_process", REPO]


def test_a_repository_is_pulled_whole_checked_and_once(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "config.json").write_text(json.dumps(LLAMA))
    save_file({"x": np.zeros(4096, np.float32)}, source / "model.safetensors")
    weights = (source / "model.safetensors").read_bytes()
    (source / "modeling.py").write_text("raise AssertionError('code was fetched')")
    with fake_hub(source) as hub:
        environment = {**os.environ, "HF_ENDPOINT": hub.url}

        def pull(**more: str) -> list[dict[str, object]]:
            done = subprocess.run(PULL, capture_output=True, text=True, env=environment | more)
            assert done.stderr == ""
            return [json.loads(line) for line in done.stdout.splitlines()]

        hub.lies = True
        [*_, refused] = pull()
        assert refused["error"][0] == "download_failed" and "it should be 0000" in refused["error"][2]  # type: ignore[index]
        hub.lies = False
        [*progress, end] = pull()
        total = len(weights)  # the other file was kept
        assert progress[-1] == {"sha256": hashlib.sha256(weights).hexdigest(), "total": total, "done": total}
        folder = Path(str(end["path"]))
        assert sorted(file.name for file in folder.iterdir()) == ["config.json", "model.safetensors"]
        sent = sorted(hub.sent)
        assert sent == ["config.json", "model.safetensors", "model.safetensors"], "what was refused was not kept"
        assert pull() == [end] and sorted(hub.sent) == sent
        (folder / "config.json").resolve().write_text('{"architectures": ["Nobody"]}')
        assert "Nobody" in pull()[-1]["error"][2]  # type: ignore[index]
        (folder / "config.json").resolve().write_text(json.dumps(LLAMA))
        assert pull(HF_HUB_OFFLINE="1") == [end], "only some files of the repository are here, and that is enough"


def pulled(hub: Hub, name: str = REPO) -> dict[str, object]:
    """What the process that pulls reports in the end."""
    command = [sys.executable, "-m", "quire.client.pull_process", name]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "HF_ENDPOINT": hub.url})
    end: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return end


def test_a_model_that_is_not_supported_is_refused_before_its_weights_come(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "config.json").write_text(json.dumps(LLAMA | {"architectures": ["RwkvForCausalLM"]}))
    (source / "model.safetensors").write_bytes(bytes(4096))
    with fake_hub(source) as hub:
        assert "the architecture `RwkvForCausalLM` is not supported" in str(pulled(hub)["error"])
        assert hub.sent == ["config.json"]


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"hidden_act": "quadratic"}, "hidden_act is 'quadratic'"),
        ({"quantization_config": {"quant_method": "aqlm"}}, "quant_method is 'aqlm'"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000"),
        ({"architectures": None}, "architectures is missing"),
    ],
)
def test_what_config_json_alone_tells_is_checked_first(
    tmp_path: Path, changed: dict[str, object], problem: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | changed))
    with pytest.raises(QuireError, match=problem):
        check_config(tmp_path)


def test_a_gguf_file_that_is_not_supported_is_refused_by_its_first_bytes(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    write_llama(source / "m-Q8_0.gguf", {"x": np.zeros((200, 256), np.float32)}, arch="rwkv6")
    with fake_hub(source) as hub:
        assert "m-Q8_0.gguf is of the architecture 'rwkv6'" in str(pulled(hub, f"{REPO}:Q8_0")["error"])
        assert hub.sent == ["the beginning of m-Q8_0.gguf"]


def test_an_embedder_that_is_pulled_pools_as_it_says(tmp_path: Path) -> None:
    source = tmp_path / "source"
    save_encoder(source)
    with fake_hub(source) as hub:
        folder = Path(str(pulled(hub)["path"]))
    assert read_sentence_modules(folder) == read_sentence_modules(source) != SentenceModules()
    given, repository = Embedder(source, threads=1), Embedder(folder, threads=1)
    assert np.array_equal(given.embed(["paper"]), repository.embed(["paper"]))
