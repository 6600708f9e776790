"""Models of which some layers have a sliding window (Gemma 3, gpt-oss, Llama 4): pages behind it go back to the pool,
and a request gives the bits that it has where every block has all layers."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from fakes import make_drafts_free
from models.head_twins import write_eagle
from quire import LLM, BeamSearchParams, SamplingParams
from quire.core.sliding_window import SlidingWindow
from quire.core.window_pages import WindowPages
from quire.executors.local import LocalExecutor

WINDOW, BLOCK = 20, 16
SHARED = "A quire is four sheets of paper or parchment folded to form eight leaves. "
PROMPTS = [SHARED, SHARED + "Then the binder sews them.", SHARED * 3, "x", "In the beginning was the word"]
PARAMS = SamplingParams(temperature=0.8, seed=5, max_tokens=40, logprobs=1, ignore_eos=True)
COMMON: dict[str, Any] = {
    "vocab_size": 259, "hidden_size": 72, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 12, "max_position_embeddings": 4608, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
    "initializer_range": 0.3,
}  # fmt: skip
LAYERS = ["sliding_attention"] * 2 + ["full_attention"]
LAYER_BYTES = 2 * 2 * 12 * BLOCK * 2  # K and V, heads, columns, tokens, bytes

Bits = list[list[tuple[int, float]]]


@pytest.fixture(scope="module")
def models(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Random models with the tokenizer of the tiny model: two of three layers have a window, or chunks."""
    import torch
    from transformers import AutoModelForCausalLM, Gemma3TextConfig, GptOssConfig, Llama4TextConfig

    windows = {"num_hidden_layers": 3, "layer_types": LAYERS, "sliding_window": WINDOW}
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    configs = {
        "gemma-3": Gemma3TextConfig(**COMMON, **windows),
        "gpt-oss": GptOssConfig(
            **COMMON, **windows, num_local_experts=4, num_experts_per_tok=2, rope_parameters=rope
        ),
        "llama-4": Llama4TextConfig(
            **COMMON, num_hidden_layers=3, attention_chunk_size=WINDOW, no_rope_layers=[1, 1, 0], num_local_experts=4,
            intermediate_size_mlp=64, rope_parameters=rope,
        ),
    }  # fmt: skip
    folders = {}
    for name, config in configs.items():
        folders[name] = tmp_path_factory.mktemp("windows") / name
        shutil.copytree(tiny_model, folders[name])
        torch.manual_seed(3)
        AutoModelForCausalLM.from_config(config).save_pretrained(folders[name])
    return folders


@pytest.fixture(scope="module")
def whole(models: dict[str, Path]) -> Callable[[str], LLM]:
    """An engine whose blocks have all layers."""

    @cache
    def make(name: str) -> LLM:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(LocalExecutor, "_has_window_pages", False)
            llm = LLM(models[name], enable_prefix_caching=False, max_num_seqs=4, max_model_len=512)
        assert llm.engine._scheduler.pages is None
        return llm

    return make


def bits(llm: LLM, prompts: list[str], params: SamplingParams = PARAMS) -> list[Bits]:
    """Tokens and logprobs of each completion of each prompt, with every invariant checked after each step."""
    scheduler = llm.engine._scheduler
    update = scheduler.update
    scheduler.update = lambda output: (update(output), scheduler.check())[0]  # type: ignore[method-assign]
    results = llm.generate(prompts, params)
    scheduler.update = update  # type: ignore[method-assign]
    return [
        [[(t, row[t].logprob) for t, row in zip(o.token_ids, o.logprobs or [], strict=True)] for o in result.outputs]
        for result in results
    ]


def pages_of(llm: LLM) -> WindowPages:
    pages = llm.engine._scheduler.pages
    assert pages is not None, "blocks have all layers"
    return pages


@pytest.mark.parametrize("name", ["gemma-3", "llama-4"])
def test_company_chunks_and_the_cache_change_nothing(
    models: dict[str, Path], whole: Callable[[str], LLM], name: str
) -> None:
    alone = [bits(whole(name), [prompt])[0] for prompt in PROMPTS]
    llm = LLM(models[name], max_num_batched_tokens=24, max_num_seqs=4, max_model_len=512)
    assert pages_of(llm).pool.num_blocks == 2 * 4 * 4 + 2
    assert bits(llm, PROMPTS) == alone
    assert bits(llm, PROMPTS) == alone
    again = llm.generate(PROMPTS[2:3], PARAMS)[0]
    assert again.num_cached_tokens == (len(again.prompt_token_ids) - 1) // BLOCK * BLOCK


def test_a_preempted_sequence_goes_on_as_if_undisturbed(models: dict[str, Path], whole: Callable[[str], LLM]) -> None:
    params, prompts = replace(PARAMS, max_tokens=90), [end + SHARED for end in "abcd"]
    undisturbed = bits(whole("gemma-3"), prompts, params)
    for caching, swap_space in ((False, 0), (False, 1 / 1024), (True, 1 / 1024)):
        llm = LLM(
            models["gemma-3"], max_model_len=256, max_num_seqs=4, max_num_batched_tokens=32, swap_space=swap_space,
            kv_cache_memory_bytes=24 * 3 * LAYER_BYTES, enable_prefix_caching=caching,
        )  # fmt: skip
        assert bits(llm, prompts, params) == undisturbed
        record = llm.engine.record
        assert pages_of(llm).pool.num_blocks == 18 and record is not None
        assert record.scheduler.num_blocks == 24 * 3 - 18 * 2 and record.scheduler.preemptions > 0


def test_completions_and_beams_share_windows(models: dict[str, Path], whole: Callable[[str], LLM]) -> None:
    llm, several = LLM(models["gemma-3"], max_num_seqs=4, max_model_len=512), replace(PARAMS, n=3)
    assert bits(llm, PROMPTS[:3], several) == bits(whole("gemma-3"), PROMPTS[:3], several)
    search = BeamSearchParams(beam_width=3, max_tokens=30)
    found, expected = (one.beam_search(PROMPTS[:3], search) for one in (llm, whole("gemma-3")))
    assert [[beam.token_ids for beam in each.outputs] for each in found] == [
        [beam.token_ids for beam in each.outputs] for each in expected
    ]


def test_prompts_that_end_at_the_edges_of_windows_and_blocks(
    models: dict[str, Path], whole: Callable[[str], LLM]
) -> None:
    for name in ("gemma-3", "llama-4"):
        llm, edges = (
            LLM(models[name], max_num_batched_tokens=24, max_num_seqs=4, max_model_len=512),
            [15, 16, 17, 19, 20, 21, 36, 37, 41],
        )
        prompts = [{"prompt_token_ids": [(7 * i) % 200 + 40 for i in range(length)]} for length in edges]
        params = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
        for one in (llm, llm):  # the second time from the cache
            answers = [result.outputs[0].token_ids for result in one.generate(prompts, params)]
            assert answers == [result.outputs[0].token_ids for result in whole(name).generate(prompts, params)]


def test_a_sequence_of_4000_tokens_holds_a_window_and_a_chunk(models: dict[str, Path]) -> None:
    llm = LLM(models["gemma-3"], max_num_batched_tokens=256, max_num_seqs=2)
    scheduler, pages, held = llm.engine._scheduler, pages_of(llm), []
    update = scheduler.update
    scheduler.update = lambda output: (held.append(pages.pool.num_held), update(output))[1]  # type: ignore[method-assign]
    ids = [(i * i) % 200 + 40 for i in range(4000)]
    llm.generate({"prompt_token_ids": ids}, SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True))
    bound = SlidingWindow(WINDOW, BLOCK, max_chunk=256).max_blocks(4000)
    assert bound == 19 and max(held) <= bound
    assert max(held[-30:]) == SlidingWindow(WINDOW, BLOCK, max_chunk=BLOCK).max_blocks(4000) - 1 == 3
    assert pages.pool.num_blocks < 4000 // BLOCK // 5


def test_drafts_change_nothing(models: dict[str, Path], whole: Callable[[str], LLM]) -> None:
    few = replace(PARAMS, allowed_token_ids=[40, 41])  # drafts are accepted, and rejected
    expected = bits(whole("gpt-oss"), PROMPTS[:3], few)
    for method in ("ngram", "suffix"):  # chains, and trees
        config = {"method": method, "num_speculative_tokens": 5}
        llm = LLM(models["gpt-oss"], max_num_seqs=4, max_model_len=512, speculative_config=config)
        speculation = llm.engine._scheduler.speculation
        make_drafts_free(speculation)
        assert bits(llm, PROMPTS[:3], few) == expected and pages_of(llm)
        assert speculation is not None and 0 < speculation.num_accepted < speculation.num_draft_tokens


@pytest.mark.parametrize("how", ["model", "eagle"])
def test_what_drafts_has_whole_blocks(
    models: dict[str, Path], whole: Callable[[str], LLM], tmp_path: Path, how: str
) -> None:
    """A draft model that is the target drafts right what is greedy; a random head now and then."""
    params = replace(PARAMS, temperature=0.0, allowed_token_ids=[40, 41, 42, 43], max_tokens=60)
    prompts = [end + SHARED for end in "abcd"]
    configs = {
        "model": {"model": str(models["gemma-3"]), "num_speculative_tokens": 3},
        "eagle": {"method": "eagle", "model": str(write_eagle(tmp_path)), "num_speculative_tokens": 3},
    }
    draft_bytes = {"model": 3 * LAYER_BYTES, "eagle": 2 * 2 * 16 * BLOCK * 2}[how]  # of a block
    cache_bytes = 26 * (3 * LAYER_BYTES + draft_bytes)
    llm = LLM(
        models["gemma-3"], max_num_seqs=4, max_model_len=256, max_num_batched_tokens=32, swap_space=1 / 1024,
        speculative_config=configs[how], kv_cache_memory_bytes=cache_bytes,
    )  # fmt: skip
    speculation = llm.engine._scheduler.speculation
    make_drafts_free(speculation)
    expected = bits(whole("gemma-3"), prompts, params)
    assert bits(llm, prompts, params) == expected and bits(llm, prompts, params) == expected
    assert speculation is not None and speculation.num_accepted > 0
    assert pages_of(llm).pool.num_blocks == 18 and llm.engine.stats().preemptions > 0
    left = cache_bytes - 18 * 2 * LAYER_BYTES
    assert llm.engine.capacity.num_blocks == left // (LAYER_BYTES + draft_bytes)


def test_pages_of_8_bits(models: dict[str, Path]) -> None:
    answers = []
    for in_pages in (True, False):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(LocalExecutor, "_has_window_pages", in_pages)
            llm = LLM(models["gemma-3"], max_num_seqs=4, max_model_len=512, kv_cache_dtype="int8")
        assert (llm.engine._scheduler.pages is not None) == in_pages
        answers.append(bits(llm, PROMPTS[:2]))
    assert answers[0] == answers[1]


def test_little_memory_and_long_windows_leave_blocks_whole(models: dict[str, Path]) -> None:
    few = LLM(models["gemma-3"], max_num_seqs=64, max_model_len=320, kv_cache_memory_bytes=100 * 3 * LAYER_BYTES)
    short = LLM(models["gemma-3"], max_num_seqs=2, max_model_len=WINDOW)
    for llm in (few, short):
        assert llm.engine._scheduler.pages is None
