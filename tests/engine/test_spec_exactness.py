"""Seeded requests over all speculative methods: the tokens are those of no speculation, and their distribution is the
model's."""

import math
import random
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from engine.same_bits import save_lfm2
from fakes import make_drafts_free
from models.head_twins import write_bigrams, write_noisy_eagle, write_noisy_medusa, write_qwen_mtp
from quire import LLM, SamplingParams
from trials import LENGTH

pytestmark = [pytest.mark.slow, pytest.mark.trial]

NUM_REQUESTS = 40 if LENGTH == 1 else 125 * LENGTH  # of each engine; 15 engines and LENGTH 10: 18,750
BLOCK_BYTES = 2 * 2 * 3 * 16 * 16 * 2  # of the tiny model: K and V, layers, heads, head_dim, block_size, bytes


@pytest.fixture(scope="session")
def rough_model(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with noise in its weights: it drafts for it, and is often wrong."""
    import torch
    from safetensors.torch import load_file, save_file

    folder = tmp_path_factory.mktemp("rough-llama")
    shutil.copytree(tiny_model, folder, dirs_exist_ok=True)
    torch.manual_seed(3)
    tensors = load_file(folder / "model.safetensors")
    noisy = {name: tensor + 0.02 * torch.randn_like(tensor) for name, tensor in tensors.items()}
    save_file(noisy, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="session")
def bigrams(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that heads can draft for."""
    return write_bigrams(tmp_path_factory.mktemp("bigrams"), tiny_model)


@pytest.fixture(scope="session")
def heads(bigrams: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    write = {"eagle": write_noisy_eagle, "medusa": write_noisy_medusa}
    return {method: write[method](tmp_path_factory.mktemp(method), bigrams) for method in write}


@pytest.fixture(scope="session")
def hybrid(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with states, which has a layer that predicts further tokens."""
    return write_qwen_mtp(tmp_path_factory.mktemp("hybrid"), "qwen3-next", tiny_model)


ENGINES: dict[str, dict[str, Any]] = {
    "ngram": {"method": "ngram", "prompt_lookup_min": 1},
    "suffix": {"method": "suffix"},
    "draft model": {"method": "draft_model"},
    "suffix and draft model": {"method": "suffix,draft_model"},
    "all, chunked": {"method": "ngram,suffix,draft_model", "max_num_batched_tokens": 16},
    "all, recomputed": {"method": "ngram,suffix,draft_model", "num_blocks": 12},
    "all, swapped": {"method": "ngram,suffix,draft_model", "num_blocks": 12, "swap_space": 0.01},
    "suffix, trees": {"method": "suffix", "num_speculative_tokens": 6, "tree_nodes": 20},
    "all, trees, swapped": {
        "method": "suffix,draft_model",
        "num_speculative_tokens": 5,
        "tree_nodes": 12,
        "num_blocks": 12,
        "swap_space": 0.01,
    },
    "eagle, chunked": {"method": "eagle", "max_num_batched_tokens": 16},
    "suffix and eagle, trees": {"method": "suffix,eagle", "num_speculative_tokens": 4, "tree_nodes": 14},
    "medusa, trees, swapped": {"method": "medusa", "tree_nodes": 14, "num_blocks": 12, "swap_space": 0.01},
    "mtp of a hybrid, chunked": {
        "method": "suffix,mtp",
        "num_speculative_tokens": 3,
        "max_num_batched_tokens": 16,
    },
    "all, at their real cost": {"method": "ngram,suffix,draft_model", "real": True},
    "all of LFM2, chunked": {"method": "ngram,suffix,draft_model", "max_num_batched_tokens": 16, "lfm2": True},
}


def requests(seed: int) -> tuple[list[str], list[SamplingParams]]:
    rng = random.Random(seed)
    prompts, params = [], []
    for _ in range(NUM_REQUESTS):
        word = "".join(rng.choice("abcd ") for _ in range(rng.randint(2, 9)))
        prompts.append((word * 9)[: rng.randint(1, 40)])
        filters = rng.choice(
            [{}, {"top_k": 5}, {"top_p": 0.8}, {"repetition_penalty": 1.2}, {"frequency_penalty": 0.4}]
        )
        params.append(
            SamplingParams(
                seed=rng.randrange(1000),
                temperature=rng.choice([0.0, 0.3, 1.0]),
                max_tokens=rng.randint(1, 20),
                n=rng.choice([1, 1, 1, 3]),
                ignore_eos=rng.random() < 0.7,
                logprobs=rng.choice([None, None, 1]),
                stop_token_ids=rng.sample(range(3, 250), rng.choice([0, 0, 20])),
                **filters,
            )
        )
    return prompts, params


def answers(llm: LLM, seed: int) -> list[Any]:
    outputs = llm.generate(*requests(seed))
    return [
        [(one.token_ids, one.finish_reason, one.stop_reason, one.cumulative_logprob) for one in output.outputs]
        for output in outputs
    ]


@pytest.mark.parametrize("name", ENGINES)
def test_seeded_requests_have_the_tokens_of_no_speculation(
    tiny_model: Path, rough_model: Path, bigrams: Path, heads: dict[str, Path], hybrid: Path, tmp_path: Path, name: str
) -> None:
    given = dict(ENGINES[name])
    head = next((path for method, path in heads.items() if method in given["method"]), None)
    target = bigrams if head else hybrid if "mtp" in given["method"] else tiny_model
    if given.pop("lfm2", False):
        target = save_lfm2(tiny_model, tmp_path)
    options: dict[str, Any] = {"max_model_len": 128, "max_num_seqs": 16, "max_num_batched_tokens": 64}
    pool, real = given.pop("num_blocks", None), given.pop("real", False)
    options |= {key: given.pop(key) for key in ("max_num_batched_tokens", "swap_space") if key in given}
    seed = list(ENGINES).index(name)
    expected = answers(LLM(target, max_model_len=128), seed)
    if head:
        given["model"] = str(head)
    if "draft_model" in given["method"]:
        given["model"] = str(rough_model)
        pool = 2 * pool if pool else None  # half of the bytes are the draft model's
    if pool:
        options["kv_cache_memory_bytes"] = pool * BLOCK_BYTES
    llm = LLM(target, speculative_config=given, **options)
    if not real:
        make_drafts_free(llm.engine._scheduler.speculation)
    assert answers(llm, seed) == expected
    stats = llm.engine.stats()
    assert (stats.preemptions > 0) == bool(pool)
    assert real or stats.accepted_tokens < stats.draft_tokens


def test_the_distribution_is_the_models(tiny_model: Path, rough_model: Path) -> None:
    """A chi-square test of the first two tokens, of eight that are allowed: the second is a draft, or follows none."""
    count = 1000 * LENGTH
    config = {"method": "ngram,draft_model", "model": str(rough_model), "prompt_lookup_min": 1}
    llm = LLM(tiny_model, speculative_config=config, max_model_len=128, max_num_seqs=32)
    expected = expected_pairs(LLM(tiny_model, max_model_len=128), count)
    statistic, most = chi_square(drawn_pairs(llm, count), expected)
    stats = llm.engine.stats()
    assert count // 20 < stats.accepted_tokens < stats.draft_tokens
    assert statistic < most


def test_drafts_that_are_accepted_by_chance_have_another_distribution(tiny_model: Path, rough_model: Path) -> None:
    """So the test above can fail: here, every draft of the rough model is accepted."""
    config = {
        "model": str(rough_model),
        "num_speculative_tokens": 2,
        "rejection_sample_method": "synthetic",
        "synthetic_acceptance_rates": [1.0, 1.0],
    }
    llm = LLM(tiny_model, speculative_config=config, max_model_len=128, max_num_seqs=32)
    statistic, most = chi_square(drawn_pairs(llm, 1000), expected_pairs(LLM(tiny_model, max_model_len=128), 1000))
    assert llm.engine.stats().accepted_tokens > 500
    assert statistic > 2 * most


ALLOWED, PROMPT = list(range(70, 78)), "abcabcabc"
Pairs = dict[tuple[int, ...], float]


def drawn_pairs(llm: LLM, count: int) -> Counter[tuple[int, ...]]:
    make_drafts_free(llm.engine._scheduler.speculation)
    base = {"temperature": 1.0, "allowed_token_ids": ALLOWED, "ignore_eos": True}
    params = [SamplingParams(seed=seed, max_tokens=4, **base) for seed in range(count)]
    return Counter(tuple(output.outputs[0].token_ids[:2]) for output in llm.generate([PROMPT] * count, params))


def expected_pairs(plain: LLM, count: int) -> Pairs:
    """How often each is drawn, by the model's probabilities."""
    ids = plain.tokenizer.encode(PROMPT)
    pairs = [(first, second) for first in ALLOWED for second in ALLOWED]
    scored = plain.generate([[*ids, *pair] for pair in pairs], SamplingParams(max_tokens=1, prompt_logprobs=0))
    firsts, seconds = dict[int, float](), dict[tuple[int, int], float]()
    for (first, second), output in zip(pairs, scored, strict=True):
        assert output.prompt_logprobs is not None
        at_first, at_second = output.prompt_logprobs[-2:]
        assert at_first is not None and at_second is not None
        firsts[first] = math.exp(at_first[first].logprob)
        seconds[first, second] = math.exp(at_second[second].logprob)
    behind = {first: sum(seconds[first, second] for second in ALLOWED) for first in ALLOWED}
    return {
        (first, second): count * firsts[first] / sum(firsts.values()) * seconds[first, second] / behind[first]
        for first, second in pairs
    }


def chi_square(drawn: Counter[tuple[int, ...]], expected: Pairs) -> tuple[float, float]:
    """-> the statistic, and the most that it may be: four standard deviations above its mean."""
    rare = [pair for pair, number in expected.items() if number < 5]
    bins = [(drawn[pair], number) for pair, number in expected.items() if number >= 5]
    if rare:
        bins.append((sum(drawn[pair] for pair in rare), sum(expected[pair] for pair in rare)))
    statistic = sum((seen - number) ** 2 / number for seen, number in bins)
    degrees = len(bins) - 1
    return statistic, degrees + 4 * math.sqrt(2 * degrees)
