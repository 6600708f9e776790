"""Draft models and heads of a model that several ranks compute: they draft what they would in one process.

`make trials` takes heads of all formats."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from engine.same_bits import PROMPTS, bits, save_lfm2
from engine.test_head_speculation import answers, params, prompts, speculating
from models.head_twins import FORMATS, write_mtp
from quire import LLM, SamplingParams
from quire.core.errors import BadRequest
from runtime.oracle import tree_oracle
from trials import LENGTH

HEADS = ("EAGLE", "EAGLE-3", "speculators", "Medusa", "Medusa, converted")


@pytest.fixture(scope="module")
def plain(tiny_model: Path) -> list[Any]:
    return answers(LLM(tiny_model, max_model_len=128))


def drafted(path: Path, config: dict[str, Any], **options: Any) -> tuple[list[Any], int, int]:
    llm = speculating(path, config, **options)
    found, stats = answers(llm), llm.engine.stats()
    llm.engine.stop()
    return found, stats.draft_tokens, stats.accepted_tokens


@pytest.mark.trial
@pytest.mark.parametrize("name", HEADS if LENGTH > 1 else ["EAGLE-3"])
def test_heads(tiny_model: Path, plain: list[Any], tmp_path: Path, name: str) -> None:
    method, write, _ = FORMATS[name]
    config = {"method": method, "model": str(write(tmp_path))}
    alone = drafted(tiny_model, config)
    assert alone[0] == plain and alone[2] > 5
    assert drafted(tiny_model, config, tensor_parallel_size=2) == alone


@pytest.mark.trial
@pytest.mark.skipif(LENGTH == 1, reason="as EAGLE-3's, and its layers are those of the target")
def test_a_layer_that_predicts_further_tokens(tiny_model: Path, tmp_path: Path) -> None:
    path, config = write_mtp(tmp_path, "glm", tiny_model), {"method": "mtp", "num_speculative_tokens": 2}
    alone = drafted(path, config)
    assert alone[2] > 5 and drafted(path, config, tensor_parallel_size=2) == alone


@pytest.mark.trial
def test_a_draft_model(tiny_model: Path, plain: list[Any]) -> None:
    """The target itself: what is greedy, it drafts right."""
    config = {"model": str(tiny_model), "num_speculative_tokens": 3}
    alone = drafted(tiny_model, config)
    swapping = {"kv_cache_memory_bytes": 300_000, "swap_space": 0.01, "max_num_batched_tokens": 32, "max_num_seqs": 8}
    assert alone[0] == plain and alone[2] > 50
    assert drafted(tiny_model, config, tensor_parallel_size=2, **swapping)[0] == plain
    if LENGTH > 1:
        assert drafted(tiny_model, config, tensor_parallel_size=3) == alone


@pytest.mark.parametrize("how", ["tensor_parallel_size", "pipeline_parallel_size"])
def test_states_of_convolutions_are_taken_back_on_every_rank(tiny_model: Path, tmp_path: Path, how: str) -> None:
    path = save_lfm2(tiny_model, tmp_path)
    few = SamplingParams(seed=3, max_tokens=24, ignore_eos=True, allowed_token_ids=[40, 41], logprobs=1)
    plain = LLM(path, max_model_len=128, **{how: 2})
    expected = bits(plain, PROMPTS, few)
    plain.engine.stop()
    llm = speculating(path, {"method": "ngram"}, **{how: 2})
    assert bits(llm, PROMPTS, few) == expected
    stats = llm.engine.stats()
    llm.engine.stop()
    assert stats.draft_tokens > stats.accepted_tokens > 0


def test_trees(tiny_model: Path, plain: list[Any]) -> None:
    outputs = LLM(tiny_model, max_model_len=128).generate(prompts(), params())
    texts = [[*output.prompt_token_ids, *one.token_ids] for output in outputs for one in output.outputs]
    llm = speculating(tiny_model, {"method": "ngram"}, tensor_parallel_size=2)
    llm.engine.executor.runner.proposer = tree_oracle(texts, 259)  # type: ignore[attr-defined]
    assert answers(llm) == plain
    stats = llm.engine.stats()
    llm.engine.stop()
    assert 50 < stats.accepted_tokens < stats.draft_tokens


def test_a_draft_model_with_fewer_heads_than_ranks_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_model, tmp_path / "small")
    config = json.loads((tmp_path / "small" / "config.json").read_text())
    few = {"num_attention_heads": 3, "head_dim": 2 * 16}
    (tmp_path / "small" / "config.json").write_text(json.dumps(config | few))
    with pytest.raises(BadRequest, match="is 4, and the draft model has 3 attention heads"):
        LLM(tiny_model, speculative_config={"model": str(tmp_path / "small")}, tensor_parallel_size=4)
