"""A model that cannot fit is refused before its weights are read, with what would fit."""

import json
import struct
import subprocess
import sys
from math import prod
from pathlib import Path
from typing import Any

import pytest

from quire.core.errors import DoesNotFit
from quire.engine import memory_check
from quire.engine.options import EngineOptions
from quire.engine.start import new_executor
from quire.executors import local
from quire.executors.options import ExecutorOptions
from quire.executors.protocol import Capacity
from quire.weights.checkpoint import open_checkpoint


def free_memory(patch: pytest.MonkeyPatch, num_bytes: int) -> None:
    for module in (memory_check, local):
        patch.setattr(module, "available_memory", lambda: num_bytes)


def start(model: Path, **options: Any) -> Capacity:
    limits = {"threads": 1, "max_num_seqs": 64, "max_num_batched_tokens": 16}
    executor = new_executor(model, EngineOptions(model=str(model), **limits, **options))
    capacity = executor.allocate(executor.load())
    executor.stop()
    return capacity


@pytest.fixture(scope="module")
def wide_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """128 MiB of weights in bfloat16, more than all else that serving takes; all are zero, and the file is sparse."""
    folder = tmp_path_factory.mktemp("wide")
    hidden, inner, layers = 2048, 8192, 1
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": hidden, "hidden_act": "silu",
        "intermediate_size": inner, "num_hidden_layers": layers, "num_attention_heads": 16, "num_key_value_heads": 16,
        "vocab_size": 64, "max_position_embeddings": 256, "rms_norm_eps": 1e-5, "tie_word_embeddings": True,
    }  # fmt: skip
    square, wide = (hidden, hidden), (inner, hidden)
    shapes = {"model.embed_tokens.weight": (64, hidden), "model.norm.weight": (hidden,)}
    for name, shape in (
        [(f"self_attn.{part}_proj", square) for part in "qkvo"]
        + [("mlp.gate_proj", wide), ("mlp.up_proj", wide), ("mlp.down_proj", (hidden, inner))]
        + [("input_layernorm", (hidden,)), ("post_attention_layernorm", (hidden,))]
    ):
        shapes[f"model.layers.0.{name}.weight"] = shape
    header, end = {}, 0
    for name, shape in shapes.items():
        begin, end = end, end + 2 * prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
    head = json.dumps(header).encode()
    (folder / "config.json").write_text(json.dumps(config))
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(head)) + head)
        file.truncate(8 + len(head) + end)
    return folder


def test_what_would_fit_is_named_and_fits(wide_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = ExecutorOptions(max_num_batched_tokens=16)
    plain, small = (memory_check._least(open_checkpoint(wide_model), options, q) for q in (None, "int4"))
    free_memory(monkeypatch, plain.total - 1)
    with pytest.raises(
        DoesNotFit, match=r"weights of .* take 1[23]\d.* MiB, .* with the least .* memory are free"
    ) as refused:
        start(wide_model)
    assert refused.value.hint.startswith("use quantization int8, which takes ")
    assert 64 << 20 < start(wide_model, quantization="int8").weight_bytes < 80 << 20
    free_memory(monkeypatch, small.total - 1)
    with pytest.raises(DoesNotFit) as refused:
        start(wide_model)
    assert "take a smaller model" in refused.value.hint and "pipeline_stages" in refused.value.hint
    free_memory(monkeypatch, plain.total - plain.weights)
    with pytest.raises(DoesNotFit) as refused:
        start(wide_model)
    assert refused.value.hint.startswith("free 130.")


def test_the_kv_cache_is_beside_what_weights_take_and_not_beside_their_files(
    wide_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free_memory(monkeypatch, 180 << 20)
    capacity = start(wide_model, quantization="int4")
    assert capacity.weight_bytes < 48 << 20
    assert capacity.cache_bytes > (180 - 128) << 20, "half of what is left beside 41 MiB, and not beside 128"


def test_where_there_is_room_nothing_is_counted(wide_model: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from quire.engine.start import new_executor; "
        f"from quire.engine.options import EngineOptions; new_executor(Path({str(wide_model)!r}), EngineOptions()); "
        "sys.exit(any(name.startswith('quire.planning') for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
