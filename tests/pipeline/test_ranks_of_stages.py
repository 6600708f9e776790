"""Stages that several ranks compute together: the tokens of one process, and streams that go on when one is killed."""

import os
import signal
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from models.checking import TINY, random_model
from models.lora_files import adapter
from pipeline.test_processes import stages
from quire import LLM, LoRARequest, SamplingParams
from quire.core.errors import BadRequest, EngineFailed
from ranks.processes import PROMPTS, check_that_streams_go_on, exists, followers, texts, wait_until
from trials import LENGTH

TRIAL = [pytest.mark.trial, pytest.mark.skipif(LENGTH == 1, reason="`make trials` ends each of them")]
VICTIMS = [
    pytest.param(0, id="a stage", marks=TRIAL),
    pytest.param(1, id="a rank of a stage"),
    pytest.param(2, id="a rank of the last stage", marks=TRIAL),
]
RANK = b"quire.executors.pipeline.rank_follower"


def all_processes(engine: int) -> list[int]:
    """Of the first stage: rank 0, then its other ranks; then the other ranks of the last."""
    [first] = stages(engine)
    return [first, *followers(first, RANK), *followers(engine, RANK)]


def test_two_stages_of_two_ranks_give_the_tokens_of_one_process(deep_model: Path) -> None:
    expected = texts(LLM(deep_model))
    few_blocks = {"kv_cache_memory_bytes": 130_000, "swap_space": 0.01}  # sequences are preempted
    llm = LLM(deep_model, tensor_parallel_size=2, pipeline_parallel_size=2, **few_blocks)
    processes = all_processes(os.getpid())
    assert len(processes) == 3 and llm.engine.capacity.micro_batches == 2
    assert texts(llm) == expected and llm.engine.stats().preemptions > 0
    llm.engine.stop()
    wait_until(lambda: not any(map(exists, processes)))


def test_ranks_of_stages_have_whole_experts_or_parts_of_all(tiny_model: Path, tmp_path: Path) -> None:
    """Three ranks for four heads and five experts: no part is as large as another. The first layer has none."""
    experts = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "mlp_only_layers": [0]}
    sizes = {"num_hidden_layers": 4, "vocab_size": 259, "max_position_embeddings": 512}
    random_model(Qwen3MoeConfig(**{**TINY, **experts, **sizes}), seed=4).save_pretrained(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((tiny_model / name).read_bytes())
    params = SamplingParams(max_tokens=12, temperature=0.7, seed=2, ignore_eos=True, logprobs=1)
    found = []
    for options in ({}, {"enable_expert_parallel": True}, {"enable_expert_parallel": False}):
        degrees = {"tensor_parallel_size": 3, "pipeline_parallel_size": 2} if options else {}
        llm = LLM(tmp_path, **degrees, **options)
        found.append([(one.outputs[0].token_ids, one.outputs[0].logprobs) for one in llm.generate(PROMPTS, params)])
        llm.engine.stop()
    assert found[0] == found[1] == found[2]


def test_adapters_reach_all_ranks_of_all_stages(deep_model: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(deep_model)
    adapter(model, tmp_path / "lora", 3, r=4, lora_alpha=16, target_modules=["q_proj", "down_proj"])
    asked = [LoRARequest("lora", 1, str(tmp_path / "lora")), None]
    params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
    found = []
    for size in (1, 2):
        llm = LLM(deep_model, enable_lora=True, pipeline_parallel_size=size, tensor_parallel_size=size)
        outputs = llm.generate(PROMPTS[:1] * 2, params, lora_request=asked)
        found.append([output.outputs[0].token_ids for output in outputs])
        llm.engine.stop()
    assert found[0] == found[1] and found[0][0] != found[0][1]


@pytest.mark.parametrize("victim", VICTIMS)
def test_streams_go_on_when_any_process_is_killed(tiny_model: Path, victim: int) -> None:
    options = {"pipeline_parallel_size": 2, "tensor_parallel_size": 2}
    check_that_streams_go_on(tiny_model, lambda engine: all_processes(engine)[victim], **options)


@pytest.mark.parametrize("victim", VICTIMS)
def test_a_process_that_hangs_is_noticed_in_the_middle_of_a_step(tiny_model: Path, victim: int) -> None:
    llm = LLM(tiny_model, pipeline_parallel_size=2, tensor_parallel_size=2)
    texts(llm)
    processes = all_processes(os.getpid())
    os.kill(processes[victim], signal.SIGSTOP)
    with pytest.raises(EngineFailed, match=("stage 1 of 2.* hangs", "stage 1 of 2", "rank 1 of 2.* hangs")[victim]):
        texts(llm)
    llm.engine.stop()
    wait_until(lambda: not any(map(exists, processes)))


def test_more_ranks_than_heads_are_refused_before_a_process_starts(tiny_model: Path) -> None:
    with pytest.raises(BadRequest, match=r"tensor_parallel_size is 9, and the model has \d attention heads"):
        LLM(tiny_model, pipeline_parallel_size=2, tensor_parallel_size=9)
    with pytest.raises(BadRequest, match=r"enable_expert_parallel, and a `LlamaForCausalLM` has no experts"):
        LLM(tiny_model, pipeline_parallel_size=2, tensor_parallel_size=2, enable_expert_parallel=True)
    assert not stages(os.getpid()) and not followers(os.getpid(), RANK)
