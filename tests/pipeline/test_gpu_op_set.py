"""Stages with the GPU's op set, as processes without a GPU: kernels are interpreted. The tokens of one process."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.interpreted import llm_of
from quire import LLM, SamplingParams
from ranks.processes import followers

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are interpreted here")

PROMPTS = ["A quire is", "xyz" * 9, "x"]
PARAMS = [
    SamplingParams(max_tokens=5, temperature=0.8, seed=1, ignore_eos=True),
    SamplingParams(max_tokens=5, temperature=0, ignore_eos=True, prompt_logprobs=1, logprobs=2),
    SamplingParams(max_tokens=5, temperature=1.3, seed=3, ignore_eos=True, top_p=0.9),
]


def texts(llm: LLM) -> list[Any]:
    results = llm.generate(PROMPTS, PARAMS)
    llm.engine.stop()
    return [(one.token_ids, one.logprobs, result.prompt_logprobs) for result in results for one in result.outputs]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_tokens_and_logprobs_are_those_of_one_process(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    """With chunks of prompts, and blocks for one sequence: the others are preempted and swapped."""
    given = {"kv_cache_memory_bytes": 1 << 20, "max_num_batched_tokens": 16, "max_num_seqs": 4, "max_model_len": 64}
    expected = texts(llm_of(tiny_model, 1, monkeypatch, dtype, **given))
    llm = llm_of(tiny_model, 2, monkeypatch, dtype, **given)
    assert len(followers(os.getpid(), b"pipeline.interpreted")) == 1 and llm.engine.capacity.micro_batches == 2
    assert texts(llm) == expected
    assert not followers(os.getpid(), b"pipeline.interpreted")
