"""Several adapters in one batch against PEFT, which merges them one by one into the model."""

import json
import shutil
from functools import cache

import gguf
import numpy as np
import pytest
from gguf.quants import quantize
from safetensors.numpy import load_file, save_file
from transformers import GPT2Config, GPTNeoXConfig, LlamaConfig, MixtralConfig, Phi3Config, Qwen2Config

from models.checking import BACKENDS, MAX_LEN, PROMPT, TINY, assert_close, make_ops, random_model
from models.gguf_gpt_writing import write_gguf as write_gpt_gguf
from models.gguf_writing import write_gguf
from models.lora_files import Adapted, adapted_model
from models.lora_steps import NONE, Together
from quire.core.errors import BadCheckpoint, BadRequest, Unsupported
from quire.models.registry import family
from quire.ops.native import NativeOps
from quire.runtime.adapters import LoraAdapters
from quire.weights.checkpoint import open_checkpoint
from quire.weights.gguf.adapter import read_gguf_adapter
from weights.gguf_files import finish, interleave

ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
LLAMA_LIKE = {
    "all": {"r": 8, "lora_alpha": 16, "target_modules": ALL},
    "qv": {"r": 16, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"], "use_rslora": True},
    "odd": {
        "r": 5,
        "lora_alpha": 7,
        "target_modules": ["k_proj", "down_proj", "gate_proj"],
        "rank_pattern": {"gate_proj": 3, "model.layers.1.mlp.down_proj": 2},
        "alpha_pattern": {"k_proj": 11},
    },
    "wide": {"r": 64, "lora_alpha": 64, "target_modules": ["o_proj", "up_proj"], "layers_to_transform": [1]},
}
CASES = {
    "llama": (LlamaConfig, {**TINY, "attention_bias": True, "mlp_bias": True}, LLAMA_LIKE),
    "qwen2": (Qwen2Config, {**TINY, "tie_word_embeddings": True}, LLAMA_LIKE),
    "gpt2": (
        GPT2Config,
        {
            "vocab_size": 96,
            "n_embd": 64,
            "n_layer": 2,
            "n_head": 4,
            "n_positions": MAX_LEN,
            "initializer_range": 0.4,
            "bos_token_id": None,
            "eos_token_id": None,
        },
        {
            "all": {"r": 5, "target_modules": ["c_attn", "c_proj", "c_fc"], "fan_in_fan_out": True},
            "attn": {"r": 64, "target_modules": ["c_attn"], "fan_in_fan_out": True},
        },
    ),
    "gpt-neox": (  # whose q, k and v are stored head by head
        GPTNeoXConfig,
        TINY,
        {"all": {"r": 8, "target_modules": ["query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"]}},
    ),
    "phi3": (  # whose q, k and v are one layer
        Phi3Config,
        TINY,
        {"all": {"r": 8, "target_modules": ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]}},
    ),
    "mixtral": (
        MixtralConfig,
        {**TINY, "num_local_experts": 4, "num_experts_per_tok": 2},
        {name: LLAMA_LIKE[name] | {"target_modules": ALL[:4]} for name in ("all", "wide")},
    ),
}
ALSO = ("llama", "gpt2")  # on plain torch as well


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    @cache
    def make(name: str) -> Adapted:
        config, options, adapters = CASES[name]
        return adapted_model(random_model(config(**options), seed=3), tmp_path_factory.mktemp(name), adapters)

    return make


@pytest.mark.parametrize(
    ("backend", "name"),
    [(backend, name) for backend in BACKENDS for name in CASES if backend == "native" or name in ALSO],
)
def test_every_row_has_the_logits_of_its_merged_model(models, backend, name):
    theirs = models(name)
    ours = Together(make_ops(backend), theirs.path, theirs.adapters)
    ids = dict.fromkeys(ours.names, PROMPT)
    found = ours.run(ids, 0)
    for adapter, expected in theirs.expected.items():
        assert_close(found[adapter], expected.prefill)
        assert adapter == NONE or np.abs(expected.prefill - theirs.expected[NONE].prefill).max() > 0.1

    ids = {adapter: [*PROMPT] for adapter in ours.names}
    for _ in range(len(theirs.expected[NONE].generated) - len(PROMPT)):
        for adapter, tokens in ids.items():
            tokens.append(int(found[adapter][-1].argmax()))
        found = ours.run(ids, len(ids[NONE]) - 1)
    assert ids == {adapter: expected.generated for adapter, expected in theirs.expected.items()}


def test_a_row_has_the_same_bits_alone_and_among_other_adapters(models):
    theirs = models("llama")
    ours = Together(make_ops("native"), theirs.path, theirs.adapters)
    together = ours.run(dict.fromkeys(ours.names, PROMPT), 0)
    for adapter in ours.names:
        assert np.array_equal(ours.run({adapter: PROMPT}, 0)[adapter], together[adapter])
        ours.run({adapter: PROMPT[:7]}, 0)
        assert np.array_equal(ours.run({adapter: PROMPT}, 7)[adapter], together[adapter][7:])


@pytest.mark.parametrize(("name", "write"), [("llama", write_gguf), ("gpt-neox", write_gpt_gguf)])
def test_the_model_may_be_a_gguf_file(models, tmp_path, name, write):
    """Which stores rows in another order: those of q and k, or q, k and v apart."""
    theirs = models(name)
    ours = Together(make_ops("native"), write(theirs.path, tmp_path / "model.gguf"), theirs.adapters)
    for name, logits in ours.run(dict.fromkeys(ours.names, PROMPT), 0).items():
        assert_close(logits, theirs.expected[name].prefill)


def write_gguf_adapter(source, path, kind=gguf.GGMLQuantizationType.F32):
    """As llama.cpp's converter would: the rows of B of q and k are interleaved with those of the model."""
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, TINY["num_hidden_layers"])
    config = json.loads((source / "adapter_config.json").read_text())
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", config["lora_alpha"])
    for stored, data in load_file(source / "adapter_model.safetensors").items():
        layer, _, side = stored.removeprefix("base_model.model.").removesuffix(".weight").rpartition(".")
        if side == "lora_B" and layer.endswith(("q_proj", "k_proj")):
            data = interleave(data, TINY["num_attention_heads" if layer.endswith("q_proj") else "num_key_value_heads"])
        if data.shape[1] % 32 == 0:
            writer.add_tensor(f"{names.get_name(layer)}.weight.{side.lower()}", quantize(data, kind), raw_dtype=kind)
        else:
            writer.add_tensor(f"{names.get_name(layer)}.weight.{side.lower()}", data)
    return finish(writer, path)


def test_llama_cpps_adapters_are_those_of_peft(models, tmp_path):
    theirs = models("llama")
    adapters = {"all": write_gguf_adapter(theirs.adapters["all"], tmp_path / "a")}
    for path in (theirs.path, write_gguf(theirs.path, tmp_path / "model.gguf")):
        ours = Together(make_ops("native"), path, adapters)
        assert_close(ours.run({"all": PROMPT}, 0)["all"], theirs.expected["all"].prefill)
    coded = write_gguf_adapter(theirs.adapters["wide"], tmp_path / "b", gguf.GGMLQuantizationType.Q8_0)
    ours = Together(make_ops("native"), theirs.path, {"wide": coded}).run({"wide": PROMPT}, 0)["wide"]
    expected = theirs.expected["wide"].prefill
    assert 0 < np.abs(ours - expected).max() < 0.05 * np.abs(expected).max()


def test_other_gguf_files_are_no_adapters(models, tmp_path):
    theirs = models("llama")
    with pytest.raises(BadCheckpoint, match=r"general\.type is missing"):
        read_gguf_adapter(write_gguf(theirs.path, tmp_path / "model.gguf"), {})
    path = write_gguf_adapter(theirs.adapters["all"], tmp_path / "adapter.gguf")
    with pytest.raises(BadCheckpoint, match="another model"):
        read_gguf_adapter(path, {"num_attention_heads": 3, "num_key_value_heads": 2})


def test_the_model_may_be_quantized(models):
    """Adapters stay floats: they change a quantized model by as much as the one it was made of."""
    theirs = models("llama")
    together = Together(NativeOps(quantization="int8"), theirs.path, theirs.adapters)
    ours = together.run(dict.fromkeys(theirs.expected, PROMPT), 0)
    errors = {}
    for name, logits in ours.items():
        expected = theirs.expected[name].prefill
        errors[name] = np.sqrt(np.mean((logits - expected) ** 2) / np.mean(expected**2))
    assert 0 < max(errors.values()) < 2 * errors[NONE] < 0.1


def test_what_the_model_does_not_have_is_listed_all_at_once(models):
    ops, theirs = make_ops("native"), models("mixtral")
    checkpoint = open_checkpoint(theirs.path)
    module = family(checkpoint.config.architecture)
    model = module.load(ops, checkpoint, module.config(checkpoint.config), MAX_LEN)
    adapters = LoraAdapters(ops, model, num_slots=1, max_rank=8)
    with pytest.raises(
        Unsupported, match=r"layers.0.mlp.down_proj, .*1.mlp.up_proj\nhint: .* are gate, k_proj, o_proj, q_proj, v_proj"
    ):
        adapters.load(models("llama").adapters["all"])
    with pytest.raises(BadRequest, match=r"max_lora_rank, which is 8: model.layers.1.self_attn.k_proj \(64\), "):
        adapters.load(theirs.adapters["wide"])
    with pytest.raises(Unsupported, match=r"c_attn"):
        adapters.load(models("gpt2").adapters["attn"])


@pytest.mark.parametrize(
    ("prefix", "problem"),
    [("", ""), ("model.language_model.", ""), ("vision_tower.", "vision_tower.layers.0"), ("model.decoder.", "")],
)
def test_layers_are_known_whatever_the_model_is_wrapped_in(models, tmp_path, prefix, problem):
    theirs = models("llama")
    shutil.copytree(theirs.adapters["qv"], tmp_path / "qv")
    path = tmp_path / "qv" / "adapter_model.safetensors"
    tensors = {
        name.replace("base_model.model.model.", f"base_model.model.{prefix}"): t for name, t in load_file(path).items()
    }
    save_file(tensors, path)
    renamed = {"qv": tmp_path / "qv"}
    if problem:
        with pytest.raises(Unsupported, match=problem):
            Together(make_ops("native"), theirs.path, renamed)
    else:
        found = Together(make_ops("native"), theirs.path, renamed).run({"qv": PROMPT}, 0)["qv"]
        assert_close(found, theirs.expected["qv"].prefill)
