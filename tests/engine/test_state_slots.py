"""Models whose states are in slots beside the blocks (Bamba, Mamba): a request gives the same bits whatever happens."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from engine.same_bits import PARAMS, PROMPTS, SHARED, Bits, bits, cold_bits, save_random
from fakes import make_drafts_free
from quire import LLM, SamplingParams
from quire.core.errors import DoesNotFit, Unsupported
from quire.ops.kv_spec import StateSpec
from quire.ops.native.cache import NativeCache

BLOCK_BYTES = 2 * 1 * 2 * 12 * 16 * 2  # K and V, layers, heads, columns, tokens, bytes
SLOT_BYTES = StateSpec(2, (4, 12, 24), 144, 4).slot_bytes


@pytest.fixture(scope="module")
def hybrid(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Bamba with the tokenizer of the tiny model."""
    from transformers import BambaConfig, BambaForCausalLM

    config = BambaConfig(
        vocab_size=259,
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=3,
        attn_layer_indices=[1],
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        mamba_n_heads=4,
        mamba_n_groups=2,
        mamba_d_state=12,
        bos_token_id=1,
        eos_token_id=2,
        initializer_range=0.3,
    )
    return save_random(tiny_model, tmp_path_factory.mktemp("tiny-bamba"), lambda: BambaForCausalLM(config))


@pytest.fixture(scope="module")
def mamba(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Mamba, which has no keys and values at all."""
    from transformers import MambaConfig, MambaForCausalLM

    config = MambaConfig(vocab_size=259, hidden_size=40, num_hidden_layers=2, bos_token_id=1, eos_token_id=2)
    return save_random(tiny_model, tmp_path_factory.mktemp("tiny-mamba"), lambda: MambaForCausalLM(config))


@pytest.fixture(scope="module")
def cold(hybrid: Path) -> list[Bits]:
    return cold_bits(hybrid)


def test_company_chunks_and_prefixes_from_the_cache_change_nothing(hybrid: Path, cold: list[Bits]) -> None:
    llm = LLM(hybrid, max_num_batched_tokens=24, max_num_seqs=8)
    assert bits(llm, PROMPTS) == cold
    assert bits(llm, PROMPTS) == cold
    again = llm.generate(PROMPTS, PARAMS)
    assert again[1].num_cached_tokens == (len(again[1].prompt_token_ids) - 1) // 16 * 16


def test_a_model_without_attention_has_prefixes_too(mamba: Path) -> None:
    cold = [bits(LLM(mamba, enable_prefix_caching=False), [prompt])[0] for prompt in PROMPTS]
    llm = LLM(mamba, max_num_batched_tokens=24, max_num_seqs=8, max_model_len=512)
    assert bits(llm, PROMPTS) == cold
    assert bits(llm, PROMPTS) == cold
    assert llm.generate(PROMPTS[1:2], PARAMS)[0].num_cached_tokens > 0


def test_a_conversation_continues_from_the_state_of_its_last_turn(hybrid: Path) -> None:
    llm, ids, num_before = LLM(hybrid), list(range(40, 90)), 0
    for turn in range(4):
        params = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
        answer = llm.generate({"prompt_token_ids": ids}, params)[0]
        assert answer.num_cached_tokens == num_before // 16 * 16
        num_before = len(ids) + 29  # the last token of an answer is not computed
        ids += [*answer.outputs[0].token_ids, *range(100 + turn, 120 + turn)]


def test_the_second_prompt_with_a_prefix_leaves_the_checkpoint_that_the_third_one_hits(
    hybrid: Path, cold: list[Bits]
) -> None:
    llm = LLM(hybrid, max_num_seqs=2)
    hits = [llm.generate([SHARED + f"{number} is another end."], PARAMS)[0].num_cached_tokens for number in range(3)]
    assert hits[0] == hits[1] == 0 < hits[2]
    assert bits(llm, PROMPTS[1:3]) == cold[1:3]


def test_swapped_states_are_those_of_undisturbed_sequences(
    hybrid: Path, cold: list[Bits], monkeypatch: pytest.MonkeyPatch
) -> None:
    num_swapped = 0
    swap_in = NativeCache.swap_states_in

    def counted(cache: NativeCache, pairs: Sequence[tuple[int, int]]) -> None:
        nonlocal num_swapped
        num_swapped += len(pairs)
        swap_in(cache, pairs)

    monkeypatch.setattr(NativeCache, "swap_states_in", counted)
    for caching in (True, False):
        options = {"enable_prefix_caching": caching, "max_model_len": 160, "swap_space": 0.01}
        tight = LLM(hybrid, kv_cache_memory_bytes=14 * BLOCK_BYTES + 8 * SLOT_BYTES, **options)
        assert bits(tight, PROMPTS * 2) == cold * 2
    assert num_swapped > 0


def test_preemption_changes_nothing(hybrid: Path, cold: list[Bits]) -> None:
    size = 14 * BLOCK_BYTES + 8 * SLOT_BYTES  # as a sequence of 160 tokens needs them: 10 blocks, 6 slots
    preemptions = 0
    for caching in (True, False):
        tight = LLM(hybrid, kv_cache_memory_bytes=size, enable_prefix_caching=caching, max_model_len=160)
        assert bits(tight, PROMPTS * 2) == cold * 2
        record = tight.engine.record
        assert record is not None and record.scheduler.num_blocks == 14
        preemptions += record.scheduler.preemptions
    assert preemptions > 0


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_completions_of_one_prompt_are_those_of_prompts_alone(hybrid: Path, prefix_caching: bool) -> None:
    llm = LLM(hybrid, enable_prefix_caching=prefix_caching)
    several = SamplingParams(n=3, temperature=1.0, seed=5, max_tokens=12, logprobs=1, ignore_eos=True)
    together = bits(llm, PROMPTS[:2], several)
    tight = LLM(hybrid, enable_prefix_caching=False, max_num_seqs=1)
    assert together == bits(tight, PROMPTS[:2], several)
    assert len({tuple(one) for one in together[0]}) == 3


def test_drafts_change_nothing(hybrid: Path, cold: list[Bits]) -> None:
    llm = LLM(hybrid, speculative_config={"method": "ngram", "num_speculative_tokens": 3})
    make_drafts_free(llm.engine._scheduler.speculation)
    assert bits(llm, PROMPTS) == cold
    few = SamplingParams(seed=3, max_tokens=40, ignore_eos=True, allowed_token_ids=[40, 41], logprobs=1)
    assert bits(llm, PROMPTS, few) == bits(LLM(hybrid), PROMPTS, few)
    assert llm.engine.stats().draft_tokens > llm.engine.stats().accepted_tokens > 0


@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_methods_without_a_model_draft_for_states(hybrid: Path, method: str) -> None:
    few_blocks_and_drafts_change_nothing(hybrid, spec_method=method)


def few_blocks_and_drafts_change_nothing(model: Path, **options: object) -> None:
    """Two tokens at random: some drafts are right. Of a hybrid, sequences are swapped out."""
    few = SamplingParams(seed=3, max_tokens=40, ignore_eos=True, allowed_token_ids=[40, 41], logprobs=1)
    alone = LLM(model, enable_prefix_caching=False, max_model_len=160)
    expected = [bits(alone, [prompt], few)[0] for prompt in PROMPTS]
    memory = {"kv_cache_memory_bytes": 14 * BLOCK_BYTES + 8 * SLOT_BYTES, "swap_space": 0.01}
    given = {"spec_method": "ngram", "enable_prefix_caching": False, "max_model_len": 160} | memory | options
    tight = LLM(model, **given)
    try:
        make_drafts_free(tight.engine._scheduler.speculation)
        assert bits(tight, PROMPTS * 2, few) == expected * 2
        stats = tight.engine.stats()
        assert stats.draft_tokens > stats.accepted_tokens > 0
        assert stats.preemptions > 0 or "mamba" in model.name
    finally:
        tight.engine.stop()


def test_what_states_cannot_do_is_refused_by_name(hybrid: Path) -> None:
    with pytest.raises(DoesNotFit, match="the recurrent states of a sequence and of a prefix need"):
        LLM(hybrid, kv_cache_memory_bytes=2 * SLOT_BYTES)


def test_a_model_without_attention_has_no_draft_model(mamba: Path, tiny_model: Path) -> None:
    with pytest.raises(Unsupported, match="for one that has no keys and values"):
        LLM(mamba, speculative_config={"model": str(tiny_model), "num_speculative_tokens": 3})


def test_a_hybrid_does_not_draft(hybrid: Path, tiny_model: Path) -> None:
    with pytest.raises(Unsupported, match="`BambaForCausalLM` as a draft model"):
        LLM(tiny_model, speculative_config={"model": str(hybrid), "num_speculative_tokens": 3})
