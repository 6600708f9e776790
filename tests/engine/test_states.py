"""A model whose states are in the blocks (LFM2): a request gives the same bits whatever happens to it."""

from pathlib import Path

import pytest

from engine.same_bits import LFM2_CONV, PARAMS, PROMPTS, Bits, bits, cold_bits, save_lfm2
from fakes import make_drafts_free
from quire import LLM, SamplingParams
from quire.core import kv_tiers
from quire.core.errors import Unsupported
from quire.runtime import disk_tier
from quire.runtime.disk_tier import DiskTier

# Two tokens at random: some drafts are right.
FEW = SamplingParams(seed=3, max_tokens=40, ignore_eos=True, allowed_token_ids=[40, 41], logprobs=1)
DRAFT_BLOCK_BYTES = 2 * 2 * 3 * 16 * 16 * 2  # of the tiny model: K and V, layers, heads, head_dim, tokens, bytes
BLOCK_BYTES = 2 * 1 * 2 * 12 * 16 * 2 + LFM2_CONV.state_bytes  # K and V, layers, heads, columns, tokens, bytes


@pytest.fixture(scope="module")
def hybrid(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random LFM2 with the tokenizer of the tiny model."""
    return save_lfm2(tiny_model, tmp_path_factory.mktemp("tiny-lfm2"))


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


@pytest.mark.parametrize("drafts", [{}, {"spec_method": "ngram"}], ids=["in blocks", "in slots"])
def test_an_engine_that_is_started_again_finds_states_on_disk(
    hybrid: Path, cold: list[Bits], drafts: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
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
        llm = LLM(hybrid, kv_disk_path=str(tmp_path), **drafts)
        assert bits(llm, PROMPTS) == cold
        llm.engine.save_blocks()
        hits.append(llm.engine.stats().tiers["disk"].hits)
        llm.engine.stop()
    assert hits[0] == 0 < hits[1]


def speculating(hybrid: Path, **options: object) -> LLM:
    """States have slots then, since those in blocks could not go back to where a draft was rejected."""
    llm = LLM(hybrid, **{"spec_method": "ngram", **options})
    make_drafts_free(llm.engine._scheduler.speculation)
    return llm


def test_drafts_change_nothing(hybrid: Path, cold: list[Bits]) -> None:
    llm = speculating(hybrid, max_num_batched_tokens=24, max_num_seqs=8)
    assert bits(llm, PROMPTS) == cold
    assert bits(llm, PROMPTS) == cold  # with prompts from the cache
    assert llm.generate(PROMPTS[1:2], PARAMS)[0].num_cached_tokens > 0
    assert bits(llm, PROMPTS, FEW) == bits(LLM(hybrid), PROMPTS, FEW)
    assert llm.engine.stats().draft_tokens > llm.engine.stats().accepted_tokens > 0


@pytest.mark.parametrize("method", ["ngram", "suffix", "draft_model"])
@pytest.mark.parametrize("swap_space", [0, 0.01], ids=["recomputed", "swapped"])
def test_drafts_in_few_blocks_change_nothing(hybrid: Path, tiny_model: Path, method: str, swap_space: float) -> None:
    alone = LLM(hybrid, enable_prefix_caching=False, max_model_len=160)
    expected = [bits(alone, [prompt], FEW)[0] for prompt in PROMPTS]
    config = {"method": method} | ({"model": str(tiny_model)} if method == "draft_model" else {})
    block_bytes = BLOCK_BYTES - LFM2_CONV.state_bytes + (DRAFT_BLOCK_BYTES if method == "draft_model" else 0)
    tight = speculating(
        hybrid,
        spec_method=None,
        speculative_config=config,
        enable_prefix_caching=False,
        max_model_len=160,
        kv_cache_memory_bytes=14 * block_bytes + 8 * LFM2_CONV.in_slots().slot_bytes,
        swap_space=swap_space,
    )
    assert bits(tight, PROMPTS * 2, FEW) == expected * 2
    stats = tight.engine.stats()
    assert stats.draft_tokens > stats.accepted_tokens > 0 and stats.preemptions > 0


def test_a_hybrid_does_not_draft(hybrid: Path, tiny_model: Path) -> None:
    with pytest.raises(Unsupported, match="`Lfm2ForCausalLM` as a draft model"):
        LLM(tiny_model, speculative_config={"model": str(hybrid), "num_speculative_tokens": 3})
