"""Stages with the GPU's op set, as processes without a GPU: kernels are interpreted. The tokens of one process."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DogeConfig, Gemma3TextConfig, Lfm2Config, LlamaConfig, LlamaForCausalLM

from models.checking import TINY, Cases, random_model
from models.plain_adapters import write_adapter
from models.test_lfm2 import HYBRID
from pipeline.interpreted import llm_of
from pipeline.stages_here import InStages
from quire import LLM, SamplingParams
from quire.ops.gpu.opset import GpuOps
from ranks.gpu_threads import OPTIONS, OnOneDevice
from ranks.processes import followers
from ranks.test_gpu_rank_families import MODELS, check

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


WINDOWED = {"num_hidden_layers": 3, "layer_types": ["sliding_attention", "full_attention", "full_attention"]}
LACKING: Cases = {  # some stage has no keys and values, or no states, or windows alone
    "lfm2": (Lfm2Config, HYBRID),
    "gemma-3": (Gemma3TextConfig, {**WINDOWED, "sliding_window": 4, "head_dim": 16}),
}


@pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")  # of a tanh that is 1
@pytest.mark.parametrize("name", LACKING)
def test_stages_may_lack_what_others_have(tmp_path: Path, name: str) -> None:
    config, options = LACKING[name]
    random_model(config(**{**TINY, **options}), seed=3).save_pretrained(tmp_path)
    alone = OnOneDevice(tmp_path)
    check(alone, InStages(tmp_path, alone.model.config.layers, new_backend=lambda: GpuOps(**OPTIONS)))


@pytest.mark.parametrize("name", ["norms of heads", "MoE", "states"])
def test_stages_give_the_bits_of_one_device(tmp_path: Path, name: str) -> None:
    config, options = MODELS[name]
    random_model(config(**{**TINY, "num_hidden_layers": 2, **options}), seed=3).save_pretrained(tmp_path)
    check(OnOneDevice(tmp_path), InStages(tmp_path, 2, new_backend=lambda: GpuOps(**OPTIONS)))


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_what_layers_read_of_layers_long_before_goes_with_the_hidden_states(tmp_path: Path, dtype: str) -> None:
    """Doge: the embeddings. Its decays are multiplied, in the type of activations."""
    random_model(DogeConfig(**TINY), seed=3).save_pretrained(tmp_path)
    given = OPTIONS | {"dtype": dtype}
    check(OnOneDevice(tmp_path, dtype=dtype), InStages(tmp_path, 2, new_backend=lambda: GpuOps(**given)))


def test_adapters_are_loaded_before_a_forward_pass(tmp_path: Path) -> None:
    model = random_model(LlamaConfig(**TINY), seed=3)
    assert isinstance(model, LlamaForCausalLM)
    model.save_pretrained(tmp_path / "model")
    adapters = {"a": write_adapter(model, tmp_path / "a", {"q_proj": 4, "v_proj": 4, "down_proj": 8}, 1)}
    stages = InStages(tmp_path / "model", 2, adapters, lambda: GpuOps(**OPTIONS))
    check(OnOneDevice(tmp_path / "model", adapters), stages, 0)
    with pytest.raises(AssertionError):
        check(OnOneDevice(tmp_path / "model"), stages, 0)
