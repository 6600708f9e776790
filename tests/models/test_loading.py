"""Checkpoints that are not what they say, and architectures nobody wrote."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from transformers import LlamaConfig

from models.checking import PROMPT, TINY, compute, make_ops, random_model
from quire.core.errors import BadCheckpoint, Unsupported
from quire.models import llama, llama_families, moe_families, older_families
from quire.models.loading import EmbeddingTable, ExpertLinear, LayerNorm, Linear, LinearPart, Vector
from quire.models.registry import ARCHITECTURES, PURPOSES, family, purpose
from quire.models.rope import RopeSpec
from quire.ops.reference import TorchOps
from quire.ops.tensors import F32, Q8_0, StoredTensor, stored_floats
from quire.weights.config import ALIASES, CheckpointConfig

CONFIG = llama.LlamaConfig(
    architecture="LlamaForCausalLM",
    hidden=8,
    layers=2,
    heads=2,
    kv_heads=1,
    head_dim=4,
    intermediate=12,
    vocab=10,
    max_position=32,
    max_length=32,
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

    def drop_pages(self) -> None: ...


def complete() -> dict[str, tuple[int, ...]]:
    layer = [shape for want in llama.layer_specs(CONFIG).values() for shape in want.shapes()]
    top = [shape for want in llama.top_specs(CONFIG).values() for shape in want.shapes()]
    return dict(top) | {f"model.layers.{i}.{name}": shape for i in range(2) for name, shape in layer}


def test_a_complete_checkpoint_loads() -> None:
    shapes = complete() | {"model.layers.0.self_attn.rotary_emb.inv_freq": (2,)}  # older exports have it
    model = llama.load(TorchOps(), Tensors(shapes), CONFIG, 32)
    matrices = sum(shape[0] * shape[1] for name, shape in complete().items() if "embed" not in name and len(shape) == 2)
    assert model.weight_bytes == 4 * matrices


def test_files_are_read_from_the_beginning_to_the_end() -> None:
    """Published ones have layer 10 before layer 2, and the head before all."""
    taken: list[str] = []

    class Watched(Tensors):
        def tensor(self, name: str) -> StoredTensor:
            taken.append(name)
            return super().tensor(name)

    names = sorted(complete(), reverse=True)
    model = llama.load(TorchOps(), Watched({name: complete()[name] for name in names}), CONFIG, 32)
    firsts = [name for name in taken if name.endswith(("lm_head.weight", "model.norm.weight", "down_proj.weight"))]
    assert firsts == sorted(firsts, reverse=True) and sorted(taken) == sorted(names)
    assert [group.keys() for group in model.weights[1:]] == [llama.layer_specs(CONFIG).keys()] * 2


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
    for use, architectures in PURPOSES.items():
        for architecture in architectures:
            module = family(architecture, use)
            assert callable(module.config) and callable(module.load)


def test_every_llama_like_architecture_has_its_row() -> None:
    rows = {
        "quire.models.llama": {*llama_families.FAMILIES, *older_families.OLDER_FAMILIES},
        "quire.models.moe": {*moe_families.FAMILIES},
    }
    for module, families in rows.items():
        assert {name for name, file in ARCHITECTURES.items() if file == module} == families


@pytest.mark.parametrize(
    ("unknown", "hint"),
    [
        ("ReformerModelWithLMHead", "docs/models.md lists the "),
        ("GPTNeoXJapaneseForCausalLM", "docs/models.md lists the "),  # GPT-NeoX is another model
        ("LlamaForTokenClassification", "of Llama, LlamaForCausalLM is supported"),
        ("MarianModel", "of Marian, MarianMTModel is supported"),
        ("BertForTokenClassification", "of Bert, BertModel, BertForMaskedLM, BertForSequenceClassification are"),
    ],
)
def test_an_unknown_architecture_names_its_family_or_lists_all(unknown: str, hint: str) -> None:
    with pytest.raises(Unsupported, match=f"`{unknown}`") as error:
        family(unknown)
    assert error.value.hint.startswith(hint)


@pytest.mark.parametrize("alias", ALIASES)
def test_every_alias_is_of_an_architecture_that_is_supported(alias: str) -> None:
    assert purpose(CheckpointConfig(Path("config.json"), {"architectures": [alias]}).architecture)


def test_code_beside_a_checkpoint_is_never_run(tmp_path: Path) -> None:
    """What `trust_remote_code` would run stands in `auto_map`: it is not looked at."""
    model = random_model(LlamaConfig(**TINY), seed=0)
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    named = {"AutoConfig": "theirs.Config", "AutoModelForCausalLM": "theirs.Model"}
    (tmp_path / "config.json").write_text(json.dumps(config | {"auto_map": named}))
    (tmp_path / "theirs.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    compute(make_ops("torch"), tmp_path)(PROMPT, 0)
    assert not (tmp_path / "ran").exists() and "theirs" not in sys.modules


# -- from stored tensors to packed ones --------------------------------------------------------------------------------

ops = TorchOps()


def numbered(*shape: int) -> StoredTensor:
    """0, 1, 2, ..., so that every number tells where it was stored."""
    return stored_floats("t", np.arange(np.prod(shape), dtype=np.float32).reshape(shape))


def order(*places: int) -> np.ndarray:
    return np.array(places, np.int32)


def test_rows_of_a_fused_tensor_are_put_in_order_with_their_biases() -> None:
    """Two heads stored as q k v, q k v become q q, k k, v v."""
    fused = Linear({"qkv": LinearPart(6, order=order(0, 3, 1, 4, 2, 5))}, 2, bias=True)
    assert dict(fused.shapes()) == {"qkv.weight": (6, 2), "qkv.bias": (6,)}
    packed = fused.load(ops, [numbered(6, 2), numbered(6)])
    assert packed.packed[:, 0].tolist() == [0, 6, 2, 8, 4, 10]
    assert packed.bias.tolist() == [0, 3, 1, 4, 2, 5]


def test_some_rows_are_taken_and_a_missing_bias_is_zero() -> None:
    some = Linear(
        {"kv": LinearPart(2, order=order(3, 1), num_stored=4), "other": LinearPart(1, bias=False)}, 2, bias=True
    )
    assert dict(some.shapes()) == {"kv.weight": (4, 2), "kv.bias": (4,), "other.weight": (1, 2)}
    packed = some.load(ops, [numbered(4, 2), numbered(4), numbered(1, 2)])
    assert packed.packed.tolist() == [[6, 7], [2, 3], [0, 1]]
    assert packed.bias.tolist() == [3, 1, 0]


def test_a_matrix_may_be_stored_with_its_inputs_first() -> None:
    turned = Linear({"c_attn": LinearPart(3, order=order(2, 0, 1))}, 2, transposed=True)
    assert dict(turned.shapes()) == {"c_attn.weight": (2, 3)}
    assert turned.load(ops, [numbered(2, 3)]).packed.tolist() == [[2, 5], [0, 3], [1, 4]]
    quantized = StoredTensor("c_attn.weight", (32, 32), Q8_0, np.zeros((32, 34), np.uint8))
    with pytest.raises(Unsupported, match=r"c_attn.weight.*Q8_0"):
        Linear({"c_attn": 32}, 32, transposed=True).load(ops, [quantized])


def test_an_order_is_taken_of_an_order() -> None:
    """A reader may have permuted the rows already."""
    stored = replace(numbered(4, 1), row_order=order(3, 2, 1, 0))
    assert ops.vector(stored.ordered(order(1, 0, 2, 3))).ravel().tolist() == [2, 3, 1, 0]
    assert ops.vector(stored.ordered(order(1, 0))).ravel().tolist() == [2, 3]
    assert ops.vector(stored.part(1, 2)).ravel().tolist() == [2, 1]
    assert ops.vector(stored.transposed()).tolist() == [[3, 2, 1, 0]]
    noise = replace(numbered(1, 3), shape=(2, 4, 3), data=np.broadcast_to(numbered(1, 3).data, (8, 12)), dummy=True)
    turned = noise.transposed()
    assert turned.shape == (2, 3, 4) and turned.data.shape == (6, 16) and turned.data.strides[0] == 0  # nothing copied


@pytest.mark.parametrize("transposed", [False, True])
def test_experts_are_stored_one_by_one_or_in_one_tensor(transposed: bool) -> None:
    shape = (2, 3) if transposed else (3, 2)
    single = ExpertLinear({"experts.{}.gate": 3, "experts.{}.up": 3}, 2, 4, transposed)
    assert list(single.shapes()) == [(f"experts.{e}.{x}.weight", shape) for x in ("gate", "up") for e in range(4)]
    tensors = numbered(8, *shape)
    one_by_one = single.load(ops, [tensors.part(i, 1).squeezed() for i in range(8)])
    stacked = ExpertLinear({"experts.gate": 3, "experts.up": 3}, 2, 4, transposed)
    assert list(stacked.shapes()) == [("experts.gate", (4, *shape)), ("experts.up", (4, *shape))]
    at_once = stacked.load(ops, [tensors.part(0, 4), tensors.part(4, 4)])
    assert at_once.packed.tolist() == one_by_one.packed.tolist()
    assert (at_once.num_experts, at_once.num_outputs, at_once.num_inputs) == (4, 6, 2)
    assert sorted(at_once.packed[1].ravel().tolist()) == [*range(6, 12), *range(30, 36)]


def test_norms_and_tables() -> None:
    assert Vector("norm", 3, offset=1.0).load(ops, [numbered(3)]).tolist() == [1, 2, 3]
    assert dict(Vector("gate", 3, suffix="correction").shapes()) == {"gate.correction": (3,)}
    for weight, bias in ((True, True), (True, False), (False, True), (False, False)):
        norm = LayerNorm("ln", 3, weight, bias)
        names = [name for name, _ in norm.shapes()]
        assert names == ["ln.weight"] * weight + ["ln.bias"] * bias
        loaded = norm.load(ops, [numbered(3) for _ in names])
        assert (loaded.weight is not None, loaded.bias is not None) == (weight, bias)
    positions = EmbeddingTable("embed_positions", 3, 2, skip_rows=2)
    assert dict(positions.shapes()) == {"embed_positions.weight": (5, 2)}
    assert positions.load(ops, [numbered(5, 2)]).tolist() == [[4, 5], [6, 7], [8, 9]]
