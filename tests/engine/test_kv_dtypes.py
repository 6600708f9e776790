"""An engine whose cache is int8 or bf16: its answers do not depend on company either, and are nearly those of fp16."""

import math
import pydoc_data.topics
from pathlib import Path

import pytest

from quire import LLM, SamplingParams
from quire.core.errors import BadRequest, Unsupported

PROMPTS = ["A quire is", "of paper, " * 8, "four sheets folded to form eight leaves", "x"]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=40, logprobs=1, ignore_eos=True),
    SamplingParams(temperature=0.9, seed=3, max_tokens=40, logprobs=1, ignore_eos=True),
]


def bits(llm: LLM, times: int = 1) -> list[list[tuple[int, float]]]:
    """Tokens and logprobs of every prompt with both parameters."""
    asked = [(prompt, params) for prompt in PROMPTS for params in PARAMS] * times
    outputs = [r.outputs[0] for r in llm.generate([p for p, _ in asked], [params for _, params in asked])]
    return [[(t, row[t].logprob) for t, row in zip(o.token_ids, o.logprobs or [], strict=True)] for o in outputs]


@pytest.mark.parametrize("dtype", ["int8", "bfloat16"])
def test_batches_chunks_caches_and_swaps_change_nothing(tiny_model: Path, dtype: str) -> None:
    block_size, num_blocks = (16, 15) if dtype == "int8" else (8, 30)
    options = {"block_size": block_size, "max_model_len": 192, "kv_cache_dtype": dtype}
    alone = LLM(tiny_model, enable_prefix_caching=False, max_num_seqs=1, **options)
    expected = bits(alone) * 3
    token_bytes = 2 * 2 * 3 * {"int8": 16 + 4, "bfloat16": 2 * 16}[dtype]  # K and V, layers, heads, a head's bytes
    for more in (
        {},
        {"max_num_batched_tokens": 7, "max_num_seqs": 7},
        {"kv_cache_memory_bytes": 240 * token_bytes, "enable_prefix_caching": False},
        {"kv_cache_memory_bytes": 240 * token_bytes, "enable_prefix_caching": False, "swap_space": 0.01},
    ):
        llm = LLM(tiny_model, **options, **more)
        assert bits(llm, 3) == expected
        record = llm.engine.record
        assert record is not None
        if "kv_cache_memory_bytes" in more:
            assert record.scheduler.num_blocks == num_blocks and record.scheduler.preemptions > 0
        if not more:
            assert record.scheduler.prefix_hits > 0


def test_int8_wants_blocks_of_sixteens(tiny_model: Path) -> None:
    with pytest.raises(BadRequest, match="block_size is 12, and a block of an int8 KV cache holds a multiple of 16"):
        LLM(tiny_model, block_size=12, kv_cache_dtype="int8")
    with pytest.raises(Unsupported, match="kv_cache_dtype is `fp8`"):
        LLM(tiny_model, kv_cache_dtype="fp8")


def test_int8_reads_prose_as_fp16_does(default_model: Path) -> None:
    """Over 512 tokens: the loss within 0.01, and nearly always the same most likely token. So near is fp16 to fp32 in a
    model whose activations are rounded to 8 bits; over many chunks the loss is the same to 0.001."""
    text = "\n\n".join(topic for _, topic in sorted(pydoc_data.topics.topics.items()))
    losses, likeliest = {}, {}
    for dtype in ("float16", "int8"):
        llm = LLM(default_model, kv_cache_dtype=dtype, max_model_len=520, max_num_seqs=1)
        prompt = llm.tokenizer.encode(text[:4000], add_special_tokens=False)[:512]
        result = llm.generate([prompt], SamplingParams(max_tokens=1, prompt_logprobs=1))[0]
        rows = [row for row in result.prompt_logprobs or [] if row]
        assert len(rows) == 511
        losses[dtype] = -math.fsum(row[t].logprob for t, row in zip(prompt[1:], rows, strict=True)) / 511
        likeliest[dtype] = [min(row, key=lambda token: row[token].rank) for row in rows]
    assert abs(losses["int8"] - losses["float16"]) < 0.01
    same = sum(x == y for x, y in zip(likeliest["int8"], likeliest["float16"], strict=True))
    assert same > 0.93 * 511
