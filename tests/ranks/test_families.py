"""Models that several ranks compute, against one process: the same bits by the kernels, for all kinds of layers."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from transformers import (
    BitNetConfig,
    BloomConfig,
    CodeGenConfig,
    Cohere2Config,
    CohereConfig,
    DbrxConfig,
    DeepseekV3Config,
    DeepseekV32Config,
    FalconConfig,
    Gemma2Config,
    GPT2Config,
    GptOssConfig,
    LlamaConfig,
    MiniCPM3Config,
    MixtralConfig,
    Olmo2Config,
    Phi3Config,
    Qwen2MoeConfig,
    Qwen3Config,
)

from models.checking import MAX_LEN, PROMPT, TINY, Cases, assert_close, random_model
from models.test_newer_families import CASES as NEWER
from quire.core.errors import Unsupported
from quire.ops.kv_spec import KVSpec
from quire.ops.ranks.cuts import RankIndex
from quire.ops.ranks.forward import RankForward
from ranks.rank_threads import InRanks, OneProcess, steps

MLA = TINY | {
    "num_key_value_heads": 4, "kv_lora_rank": 32, "q_lora_rank": 40, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
    "v_head_dim": 12, "n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 3, "n_group": 4,
    "topk_group": 2, "moe_intermediate_size": 24, "first_k_dense_replace": 1,
}  # fmt: skip
NINE = {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 144, "head_dim": 16}
GPT2 = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": MAX_LEN}
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
CASES: Cases = {
    "llama": (LlamaConfig, {}),  # 4 heads, 2 KV heads: three ranks have the same KV head twice
    "llama-nine-heads": (LlamaConfig, NINE | {"tie_word_embeddings": True}),
    "llama-biases": (LlamaConfig, {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 1}),
    "qwen3": (Qwen3Config, {"head_dim": 32, "intermediate_size": 100}),  # norms of heads
    "olmo2": (Olmo2Config, {}),  # norms of all of q and of all of k
    "gemma2": (Gemma2Config, {"head_dim": 32, "sliding_window": 6, "query_pre_attn_scalar": 30}),
    "phi3": (Phi3Config, {"pad_token_id": 0}),  # q, k and v in one tensor, gate and up in another
    "cohere": (CohereConfig, {"use_qk_norm": True}),  # a norm for each head, attention beside the feed-forward layer
    "cohere2": (Cohere2Config, {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]}),
    "gpt2": (GPT2Config, GPT2),  # transposed, with learned positions
    "bloom": (BloomConfig, {"n_layer": 2, "n_head": 4, "hidden_size": 64}),  # ALiBi, q, k and v of each head together
    "falcon": (FalconConfig, {"new_decoder_architecture": True, "num_kv_heads": 2, "bias": False}),
    "mixtral": (MixtralConfig, {"num_local_experts": 5, "num_experts_per_tok": 2}),
    "qwen2-moe": (
        Qwen2MoeConfig,
        {
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 48,
            "shared_expert_intermediate_size": 80,
        },
    ),
    "gpt-oss": (
        GptOssConfig,
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "head_dim": 32,
            "rope_parameters": ROPE,
            "sliding_window": 6,
        },
    ),
    "deepseek-v3": (DeepseekV3Config, MLA),
    "deepseek-v32": (DeepseekV32Config, MLA | {"index_topk": 6, "index_head_dim": 16, "index_n_heads": 8}),
    "minicpm3": (MiniCPM3Config, MLA | {"scale_emb": 3, "dim_model_base": 32}),  # scaled residuals
    "bitnet": (BitNetConfig, {}),  # norms of what the output and down projections read
    "dbrx": (
        DbrxConfig,
        {
            "d_model": 128,
            "attn_config": {"kv_n_heads": 2, "clip_qkv": 2.0, "rope_theta": 5000.0},
            "ffn_config": {"ffn_hidden_size": 40, "moe_num_experts": 4, "moe_top_k": 2},
        },
    ),
    "codegen": (CodeGenConfig, {"rotary_dim": 8}),  # q, k and v in four parts
    **{name: NEWER[name] for name in ("afmoe", "llama-4", "gemma-3n", "gemma-4")},
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    @cache
    def make(name: str) -> Path:
        config, options = CASES[name]
        path = tmp_path_factory.mktemp(name)
        random_model(config(**{**TINY, **options}), seed=len(name)).save_pretrained(path)
        return path

    return make


@pytest.mark.parametrize("name", CASES)
def test_kernels_give_the_bits_of_one_process(checkpoint: Callable[[str], Path], name: str) -> None:
    alone = steps(OneProcess("native", checkpoint(name)).logits, PROMPT)
    for size in (2, 3):
        ranks = InRanks("native", checkpoint(name), size)
        for ours, theirs in zip(steps(ranks.logits, PROMPT), alone, strict=True):
            np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("name", ["llama-nine-heads", "olmo2", "gpt2", "mixtral", "deepseek-v3"])
def test_plain_ops_give_the_logits_of_one_process(checkpoint: Callable[[str], Path], name: str) -> None:
    alone = steps(OneProcess("torch", checkpoint(name)).logits, PROMPT)
    for size in (2, 3):
        ranks = InRanks("torch", checkpoint(name), size)
        for ours, theirs in zip(steps(ranks.logits, PROMPT), alone, strict=True):
            assert_close(ours, theirs)
            assert ours.argmax(-1).tolist() == theirs.argmax(-1).tolist()


def check_bits(path: Path, backend: str, size: int, threads: int = 1) -> None:
    """With a prompt that is long enough for its rows to be quantized together."""
    alone = steps(OneProcess(backend, path).logits, 2 * PROMPT)
    ranks = InRanks(backend, path, size, threads=threads)
    for ours, theirs in zip(steps(ranks.logits, 2 * PROMPT), alone, strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_rows_that_ranks_quantize_together_have_the_bits_of_one_process(
    checkpoint: Callable[[str], Path], quantization: str
) -> None:
    for name in ("llama-nine-heads", "mixtral"):
        for size, threads in ((2, 2), (3, 1)):
            check_bits(checkpoint(name), f"native {quantization}", size, threads)


def test_adapters_are_divided_as_their_layers_are(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    from models.lora_files import adapter

    for name in ("llama-nine-heads", "phi3"):  # q, k and v in one matrix, of three parts and of one
        path = checkpoint(name)
        model = AutoModelForCausalLM.from_pretrained(path)
        modules = ["q_proj", "v_proj", "o_proj", "up_proj", "down_proj"]
        modules = modules if name != "phi3" else ["qkv_proj", "gate_up_proj", "down_proj"]
        adapters = {name: tmp_path / name}
        adapter(model, adapters[name], seed=3, r=5, lora_alpha=7, target_modules=modules)
        alone = steps(OneProcess("native", path, adapters).logits, PROMPT, adapter=0)
        plain = steps(OneProcess("native", path).logits, PROMPT)
        assert not np.array_equal(alone[0], plain[0]), "the adapter adapts nothing"
        for size in (2, 3):
            ranks = InRanks("native", path, size, adapters)
            for ours, theirs in zip(steps(ranks.logits, PROMPT, adapter=0), alone, strict=True):
                np.testing.assert_array_equal(ours, theirs)


def test_ranks_may_have_several_threads(checkpoint: Callable[[str], Path]) -> None:
    for name in ("llama-nine-heads", "mixtral"):
        check_bits(checkpoint(name), "native", 2, threads=2)


def test_a_rank_has_its_part_of_the_weights(checkpoint: Callable[[str], Path]) -> None:
    """But for what is padded to whole tiles."""
    whole = OneProcess("native", checkpoint("llama")).weight_bytes
    parts = [rank.weight_bytes for rank in InRanks("native", checkpoint("llama"), 2).ranks]
    assert whole <= sum(parts) < 1.1 * whole and max(parts) < 0.6 * whole


def test_an_op_that_is_not_divided_is_refused_by_name() -> None:
    ops = RankForward(None, RankIndex(0, 2), KVSpec(1, 1, 16, 16, "float16"), 1)
    with pytest.raises(Unsupported, match="the model's `scan` is not divided among ranks"):
        ops.scan(None)
