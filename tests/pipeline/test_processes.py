"""Stages as processes: the tokens of one process, and nothing left behind, however one of them ends."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from models.lora_files import adapter
from quire import LLM, LoRARequest, SamplingParams
from quire.core.errors import BadRequest, EngineFailed, Unsupported
from quire.core.structured import Structured
from ranks.processes import PROMPTS, check_that_streams_go_on, exists, followers, texts, wait_until


@pytest.fixture
def two(tiny_model: Path) -> Iterator[LLM]:
    llm = LLM(tiny_model, pipeline_parallel_size=2)
    yield llm
    llm.engine.stop()


def stages(parent: int) -> list[int]:
    return followers(parent, b"quire.executors.pipeline.follower")


def test_tokens_and_logprobs_are_those_of_one_process(deep_model: Path) -> None:
    expected = texts(LLM(deep_model))
    few_blocks = {"kv_cache_memory_bytes": 130_000, "swap_space": 0.01}  # sequences are preempted
    for size, options in ((2, few_blocks), (4, {})):
        llm = LLM(deep_model, pipeline_parallel_size=size, **options)
        assert llm.engine.capacity.micro_batches == size
        assert texts(llm) == expected
        assert (llm.engine.stats().preemptions > 0) == (options is few_blocks)
        llm.engine.stop()
    assert not stages(os.getpid())


def test_a_real_model_in_three_stages(default_model: Path) -> None:
    """Its head has as many weights as eight layers, in a GGUF file. With draft tokens and a grammar."""
    params = [
        SamplingParams(max_tokens=8, temperature=0, logprobs=1),
        SamplingParams(max_tokens=8, temperature=0.7, seed=5),
        SamplingParams(max_tokens=8, temperature=0, structured=Structured("regex", "(yes|no)")),
    ]
    found = []
    for size in (1, 3):
        llm = LLM(default_model, max_model_len=256, pipeline_parallel_size=size, spec_method="ngram")
        outputs = llm.generate(PROMPTS, params)
        found.append([(output.outputs[0].token_ids, output.outputs[0].logprobs) for output in outputs])
        llm.engine.stop()
    assert found[0] == found[1]


def test_a_killed_stage_ends_the_step_with_a_reason(two: LLM) -> None:
    [stage] = stages(os.getpid())
    texts(two)
    os.kill(stage, signal.SIGKILL)
    ranks = two.engine.executor.ranks  # type: ignore[attr-defined]
    wait_until(lambda: ranks.lost)
    with pytest.raises(EngineFailed, match=rf"stage 1 of 2 \(process {stage}\) was killed by signal 9"):
        texts(two)
    wait_until(lambda: not exists(stage))


def test_a_stage_that_hangs_is_found_by_its_heartbeat_in_the_middle_of_a_step(two: LLM) -> None:
    [stage] = stages(os.getpid())
    texts(two)
    os.kill(stage, signal.SIGSTOP)
    with pytest.raises(EngineFailed, match=rf"stage 1 of 2 \(process {stage}\) hangs"):
        texts(two)
    wait_until(lambda: not exists(stage))


def test_streams_go_on_when_a_stage_is_killed(tiny_model: Path) -> None:
    check_that_streams_go_on(tiny_model, lambda engine: stages(engine)[0], pipeline_parallel_size=2)


def test_adapters_reach_all_stages(tiny_model: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    adapter(model, tmp_path / "lora", 3, r=4, lora_alpha=16, target_modules=["q_proj", "down_proj"])
    asked = [LoRARequest("lora", 1, str(tmp_path / "lora")), None]
    params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
    found = []
    for size in (1, 2):
        llm = LLM(tiny_model, enable_lora=True, pipeline_parallel_size=size)
        outputs = llm.generate(PROMPTS[:1] * 2, params, lora_request=asked)
        found.append([output.outputs[0].token_ids for output in outputs])
        llm.engine.stop()
    assert found[0] == found[1] and found[0][0] != found[0][1]


def test_more_stages_than_layers_are_refused(tiny_model: Path) -> None:
    with pytest.raises(BadRequest, match=r"pipeline_parallel_size is 3, and the model has 2 layers.*\n.*1 to 2"):
        LLM(tiny_model, pipeline_parallel_size=3)
    with pytest.raises(Unsupported, match=r"a stage of one rank has all experts.*\n.*leave out enable_expert_parallel"):
        LLM(tiny_model, enable_expert_parallel=True, pipeline_parallel_size=2)
    assert not stages(os.getpid())
