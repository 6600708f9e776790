"""Heads that draft from hidden states: tiny random ones, written as they are published, and the same in plain torch.

A twin computes everything anew for every draft: the target by transformers, the head as its authors' formulas."""

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    Glm4MoeConfig,
    LlamaConfig,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
)
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3DecoderLayer, DeepseekV3RotaryEmbedding
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeDecoderLayer, Glm4MoeRotaryEmbedding
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb
from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen3_5
from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe as qwen3_5_moe
from transformers.models.qwen3_next import modeling_qwen3_next as qwen3_next

HIDDEN, VOCAB, LAYERS = 72, 259, 2  # of tests/conftest.py's tiny_model
HEADS, KV_HEADS, HEAD_DIM, FFN, EPS = 4, 2, 16, 96, 1e-5
TAPS = [0, 2, 1]
LAYER = {
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": FFN,
    "num_hidden_layers": 1,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "hidden_act": "silu",
    "rms_norm_eps": EPS,
    "vocab_size": VOCAB,
    "max_position_embeddings": 512,
    "rope_theta": 10000.0,
}
Tensors = dict[str, Tensor]
# (tokens, k, path) -> k drafts, their logits [k, VOCAB]; the first drafts are those of the path, where there is one
Drafts = Callable[..., tuple[list[int], Tensor]]


class Target:
    """What transformers makes of the target, all tokens at once."""

    def __init__(self, path: Path) -> None:
        self.model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        self.embed = self.model.get_input_embeddings().weight.detach()
        self.head = self.model.lm_head.weight.detach()

    @torch.no_grad()
    def hidden(self, tokens: list[int]) -> list[Tensor]:
        """The input of every layer, and what the LM head reads: [tokens, HIDDEN] each."""
        taken: list[Tensor] = []
        hooks = [
            layer.register_forward_pre_hook(lambda _, args: taken.append(args[0][0]))
            for layer in self.model.model.layers
        ]
        hooks.append(
            self.model.model.norm.register_forward_hook(lambda _, args, out: taken.extend((args[0][0], out[0])))
        )
        self.model(torch.tensor([tokens]), use_cache=False)
        for hook in hooks:
            hook.remove()
        return taken


# -- EAGLE ------------------------------------------------------------------------------------------------------------


def layer_tensors(prefix: str, inputs: int, *, qk_norms: bool = False, attn_norm: bool = True) -> Tensors:
    q, kv = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    sizes = {"q_proj": (q, inputs), "k_proj": (kv, inputs), "v_proj": (kv, inputs), "o_proj": (HIDDEN, q)}
    made = {f"{prefix}self_attn.{name}.weight": torch.randn(size) * 0.2 for name, size in sizes.items()}
    made |= {
        f"{prefix}mlp.{name}.weight": torch.randn(size) * 0.2
        for name, size in {"gate_proj": (FFN, HIDDEN), "up_proj": (FFN, HIDDEN), "down_proj": (HIDDEN, FFN)}.items()
    }
    norms = {"post_attention_layernorm": HIDDEN} | ({"input_layernorm": HIDDEN} if attn_norm else {})
    norms |= {"self_attn.q_norm": HEAD_DIM, "self_attn.k_norm": HEAD_DIM} if qk_norms else {}
    return made | {f"{prefix}{name}.weight": 1 + 0.3 * torch.randn(size) for name, size in norms.items()}


def save_head(folder: Path, config: dict[str, Any], tensors: Tensors) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


def write_eagle(folder: Path, *, vocab: int = VOCAB, hidden: int = HIDDEN) -> Path:
    """As EAGLE publishes it: no norm before the first layer's attention, a bias in `fc`, the target's head."""
    torch.manual_seed(3)
    tensors = layer_tensors("layers.0.", HIDDEN, attn_norm=False)
    tensors |= {"fc.weight": torch.randn(HIDDEN, 2 * HIDDEN) * 0.2, "fc.bias": torch.randn(HIDDEN) * 0.2}
    config = LAYER | {"architectures": ["LlamaForCausalLM"], "vocab_size": vocab, "hidden_size": hidden}
    return save_head(folder, config, tensors)


def eagle3_tensors(prefix: str, draft_vocab: int, **layer: Any) -> Tensors:
    tensors = layer_tensors(prefix, 2 * HIDDEN, **layer)
    tensors[f"{prefix}hidden_norm.weight"] = 1 + 0.3 * torch.randn(HIDDEN)
    tensors |= {"fc.weight": torch.randn(HIDDEN, 3 * HIDDEN) * 0.2, "norm.weight": 1 + 0.3 * torch.randn(HIDDEN)}
    return tensors | {"lm_head.weight": torch.randn(draft_vocab, HIDDEN) * 0.2}


def draft_vocabulary(count: int) -> Tensors:
    tokens = torch.randperm(VOCAB)[:count].sort().values
    known = torch.zeros(VOCAB, dtype=torch.bool)
    known[tokens] = True
    return {"d2t": tokens - torch.arange(count), "t2d": known}


def write_eagle3(folder: Path, **changes: Any) -> Path:
    """As EAGLE-3's repositories have it: `midlayer`, a vocabulary of its own, the target's embedding."""
    torch.manual_seed(4)
    tensors = eagle3_tensors("midlayer.", 200) | draft_vocabulary(200)
    config = LAYER | {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 200}
    return save_head(folder, config | {"eagle_config": {"eagle_aux_hidden_state_layer_ids": TAPS}} | changes, tensors)


def write_speculator(folder: Path) -> Path:
    """As `speculators` writes it, with all of its norms and an embedding of its own."""
    torch.manual_seed(5)
    tensors = eagle3_tensors("layers.0.", 128) | draft_vocabulary(128)
    tensors |= {
        "embed_tokens.weight": torch.randn(VOCAB, HIDDEN),
        "input_norm.weight": 1 + torch.randn(3 * HIDDEN) * 0.3,
    }
    config = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "transformer_layer_config": LAYER,
        "draft_vocab_size": 128,
        "target_hidden_size": None,
        "eagle_aux_hidden_state_layer_ids": TAPS,
        "norm_before_residual": True,
        "norm_before_fc": True,
        "norm_output": True,
        "speculators_config": {"algorithm": "eagle3", "verifier": {"name_or_path": "tiny"}},
    }
    return save_head(folder, config, tensors)


def write_deep_speculator(folder: Path) -> Path:
    """Two layers of a Qwen3, a norm for each tap, the whole vocabulary."""
    torch.manual_seed(6)
    tensors = eagle3_tensors("layers.0.", VOCAB, qk_norms=True) | layer_tensors("layers.1.", HIDDEN, qk_norms=True)
    tensors |= {f"fc_norm.{i}.weight": 1 + 0.3 * torch.randn(HIDDEN) for i in range(3)}
    layer = LAYER | {"model_type": "qwen3", "num_hidden_layers": 2, "layer_types": ["full_attention"] * 7}
    config = {"architectures": ["Eagle3Speculator"], "transformer_layer_config": layer, "draft_vocab_size": VOCAB}
    config |= {"eagle_aux_hidden_state_layer_ids": TAPS, "fc_norm": True}
    return save_head(folder, config, tensors)


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS) * weight


def attend(x: Tensor, w: Callable[[str], Tensor | None]) -> Tensor:
    """[tokens, inputs] -> [tokens, HIDDEN]"""
    n = len(x)
    rotary = LlamaRotaryEmbedding(LlamaConfig(**{k: v for k, v in LAYER.items() if k != "model_type"}))
    cos, sin = rotary(x[None], torch.arange(n)[None])
    q, k, v = (F.linear(x, w(f"self_attn.{name}_proj")).view(1, n, -1, HEAD_DIM).transpose(1, 2) for name in "qkv")
    if (norm := w("self_attn.q_norm")) is not None:
        q, k = rms(q, norm), rms(k, w("self_attn.k_norm"))
    q, k = apply_rotary_pos_emb(q, k, cos, sin)
    k, v = (y.repeat_interleave(HEADS // KV_HEADS, 1) for y in (k, v))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return F.linear(out.transpose(1, 2).reshape(n, -1), w("self_attn.o_proj"))


def feed_forward(x: Tensor, w: Callable[[str], Tensor | None]) -> Tensor:
    h = rms(x, w("post_attention_layernorm"))
    h = F.silu(F.linear(h, w("mlp.gate_proj"))) * F.linear(h, w("mlp.up_proj"))
    return x + F.linear(h, w("mlp.down_proj"))


def chain(
    hidden: Tensor,
    tokens: list[int],
    k: int,
    path: Sequence[int],
    step: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]],
) -> tuple[list[int], Tensor]:
    """`step(hidden states, ids)` gives the head's hidden states and logits of all positions."""
    ids, lines = list(tokens[1:]), []
    hidden = hidden[: len(ids)]
    for number in range(k):
        own, logits = step(hidden, torch.tensor(ids))
        lines.append(logits[-1])
        ids.append(path[number] if number < len(path) else int(logits[-1].argmax()))
        hidden = torch.cat([hidden, own[-1:]])
    return ids[len(tokens) - 1 :], torch.stack(lines)


def eagle_twin(target: Target, path: Path) -> Drafts:
    t = load_file(path / "model.safetensors")

    def step(hidden: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        def w(name: str) -> Tensor | None:
            return t.get(f"layers.0.{name}.weight")

        x = F.linear(torch.cat([target.embed[ids], hidden], -1), t["fc.weight"], t["fc.bias"])
        x = feed_forward(x + attend(x, w), w)
        return x, F.linear(x, target.head)

    return lambda tokens, k, path=(): chain(target.hidden(tokens)[LAYERS + 1], tokens, k, path, step)


def eagle3_twin(target: Target, path: Path) -> Drafts:
    c = json.loads((path / "config.json").read_text())
    t = {name.replace("midlayer.", "layers.0."): w for name, w in load_file(path / "model.safetensors").items()}
    embed = t.get("embed_tokens.weight", target.embed)
    num_layers = c.get("transformer_layer_config", c)["num_hidden_layers"]

    def weights(index: int) -> Callable[[str], Tensor | None]:
        return lambda name: t.get(f"layers.{index}.{name}.weight")

    def fused(tokens: list[int]) -> Tensor:
        every = target.hidden(tokens)
        taps = [every[index] for index in TAPS]
        if c.get("fc_norm"):
            taps = [rms(x, t[f"fc_norm.{i}.weight"]) for i, x in enumerate(taps)]
        x = torch.cat(taps, -1)
        return F.linear(rms(x, t["input_norm.weight"]) if c.get("norm_before_fc") else x, t["fc.weight"])

    def step(hidden: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        w = weights(0)
        normed = rms(hidden, w("hidden_norm"))
        residual = normed if c.get("norm_before_residual") else hidden
        x = residual + attend(torch.cat([rms(embed[ids], w("input_layernorm")), normed], -1), w)
        x = feed_forward(x, w)
        for index in range(1, num_layers):
            w = weights(index)
            x = feed_forward(x + attend(rms(x, w("input_layernorm")), w), w)
        last = rms(x, t["norm.weight"])
        logits = F.linear(last, t["lm_head.weight"])
        if "d2t" in t:
            places = torch.arange(logits.shape[1]) + t["d2t"]
            logits = torch.full((len(logits), VOCAB), -torch.inf).index_copy(1, places, logits)
        return (last if c.get("norm_output") else x), logits

    return lambda tokens, k, path=(): chain(fused(tokens), tokens, k, path, step)


# -- Medusa -----------------------------------------------------------------------------------------------------------

NUM_HEADS, NUM_BLOCKS = 3, 2


def medusa_tensors() -> Tensors:
    torch.manual_seed(7)
    tensors = {}
    for head in range(NUM_HEADS):
        for block in range(NUM_BLOCKS):
            tensors[f"{head}.{block}.linear.weight"] = torch.randn(HIDDEN, HIDDEN) * 0.2
            tensors[f"{head}.{block}.linear.bias"] = torch.randn(HIDDEN) * 0.2
        tensors[f"{head}.{NUM_BLOCKS}.weight"] = torch.randn(VOCAB, HIDDEN) * 0.2
    return tensors


def write_medusa(folder: Path) -> Path:
    """As published: the state dict of the heads, in torch's own format."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {"medusa_num_heads": NUM_HEADS, "medusa_num_layers": NUM_BLOCKS, "base_model_name_or_path": "tiny"}
    (folder / "config.json").write_text(json.dumps(config))
    torch.save(medusa_tensors(), folder / "medusa_lm_head.pt")
    return folder


def write_converted_medusa(folder: Path) -> Path:
    """As vLLM reads it, with LM heads of some tokens."""
    tensors = {}
    for name, tensor in medusa_tensors().items():
        head, block, *rest = name.split(".")
        new = f"blocks.{head}.layers.{block}.{rest[-1]}" if rest[0] == "linear" else f"lm_heads.{head}.weight"
        tensors[new] = tensor
    tokens = torch.randperm(VOCAB)[:150]
    config = {"model_type": "medusa", "architectures": ["MedusaModel"], "hidden_size": HIDDEN, "vocab_size": VOCAB}
    config |= {"num_heads": NUM_HEADS, "num_hidden_layers": NUM_BLOCKS, "truncated_vocab_size": 150}
    return save_head(folder, config, {**tensors, "token_map": tokens})


def medusa_twin(target: Target, path: Path) -> Drafts:
    t = medusa_tensors()
    file = path / "model.safetensors"
    tokens_of_heads = load_file(file)["token_map"] if file.exists() else torch.arange(VOCAB)

    def drafts(tokens: list[int], k: int, path: Sequence[int] = ()) -> tuple[list[int], Tensor]:
        last = target.hidden(tokens)[LAYERS + 1][len(tokens) - 2]
        lines = torch.full((k, VOCAB), -torch.inf)
        for head in range(k):
            x = last
            for block in range(NUM_BLOCKS):
                x = x + F.silu(F.linear(x, t[f"{head}.{block}.linear.weight"], t[f"{head}.{block}.linear.bias"]))
            lines[head, tokens_of_heads] = F.linear(x, t[f"{head}.{NUM_BLOCKS}.weight"][tokens_of_heads])
        return lines.argmax(-1).tolist(), lines

    return drafts


# -- MTP --------------------------------------------------------------------------------------------------------------

COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 96,
    "moe_intermediate_size": 24,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LATENTS = {"kv_lora_rank": 32, "q_lora_rank": 40, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12}
FAMILIES: dict[str, tuple[Any, Any, Any]] = {
    "deepseek": (
        DeepseekV3Config(**COMMON, **LATENTS, num_key_value_heads=4),
        DeepseekV3DecoderLayer,
        DeepseekV3RotaryEmbedding,
    ),
    "glm": (
        Glm4MoeConfig(**COMMON, num_key_value_heads=2, head_dim=16, use_qk_norm=True),
        Glm4MoeDecoderLayer,
        Glm4MoeRotaryEmbedding,
    ),
}


def write_mtp(folder: Path, family: str, tokenizer: Path) -> Path:
    """A target whose checkpoint has one layer more, with the tokenizer of another."""
    config, layer_type, _ = FAMILIES[family]
    torch.manual_seed(8)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    for file in tokenizer.glob("token*"):
        shutil.copy(file, folder)
    tensors = load_file(folder / "model.safetensors")
    prefix = f"model.layers.{LAYERS}."
    for name, tensor in stacked_apart(layer_type(config, LAYERS).state_dict()).items():
        random = 1 + 0.3 * torch.randn(tensor.shape) if tensor.dim() == 1 else torch.randn(tensor.shape) * 0.2
        tensors[prefix + name] = random
    for name in ("enorm", "hnorm", "shared_head.norm"):
        tensors[f"{prefix}{name}.weight"] = 1 + 0.3 * torch.randn(HIDDEN)
    tensors[f"{prefix}eh_proj.weight"] = torch.randn(HIDDEN, 2 * HIDDEN) * 0.2
    tensors[f"{prefix}embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors[f"{prefix}shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    save_file(tensors, folder / "model.safetensors")
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(values | {"num_nextn_predict_layers": 1}))
    return folder


def stacked_apart(state: Tensors) -> Tensors:
    """Experts as checkpoints store them: a matrix each."""
    apart = {}
    for name, tensor in state.items():
        if name.endswith("experts.gate_up_proj"):
            for expert, matrix in enumerate(tensor):
                gate, up = matrix.chunk(2)
                base = name.removesuffix("gate_up_proj")
                apart |= {f"{base}{expert}.gate_proj.weight": gate, f"{base}{expert}.up_proj.weight": up}
        elif name.endswith("experts.down_proj"):
            base = name.removesuffix("down_proj")
            apart |= {f"{base}{expert}.down_proj.weight": matrix for expert, matrix in enumerate(tensor)}
        else:
            apart[name] = tensor
    return apart


def stacked_together(state: Tensors, like: Tensors) -> Tensors:
    """Experts as transformers has them: one tensor of all."""
    together = {name: tensor for name, tensor in state.items() if name in like}
    for name in like.keys() - together.keys():
        base = name.removesuffix("gate_up_proj").removesuffix("down_proj")
        experts = range(like[name].shape[0])
        parts = ("gate_proj", "up_proj") if name.endswith("gate_up_proj") else ("down_proj",)
        matrices = [torch.cat([state[f"{base}{expert}.{part}.weight"] for part in parts]) for expert in experts]
        together[name] = torch.stack(matrices)
    return together


def mtp_twin(target: Target, path: Path) -> Drafts:
    config, layer_type, rotary_type = FAMILIES["glm" if "Glm" in type(target.model).__name__ else "deepseek"]
    prefix = f"model.layers.{LAYERS}."
    t = {n.removeprefix(prefix): w for n, w in load_file(path / "model.safetensors").items() if n.startswith(prefix)}
    config._attn_implementation = "eager"
    layer, rotary = layer_type(config, LAYERS).eval(), rotary_type(config)
    layer.load_state_dict(stacked_together(t, layer.state_dict()))
    eps = config.rms_norm_eps

    def norm(x: Tensor, name: str) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * t[f"{name}.weight"]

    @torch.no_grad()
    def step(hidden: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        n = len(ids)
        x = F.linear(torch.cat([norm(target.embed[ids], "enorm"), norm(hidden, "hnorm")], -1), t["eh_proj.weight"])
        mask = torch.full((n, n), -torch.inf).triu(1)[None, None]
        positions = torch.arange(n)[None]
        out = layer(
            x[None], attention_mask=mask, position_ids=positions, position_embeddings=rotary(x[None], positions)
        )
        out = (out[0] if isinstance(out, tuple) else out)[0]
        return out, F.linear(norm(out, "shared_head.norm"), target.head)

    return lambda tokens, k, path=(): chain(target.hidden(tokens)[LAYERS + 1], tokens, k, path, step)


# -- MTP of hybrids ---------------------------------------------------------------------------------------------------

QWEN = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 96,
    "num_hidden_layers": LAYERS,
    "layer_types": ["linear_attention", "full_attention"],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 20,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
QWEN_EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 40,
}
QWEN_FAMILIES: dict[str, tuple[Any, Any]] = {
    "qwen3-next": (Qwen3NextConfig(**QWEN, **QWEN_EXPERTS), qwen3_next),
    "qwen3.5": (Qwen3_5TextConfig(**QWEN), qwen3_5),
    "qwen3.5-moe": (Qwen3_5MoeTextConfig(**QWEN, **QWEN_EXPERTS), qwen3_5_moe),
}


def qwen_part(family: str, name: str) -> Any:
    """A class of the family's file."""
    prefix = {"qwen3-next": "Qwen3Next", "qwen3.5": "Qwen3_5", "qwen3.5-moe": "Qwen3_5Moe"}[family]
    rotary = "TextRotaryEmbedding" if family != "qwen3-next" and name == "RotaryEmbedding" else name
    return getattr(QWEN_FAMILIES[family][1], prefix + rotary)


def write_qwen_mtp(folder: Path, family: str, tokenizer: Path) -> Path:
    """A hybrid whose checkpoint has a layer that predicts further tokens, with the tokenizer of another."""
    config = QWEN_FAMILIES[family][0]
    torch.manual_seed(8)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    for file in tokenizer.glob("token*"):
        shutil.copy(file, folder)
    state = qwen_part(family, "DecoderLayer")(config, layer_idx=1).state_dict()  # one with attention
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in (stacked_apart(state) if family == "qwen3-next" else state).items():
        random = 0.3 * torch.randn(tensor.shape) if tensor.dim() == 1 else torch.randn(tensor.shape) * 0.2
        tensors[f"mtp.layers.0.{name}"] = random
    for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):  # stored less 1
        tensors[f"mtp.{name}.weight"] = 0.3 * torch.randn(HIDDEN)
    tensors["mtp.fc.weight"] = torch.randn(HIDDEN, 2 * HIDDEN) * 0.2
    save_file(tensors, folder / "model.safetensors")
    return folder


def qwen_mtp_twin(target: Target, path: Path, family: str) -> Drafts:
    config = QWEN_FAMILIES[family][0]
    t = {n.removeprefix("mtp."): w for n, w in load_file(path / "model.safetensors").items() if n.startswith("mtp.")}
    config._attn_implementation = "eager"
    layer = qwen_part(family, "DecoderLayer")(config, layer_idx=1).eval()
    rotary = qwen_part(family, "RotaryEmbedding")(config)
    state = {n.removeprefix("layers.0."): w for n, w in t.items() if n.startswith("layers.0.")}
    layer.load_state_dict(stacked_together(state, layer.state_dict()))

    def norm(x: Tensor, name: str) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + config.rms_norm_eps) * (1 + t[f"{name}.weight"])

    @torch.no_grad()
    def step(hidden: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        n = len(ids)
        pair = [norm(target.embed[ids], "pre_fc_norm_embedding"), norm(hidden, "pre_fc_norm_hidden")]
        x = F.linear(torch.cat(pair, -1), t["fc.weight"])[None]
        positions = torch.arange(n)[None]
        out = layer(
            x,
            attention_mask=torch.full((n, n), -torch.inf).triu(1)[None, None],
            position_ids=positions,
            position_embeddings=rotary(x, positions),
        )
        out = norm((out[0] if isinstance(out, tuple) else out)[0], "norm")
        return out, F.linear(out, target.head)

    return lambda tokens, k, path=(): chain(target.hidden(tokens)[LAYERS + 1], tokens, k, path, step)


# -- heads that are often right ---------------------------------------------------------------------------------------


def write_bigrams(folder: Path, tiny_model: Path) -> Path:
    """A target whose next token depends on the last alone: its layers add nothing."""
    shutil.copytree(tiny_model, folder, dirs_exist_ok=True)
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensors[name] = torch.zeros_like(tensor)
    tensors["lm_head.weight"] *= 2
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def write_noisy_eagle(folder: Path, bigrams: Path, noise: float = 0.6) -> Path:
    """It reads the embedding as the target does, but for noise; its own layer adds nothing, either."""
    torch.manual_seed(9)
    tensors = layer_tensors("layers.0.", HIDDEN, attn_norm=False)
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        tensors[f"layers.0.{name}.weight"] *= 0
    rms_of_embedding = load_file(bigrams / "model.safetensors")["model.embed_tokens.weight"].pow(2).mean().sqrt()
    copy = torch.eye(HIDDEN) + noise * torch.randn(HIDDEN, HIDDEN) / HIDDEN**0.5
    tensors["fc.weight"] = torch.cat([copy, torch.zeros(HIDDEN, HIDDEN)], 1) / rms_of_embedding
    tensors["fc.bias"] = torch.zeros(HIDDEN)
    return save_head(folder, LAYER | {"architectures": ["LlamaForCausalLM"]}, tensors)


def write_noisy_medusa(folder: Path, bigrams: Path, noise: float = 2.0) -> Path:
    """Each LM head gives a token the sum of what is read where greedy decoding has it so many positions later, and
    noise."""
    torch.manual_seed(10)
    t = load_file(bigrams / "model.safetensors")
    read = rms(t["model.embed_tokens.weight"], t["model.norm.weight"])
    follower = (read @ t["lm_head.weight"].T).argmax(-1)
    tensors, later = {}, follower
    for head in range(NUM_HEADS):
        later = follower[later]
        sums = F.one_hot(later, VOCAB).float().T @ read
        tensors[f"{head}.0.linear.weight"] = torch.zeros(HIDDEN, HIDDEN)
        tensors[f"{head}.1.weight"] = 0.1 * (sums + noise * torch.randn(VOCAB, HIDDEN))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"medusa_num_heads": NUM_HEADS, "medusa_num_layers": 1}))
    save_file(tensors, folder / "medusa_lm_head.safetensors")
    return folder


# method, how its head is written, and its twin
FORMATS: dict[str, tuple[str, Callable[[Path], Path], Callable[[Target, Path], Drafts]]] = {
    "EAGLE": ("eagle", write_eagle, eagle_twin),
    "EAGLE-3": ("eagle3", write_eagle3, eagle3_twin),
    "speculators": ("eagle3", write_speculator, eagle3_twin),
    "speculators, deep": ("eagle3", write_deep_speculator, eagle3_twin),
    "Medusa": ("medusa", write_medusa, medusa_twin),
    "Medusa, converted": ("medusa", write_converted_medusa, medusa_twin),
}
