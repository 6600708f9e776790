"""Models with gated delta nets and lightning attention (Qwen3-Next, MiniMax): the same bits whatever happens."""

from pathlib import Path
from typing import Any

import pytest

from engine.same_bits import PARAMS, PROMPTS, SHARED, Bits, bits, cold_bits, save_random
from quire import LLM, SamplingParams
from quire.ops.kv_spec import StateSpec

SIZES: dict[str, Any] = {
    "vocab_size": 259,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "num_experts_per_tok": 2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.3,
}
DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 20,
    "num_experts": 4,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}
BLOCK_BYTES = 2 * 1 * 4 * 32 * 16 * 2  # K and V, layers, heads, columns, tokens, bytes
STATES = {"qwen3-next": StateSpec(2, (4, 12, 20), 128, 4), "minimax": StateSpec(2, (4, 32, 32))}


@pytest.fixture(scope="module", params=STATES)
def model(request: pytest.FixtureRequest, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model with the tokenizer of the tiny model."""
    from transformers import MiniMaxConfig, MiniMaxForCausalLM, Qwen3NextConfig, Qwen3NextForCausalLM

    folder = tmp_path_factory.mktemp("models") / request.param
    if request.param == "minimax":
        return save_random(tiny_model, folder, lambda: MiniMaxForCausalLM(MiniMaxConfig(**SIZES, num_local_experts=4)))
    return save_random(tiny_model, folder, lambda: Qwen3NextForCausalLM(Qwen3NextConfig(**SIZES, **DELTA)))


@pytest.fixture(scope="module")
def cold(model: Path) -> list[Bits]:
    return cold_bits(model)


def test_company_chunks_and_prefixes_from_the_cache_change_nothing(model: Path, cold: list[Bits]) -> None:
    llm = LLM(model, max_num_batched_tokens=24, max_num_seqs=8)
    assert bits(llm, PROMPTS) == cold
    assert bits(llm, PROMPTS) == cold
    again = llm.generate(PROMPTS, PARAMS)
    assert again[1].num_cached_tokens == (len(again[1].prompt_token_ids) - 1) // 16 * 16


def test_a_conversation_continues_from_the_state_of_its_last_turn(model: Path) -> None:
    llm, params = LLM(model), SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    ids = llm.tokenizer.encode(SHARED)
    for turn in range(3):
        answer = llm.generate([ids], params)[0]
        if turn:
            assert answer.num_cached_tokens > len(ids) - 40
        ids = [*ids, *answer.outputs[0].token_ids, 5, 6, 7]


def test_preemption_changes_nothing(model: Path, cold: list[Bits]) -> None:
    size = 14 * BLOCK_BYTES + 8 * STATES[model.name].slot_bytes  # a sequence of 160 tokens needs 10 blocks, 6 slots
    preemptions = 0
    for caching in (True, False):
        tight = LLM(model, kv_cache_memory_bytes=size, enable_prefix_caching=caching, max_model_len=160)
        assert bits(tight, PROMPTS * 2) == cold * 2
        record = tight.engine.record
        assert record is not None and record.scheduler.num_blocks == 14
        preemptions += record.scheduler.preemptions
    assert preemptions > 0


def test_completions_of_one_prompt_are_those_of_prompts_alone(model: Path) -> None:
    several = SamplingParams(n=3, temperature=1.0, seed=5, max_tokens=12, logprobs=1, ignore_eos=True)
    together = bits(LLM(model), PROMPTS[:2], several)
    assert together == bits(LLM(model, enable_prefix_caching=False, max_num_seqs=1), PROMPTS[:2], several)
    assert len({tuple(one) for one in together[0]}) == 3


def test_drafts_change_nothing(model: Path, cold: list[Bits]) -> None:
    llm = LLM(model, speculative_config={"method": "ngram", "num_speculative_tokens": 3})
    assert bits(llm, PROMPTS) == cold
