"""Models whose layers differ (Gemma 4: widths of heads, keys of other layers; Llama 4: chunks): a request gives the
same bits alone, with others, in chunks, from the cache and after a preemption."""

from pathlib import Path
from typing import Any

import pytest

from engine.same_bits import SHARED, bits, save_random
from quire import LLM

PROMPTS = [SHARED, SHARED + "Then the binder sews them.", "x"]
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
COMMON = {
    "vocab_size": 259, "hidden_size": 48, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 256, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "initializer_range": 0.3,
}  # fmt: skip
GEMMA_4 = {
    "num_hidden_layers": 4, "head_dim": 12, "global_head_dim": 16, "hidden_size_per_layer_input": 8,
    "num_kv_shared_layers": 2, "sliding_window": 20, "layer_types": ["sliding_attention", "full_attention"] * 2,
    "rope_parameters": {"full_attention": ROPE, "sliding_attention": ROPE}, "vocab_size_per_layer_input": 259,
}  # fmt: skip
LLAMA_4 = {
    "num_hidden_layers": 2, "head_dim": 12, "intermediate_size_mlp": 64, "attention_chunk_size": 20,
    "no_rope_layers": [1, 0], "num_local_experts": 4, "floor_scale": 6, "rope_parameters": ROPE,
}  # fmt: skip
BLOCK_BYTES = {"gemma-4": 2 * 2 * 2 * 16 * 16 * 2, "llama-4": 2 * 2 * 2 * 12 * 16 * 2}  # K and V, layers, heads, ...


@pytest.fixture(scope="module", params=BLOCK_BYTES)
def model(request: pytest.FixtureRequest, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model with the tokenizer of the tiny model."""
    from transformers import AutoModelForCausalLM, Gemma4TextConfig, Llama4TextConfig

    kinds: dict[str, tuple[Any, dict[str, Any]]] = {
        "gemma-4": (Gemma4TextConfig, GEMMA_4),
        "llama-4": (Llama4TextConfig, LLAMA_4),
    }
    config, options = kinds[request.param]
    folder = tmp_path_factory.mktemp("layers") / str(request.param)
    return save_random(tiny_model, folder, lambda: AutoModelForCausalLM.from_config(config(**COMMON | options)))


def test_company_chunks_the_cache_and_preemption_change_nothing(model: Path) -> None:
    alone = LLM(model, enable_prefix_caching=False)
    cold = [bits(alone, [prompt])[0] for prompt in PROMPTS]
    together = LLM(model, max_num_batched_tokens=24, max_num_seqs=8)
    assert bits(together, PROMPTS) == cold
    assert bits(together, PROMPTS) == cold
    tight = LLM(
        model, enable_prefix_caching=False, max_model_len=160, kv_cache_memory_bytes=14 * BLOCK_BYTES[model.name]
    )
    assert bits(tight, PROMPTS * 2) == cold * 2
    record = tight.engine.record
    assert record is not None and record.scheduler.num_blocks == 14 and record.scheduler.preemptions > 0
