"""Small random models in Hugging Face's layout, as transformers saves them. Their widths are whole blocks of 256."""

from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from tokenizers.pre_tokenizers import ByteLevel

SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
VOCAB = len(SPECIALS) + 256 + 5  # five rows more than there are tokens
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
    "initializer_range": 0.08,
}
EXPERTS = {"num_experts_per_tok": 2, "intermediate_size": 256}
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {"tie_word_embeddings": False},
    "Qwen2": {"tie_word_embeddings": True},
    "Qwen3": {"head_dim": 64},
    "Gemma3": {"head_dim": 64, "query_pre_attn_scalar": 64, "sliding_window": 16},
    "Mixtral": {**EXPERTS, "num_local_experts": 4},
}
MORE_FAMILIES: dict[str, dict[str, Any]] = {
    "Qwen3Moe": {"head_dim": 64, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 256},
    "Qwen3Next": {
        "head_dim": 64, "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2,
        "linear_num_value_heads": 4, "linear_key_head_dim": 64, "linear_value_head_dim": 64, "num_experts": 4,
        "num_experts_per_tok": 2, "moe_intermediate_size": 256, "shared_expert_intermediate_size": 256,
    },
    "Lfm2": {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False},
}  # fmt: skip
RECURRENT: dict[str, dict[str, Any]] = {
    "Bamba": {"attn_layer_indices": [1], "mamba_n_heads": 8, "mamba_n_groups": 2, "mamba_d_state": 32},
    "Jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 2, "mamba_d_state": 8},
}
# Heads side by side; in both Gemmas the last two layers read the keys and values of the first two.
UNEVEN: dict[str, dict[str, Any]] = {
    "Gemma3n": {
        "num_hidden_layers": 4, "head_dim": 64, "hidden_size_per_layer_input": 32, "laurel_rank": 32,
        "num_kv_shared_layers": 2, "sliding_window": 16, "vocab_size_per_layer_input": VOCAB,
        "layer_types": ["sliding_attention", "full_attention"] * 2, "activation_sparsity_pattern": [0.9, 0.0, 0.5, 0.0],
    },
    "Gemma4": {
        "num_hidden_layers": 4, "head_dim": 32, "global_head_dim": 64, "hidden_size_per_layer_input": 32,
        "num_kv_shared_layers": 2, "sliding_window": 16, "vocab_size_per_layer_input": VOCAB,
        "layer_types": ["sliding_attention", "full_attention"] * 2, "use_double_wide_mlp": True,
    },
    "DiffLlama": {},
}  # fmt: skip
CONFIGS = {family: f"{family}TextConfig" for family in ("Gemma3", "Gemma3n", "Gemma4")}


@cache
def _model(family: str, changes: tuple[tuple[str, Any], ...]) -> Any:
    torch.manual_seed(11)
    settings = COMMON | (FAMILIES | MORE_FAMILIES | RECURRENT | UNEVEN)[family] | dict(changes)
    config = getattr(transformers, CONFIGS.get(family, f"{family}Config"))(**settings)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.data += 0.1 * torch.randn_like(parameter)
    return model


def write_plain(folder: Path, family: str = "Llama", dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """-> the model, in fp32. `changes`: of its config."""
    model = _model(family, tuple(changes.items()))
    model.to(dtype).save_pretrained(folder)
    vocab = {token: index for index, token in enumerate([*SPECIALS, *sorted(ByteLevel.alphabet())])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIALS)
    wrapped = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=SPECIALS[1], eos_token=SPECIALS[2]
    )
    wrapped.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    wrapped.save_pretrained(folder)
    return model.to(torch.float32)
