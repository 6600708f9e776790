"""A repository is planned by its headers. The hub is a server of this test; nothing uses the network."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from benchmarks.hollow_files import write_llama_gguf
from safetensors.numpy import load_file, save_file

from hub.fake_hub import REPO, Hub, fake_hub
from weights.quantized_files import write_model

LLAMA = {"architectures": ["LlamaForCausalLM"], "hidden_act": "silu", "hidden_size": 256, "intermediate_size": 512}
LLAMA |= {"num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 512, "max_position_embeddings": 64}
LLAMA |= {"num_key_value_heads": 4, "rms_norm_eps": 1e-5, "tie_word_embeddings": False}


def planned(name: str, hub: Hub, *flags: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own: the hub's library reads its settings once, when it is imported."""
    command = [sys.executable, "-m", "quire.cli.main", "plan", name, "--hardware", "l4", "--json", *flags]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, "HF_ENDPOINT": hub.url})


def write_safetensors(folder: Path) -> Path:
    (folder / "config.json").write_text(json.dumps(LLAMA))
    layer = {
        "input_layernorm": (256,), "post_attention_layernorm": (256,), "mlp.gate_proj": (512, 256),
        "mlp.up_proj": (512, 256), "mlp.down_proj": (256, 512),
        **{f"self_attn.{name}_proj": (256, 256) for name in "qkvo"},
    }  # fmt: skip
    shapes = {f"model.layers.{i}.{name}": shape for i in range(2) for name, shape in layer.items()}
    shapes |= {"model.embed_tokens": (512, 256), "model.norm": (256,), "lm_head": (512, 256)}
    tensors = {f"{name}.weight": np.zeros(shape, np.float16) for name, shape in shapes.items()}
    save_file(tensors, folder / "model.safetensors")
    return folder


def write_shards(folder: Path) -> Path:
    write_safetensors(folder)
    whole = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    weight_map = {name: names[index % 2] for index, name in enumerate(whole)}
    for file in names:
        save_file({name: whole[name] for name in whole if weight_map[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def write_gguf(folder: Path) -> Path:
    return write_llama_gguf(folder / "tiny-Q8_0.gguf", LLAMA, "q8_0")


@pytest.mark.parametrize("write", [write_safetensors, write_shards, write_gguf])
def test_a_model_that_is_not_here_is_planned_by_its_headers(write: Any, tmp_path: Path) -> None:
    """As if it were here, and nothing is put into the cache."""
    here = write(tmp_path)
    with fake_hub(tmp_path) as hub:
        remote, local = planned(REPO, hub), planned(str(here), hub)
    assert remote.returncode == local.returncode == 0, remote.stderr
    assert f"read from the headers of {REPO}" in remote.stderr
    plans = [json.loads(done.stdout) for done in (remote, local)]
    assert plans[0]["memory"] == plans[1]["memory"] and plans[0]["model"]["parameters"] > 1e6
    assert not Path(os.environ["HF_HOME"], "hub").exists()


def test_only_headers_are_fetched(tmp_path: Path) -> None:
    write_safetensors(tmp_path)
    with fake_hub(tmp_path) as hub:
        assert planned(REPO, hub).returncode == 0
        assert hub.sent == ["the beginning of config.json", *["the beginning of model.safetensors"] * 2]


def test_weights_without_a_header_are_to_be_pulled_first(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "pytorch_model.bin").write_bytes(b"x" * 100)
    with fake_hub(tmp_path) as hub:
        done = planned(REPO, hub)
    assert done.returncode and f"quire pull {REPO}" in done.stderr and "Traceback" not in done.stderr
    (tmp_path / "pytorch_model.bin").unlink()
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 100)
    with fake_hub(tmp_path) as hub:
        done = planned(REPO, hub)
    assert done.returncode and "model.safetensors is no safetensors file" in done.stderr


def test_a_download_that_was_cut_off_is_not_finished(tmp_path: Path) -> None:
    """A plan needs the headers of what is missing, and no more."""
    here = write_shards(tmp_path)
    with fake_hub(tmp_path) as hub:
        first = f"import huggingface_hub; huggingface_hub.snapshot_download({REPO!r}, allow_patterns=['*1-of*', 'c*'])"
        subprocess.run([sys.executable, "-c", first], check=True, env={**os.environ, "HF_ENDPOINT": hub.url})
        hub.sent.clear()
        remote, local = planned(REPO, hub), planned(str(here), hub)
    assert remote.returncode == 0, remote.stderr
    assert json.loads(remote.stdout)["memory"] == json.loads(local.stdout)["memory"]
    assert all(file.startswith("the beginning of") for file in hub.sent) and hub.sent


@pytest.mark.parametrize("name", ["gptq-4", "gptq-4-act-order", "awq-gemm", "packed-4", "w8a8", "fp8-blocks"])
def test_a_quantized_repository_is_planned_as_its_files_are(tmp_path: Path, name: str) -> None:
    """Headers have no scales and no zero points, from which readers see how a weight is kept: config.json says it."""
    write_model(tmp_path, name, {"sym": name == "gptq-4", "ignore": ["lm_head"]})
    if name == "gptq-4":  # older exports have the settings in a file of their own
        config = json.loads((tmp_path / "config.json").read_text())
        (tmp_path / "quantize_config.json").write_text(json.dumps(config.pop("quantization_config")))
        (tmp_path / "config.json").write_text(json.dumps(config))
    with fake_hub(tmp_path) as hub:
        flags = ("--context", "64", "--prompt", "32", "--output", "32")
        remote, local = planned(REPO, hub, *flags), planned(str(tmp_path), hub, *flags)
    assert remote.returncode == local.returncode == 0, remote.stderr
    plans = [json.loads(done.stdout) for done in (remote, local)]
    for part in ("memory", "decode"):
        assert plans[0][part] == plans[1][part]
    assert "counted as config.json says" in remote.stderr
