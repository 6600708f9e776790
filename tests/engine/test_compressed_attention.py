"""Compressed attention (DeepSeek V4) in an engine: what is kept of tokens is in window pages and goes back to the pool,
what is kept of groups is in the blocks, and a request gives the same bits whatever happens to it."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine.test_kv_tiers import Engine, always_fetch
from engine.test_window_pages import BLOCK, COMMON, PARAMS, PROMPTS, SHARED, bits, pages_of
from fakes import make_drafts_free
from quire import LLM, BeamSearchParams, SamplingParams
from quire.core.errors import BadRequest, Unsupported
from quire.executors.local import LocalExecutor
from quire.models.deepseek_v4 import config as read_config
from quire.runtime.kv import check_gpu_spec, kv_spec
from quire.weights.checkpoint import open_checkpoint

assert always_fetch  # a fixture

LAYERS = ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"]
HEAD, INDEX, SPARSE, HEAVY = 20, 12, 3, 24  # columns of a head, and of the indexer; tokens of a group
SIZES = {
    "num_hidden_layers": 3, "num_key_value_heads": 1, "head_dim": HEAD, "qk_rope_head_dim": 10, "q_lora_rank": 24,
    "o_groups": 2, "o_lora_rank": 16, "index_n_heads": 4, "index_head_dim": INDEX, "index_topk": 5,
    "sliding_window": 20, "n_routed_experts": 4, "num_experts_per_tok": 2, "layer_types": LAYERS, "num_hash_layers": 1,
    "compress_rates": dict(zip(LAYERS[1:], (SPARSE, HEAVY), strict=True)),
}  # fmt: skip
PAGE_BYTES = 2 * BLOCK * (HEAD + HEAD + 4 * (HEAD + INDEX) + 3 * HEAD)  # of what is kept of tokens
BLOCK_BYTES = 2 * (-(-BLOCK // SPARSE) * (HEAD + INDEX) + HEAD)  # of entries
WHOLE_BYTES = PAGE_BYTES + BLOCK_BYTES


@pytest.fixture(scope="module")
def model(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    import torch
    from transformers import AutoModelForCausalLM, DeepseekV4Config

    from models.checking import randomized

    folder = tmp_path_factory.mktemp("compressed") / "deepseek-v4"
    shutil.copytree(tiny_model, folder)
    torch.manual_seed(3)
    randomized(AutoModelForCausalLM.from_config(DeepseekV4Config(**COMMON | SIZES))).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def whole(model: Path) -> LLM:
    """An engine whose blocks have what is kept of tokens, too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LocalExecutor, "_has_window_pages", False)
        llm = LLM(model, max_num_seqs=4, max_model_len=640, max_num_batched_tokens=640)
    assert llm.engine._scheduler.pages is None
    return llm


@pytest.fixture(scope="module")
def alone(whole: LLM) -> Callable[..., list[Any]]:
    """What each prompt gives by itself, in one chunk."""

    def of(params: SamplingParams, *prompts: str) -> list[Any]:
        whole.reset_prefix_cache()
        return [bits(whole, [prompt], params)[0] for prompt in prompts]

    return of


def test_company_chunks_and_the_cache_change_nothing(model: Path, whole: LLM, alone: Callable[..., list[Any]]) -> None:
    expected = alone(PARAMS, *PROMPTS)
    llm = LLM(model, max_num_batched_tokens=24, max_num_seqs=4, max_model_len=512)
    assert pages_of(llm).window.size == HEAVY
    for one in (llm, llm, whole, whole):  # the second time from the cache
        assert bits(one, PROMPTS) == expected
    again = llm.generate(PROMPTS[2:3], PARAMS)[0]
    assert again.num_cached_tokens == (len(again.prompt_token_ids) - 1) // BLOCK * BLOCK


def test_a_preempted_sequence_goes_on_as_if_undisturbed(model: Path, alone: Callable[..., list[Any]]) -> None:
    params, prompts = replace(PARAMS, max_tokens=100), [end + 6 * SHARED for end in "abcd"]
    kv_bytes = 24 * WHOLE_BYTES  # 18 pages, which the sequences of a step need, and entries of 126 blocks
    for caching, swap_space in ((False, 0), (False, 1 / 1024), (True, 1 / 1024)):
        llm = LLM(
            model, max_model_len=640, max_num_seqs=4, max_num_batched_tokens=32, swap_space=swap_space,
            kv_cache_memory_bytes=kv_bytes, enable_prefix_caching=caching,
        )  # fmt: skip
        assert bits(llm, prompts, params) == alone(params, *prompts)
        record = llm.engine.record
        assert pages_of(llm) and record is not None and record.scheduler.preemptions > 0


def test_completions_and_beams_share_pages(model: Path, whole: LLM) -> None:
    llm, several = LLM(model, max_num_seqs=4, max_model_len=512), replace(PARAMS, n=3)
    assert bits(llm, PROMPTS[:3], several) == bits(whole, PROMPTS[:3], several)
    search = BeamSearchParams(beam_width=3, max_tokens=30)
    found, expected = (one.beam_search(PROMPTS[:3], search) for one in (llm, whole))
    assert [[beam.token_ids for beam in each.outputs] for each in found] == [
        [beam.token_ids for beam in each.outputs] for each in expected
    ]


def test_prompts_that_end_at_the_edges_of_groups_and_blocks(model: Path, whole: LLM) -> None:
    llm = LLM(model, max_num_batched_tokens=24, max_num_seqs=4, max_model_len=512)
    edges = [15, 16, 17, 23, 24, 25, 33, 47, 48, 49, 64]
    prompts: Any = [{"prompt_token_ids": [(7 * i) % 200 + 40 for i in range(length)]} for length in edges]
    params = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    whole.reset_prefix_cache()
    expected = [result.outputs[0].token_ids for result in whole.generate(prompts, params)]
    for one in (llm, llm):  # the second time from the cache
        assert [result.outputs[0].token_ids for result in one.generate(prompts, params)] == expected


def test_drafts_change_nothing(model: Path, alone: Callable[..., list[Any]]) -> None:
    few = replace(PARAMS, allowed_token_ids=[40, 41])  # drafts are accepted, and rejected
    for method in ("ngram", "suffix"):
        config = {"method": method, "num_speculative_tokens": 5}
        llm = LLM(model, max_num_seqs=4, max_model_len=512, speculative_config=config)
        speculation = llm.engine._scheduler.speculation
        make_drafts_free(speculation)
        assert bits(llm, PROMPTS[:3], few) == alone(few, *PROMPTS[:3])
        assert speculation is not None and 0 < speculation.num_accepted < speculation.num_draft_tokens


def test_a_restarted_engine_finds_its_prefixes_on_disk(
    model: Path, alone: Callable[..., list[Any]], tmp_path: Path
) -> None:
    prompts = [SHARED * 4, SHARED * 4 + "Then the binder sews them."]
    for hits in (0, 288):
        options: dict[str, Any] = {"max_model_len": 512, "max_num_batched_tokens": 64}
        with Engine(model, kv_disk_path=str(tmp_path), **options) as engine:
            assert [bits(engine.llm, [prompt])[0] for prompt in prompts] == alone(PARAMS, *prompts)
            assert engine.hits >= hits and pages_of(engine.llm)


def test_without_an_indexer_where_it_would_choose_all_entries(model: Path, whole: LLM) -> None:
    llm = LLM(model, max_model_len=17)
    params = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)
    prompt: Any = {"prompt_token_ids": [50, 60, 70, 80, 90, 100, 110]}
    tokens = [one.generate(prompt, params)[0].outputs[0].token_ids for one in (llm, whole)]
    assert tokens[0] == tokens[1]


def test_what_is_not_there_is_refused(model: Path) -> None:
    with pytest.raises(Unsupported, match="an int8 KV cache of latent vectors"):
        LLM(model, max_model_len=64, kv_cache_dtype="int8")
    with pytest.raises(BadRequest, match="size is 3, and the model's heads are in 2 groups, which stay whole"):
        LLM(model, max_model_len=64, tensor_parallel_size=3)
    spec = kv_spec(read_config(open_checkpoint(model).config), BLOCK, "bfloat16")
    with pytest.raises(Unsupported, match="compressed attention on a GPU"):
        check_gpu_spec(spec)
