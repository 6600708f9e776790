"""The layer of Qwen3-Next and Qwen3.5 that predicts further tokens drafts for a hybrid: states are rolled back."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from fakes import make_drafts_free
from models.gguf_delta_writing import write_delta_gguf
from models.head_twins import QWEN_FAMILIES, Target, qwen_mtp_twin, write_qwen_mtp
from quire import LLM, SamplingParams
from quire.core.errors import Unsupported

pytestmark = pytest.mark.slow

PROMPTS = ["abcdefghij" * 5, "abcdefghij" * 5 + "k", "x", *("xyz" * 9 + str(number) for number in range(5))]
FEW = [70, 71, 72]  # tokens: a head that has learned nothing is right in one case of three
CONFIG = {"method": "mtp", "num_speculative_tokens": 3}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Callable[[str], Path]:
    return cache(lambda family: write_qwen_mtp(tmp_path_factory.mktemp("qwen"), family, tiny_model))


def speculating(path: Path, config: dict[str, Any] = CONFIG, **options: Any) -> LLM:
    llm = LLM(path, speculative_config=config, **{"device": "cpu", "max_model_len": 128, **options})
    make_drafts_free(llm.engine._scheduler.speculation)
    return llm


def answers(llm: LLM) -> list[Any]:
    given = {"max_tokens": 60, "ignore_eos": True, "logprobs": 1}
    params = [
        SamplingParams(temperature=0.0 if number % 2 else 0.8, seed=number, allowed_token_ids=FEW, **given)
        for number in range(len(PROMPTS))
    ]
    outputs = llm.generate(PROMPTS, params)
    return [[(list(one.token_ids), one.cumulative_logprob) for one in output.outputs] for output in outputs]


@pytest.mark.parametrize("in_gguf", [False, True], ids=["safetensors", "gguf"])
@pytest.mark.parametrize("family", QWEN_FAMILIES)
def test_drafts_are_those_of_plain_torch(
    made: Callable[[str], Path], family: str, in_gguf: bool, tmp_path: Path
) -> None:
    """In chunks, beside other sequences, after right drafts and wrong ones."""
    path = made(family)
    twin = qwen_mtp_twin(Target(path), path, family)
    three = {**CONFIG, "num_speculative_tokens_per_batch_size": [[1, 4, 3]]}  # whatever they gain
    stored = write_delta_gguf(path, tmp_path / "model.gguf") if in_gguf else path
    memory: dict[str, Any] = {"kv_cache_dtype": "float32", "max_num_batched_tokens": 32, "max_num_seqs": 4}
    llm = speculating(stored, three, tokenizer=str(path), **memory)
    proposer = llm.engine.executor.runner.proposer._methods[0][1]  # type: ignore[attr-defined]
    heard: list[tuple[list[int], list[int]]] = []
    propose = proposer.propose

    def listen(known: Any, counts: Any) -> Any:
        texts = {row: tokens.tolist() for row, tokens in known.items()}
        drafts = propose(known, counts)
        heard.extend((texts[row], of_row) for row, of_row in drafts.items())
        return drafts

    proposer.propose = listen
    llm.generate(PROMPTS, SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True))
    assert len(heard) > 30 and any(len(drafts) == 3 for _, drafts in heard)
    for tokens, drafts in heard[::3]:
        assert drafts == twin(tokens, len(drafts))[0]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_num_batched_tokens": 16, "max_num_seqs": 4},
        {"enable_prefix_caching": False},
        {"kv_cache_memory_bytes": 200_000, "swap_space": 0.01},
    ],
    ids=["together", "chunked", "without a prefix cache", "swapped"],
)
def test_tokens_are_those_of_no_drafts(made: Callable[[str], Path], options: dict[str, Any]) -> None:
    path = made("qwen3-next")
    expected = answers(LLM(path, device="cpu", max_model_len=128))
    llm = speculating(path, **options)
    assert answers(llm) == expected
    assert answers(llm) == expected  # with prompts from the cache
    stats = llm.engine.stats()
    assert stats.draft_tokens > stats.accepted_tokens > 20 and stats.held_blocks == 0
    assert (stats.preemptions > 0) == ("swap_space" in options)


def test_a_hybrid_without_the_layer_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_config(QWEN_FAMILIES["qwen3.5"][0]).save_pretrained(tmp_path)
    for file in tiny_model.glob("token*"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    with pytest.raises(Unsupported, match="without layers that predict further tokens"):
        LLM(tmp_path, spec_method="mtp")
