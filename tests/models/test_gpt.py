"""Families with layer norms, as transformers and as llama.cpp's converter write them, against transformers."""

from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import (
    BioGptConfig,
    BloomConfig,
    CodeGenConfig,
    Cohere2Config,
    CohereConfig,
    FalconConfig,
    GPT2Config,
    GPTBigCodeConfig,
    GPTJConfig,
    GPTNeoConfig,
    GPTNeoXConfig,
    Jais2Config,
    MptConfig,
    NemotronConfig,
    OlmoConfig,
    OpenAIGPTConfig,
    OPTConfig,
    PersimmonConfig,
    PhiConfig,
    StableLmConfig,
    Starcoder2Config,
    XGLMConfig,
)

from models.checking import (
    BACKENDS,
    MAX_LEN,
    PROMPT,
    Cases,
    Theirs,
    assert_close,
    check_against_transformers,
    checkpoints_of,
    compute,
    make_ops,
)
from quire.core.errors import Unsupported

HEADS_9 = {"hidden_size": 72, "num_attention_heads": 9}
ROTARY_HALF = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}}
ALIBI = {"alibi": True, "multi_query": False, "parallel_attn": False, "bias": True}
PAD = {"pad_token_id": 0}
PAD_1 = {"pad_token_id": 1}
CASES: Cases = {
    "gpt2": (GPT2Config, {}),
    "gpt2-untied": (GPT2Config, {**HEADS_9, "tie_word_embeddings": False}),
    "gptj": (GPTJConfig, {"rotary_dim": 8}),
    "gptj-heads-3": (GPTJConfig, {"rotary_dim": 12, "num_attention_heads": 3, "hidden_size": 72, "n_inner": 80}),
    "codegen": (CodeGenConfig, {"rotary_dim": 8}),
    "gpt-neo": (
        GPTNeoConfig,
        {"num_hidden_layers": 3, "attention_types": [[["global", "local", "local"], 1]], "window_size": 5},
    ),
    "openai-gpt": (OpenAIGPTConfig, {}),
    "xglm": (
        XGLMConfig,
        {"d_model": 64, "ffn_dim": 80, "num_layers": 2, "attention_heads": 4, "init_std": 0.3} | PAD_1,
    ),
    "biogpt": (BioGptConfig, PAD_1),
    "persimmon": (PersimmonConfig, {}),
    "persimmon-plain": (PersimmonConfig, {"qk_layernorm": False, **ROTARY_HALF, "num_attention_heads": 2}),
    "gpt-neox": (GPTNeoXConfig, {}),
    "gpt-neox-in-turn": (GPTNeoXConfig, {**HEADS_9, **ROTARY_HALF, "use_parallel_residual": False}),
    "gpt-neox-no-bias": (GPTNeoXConfig, {"attention_bias": False, "tie_word_embeddings": True}),
    "opt": (OPTConfig, {"ffn_dim": 80, "init_std": 0.4}),
    "opt-350m": (OPTConfig, {"ffn_dim": 80, "init_std": 0.4, "do_layer_norm_before": False, "word_embed_proj_dim": 40}),
    "opt-plain": (
        OPTConfig,
        {
            "ffn_dim": 80,
            "init_std": 0.4,
            "enable_bias": False,
            "layer_norm_elementwise_affine": False,
            "tie_word_embeddings": False,
        },
    ),
    "mpt": (MptConfig, {"max_seq_len": MAX_LEN, "attn_config": {"softmax_scale": 0.3}}),
    "mpt-heads-6": (MptConfig, {"max_seq_len": MAX_LEN, "hidden_size": 48, "num_attention_heads": 6}),
    "mpt-clipped": (MptConfig, {"max_seq_len": MAX_LEN, "attn_config": {"clip_qkv": 2.0}}),
    "bloom": (BloomConfig, {}),
    "bloom-heads-9": (BloomConfig, HEADS_9),
    "falcon-7b": (FalconConfig, {**HEADS_9}),
    "falcon-40b": (FalconConfig, {"new_decoder_architecture": True, "num_kv_heads": 2, "bias": True}),
    "falcon-11b": (
        FalconConfig,
        {
            "new_decoder_architecture": True,
            "num_kv_heads": 2,
            "num_ln_in_parallel_attn": 1,
            "ffn_hidden_size": 96,
            "tie_word_embeddings": False,
        },
    ),
    "falcon-rw": (FalconConfig, {**ALIBI, "num_attention_heads": 6, "hidden_size": 48}),
    "falcon-in-turn": (FalconConfig, {"multi_query": False, "parallel_attn": False}),
    "starcoder": (GPTBigCodeConfig, {"num_attention_heads": 5, "hidden_size": 80}),
    "starcoder-mha": (
        GPTBigCodeConfig,
        {"multi_query": False, "tie_word_embeddings": False, "activation_function": "relu"},
    ),
    "starcoder2": (Starcoder2Config, {"num_attention_heads": 6, "hidden_size": 96}),
    "starcoder2-window": (Starcoder2Config, {"sliding_window": 5, "use_bias": False, "tie_word_embeddings": False}),
    "nemotron": (NemotronConfig, {"num_key_value_heads": 2, "head_dim": 32, "intermediate_size": 112}),
    "jais2": (Jais2Config, {"num_key_value_heads": 2, "intermediate_size": 112}),
    "nemotron-biases": (
        NemotronConfig,
        {"num_key_value_heads": 1, "head_dim": 20, "intermediate_size": 80, "attention_bias": True, "mlp_bias": True},
    ),
    "jais2-no-biases": (
        Jais2Config,
        {"attention_bias": False, "mlp_bias": False, "num_key_value_heads": 4, "tie_word_embeddings": True},
    ),
    "phi": (PhiConfig, {}),
    "phi-norms": (PhiConfig, {"qk_layernorm": True, "tie_word_embeddings": False, "hidden_act": "gelu"}),
    "stablelm": (StableLmConfig, {}),
    "stablelm-2-12b": (
        StableLmConfig,
        {"qk_layernorm": True, "use_parallel_residual": True, "use_qkv_bias": True, **ROTARY_HALF},
    ),
    "olmo": (OlmoConfig, {"attention_bias": True, "num_key_value_heads": 4, "tie_word_embeddings": True}),
    "olmo-clipped": (OlmoConfig, {"clip_qkv": 2.0}),
    "command-r": (CohereConfig, PAD),
    "command-r-plus": (CohereConfig, PAD | {"use_qk_norm": True, "logit_scale": 0.5, "attention_bias": True}),
    "command-r7b": (Cohere2Config, PAD | {"num_hidden_layers": 5, "sliding_window": 6}),
    "command-a": (
        Cohere2Config,
        PAD
        | {
            **HEADS_9,
            "num_key_value_heads": 3,
            "num_hidden_layers": 3,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "sliding_window": 5,
        },
    ),
}
checkpoints = checkpoints_of(CASES)
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")  # in GPTBigCode


@pytest.mark.verifies("safetensors")
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_logits_and_greedy_tokens_are_those_of_transformers(
    checkpoints: Callable[[str], Theirs], backend: str, name: str
) -> None:
    check_against_transformers(backend, checkpoints(name))


# -- GGUF --------------------------------------------------------------------------------------------------------------

IN_GGUF = [
    "gpt2", "gpt2-untied", "gptj-heads-3", "gpt-neox", "gpt-neox-in-turn", "mpt-clipped", "bloom-heads-9", "falcon-7b",
    "falcon-40b", "falcon-11b", "starcoder", "starcoder2", "phi", "stablelm", "stablelm-2-12b", "olmo-clipped",
    "command-r", "command-r-plus", "command-r7b",
]  # fmt: skip


@pytest.fixture
def write_gguf() -> Callable[..., Path]:
    """Without the `gguf` package it cannot be had."""
    write: Callable[..., Path] = pytest.importorskip(
        "models.gguf_gpt_writing", reason="needs the package gguf"
    ).write_gguf
    return write


@pytest.mark.verifies("gguf", backend="torch")
@pytest.mark.parametrize("name", IN_GGUF)
def test_a_gguf_file_computes_what_its_checkpoint_does(
    checkpoints: Callable[[str], Theirs], name: str, tmp_path: Path, write_gguf: Callable[..., Path]
) -> None:
    theirs = checkpoints(name)
    path = write_gguf(theirs.path, tmp_path / "model.gguf")
    assert_close(compute(make_ops("torch"), path)(PROMPT, 0), theirs.prefill)


def test_phi_2_with_one_tensor_for_q_k_and_v(
    checkpoints: Callable[[str], Theirs], tmp_path: Path, write_gguf: Callable[..., Path]
) -> None:
    theirs = checkpoints("phi")
    path = write_gguf(theirs.path, tmp_path / "model.gguf", fuse_qkv=True)
    assert_close(compute(make_ops("torch"), path)(PROMPT, 0), theirs.prefill)


@pytest.mark.parametrize(
    ("name", "key", "value", "message"),
    [
        ("starcoder", "starcoder.attention.head_count_kv", 5, r"starcoder\.attention\.head_count_kv is 5"),
        ("mpt-clipped", "mpt.attention.max_alibi_bias", 0.0, r"attn_config\.alibi_bias_max is 0\.0"),
        ("mpt-clipped", "mpt.attention.head_count_kv", 2, r"attn_config\.kv_n_heads is 2"),
    ],
)
def test_metadata_without_code_is_refused_by_name(
    checkpoints: Callable[[str], Theirs],
    name: str,
    key: str,
    value: float,
    message: str,
    tmp_path: Path,
    write_gguf: Callable[..., Path],
) -> None:
    path = write_gguf(checkpoints(name).path, tmp_path / "model.gguf", instead={key: value})
    with pytest.raises(Unsupported, match=message):
        compute(make_ops("torch"), path)
