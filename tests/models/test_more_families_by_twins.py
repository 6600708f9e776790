"""Families that transformers does not have: against an equivalent one under their names, or against a plain twin that
follows the published description; from safetensors and from GGUF."""

import json
from collections.abc import Callable
from math import sqrt
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from torch.nn import functional as F
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    HunYuanDenseV1Config,
    LlamaConfig,
    MixtralConfig,
    Starcoder2Config,
)

from models.checking import (
    BACKENDS,
    NUM_GREEDY,
    PROMPT,
    TINY,
    Cases,
    Theirs,
    ask_transformers,
    assert_close,
    check_against_transformers,
    checkpoints_of,
    compute,
    make_ops,
    rewritten,
)
from quire.models.alibi import alibi_slopes
from quire.models.older_families import CODESHELL, TELECHAT
from weights.gguf_files import finish, interleave

Tensors = dict[str, np.ndarray]
HIDDEN, HEADS, LAYERS = TINY["hidden_size"], TINY["num_attention_heads"], TINY["num_hidden_layers"]
WINDOWS = {"num_hidden_layers": 4, "sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"] * 2}
ROPES = {
    "full_attention": {"rope_type": "default", "rope_theta": 50_000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
}
CASES: Cases = {
    "biases": (LlamaConfig, {"attention_bias": True, "mlp_bias": True}),
    "hunyuan": (HunYuanDenseV1Config, {"head_dim": 24}),
    "starcoder2": (Starcoder2Config, {"sliding_window": None, "use_bias": True, "norm_epsilon": 1e-4}),
    "gemma3": (
        Gemma3TextConfig,
        WINDOWS
        | {"head_dim": 24, "query_pre_attn_scalar": 24, "hidden_activation": "silu", "tie_word_embeddings": False}
        | {"rope_parameters": ROPES},
    ),
    "mixtral": (MixtralConfig, {"num_local_experts": 6, "num_experts_per_tok": 2, "sliding_window": None}),
}
checkpoints = checkpoints_of(CASES)
Checkpoints = Callable[[str], Theirs]


def fused(tensors: Tensors, parts: str, name: str) -> Tensors:
    """The projections `parts` of attention stacked to one, `name`."""
    out = {}
    for key, data in tensors.items():
        stem, part = key.partition(".self_attn.")[::2]
        if part.startswith(f"{parts[0]}_proj."):
            kind = part.removeprefix(f"{parts[0]}_proj.")
            stacked = [tensors[f"{stem}.self_attn.{each}_proj.{kind}"] for each in parts]
            out[f"{stem}.self_attn.{name}.{kind}"] = np.concatenate(stacked)
        elif not part.startswith(tuple(f"{each}_proj." for each in parts)):
            out[key] = data
    return out


def under(tensors: Tensors, renamed: Any) -> Tensors:
    """Under the names that a family gives them."""
    out = {}
    for name, data in tensors.items():
        for theirs, ours in renamed.items():
            name = name.replace(ours, theirs)
        out[name] = data
    return out


@pytest.mark.parametrize("name", ["biases"])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.verifies("safetensors", architecture="TeleChat2ForCausalLM")
def test_telechat_is_llama_with_keys_and_values_head_by_head(
    checkpoints: Checkpoints, backend: str, name: str, tmp_path: Path
) -> None:
    """And with biases of two of its linear layers."""
    theirs = checkpoints(name)
    tensors = load_file(theirs.path / "model.safetensors")
    for key in tensors:
        if key.endswith(".bias") and ("o_proj" not in key and "down_proj" not in key):
            tensors[key][:] = 0
    for folder in ("whole", "again", "telechat"):
        (tmp_path / folder).mkdir()
    whole = rewritten(theirs, tmp_path / "whole", {}, tensors, ())
    expected = ask_transformers(AutoModelForCausalLM.from_pretrained(whole.path), tmp_path / "again")
    kept = {key: data for key, data in tensors.items() if data.any()}
    for key, data in fused(kept, "kv", "kv_proj").items():
        if ".kv_proj." in key:
            data = data.reshape(2, TINY["num_key_value_heads"], -1, HIDDEN).swapaxes(0, 1).reshape(data.shape)
        kept[key] = data
    kept = {key: data for key, data in kept.items() if ".k_proj." not in key and ".v_proj." not in key}
    values = {"n_layer": LAYERS, "n_head": HEADS, "ffn_hidden_size": TINY["intermediate_size"], "seq_length": 64}
    values |= {"architectures": ["TeleChat2ForCausalLM"], "layer_norm_epsilon": 1e-6}
    without = ("num_hidden_layers", "num_attention_heads", "intermediate_size", "rms_norm_eps", "hidden_act")
    without += ("max_position_embeddings", "attention_bias", "mlp_bias")
    ours = rewritten(expected, tmp_path / "telechat", values, under(kept, TELECHAT.renamed), without)
    check_against_transformers(backend, ours)


@pytest.mark.parametrize("name", ["hunyuan"])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.verifies("safetensors", architecture="MaincoderForCausalLM")
def test_maincoder_is_hunyuan_with_rotary_pairs_side_by_side(
    checkpoints: Checkpoints, backend: str, name: str, tmp_path: Path
) -> None:
    theirs = checkpoints(name)
    tensors = {}
    for key, data in load_file(theirs.path / "model.safetensors").items():
        if key.endswith(("q_proj.weight", "k_proj.weight")):
            data = interleave(data, len(data) // 24)
        if key.endswith(("query_layernorm.weight", "key_layernorm.weight")):
            data = interleave(data[:, None], 1)[:, 0]
        key = key.replace("query_layernorm", "q_norm").replace("key_layernorm", "k_norm")
        tensors[key] = data
    values = {"architectures": ["MaincoderForCausalLM"]}
    ours = rewritten(theirs, tmp_path, values, tensors, ())
    check_against_transformers(backend, ours)
    if backend == "torch":
        path = write_gguf(tmp_path, tmp_path / "model.gguf", gguf.MODEL_ARCH.MAINCODER, tensors)
        assert_close(compute(make_ops(backend), path)(PROMPT, 0), theirs.prefill)


@pytest.mark.parametrize("name", ["starcoder2"])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.verifies("safetensors", architecture="CodeShellForCausalLM")
def test_codeshell_is_starcoder2_with_q_k_and_v_in_one(
    checkpoints: Checkpoints, backend: str, name: str, tmp_path: Path
) -> None:
    theirs = checkpoints(name)
    tensors = under(fused(load_file(theirs.path / "model.safetensors"), "qkv", "qkv_proj"), CODESHELL.renamed)
    values = {"n_layer": LAYERS, "n_head": HEADS, "n_embd": HIDDEN, "n_inner": TINY["intermediate_size"]}
    values |= {"architectures": ["CodeShellForCausalLM"], "num_query_groups": 2, "n_positions": 64}
    values |= {"layer_norm_epsilon": 1e-4, "activation_function": "gelu_pytorch_tanh"}
    without = ("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "hidden_size", "intermediate_size")
    without += ("max_position_embeddings", "hidden_act", "use_bias", "sliding_window")
    check_against_transformers(backend, rewritten(theirs, tmp_path, values, tensors, without))
    if backend == "torch":
        path = write_gguf(tmp_path, tmp_path / "model.gguf", gguf.MODEL_ARCH.CODESHELL, tensors)
        assert_close(compute(make_ops(backend), path)(PROMPT, 0), theirs.prefill)


@pytest.mark.parametrize("name", ["gemma3"])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.verifies("safetensors", architecture="Plamo3ForCausalLM")
def test_plamo_3_is_gemma_3_with_other_norms(checkpoints: Checkpoints, backend: str, name: str, tmp_path: Path) -> None:
    theirs = checkpoints(name)
    names = {
        "post_attention_layernorm": ("post_mixer_norm", 0.2),
        "post_feedforward_layernorm": ("post_mlp_norm", 5**-1.5),
        "pre_feedforward_layernorm": ("pre_mlp_norm", 1.0),
        "input_layernorm": ("pre_mixer_norm", 1.0),
    }
    tensors, converted = {}, {}
    for key, data in fused(load_file(theirs.path / "model.safetensors"), "qkv", "qkv_proj").items():
        part = key.split(".")[-2]
        if part in names:
            name_of, offset = names[part]
            key, data = key.replace(part, name_of), data + np.float32(1 - offset)
        if part == "embed_tokens":
            data = data * np.float32(sqrt(HIDDEN))
        if part == "up_proj":
            continue
        if part == "gate_proj":
            up = load_file(theirs.path / "model.safetensors")[key.replace("gate_proj", "up_proj")]
            key, data = key.replace("gate_proj", "gate_up_proj"), np.concatenate([data, up])
        key = key.replace("model.layers.", "model.layers.layers.").replace("self_attn", "mixer")
        tensors[key] = data
        converted[key] = data + np.float32(names[part][1] if part in names else 1.0) if "norm" in part else data
    values = {"architectures": ["Plamo3ForCausalLM"], "window_size": 6, "sliding_window_pattern": 2}
    values |= {"rope_parameters": None, "rope_theta": 50_000.0, "rope_local_theta": 10_000.0}
    without = ("sliding_window", "layer_types", "hidden_act", "hidden_activation", "_sliding_window_pattern")
    check_against_transformers(backend, rewritten(theirs, tmp_path, values, tensors, without))
    if backend == "torch":
        path = write_gguf(tmp_path, tmp_path / "model.gguf", gguf.MODEL_ARCH.PLAMO3, converted)
        assert_close(compute(make_ops(backend), path)(PROMPT, 0), theirs.prefill)


# -- plain twins -------------------------------------------------------------------------------------------------------


def alibi_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """q [T, heads * n], k and v [T, kv_heads * n] -> [T, heads * n]"""
    q, k, v = (x.unflatten(1, (-1, HIDDEN // HEADS)).transpose(0, 1) for x in (q, k, v))
    k, v = (x.repeat_interleave(len(q) // len(x), 0) for x in (k, v))
    places = torch.arange(q.shape[1])
    falling = torch.tensor(alibi_slopes(HEADS), dtype=q.dtype)[:, None, None] * (places[None] - places[:, None])
    scores = (q @ k.mT * scale + falling).masked_fill(places[None] > places[:, None], float("-inf"))
    return (scores.softmax(-1) @ v).transpose(0, 1).flatten(1)


def norm(x: torch.Tensor, w: dict[str, torch.Tensor], name: str, rms: bool, eps: float = 1e-6) -> torch.Tensor:
    if rms:
        return F.rms_norm(x, x.shape[-1:], w[f"{name}.weight"], eps)
    return F.layer_norm(x, x.shape[-1:], w[f"{name}.weight"], w[f"{name}.bias"], eps)


def refact(w: dict[str, torch.Tensor], ids: list[int]) -> torch.Tensor:
    x, kv = w["transformer.wte.weight"][ids], HIDDEN // HEADS
    for layer in range(LAYERS):
        stem = f"transformer.h.{layer}."
        h = norm(x, w, f"{stem}ln_1", rms=True)
        k, v = (h @ w[f"{stem}attn.kv.weight"].T).split(kv, 1)
        h = alibi_attention(h @ w[f"{stem}attn.q.weight"].T, k, v, 1 / sqrt(kv))
        x = x + h @ w[f"{stem}attn.c_proj.weight"].T
        gate, up = (norm(x, w, f"{stem}ln_2", rms=True) @ w[f"{stem}mlp.gate_up_proj.weight"].T).chunk(2, 1)
        x = x + (F.silu(gate) * up) @ w[f"{stem}mlp.c_proj.weight"].T
    return norm(x, w, "transformer.ln_f", rms=True) @ w["lm_head.weight"].T


def jais(w: dict[str, torch.Tensor], ids: list[int]) -> torch.Tensor:
    def conv1d(x: torch.Tensor, name: str) -> torch.Tensor:
        return x @ w[f"{name}.weight"] + w[f"{name}.bias"]

    x = w["transformer.wte.weight"][ids] * 3.0
    for layer in range(LAYERS):
        stem = f"transformer.h.{layer}."
        q, k, v = conv1d(norm(x, w, f"{stem}ln_1", rms=False), f"{stem}attn.c_attn").chunk(3, 1)
        x = x + conv1d(alibi_attention(q, k, v, HEADS / HIDDEN), f"{stem}attn.c_proj")
        h = norm(x, w, f"{stem}ln_2", rms=False)
        x = x + conv1d(conv1d(h, f"{stem}mlp.c_fc") * F.silu(conv1d(h, f"{stem}mlp.c_fc2")), f"{stem}mlp.c_proj")
    return 0.4 * (norm(x, w, "transformer.ln_f", rms=False) @ w["lm_head.weight"].T)


def twin_checkpoint(
    path: Path, twin: Any, values: dict[str, Any], shapes: dict[str, tuple[int, ...]], small: str = "-"
) -> Theirs:
    """Tensors that have `small` in their names have small values."""
    rng = np.random.default_rng(7)
    tensors = {
        name: rng.normal(0.5 if len(shape) == 1 else 0, 0.02 if small in name else 0.3, shape).astype(np.float32)
        for name, shape in shapes.items()
    }
    save_file(tensors, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(values))
    weights = {name: torch.from_numpy(data).double() for name, data in tensors.items()}
    ids = list(PROMPT)
    for _ in range(NUM_GREEDY):
        ids.append(int(twin(weights, ids)[-1].argmax()))
    return Theirs(path, twin(weights, PROMPT).float().numpy(), ids)


GPT_KEYS = {"n_embd": HIDDEN, "n_layer": LAYERS, "n_head": HEADS, "n_positions": 64, "vocab_size": 96}
GPT_KEYS |= {"layer_norm_epsilon": 1e-6}


@pytest.mark.parametrize("name", ["refact"])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.verifies("safetensors", architecture="GPTRefactForCausalLM")
def test_refact_is_llama_with_alibi(backend: str, name: str, tmp_path: Path) -> None:
    kv, inner = HIDDEN // HEADS, 512
    layer = {
        "ln_1": (HIDDEN,),
        "attn.q": (HIDDEN, HIDDEN),
        "attn.kv": (2 * kv, HIDDEN),
        "attn.c_proj": (HIDDEN, HIDDEN),
    }
    layer |= {"ln_2": (HIDDEN,), "mlp.gate_up_proj": (2 * inner, HIDDEN), "mlp.c_proj": (HIDDEN, inner)}
    shapes = {
        "transformer.wte.weight": (96, HIDDEN),
        "lm_head.weight": (96, HIDDEN),
        "transformer.ln_f.weight": (HIDDEN,),
    }
    for i in range(LAYERS):
        shapes |= {f"transformer.h.{i}.{part}.weight": shape for part, shape in layer.items()}
    values = GPT_KEYS | {"architectures": ["GPTRefactForCausalLM"], "tie_word_embeddings": False}
    theirs = twin_checkpoint(tmp_path, refact, values, shapes)
    check_against_transformers(backend, theirs)
    if backend != "torch":
        return
    split = {}
    for key, data in load_file(tmp_path / "model.safetensors").items():
        parts = {"attn.kv": ("attn.k", "attn.v"), "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj")}
        halves = next((names for stem, names in parts.items() if f".{stem}." in key), None)
        if halves is None:
            split[key] = data
            continue
        for half, numbers in zip(halves, np.split(data, 2), strict=True):
            split[f"{key.rsplit('.', 3)[0]}.{half}.weight"] = numbers
    named = {REFACT_GGUF.get(key.split(".", 3)[-1].removesuffix(".weight"), ""): key for key in split}
    assert len(named) > 5
    path = write_gguf(tmp_path, tmp_path / "model.gguf", gguf.MODEL_ARCH.REFACT, split, REFACT_GGUF)
    assert_close(compute(make_ops(backend), path)(PROMPT, 0), theirs.prefill)


REFACT_GGUF = {
    "attn.q": "attn_q", "attn.k": "attn_k", "attn.v": "attn_v", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
}  # fmt: skip


@pytest.mark.parametrize("name", ["jais"])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.verifies("safetensors", architecture="JAISLMHeadModel")
def test_jais_is_gpt_2_with_alibi_and_a_gate(backend: str, name: str, tmp_path: Path) -> None:
    layer = {"attn.c_attn": (HIDDEN, 3 * HIDDEN), "attn.c_proj": (HIDDEN, HIDDEN), "mlp.c_proj": (160, HIDDEN)}
    layer |= {"mlp.c_fc": (HIDDEN, 160), "mlp.c_fc2": (HIDDEN, 160), "ln_1": (HIDDEN,), "ln_2": (HIDDEN,)}
    shapes = {"transformer.wte.weight": (96, HIDDEN), "lm_head.weight": (96, HIDDEN)}
    shapes |= {f"transformer.ln_f.{kind}": (HIDDEN,) for kind in ("weight", "bias")}
    for i in range(LAYERS):
        for part, shape in layer.items():
            shapes |= {f"transformer.h.{i}.{part}.weight": shape, f"transformer.h.{i}.{part}.bias": shape[-1:]}
    values = GPT_KEYS | {"architectures": ["JAISLMHeadModel"], "n_inner": 160, "activation_function": "swiglu"}
    values |= {"position_embedding_type": "alibi", "mup_scale_qk_dot_by_d": True, "mup_embeddings_scale": 3.0}
    values |= {"mup_output_alpha": 2.0, "mup_width_scale": 0.2, "tie_word_embeddings": False}
    theirs = twin_checkpoint(tmp_path, jais, values, shapes)
    check_against_transformers(backend, theirs)
    if backend != "torch":
        return
    converted = {}
    for key, data in load_file(tmp_path / "model.safetensors").items():
        data = data.T if data.ndim == 2 and ".h." in key else data
        converted[key] = data * np.float32({"transformer.wte.weight": 3.0, "lm_head.weight": 0.4}.get(key, 1.0))
    path = write_gguf(tmp_path, tmp_path / "model.gguf", gguf.MODEL_ARCH.JAIS, converted)
    assert_close(compute(make_ops(backend), path)(PROMPT, 0), theirs.prefill)


# -- Arctic ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["mixtral"])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.verifies("safetensors", architecture="ArcticForCausalLM")
def test_arctic_has_experts_beside_a_feed_forward_layer(
    checkpoints: Checkpoints, backend: str, name: str, tmp_path: Path
) -> None:
    """Mixtral's modules in the order of Arctic."""
    theirs = checkpoints(name)
    model = AutoModelForCausalLM.from_pretrained(theirs.path).eval()
    torch.manual_seed(1)
    beside = [arctic_mlp() for _ in range(LAYERS)]
    for layer, (scale, *matrices) in zip(model.model.layers, beside, strict=True):
        layer.forward = arctic_layer(layer, scale, *matrices)  # type: ignore[method-assign]
    (tmp_path / "again").mkdir()
    expected = ask_transformers(model, tmp_path / "again")
    tensors = load_file(theirs.path / "model.safetensors")
    for index, parts in enumerate(beside):
        names = ("residual_layernorm", "residual_mlp.w1", "residual_mlp.w3", "residual_mlp.w2")
        for part, data in zip(names, parts, strict=True):
            tensors[f"model.layers.{index}.{part}.weight"] = data.numpy()
    (tmp_path / "arctic").mkdir()
    values = {"architectures": ["ArcticForCausalLM"], "parallel_attn_mlp_res": True, "use_residual": True}
    ours = rewritten(expected, tmp_path / "arctic", values | {"moe_layer_frequency": 1}, tensors, ())
    check_against_transformers(backend, ours)
    if backend == "torch":
        path = write_gguf(ours.path, tmp_path / "model.gguf", gguf.MODEL_ARCH.ARCTIC, arctic_gguf(tensors))
        assert_close(compute(make_ops(backend), path)(PROMPT, 0), expected.prefill)


def arctic_mlp() -> list[torch.Tensor]:
    scale = torch.empty(HIDDEN).normal_(0.5, 0.5)
    return [scale, *(torch.empty(HIDDEN, HIDDEN).normal_(0, 0.3) for _ in range(3))]


def arctic_layer(layer: Any, scale: torch.Tensor, w1: torch.Tensor, w3: torch.Tensor, w2: torch.Tensor) -> Any:
    def forward(hidden_states: torch.Tensor, **options: Any) -> torch.Tensor:
        attended, _ = layer.self_attn(hidden_states=layer.input_layernorm(hidden_states), **options)
        after = hidden_states + attended
        h = F.rms_norm(after, (HIDDEN,), scale, layer.input_layernorm.variance_epsilon)
        fed = (F.silu(h @ w1.T) * (h @ w3.T)) @ w2.T
        routed = layer.mlp(layer.post_attention_layernorm(hidden_states))
        return after + fed + (routed[0] if isinstance(routed, tuple) else routed)

    return forward


def arctic_gguf(tensors: Tensors) -> Tensors:
    """Experts stacked, queries and keys in pairs."""
    out: Tensors = {}
    for name, data in tensors.items():
        if ".experts.0." in name:
            stack = np.stack([tensors[name.replace(".experts.0.", f".experts.{i}.")] for i in range(6)])
            layer, part = name.split(".")[2], name.split(".")[-2]
            out[f"layers.{layer}.feed_forward.experts.{part}.weight"] = stack
        elif ".experts." not in name:
            heads = HEADS if ".q_proj." in name else TINY["num_key_value_heads"]
            out[name] = interleave(data, heads) if name.endswith(("q_proj.weight", "k_proj.weight")) else data
    return out


# -- GGUF --------------------------------------------------------------------------------------------------------------


def write_gguf(source: Path, path: Path, arch: Any, tensors: Tensors, special: dict[str, str] | None = None) -> Path:
    """`tensors`: as the converter leaves them, under their names in Hugging Face's layout; `special`: those of a layer
    that it names itself."""
    c = json.loads((source / "config.json").read_text())

    def value(*keys: str) -> Any:
        return next((c[key] for key in keys if c.get(key) is not None), None)

    layers, hidden, heads = (
        value(*keys)
        for keys in (("num_hidden_layers", "n_layer"), ("hidden_size", "n_embd"), ("num_attention_heads", "n_head"))
    )
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[arch])
    writer.add_block_count(layers)
    writer.add_context_length(64)
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(value("intermediate_size", "n_inner") or 512)
    writer.add_head_count(heads)
    kv_heads = {gguf.MODEL_ARCH.REFACT: 1, gguf.MODEL_ARCH.JAIS: heads}.get(arch)
    writer.add_head_count_kv(kv_heads or value("num_key_value_heads", "num_query_groups"))
    eps = value("rms_norm_eps", "layer_norm_epsilon", "norm_epsilon")
    layer_norms = arch in (gguf.MODEL_ARCH.JAIS, gguf.MODEL_ARCH.CODESHELL)
    (writer.add_layer_norm_eps if layer_norms else writer.add_layer_norm_rms_eps)(eps)
    rope = c.get("rope_parameters") or {}
    writer.add_rope_freq_base(value("rope_theta") or rope.get("rope_theta") or 10_000.0)
    if "rope_local_theta" in c:
        writer.add_rope_freq_base_swa(c["rope_local_theta"])
        writer.add_sliding_window(c["window_size"])
        writer.add_sliding_window_pattern(c["sliding_window_pattern"])
    if c.get("head_dim"):
        writer.add_key_length(c["head_dim"])
        writer.add_value_length(c["head_dim"])
    if c.get("num_local_experts"):
        writer.add_expert_count(c["num_local_experts"])
        writer.add_expert_used_count(c["num_experts_per_tok"])
    if arch is gguf.MODEL_ARCH.JAIS:
        writer.add_max_alibi_bias(8.0)
    names = gguf.get_tensor_name_map(arch, layers)
    for name, data in tensors.items():
        stem, _, kind = name.rpartition(".")
        own = (special or {}).get(".".join(stem.split(".")[3:]))
        translated = f"blk.{stem.split('.')[2]}.{own}.{kind}" if own else names.get_name(name, (".weight", ".bias"))
        assert translated is not None, name
        writer.add_tensor(translated, np.ascontiguousarray(data))
    return finish(writer, path)
