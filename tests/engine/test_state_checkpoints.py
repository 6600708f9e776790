"""Checkpoints of recurrent states in bf16 and int8: how far a resumed prompt is from a cold one, and what is exact."""

from dataclasses import replace
from pathlib import Path

import pytest

from engine.prefill_thread import PrefillThread
from engine.same_bits import PROMPTS, SHARED, Bits, bits
from engine.test_kv_tiers import always_fetch
from engine.test_state_keeping import LONG, engine, hits, states_in
from engine.test_state_slots import BLOCK_BYTES, SLOT_BYTES, hybrid, mamba
from engine.test_transfers import connected, consumer, transfers
from quire import LLM, SamplingParams
from quire.core.errors import Unsupported
from quire.executors import local

assert always_fetch and hybrid and mamba  # fixtures

DTYPES = {"bfloat16": 0.1, "int8": 0.6}  # the most that a logprob may be off in a tiny random model
FIRST = SamplingParams(temperature=0.0, max_tokens=1, logprobs=20)
APART = [f"{number} {SHARED}" for number in "abcdefghij"]  # that have no block in common


def first_logprobs(llm: LLM, prompt: str) -> tuple[dict[int, float], int]:
    """Of the 20 best first tokens, and how many tokens were cached."""
    [result] = llm.generate([prompt], FIRST)
    assert result.outputs[0].logprobs is not None
    return {token: one.logprob for token, one in result.outputs[0].logprobs[0].items()}, result.num_cached_tokens


def error(ours: dict[int, float], theirs: dict[int, float]) -> float:
    common = ours.keys() & theirs.keys()
    assert len(common) >= 15
    return max(abs(ours[token] - theirs[token]) for token in common)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["hybrid", "mamba"])
def test_a_resumed_prompt_is_near_a_cold_one(name: str, dtype: str, request: pytest.FixtureRequest) -> None:
    model: Path = request.getfixturevalue(name)
    cold = LLM(model, enable_prefix_caching=False, max_model_len=512)
    small = LLM(model, state_checkpoint_dtype=dtype, max_model_len=512)
    errors = []
    for prompt in APART[:3]:
        expected = first_logprobs(cold, prompt)
        assert expected[1] == 0 and first_logprobs(small, prompt) == expected  # what runs is exact
        again, num_cached = first_logprobs(small, prompt)
        assert num_cached == (len(small.tokenizer.encode(prompt)) - 1) // 16 * 16
        errors.append(error(again, expected[0]))
    assert 0 < max(errors) < DTYPES[dtype], errors


def test_running_sequences_are_swapped_exactly(hybrid: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    params = SamplingParams(temperature=0.8, seed=5, max_tokens=40, logprobs=1, ignore_eos=True)
    prompts, alone = APART[:5], LLM(hybrid, enable_prefix_caching=False)
    cold = [bits(alone, [prompt], params)[0] for prompt in prompts]
    options = {"kv_cache_memory_bytes": 40 * SLOT_BYTES, "max_model_len": 160, "swap_space": 0.01, "max_num_seqs": 4}
    sized = local.size_cache
    monkeypatch.setattr(local, "size_cache", lambda *args, **given: replace(sized(*args, **given), num_blocks=14))
    tight = LLM(hybrid, **options, state_checkpoint_dtype="int8")
    assert bits(tight, prompts, params) == cold
    assert tight.engine.stats().preemptions > 0 and tight.engine.stats().prefix_hits == 0


@pytest.mark.parametrize("dtype", DTYPES)
def test_smaller_checkpoints_leave_room_for_more(hybrid: Path, dtype: str) -> None:
    size = 40 * BLOCK_BYTES + 40 * SLOT_BYTES
    options = {"kv_cache_memory_bytes": size, "max_model_len": 160, "max_num_seqs": 2}
    whole, small = (LLM(hybrid, **options, state_checkpoint_dtype=name).engine.capacity for name in ("float32", dtype))
    assert whole.cache_bytes <= size >= small.cache_bytes > 0.9 * size
    assert small.num_checkpoint_slots + small.num_slots > 1.2 * whole.num_slots
    assert small.num_blocks >= whole.num_blocks and small.block_bytes == whole.block_bytes == BLOCK_BYTES


def test_few_slots_and_drafts_are_near_undisturbed_sequences(hybrid: Path) -> None:
    """All answers of a crowd that is resumed come; their first tokens are about as likely as undisturbed ones."""
    prompts, params = PROMPTS[:3], SamplingParams(temperature=0.0, max_tokens=10, logprobs=1, ignore_eos=True)
    alone = LLM(hybrid, enable_prefix_caching=False)
    cold: list[Bits] = [bits(alone, [prompt], params)[0] for prompt in prompts]
    size = 14 * BLOCK_BYTES + 8 * SLOT_BYTES
    options = {"kv_cache_memory_bytes": size, "max_model_len": 160, "spec_method": "ngram"}
    tight = LLM(hybrid, **options, state_checkpoint_dtype="bfloat16")
    for _ in range(2):
        for ours, theirs in zip(bits(tight, prompts * 2, params), cold * 2, strict=True):
            assert len(ours[0]) == 10 and ours[0][0][1] == pytest.approx(theirs[0][0][1], abs=DTYPES["bfloat16"])
    assert tight.engine.stats().prefix_hits > 0


@pytest.mark.usefixtures("always_fetch")
def test_the_disk_keeps_the_smaller_ones(hybrid: Path, tmp_path: Path) -> None:
    sizes = {}
    for dtype in ("float32", *DTYPES):
        for _ in range(2):
            with engine(hybrid, tmp_path / dtype, state_checkpoint_dtype=dtype) as llm:
                [expected], [got] = (
                    [first_logprobs(one, LONG[0])[0]] for one in (LLM(hybrid, enable_prefix_caching=False), llm)
                )
                num_hits = hits(llm)
        assert num_hits > 0 and error(got, expected) <= DTYPES.get(dtype, 0.0)
        sizes[dtype] = min(file.stat().st_size for file in states_in(tmp_path / dtype))
    assert sizes["bfloat16"] < 0.55 * sizes["float32"] and sizes["int8"] < 0.3 * sizes["float32"]
    assert len(list((tmp_path / "int8").iterdir())) == 1


def test_prompts_of_a_prefill_engine_come_with_a_smaller_state(hybrid: Path, tmp_path: Path) -> None:
    address, options = f"unix:{tmp_path}/prefill", {"max_model_len": 512, "state_checkpoint_dtype": "int8"}
    expected, _ = first_logprobs(LLM(hybrid, enable_prefix_caching=False), LONG[0])
    with PrefillThread(hybrid, address, **options), consumer(hybrid, address, **options) as llm:
        connected(llm)
        got, _ = first_logprobs(llm, LONG[0])
        assert 0 < error(got, expected) < DTYPES["int8"]
        assert (transfers(llm).prefills, transfers(llm).failed) == (1, 0)


@pytest.mark.parametrize("parallel", ["tensor_parallel_size", "pipeline_parallel_size"])
def test_ranks_and_stages_have_their_parts_of_a_checkpoint(hybrid: Path, parallel: str) -> None:
    expected, _ = first_logprobs(LLM(hybrid, enable_prefix_caching=False), LONG[0])
    llm = LLM(hybrid, state_checkpoint_dtype="int8", **{parallel: 2})
    try:
        assert first_logprobs(llm, LONG[0]) == (expected, 0)
        got, num_cached = first_logprobs(llm, LONG[0])
        assert num_cached > 0 < error(got, expected) < DTYPES["int8"]
    finally:
        llm.engine.stop()


def test_what_cannot_be_is_refused_by_name(hybrid: Path, tiny_model: Path, tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match="state_checkpoint_dtype is int8, and no layer of this model has a state"):
        LLM(tiny_model, state_checkpoint_dtype="int8")
    with pytest.raises(Unsupported, match="swap_space with checkpoints of states in int8 on the host"):
        LLM(hybrid, swap_space=0.01, kv_disk_path=str(tmp_path), state_checkpoint_dtype="int8")
