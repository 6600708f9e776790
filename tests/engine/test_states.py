"""A model whose states are in the blocks (LFM2): a request gives the same bits whatever happens to it."""

from pathlib import Path

import pytest

from engine.same_bits import PARAMS, PROMPTS, Bits, bits, cold_bits, save_random
from quire import LLM, SamplingParams
from quire.core import kv_tiers
from quire.core.errors import Unsupported
from quire.ops.kv_spec import ConvSpec
from quire.runtime import disk_tier
from quire.runtime.disk_tier import DiskTier

CONV = ConvSpec(num_layers=2, channels=48, taps=4)
BLOCK_BYTES = 2 * 1 * 2 * 12 * 16 * 2 + CONV.state_bytes  # K and V, layers, heads, columns, tokens, bytes


@pytest.fixture(scope="module")
def hybrid(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random LFM2 with the tokenizer of the tiny model."""
    from transformers import Lfm2Config, Lfm2ForCausalLM

    config = Lfm2Config(
        vocab_size=259,
        hidden_size=CONV.channels,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        layer_types=["conv", "full_attention", "conv"],
        conv_L_cache=CONV.taps,
        block_multiple_of=16,
        bos_token_id=1,
        eos_token_id=2,
        initializer_range=0.3,
    )
    return save_random(tiny_model, tmp_path_factory.mktemp("tiny-lfm2"), lambda: Lfm2ForCausalLM(config))


@pytest.fixture(scope="module")
def cold(hybrid: Path) -> list[Bits]:
    return cold_bits(hybrid)


def test_company_chunks_and_prefixes_from_the_cache_change_nothing(hybrid: Path, cold: list[Bits]) -> None:
    llm = LLM(hybrid, max_num_batched_tokens=24, max_num_seqs=8)
    assert bits(llm, PROMPTS) == cold
    assert bits(llm, PROMPTS) == cold
    again = llm.generate(PROMPTS, PARAMS)
    assert again[1].num_cached_tokens == (len(again[1].prompt_token_ids) - 1) // 16 * 16


@pytest.mark.parametrize("swap_space", [0, 0.01], ids=["recomputed", "swapped"])
def test_preemption_changes_nothing(hybrid: Path, cold: list[Bits], swap_space: float) -> None:
    options = {"enable_prefix_caching": False, "max_model_len": 160, "swap_space": swap_space}
    tight = LLM(hybrid, kv_cache_memory_bytes=14 * BLOCK_BYTES, **options)
    assert bits(tight, PROMPTS * 2) == cold * 2
    record = tight.engine.record
    assert record is not None and record.scheduler.num_blocks == 14 and record.scheduler.preemptions > 0


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_completions_of_one_prompt_are_those_of_prompts_alone(hybrid: Path, prefix_caching: bool) -> None:
    llm = LLM(hybrid, enable_prefix_caching=prefix_caching)
    several = SamplingParams(n=3, temperature=1.0, seed=5, max_tokens=12, logprobs=1, ignore_eos=True)
    together = bits(llm, PROMPTS[:2], several)
    tight = LLM(hybrid, enable_prefix_caching=False, max_num_seqs=1)
    assert together == bits(tight, PROMPTS[:2], several)
    assert len({tuple(one) for one in together[0]}) == 3


def test_an_engine_that_is_started_again_finds_states_on_disk(
    hybrid: Path, cold: list[Bits], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DiskTier, "read_seconds", lambda self, num_blocks: 0.0)
    for module, name in (
        (kv_tiers, "MIN_FETCH_SECONDS"),
        (disk_tier, "FIND_SECONDS"),
        (kv_tiers, "FIRST_FETCH_SECONDS"),
    ):
        monkeypatch.setattr(module, name, 60.0)
    hits = []
    for _ in range(2):
        llm = LLM(hybrid, kv_disk_path=str(tmp_path))
        assert bits(llm, PROMPTS) == cold
        llm.engine.save_blocks()
        hits.append(llm.engine.stats().tiers["disk"].hits)
        llm.engine.stop()
    assert hits[0] == 0 < hits[1]


def test_what_states_cannot_do_is_refused_by_name(hybrid: Path) -> None:
    with pytest.raises(Unsupported, match="speculative decoding with a `Lfm2ForCausalLM`"):
        LLM(hybrid, speculative_config={"method": "ngram", "num_speculative_tokens": 3})


def test_a_hybrid_does_not_draft(hybrid: Path, tiny_model: Path) -> None:
    with pytest.raises(Unsupported, match="`Lfm2ForCausalLM` as a draft model"):
        LLM(tiny_model, speculative_config={"model": str(hybrid), "num_speculative_tokens": 3})
