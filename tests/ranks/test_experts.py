"""Expert parallel: each rank has whole experts, and results have the bits of one process.

By default one case of each kind of routing; `make trials` takes all families with experts."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import GraniteConfig, MixtralConfig

from models import test_deepseek, test_gpt_oss, test_latest_families, test_lfm2, test_moe, test_newer_families
from models.checking import PROMPT, TINY, Cases, assert_close, random_model
from quire import LLM, SamplingParams
from quire.core.errors import BadRequest, Unsupported
from quire.ops.ranks.cuts import RankIndex
from ranks.rank_threads import InRanks, OneProcess, steps
from trials import LENGTH

WIDE = {"num_hidden_layers": 1, "num_local_experts": 7, "num_experts_per_tok": 3, "hidden_size": 128}
CASES: Cases = {
    **{name: test_moe.CASES[name] for name in ("qwen2-moe", "glm4-moe-groups", "phimoe", "granite-moe")},
    "gpt-oss": test_gpt_oss.CASES["gpt-oss"],  # with biases
    "deepseek-v3": (test_deepseek.CASES["v3"][0], test_deepseek.SIZES),
    "lfm2-moe": test_lfm2.CASES["lfm2-moe"],
    "llama-4": test_newer_families.CASES["llama-4"],  # weights multiply inputs
    "longcat": test_latest_families.CASES["longcat"],  # some pass on their input
    "seven": (MixtralConfig, WIDE),
}
if LENGTH > 1:
    CASES = {**test_moe.CASES, **CASES}
    CASES = {name: case for name, case in CASES.items() if case[0] is not GraniteConfig and "tied" not in name}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    @cache
    def make(name: str) -> Path:
        config, options = CASES[name]
        path = tmp_path_factory.mktemp(name)
        random_model(config(**{**TINY, **options}), seed=len(name)).save_pretrained(path)
        return path

    return make


@pytest.mark.trial
@pytest.mark.parametrize("name", CASES)
def test_kernels_give_the_bits_of_one_process(checkpoint: Callable[[str], Path], name: str) -> None:
    alone = steps(OneProcess("native", checkpoint(name)).logits, PROMPT)
    for size in (2, 3, 4) if LENGTH > 1 or name == "seven" else (2 + len(name) % 3,):
        ranks = InRanks("native", checkpoint(name), size, experts=True)
        for ours, theirs in zip(steps(ranks.logits, PROMPT), alone, strict=True):
            np.testing.assert_array_equal(ours, theirs)


def test_experts_that_pass_on_their_input_are_divided_as_whole_ones(checkpoint: Callable[[str], Path]) -> None:
    with pytest.raises(Unsupported, match=r"not divided by their columns\nhint: use enable_expert_parallel"):
        InRanks("native", checkpoint("longcat"), 2)


@pytest.mark.parametrize("name", ["seven", "gpt-oss", "llama-4", "longcat"])
def test_plain_ops_give_the_logits_of_one_process(checkpoint: Callable[[str], Path], name: str) -> None:
    alone = steps(OneProcess("torch", checkpoint(name)).logits, PROMPT)
    ranks = InRanks("torch", checkpoint(name), 2, experts=True)
    for ours, theirs in zip(steps(ranks.logits, PROMPT), alone, strict=True):
        assert_close(ours, theirs)
        assert ours.argmax(-1).tolist() == theirs.argmax(-1).tolist()


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_quantized_experts_of_ranks_with_several_threads(checkpoint: Callable[[str], Path], quantization: str) -> None:
    path, backend = checkpoint("seven"), f"native {quantization}"
    alone = steps(OneProcess(backend, path).logits, 2 * PROMPT)
    ranks = InRanks(backend, path, 2, threads=2, experts=True)
    for ours, theirs in zip(steps(ranks.logits, 2 * PROMPT), alone, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_seven_experts_on_two_ranks_are_three_and_four(checkpoint: Callable[[str], Path]) -> None:
    assert [RankIndex(rank, 2).experts(7).count for rank in range(2)] == [3, 4]
    parts = [rank.model.weight_bytes for rank in InRanks("native", checkpoint("seven"), 2, experts=True).ranks]
    whole = OneProcess("native", checkpoint("seven")).weight_bytes
    assert max(parts) < 0.65 * whole and whole <= sum(parts) < 1.1 * whole


@pytest.fixture(scope="module")
def tiny_moe(tiny_model: Path, checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With the tokenizer of the tiny model."""
    path = tmp_path_factory.mktemp("tiny-moe")
    sizes = TINY | WIDE | {"vocab_size": 259, "max_position_embeddings": 512}
    random_model(MixtralConfig(**sizes), seed=4).save_pretrained(path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (path / name).write_bytes((tiny_model / name).read_bytes())
    return path


def texts(llm: LLM) -> list[Any]:
    params = SamplingParams(max_tokens=20, temperature=0.8, seed=5, ignore_eos=True, logprobs=1)
    results = llm.generate(["A quire is", "Chapter 1. " * 5, "x"], params)
    llm.engine.stop()
    return [(result.outputs[0].token_ids, result.outputs[0].logprobs) for result in results]


def test_processes_give_the_tokens_of_one(tiny_moe: Path) -> None:
    alone = texts(LLM(tiny_moe, enable_expert_parallel=True))
    assert texts(LLM(tiny_moe, tensor_parallel_size=3, enable_expert_parallel=True)) == alone


def test_models_that_cannot_be_divided_so_are_refused(tiny_model: Path, tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match=r"a `LlamaForCausalLM` has no experts.*\n.*leave it out"):
        LLM(tiny_model, tensor_parallel_size=2, enable_expert_parallel=True)
    random_model(MixtralConfig(**TINY | WIDE | {"num_local_experts": 3}), seed=4).save_pretrained(tmp_path)
    with pytest.raises(BadRequest, match=r"3 experts for 4 ranks.*\n.*1 to 3"):
        InRanks("native", tmp_path, 4, experts=True)
