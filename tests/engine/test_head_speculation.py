"""Drafts of heads change nothing: the engine without them is the oracle. Where a head is always right, its drafts show
that its keys and values, and the hidden states it reads, are those of the right positions."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from fakes import make_drafts_free
from models.head_twins import FORMATS, Target, write_mtp
from models.lora_files import adapter
from quire import LLM, LoRARequest, SamplingParams
from quire.core.errors import QuireError

pytestmark = pytest.mark.slow

BLOCK = 2 * 2 * 3 * 16 * 16 * 2  # bytes of the tiny model's: K and V, layers, heads, head_dim, block_size, fp16
FEW = [70, 71, 72]  # tokens: a head that has learned nothing is right in one case of three
Made = Callable[[str], tuple[Path, dict[str, Any]]]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Made:
    """Format -> target, and its speculative_config."""

    @cache
    def make(name: str) -> tuple[Path, dict[str, Any]]:
        folder = tmp_path_factory.mktemp("head")
        if name.startswith("MTP"):
            return write_mtp(folder, name.split()[1], tiny_model), {"method": "mtp", "num_speculative_tokens": 2}
        method, write, _ = FORMATS[name]
        return tiny_model, {"method": method, "model": str(write(folder))}

    return make


def prompts() -> list[str]:
    return ["abcdefghij" * 7, "abcdefghij" * 7 + "k", "x", *("xyz" * 9 + str(number) for number in range(3))]


def params() -> list[SamplingParams]:
    """Greedy and drawn, filtered, with penalties, several samples, logprobs."""
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0, "allowed_token_ids": FEW},
        {"temperature": 0.8},
        {"temperature": 0.7, "n": 2, "logprobs": 1, "allowed_token_ids": FEW},
        {"temperature": 0.6, "top_p": 0.9, "top_k": 30, "repetition_penalty": 1.1, "presence_penalty": 0.2},
        {"temperature": 0.0},
        {"temperature": 0.9, "allowed_token_ids": FEW},
    ]
    given = {"max_tokens": 20, "ignore_eos": True}
    return [SamplingParams(seed=number, **given, **kind) for number, kind in enumerate(kinds)]


def answers(llm: LLM) -> list[Any]:
    outputs = llm.generate(prompts(), params())
    return [[(list(one.token_ids), one.cumulative_logprob) for one in output.outputs] for output in outputs]


def speculating(path: Path, config: dict[str, Any], **options: Any) -> LLM:
    llm = LLM(path, speculative_config=config, **{"device": "cpu", "max_model_len": 128, **options})
    make_drafts_free(llm.engine._scheduler.speculation)
    return llm


ENGINES: dict[str, dict[str, Any]] = {
    "together": {},
    "chunked": {"max_num_batched_tokens": 16, "max_num_seqs": 8},
    "preempted": {"kv_cache_memory_bytes": 16 * BLOCK, "max_num_seqs": 8},
    "swapped": {
        "kv_cache_memory_bytes": 16 * BLOCK,
        "swap_space": 0.01,
        "max_num_batched_tokens": 48,
        "max_num_seqs": 8,
    },
    "without a prefix cache": {"enable_prefix_caching": False},
}


@pytest.fixture(scope="module")
def plain(made: Made) -> Callable[[Path], list[Any]]:
    return cache(lambda path: answers(LLM(path, device="cpu", max_model_len=128)))


@pytest.mark.parametrize(
    "name, engine",
    [
        *(("EAGLE-3", engine) for engine in ENGINES),
        *((name, "swapped") for name in (*FORMATS, "MTP deepseek", "MTP glm") if name != "EAGLE-3"),
    ],
)
def test_tokens_are_those_of_no_drafts(made: Made, plain: Any, name: str, engine: str) -> None:
    path, config = made(name)
    options = dict(ENGINES[engine])
    if name == "MTP deepseek":  # whose blocks are smaller
        options["kv_cache_memory_bytes"] //= 2
    llm = speculating(path, config, **options)
    assert answers(llm) == plain(path)
    if engine == "together":  # the second time prompts are found in the cache
        assert answers(llm) == plain(path)
    stats = llm.engine.stats()
    assert stats.accepted_tokens > 5 and stats.draft_tokens > 40 and stats.held_blocks == 0
    assert (stats.preemptions > 0) == ("kv_cache_memory_bytes" in ENGINES[engine])


def test_drafts_in_the_engine_are_those_of_plain_torch(made: Made, tiny_model: Path) -> None:
    """In chunks, among others, preempted and swapped: whatever happens to its blocks, a head drafts what it would
    alone."""
    path, config = made("speculators")
    twin = FORMATS["speculators"][2](Target(path), Path(config["model"]))
    options = {"max_num_batched_tokens": 16, "max_num_seqs": 6, "enable_prefix_caching": False, "swap_space": 0.01}
    llm = speculating(path, config, kv_cache_dtype="float32", kv_cache_memory_bytes=2 * 12 * BLOCK, **options)
    proposer = llm.engine.executor.runner.proposer._methods[0][1]  # type: ignore[attr-defined]
    heard: list[tuple[list[int], list[int]]] = []
    propose = proposer.propose

    def listen(known: Any, counts: Any) -> Any:
        texts = {row: tokens.tolist() for row, tokens in known.items()}
        drafts = propose(known, counts)
        heard.extend((texts[row], of_row) for row, of_row in drafts.items())
        return drafts

    proposer.propose = listen
    greedy = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
    llm.generate(prompts(), greedy)
    assert llm.engine.stats().preemptions > 0 and len(heard) > 40
    for tokens, drafts in heard[::4]:
        assert drafts == twin(tokens, len(drafts))[0], f"after {len(tokens)} tokens"


def test_fixed_drafts_are_fewer_where_a_step_has_no_room_for_all(made: Made) -> None:
    path, config = made("EAGLE-3")
    always = {**config, "tree_nodes": 14, "num_speculative_tokens_per_batch_size": [[1, 8, 14]]}
    given = {"device": "cpu", "max_model_len": 128, "max_num_batched_tokens": 24, "max_num_seqs": 8}
    llm = LLM(path, speculative_config=always, **given)
    assert answers(llm) == answers(LLM(path, **given))
    assert llm.engine.stats().draft_tokens > 20


def test_an_adapter_changes_the_target_alone(made: Made, tmp_path: Path) -> None:
    path, config = made("EAGLE-3")
    adapter(Target(path).model, tmp_path / "sql", 1, r=4, lora_alpha=16, target_modules=["q_proj", "down_proj"])
    asked = SamplingParams(temperature=0.5, seed=1, max_tokens=20, ignore_eos=True)
    requests = [LoRARequest("sql", 1, str(tmp_path / "sql")), None]

    def tokens(llm: LLM) -> list[list[int]]:
        outputs = llm.generate([prompts()[0]] * 2, asked, lora_request=requests)
        return [list(output.outputs[0].token_ids) for output in outputs]

    llm = speculating(path, config, enable_lora=True)
    expected = tokens(LLM(path, device="cpu", max_model_len=128, enable_lora=True))
    assert tokens(llm) == expected and expected[0] != expected[1]
    assert llm.engine.stats().draft_tokens > 10


def test_a_sequence_that_no_drafts_are_wanted_for_is_read_no_longer(made: Made) -> None:
    path, config = made("EAGLE-3")
    never = {**config, "num_speculative_tokens_per_batch_size": [[1, 8, 0]]}
    llm = LLM(path, device="cpu", max_model_len=128, speculative_config=never)
    program = llm.engine.executor.runner.proposer._methods[0][1]._program  # type: ignore[attr-defined]
    num_read, run = [0], program.run

    def count(batch: Any) -> Any:
        num_read[0] += batch.num_tokens
        return run(batch)

    program.run = count
    asked = SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True)
    [output] = llm.generate(["abcdefgh"], asked)
    assert output.outputs[0].token_ids == LLM(path, device="cpu").generate(["abcdefgh"], asked)[0].outputs[0].token_ids
    assert 8 <= num_read[0] < 8 + 12


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", ["EAGLE-3", "Medusa", "MTP deepseek"])
@pytest.mark.parametrize("eager", [False, True])
def test_tokens_on_a_gpu_are_those_of_no_drafts(made: Made, name: str, eager: bool) -> None:
    path, config = made(name)
    given = {"device": "cuda", "batch_invariant": True, "enforce_eager": eager, "max_model_len": 128}
    llm = speculating(path, config, **given)
    assert answers(llm) == answers(LLM(path, **given))
    assert llm.engine.stats().accepted_tokens > 10


def test_a_head_of_another_model_is_refused(default_model: Path, made: Made) -> None:
    with pytest.raises(QuireError, match="hidden states of 72 columns, and the model's have 576"):
        LLM(default_model, speculative_config=made("EAGLE-3")[1])
    with pytest.raises(QuireError, match=r'is a head, and no model(.|\n)*"method": "eagle3"'):
        LLM(default_model, speculative_config={"model": made("speculators")[1]["model"]})
    with pytest.raises(QuireError, match="without layers that predict further tokens"):
        LLM(default_model, spec_method="mtp")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_drafts_that_follow_each_other_on_a_gpu_are_those_of_single_steps(made: Made) -> None:
    path, config = made("EAGLE-3")
    config = {**config, "num_speculative_tokens_per_batch_size": [[1, 64, 3]]}  # whatever steps and drafts take
    given = {"device": "cuda", "batch_invariant": True, "max_model_len": 128}
    counts = []
    for chained in (True, False):
        llm = speculating(path, config, **given)
        program = llm.engine.executor.runner.proposer._methods[0][1]._program  # type: ignore[attr-defined]
        assert program.chain is not None
        if not chained:
            program.chain = None
        answers(llm)
        counts.append((llm.engine.stats().draft_tokens, llm.engine.stats().accepted_tokens))
    assert counts[0] == counts[1] and counts[0][1] > 10
