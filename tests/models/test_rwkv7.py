"""RWKV 7 against a plain twin, written from its published description: transformers does not have it."""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from torch.nn import functional as F

from models.checking import (
    BACKENDS,
    NUM_GREEDY,
    PROMPT,
    Theirs,
    assert_close,
    check_against_transformers,
    compute,
    make_ops,
)
from quire.core.errors import BadCheckpoint, Unsupported
from quire.models.registry import family
from quire.weights.config import CheckpointConfig
from weights.gguf_files import finish

ARCHITECTURE = "RWKV7ForCausalLM"
TINY = {"architectures": [ARCHITECTURE], "vocab_size": 96, "hidden_size": 64, "num_hidden_layers": 3, "head_dim": 16}
TINY |= {"intermediate_size": 112, "norm_eps": 1e-4, "tie_word_embeddings": False}
RANKS = {"decay_low_rank_dim": 12, "a_low_rank_dim": 8, "v_low_rank_dim": 20, "gate_low_rank_dim": 24}
CASES: dict[str, dict[str, Any]] = {
    "rwkv7": RANKS,
    "rwkv7-odd": RANKS | {"hidden_size": 60, "head_dim": 20, "num_hidden_layers": 2, "tie_word_embeddings": True},
    "rwkv7-default-ranks": {"hidden_size": 32, "head_dim": 32, "num_hidden_layers": 2},
}
Weights = dict[str, torch.Tensor]


def random_tensors(c: dict[str, Any], seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    n, inner, vocab, size = (c[key] for key in ("hidden_size", "intermediate_size", "vocab_size", "head_dim"))
    ranks = {
        part: c.get(f"{name}_low_rank_dim", 32) for part, name in zip("wavg", ("decay", "a", "v", "gate"), strict=True)
    }

    def normal(*shape: int, scale: float = 0.3, mean: float = 0.0) -> np.ndarray:
        return rng.normal(mean, scale, shape).astype(np.float32)

    tensors = {"model.embeddings.weight": normal(vocab, n), "lm_head.weight": normal(vocab, n)}
    if c["tie_word_embeddings"]:
        del tensors["lm_head.weight"]
    norms = ["model.norm", "model.layers.0.pre_norm"]
    for layer in range(c["num_hidden_layers"]):
        stem = f"model.layers.{layer}."
        norms += [stem + name for name in ("attn_norm", "ffn_norm", "attn.g_norm")]
        tensors |= {f"{stem}attn.x_{part}": rng.random((1, 1, n), np.float32) for part in "rwkvag"}
        tensors |= {f"{stem}attn.{part}_proj.weight": normal(n, n) for part in "rkvo"}
        tensors |= {f"{stem}attn.{name}": normal(n, scale=0.5, mean=0.5) for name in ("k_k", "k_a")}
        tensors[f"{stem}attn.r_k"] = normal(n // size, size)
        for part, rank in ranks.items():
            if part == "v" and layer == 0:
                continue
            tensors[f"{stem}attn.{part}_lora.lora.0.weight"] = normal(rank, n)
            tensors[f"{stem}attn.{part}_lora.lora.2.weight"] = normal(n, rank)
            if part != "g":
                tensors[f"{stem}attn.{part}_lora.lora.2.bias"] = normal(n, scale=1.0)
        tensors |= {f"{stem}ffn.x_k": rng.random(n, np.float32), f"{stem}ffn.key.weight": normal(inner, n)}
        tensors[f"{stem}ffn.value.weight"] = normal(n, inner)
    for name in norms:
        tensors |= {f"{name}.weight": normal(n, scale=0.5, mean=0.5), f"{name}.bias": normal(n)}
    return tensors


class Twin:
    """The description, in double precision: one token after the other."""

    def __init__(self, c: dict[str, Any], tensors: dict[str, np.ndarray]) -> None:
        self.c, self.w = c, {name: torch.from_numpy(data).double() for name, data in tensors.items()}

    def logits(self, ids: list[int]) -> np.ndarray:
        x = self.norm("model.layers.0.pre_norm", self.w["model.embeddings.weight"][ids])
        first_value = None
        for layer in range(self.c["num_hidden_layers"]):
            stem = f"model.layers.{layer}."
            mixed, value = self.time_mix(f"{stem}attn.", self.norm(f"{stem}attn_norm", x), first_value)
            first_value = value if first_value is None else first_value
            x = x + mixed
            h = self.norm(f"{stem}ffn_norm", x)
            h = shifted(h, self.w[f"{stem}ffn.x_k"]) @ self.w[f"{stem}ffn.key.weight"].T
            x = x + h.relu().square() @ self.w[f"{stem}ffn.value.weight"].T
        head = self.w.get("lm_head.weight", self.w["model.embeddings.weight"])
        return (self.norm("model.norm", x) @ head.T).float().numpy()

    def norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, x.shape[-1:], self.w[f"{name}.weight"], self.w[f"{name}.bias"], self.c["norm_eps"])

    def lora(self, name: str, x: torch.Tensor, inner: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        bias = self.w.get(f"{name}_lora.lora.2.bias", torch.zeros((), dtype=torch.double))
        low = inner(x @ self.w[f"{name}_lora.lora.0.weight"].T)
        return low @ self.w[f"{name}_lora.lora.2.weight"].T + bias

    def time_mix(
        self, stem: str, x: torch.Tensor, first_value: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        size, n = self.c["head_dim"], x.shape[1]
        xr, xw, xk, xv, xa, xg = (shifted(x, self.w[f"{stem}x_{part}"].ravel()) for part in "rwkvag")
        r, k, v = (x @ self.w[f"{stem}{part}_proj.weight"].T for part, x in zip("rkv", (xr, xk, xv), strict=True))
        decay = torch.exp(-np.exp(-0.5) * self.lora(f"{stem}w", xw, torch.tanh).sigmoid())
        rate = self.lora(f"{stem}a", xa, lambda low: low).sigmoid()
        gate = self.lora(f"{stem}g", xg, torch.sigmoid)
        if first_value is not None:
            v = torch.lerp(v, first_value, self.lora(f"{stem}v", xv, lambda low: low).sigmoid())
        removed = F.normalize((k * self.w[f"{stem}k_k"]).unflatten(1, (-1, size)), dim=-1)
        k = k + k * (rate - 1) * self.w[f"{stem}k_a"]
        heads = [part.unflatten(1, (-1, size)) for part in (r, decay, k, v, rate)]
        state, out = torch.zeros(n // size, size, size, dtype=torch.double), []  # rows: values, columns: keys
        for rt, wt, kt, vt, at, ut in zip(*heads, removed, strict=True):
            state = state * wt[:, None] - (state @ ut[:, :, None]) @ (ut * at)[:, None] + vt[:, :, None] @ kt[:, None]
            out.append((state @ rt[:, :, None])[:, :, 0].flatten())
        norm = F.group_norm(torch.stack(out), n // size, self.w[f"{stem}g_norm.weight"], self.w[f"{stem}g_norm.bias"],
                            eps=self.c["norm_eps"] * size)  # fmt: skip
        bonus = (heads[0] * heads[2] * self.w[f"{stem}r_k"]).sum(-1, keepdim=True) * heads[3]
        return ((norm + bonus.flatten(1)) * gate) @ self.w[f"{stem}o_proj.weight"].T, v


def shifted(x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    before = torch.cat([torch.zeros_like(x[:1]), x[:-1]])
    return x + (before - x) * factor


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Theirs]:
    @cache
    def make(name: str) -> Theirs:
        path, values = tmp_path_factory.mktemp(name), TINY | CASES[name]
        tensors = random_tensors(values, seed=sum(map(ord, name)))
        save_file(tensors, path / "model.safetensors")
        (path / "config.json").write_text(json.dumps(values))
        twin, ids = Twin(values, tensors), list(PROMPT)
        for _ in range(NUM_GREEDY):
            ids.append(int(twin.logits(ids)[-1].argmax()))
        return Theirs(path, twin.logits(PROMPT), ids)

    return make


@pytest.mark.verifies("safetensors", architecture=ARCHITECTURE)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_logits_and_greedy_tokens_are_those_of_the_description(
    checkpoints: Callable[[str], Theirs], backend: str, name: str
) -> None:
    check_against_transformers(backend, checkpoints(name))


def write_gguf(source: Path, path: Path) -> Path:
    """As llama.cpp's converter writes it, with the matrices that layer 0 has no use for."""
    c, tensors = json.loads((source / "config.json").read_text()), load_file(source / "model.safetensors")
    writer = gguf.GGUFWriter(path, "rwkv7")
    writer.add_context_length(1 << 20)
    writer.add_embedding_length(c["hidden_size"])
    writer.add_block_count(c["num_hidden_layers"])
    writer.add_layer_norm_eps(c["norm_eps"])
    writer.add_wkv_head_size(c["head_dim"])
    writer.add_decay_lora_rank(c["decay_low_rank_dim"])
    writer.add_iclr_lora_rank(c["a_low_rank_dim"])
    writer.add_value_residual_mix_lora_rank(c["v_low_rank_dim"])
    writer.add_gate_lora_rank(c["gate_low_rank_dim"])
    writer.add_feed_forward_length(c["intermediate_size"])
    writer.add_head_count(0)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.RWKV7, c["num_hidden_layers"])
    for layer in range(c["num_hidden_layers"]):
        stem = f"model.layers.{layer}.attn.x_"
        stacked = np.stack([tensors.pop(f"{stem}{part}") for part in "rwkvag"])
        writer.add_tensor(f"blk.{layer}.time_mix_lerp_fused.weight", stacked)
    for name, data in tensors.items():
        unified = name.replace("ffn_norm", "ln2").replace("ffn", "feed_forward").replace("g_norm", "ln_x")
        unified = unified.replace("attn_norm", "attention_norm").replace("attn", "attention")
        for old, new in (("0.weight", "1.weight"), ("2.weight", "2.weight"), ("2.bias", "0.weight")):
            unified = unified.replace(f"_lora.lora.{old}", new)
        translated = names.get_name(unified, try_suffixes=(".weight", ".bias"))
        assert translated is not None, unified
        translated += "" if translated.endswith((".weight", ".bias")) else ".weight"
        writer.add_tensor(translated, np.ascontiguousarray(data.flatten() if "r_k" in name else data))
        if translated.startswith("blk.0.time_mix_a"):
            writer.add_tensor(translated.replace("time_mix_a", "time_mix_v"), np.ascontiguousarray(data))
    return finish(writer, path)


@pytest.mark.verifies("gguf", architecture=ARCHITECTURE)
@pytest.mark.parametrize("name", ["rwkv7"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_gguf_files_give_the_same_logits(
    checkpoints: Callable[[str], Theirs], backend: str, name: str, tmp_path: Path
) -> None:
    theirs = checkpoints(name)
    path = write_gguf(theirs.path, tmp_path / "model.gguf")
    assert_close(compute(make_ops(backend), path)(PROMPT, 0), theirs.prefill)


@pytest.mark.parametrize(
    ("values", "error", "message"),
    [
        ({"head_dim": 24}, BadCheckpoint, "head_dim is 24, and hidden_size 64"),
        ({"attn": {"layers": [1]}}, Unsupported, "attn is"),
        ({"hidden_act": "relu"}, Unsupported, "hidden_act is 'relu'"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(values: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        family(ARCHITECTURE).config(CheckpointConfig(Path("config.json"), TINY | values))
