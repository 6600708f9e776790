"""Checkpoints that are not what they say, and architectures nobody wrote."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from quire.core.errors import BadCheckpoint, Unsupported
from quire.models import llama
from quire.models.config import ModelConfig
from quire.models.registry import ARCHITECTURES, family
from quire.models.rope import RopeSpec
from quire.ops.tensors import F32, StoredTensor
from quire.ops.torch import TorchOps
from quire.weights.config import CheckpointConfig

CONFIG = ModelConfig(
    architecture="LlamaForCausalLM",
    hidden=8,
    layers=2,
    heads=2,
    kv_heads=1,
    head_dim=4,
    intermediate=12,
    vocab=10,
    max_position=32,
    longest=32,
    eps=1e-5,
    rope=RopeSpec("default", 10000.0, 4, 32, {}),
    windows=(0, 0),
    rotated=(True, True),
)


class Tensors:
    """A checkpoint in memory."""

    def __init__(self, shapes: dict[str, tuple[int, ...]]) -> None:
        self.path = Path("tiny")
        self.config = CheckpointConfig(self.path, {"architectures": ["LlamaForCausalLM"]})
        self.shapes = shapes
        self.nbytes = sum(4 * int(np.prod(shape)) for shape in shapes.values())

    def names(self) -> list[str]:
        return list(self.shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        return self.shapes[name]

    def tensor(self, name: str) -> StoredTensor:
        shape = self.shapes[name]
        rows = np.ones((int(np.prod(shape[:-1])), shape[-1]), np.float32)
        return StoredTensor(name, shape, F32, rows.view(np.uint8))


def complete() -> dict[str, tuple[int, ...]]:
    layer = [shape for want in llama.layer_names(CONFIG).values() for shape in want.shapes()]
    top = [shape for want in llama.top_names(CONFIG).values() for shape in want.shapes()]
    return dict(top) | {f"model.layers.{i}.{name}": shape for i in range(2) for name, shape in layer}


def test_a_complete_checkpoint_loads() -> None:
    shapes = complete() | {"model.layers.0.self_attn.rotary_emb.inv_freq": (2,)}  # older exports have it
    model = llama.load(TorchOps(), Tensors(shapes), CONFIG, 32)
    matrices = sum(shape[0] * shape[1] for name, shape in complete().items() if "embed" not in name and len(shape) == 2)
    assert model.weight_bytes == 4 * matrices


def test_a_tied_head_may_be_stored_twice() -> None:
    tied = replace(CONFIG, tied=True)
    twice = llama.load(TorchOps(), Tensors(complete()), tied, 32)
    without = {name: shape for name, shape in complete().items() if name != "lm_head.weight"}
    once = llama.load(TorchOps(), Tensors(without), tied, 32)
    assert twice.weight_bytes == once.weight_bytes  # the second copy is passed over


def test_rotary_factors_of_a_gguf_file_are_read() -> None:
    llama.load(TorchOps(), Tensors(complete() | {"rope_freqs": (2,)}), CONFIG, 32)
    with pytest.raises(BadCheckpoint, match="3 factors, and there are 2"):
        llama.load(TorchOps(), Tensors(complete() | {"rope_freqs": (3,)}), CONFIG, 32)


def test_impossible_numbers() -> None:
    with pytest.raises(BadCheckpoint, match="heads as 0"):
        replace(CONFIG, heads=0)
    with pytest.raises(BadCheckpoint, match="2 query heads cannot share 3"):
        replace(CONFIG, kv_heads=3)


def test_all_that_is_wrong_is_said_at_once() -> None:
    shapes = complete()
    del shapes["model.norm.weight"], shapes["model.layers.1.mlp.up_proj.weight"]
    shapes["model.layers.0.self_attn.k_proj.weight"] = (8, 8)
    shapes["model.layers.0.self_attn.q_norm.weight"] = (4,)
    with pytest.raises(BadCheckpoint) as error:
        llama.load(TorchOps(), Tensors(shapes), CONFIG, 32)
    message = error.value.message
    assert "2 are missing: model.norm.weight, model.layers.1.mlp.up_proj.weight" in message
    assert "1 is unknown: model.layers.0.self_attn.q_norm.weight" in message
    assert "model.layers.0.self_attn.k_proj.weight is [8, 8] and not [4, 8]" in message


def test_long_lists_are_cut() -> None:
    with pytest.raises(BadCheckpoint, match=r"21 are missing: .* and 13 more"):
        llama.load(TorchOps(), Tensors({}), CONFIG, 32)


def test_every_architecture_has_its_file() -> None:
    for architecture in ARCHITECTURES:
        module = family(architecture)
        assert callable(module.config) and callable(module.load)


def test_an_unknown_architecture_names_the_nearest() -> None:
    with pytest.raises(Unsupported, match="`Qwen9ForCausalLM`") as error:
        family("Qwen9ForCausalLM")
    assert "Qwen2ForCausalLM" in error.value.hint
