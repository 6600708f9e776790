"""Trees of heads: the tokens are those of no drafts, more of them are accepted than of chains, and every node has the
probability that plain torch gives it."""

from collections.abc import Callable
from functools import cache
from itertools import pairwise
from operator import eq
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.test_head_speculation import BLOCK, speculating
from models.head_twins import FORMATS, Target, write_bigrams, write_noisy_eagle, write_noisy_medusa
from quire import LLM, SamplingParams
from quire.core.draft_tree import DraftTree, depths, is_unknown, path_to

pytestmark = pytest.mark.slow

TREE = {"num_speculative_tokens": 3, "tree_nodes": 14, "tree_top_k": 4}
Heads = Callable[[str], Path]


@pytest.fixture(scope="module")
def bigrams(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Path:
    return write_bigrams(tmp_path_factory.mktemp("bigrams"), tiny_model)


@pytest.fixture(scope="module")
def heads(tmp_path_factory: pytest.TempPathFactory, bigrams: Path) -> Heads:
    write = {"eagle": write_noisy_eagle, "medusa": write_noisy_medusa}
    return cache(lambda method: write[method](tmp_path_factory.mktemp(method), bigrams))


def prompts() -> list[str]:
    return ["abcdefghij" * 7, "x", *(f"{number}xyz" * 9 for number in range(4))]


def params(temperature: float) -> list[SamplingParams]:
    kinds: list[dict[str, Any]] = [{}, {"n": 2, "logprobs": 1}, {}, {"top_k": 20, "repetition_penalty": 1.1}, {}, {}]
    given = {"temperature": temperature, "max_tokens": 32, "ignore_eos": True}
    return [SamplingParams(seed=number, **given, **kind) for number, kind in enumerate(kinds)]


def answers(llm: LLM, temperature: float) -> list[Any]:
    outputs = llm.generate(prompts(), params(temperature))
    return [[(list(one.token_ids), one.cumulative_logprob) for one in output.outputs] for output in outputs]


@pytest.fixture(scope="module")
def plain(bigrams: Path) -> Callable[[float], list[Any]]:
    llm = LLM(bigrams, device="cpu", max_model_len=160)
    return cache(lambda temperature: answers(llm, temperature))


ENGINES: dict[str, dict[str, Any]] = {
    "together": {},
    "chunked, without a prefix cache": {
        "max_num_batched_tokens": 48,
        "max_num_seqs": 8,
        "enable_prefix_caching": False,
    },
    "swapped": {
        "kv_cache_memory_bytes": 26 * BLOCK,
        "swap_space": 0.01,
        "max_num_batched_tokens": 64,
        "max_num_seqs": 8,
    },
}


@pytest.mark.parametrize("method, engine", [*(("eagle", engine) for engine in ENGINES), ("medusa", "swapped")])
def test_tokens_are_those_of_no_drafts(bigrams: Path, heads: Heads, plain: Any, method: str, engine: str) -> None:
    config = {"method": method, "model": str(heads(method)), **TREE}
    llm = speculating(bigrams, config, **{"max_model_len": 160, **ENGINES[engine]})
    runs = branched_runs(llm)
    for temperature in (0.0, 0.7):
        assert answers(llm, temperature) == plain(temperature)
    stats = llm.engine.stats()
    assert len(runs) > 20 and stats.accepted_tokens > 60 and stats.held_blocks == 0
    assert (stats.preemptions > 0) == ("kv_cache_memory_bytes" in ENGINES[engine])


def branched_runs(llm: LLM) -> list[Any]:
    """The runs with trees, from now on."""
    runner, runs = llm.engine.executor.runner, list[Any]()  # type: ignore[attr-defined]
    launch = runner._launch

    def listen(plan: Any) -> Any:
        runs.extend(run for run in plan.runs if run.parents)
        return launch(plan)

    runner._launch = listen
    return runs


@pytest.mark.parametrize("trees", [{}, {"tree_nodes": 30}])
def test_drafts_of_another_method_may_be_more_than_a_head_has(
    bigrams: Path, heads: Heads, plain: Any, trees: dict[str, int]
) -> None:
    """`suffix` proposes 24 tokens; the head reads what it needs of the hidden states of all that are accepted."""
    llm = speculating(bigrams, {"method": "suffix,eagle", "model": str(heads("eagle")), **trees}, max_model_len=160)
    for temperature in (0.0, 0.7):
        assert answers(llm, temperature) == plain(temperature)
    assert llm.engine.stats().accepted_tokens > 100


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("method", ["eagle", "medusa"])
def test_more_is_accepted_of_trees_than_of_chains(bigrams: Path, heads: Heads, method: str, temperature: float) -> None:
    """The same head, noisy as it is, with as many drafts in a row."""

    def mean_accepted(**tree: int) -> float:
        config = {"method": method, "model": str(heads(method)), "num_speculative_tokens": 3, **tree}
        llm = speculating(bigrams, config, max_model_len=160)
        answers(llm, temperature)
        stats = llm.engine.stats()
        return stats.accepted_tokens / stats.drafts

    chains, trees = mean_accepted(), mean_accepted(tree_nodes=14, tree_top_k=4)
    assert trees > 1.1 * chains, f"{trees:.2f} tokens of a tree, {chains:.2f} of a chain"


@pytest.mark.parametrize("name", ["EAGLE", "speculators", "Medusa"])
def test_nodes_have_the_probabilities_of_plain_torch(tiny_model: Path, tmp_path: Path, name: str) -> None:
    """Whatever happens to the blocks of a sequence, and whichever branch was accepted before."""
    method, write, new_twin = FORMATS[name]
    head = write(tmp_path / "head")
    twin = new_twin(Target(tiny_model), head)
    options = {"max_num_batched_tokens": 48, "max_num_seqs": 6, "enable_prefix_caching": False, "swap_space": 0.01}
    options |= {"kv_cache_dtype": "float32", "kv_cache_memory_bytes": 2 * 24 * BLOCK, "max_model_len": 160}
    llm = speculating(tiny_model, {"method": method, "model": str(head), **TREE}, **options)
    heard = list[tuple[list[int], DraftTree]]()
    proposer = llm.engine.executor.runner.proposer._methods[0][1]  # type: ignore[attr-defined]
    propose = proposer.propose

    def listen(known: Any, counts: Any) -> Any:
        texts = {row: tokens.tolist() for row, tokens in known.items()}
        drafts = propose(known, counts)
        heard.extend((texts[row], tree) for row, tree in drafts.items() if isinstance(tree, DraftTree))
        return drafts

    proposer.propose = listen
    llm.generate(prompts(), SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True))
    assert len(heard) > 10
    for tokens, tree in heard[1::4]:
        check_tree(twin, tokens, tree)


def check_tree(twin: Any, tokens: list[int], tree: DraftTree) -> None:
    tree.check()
    assert len(tree.tokens) == TREE["tree_nodes"] and max(depths(tree.parents)) <= 3
    joint = list[float]()
    for node, token in enumerate(tree.tokens):
        if node % 3 == 0:
            path = [tree.tokens[one] for one in path_to(tree.parents, node)]
            line = torch.softmax(twin(tokens, len(path), path)[1][-1].double(), -1)
            assert tree.confidences[node] == pytest.approx(float(line[token]), rel=2e-2, abs=1e-4), f"node {node}"
            assert token in line.topk(9).indices.tolist()  # eight, or one that rounds alike
        parent = tree.parents[node]
        joint.append(tree.confidences[node] * (joint[parent] if parent >= 0 else 1.0))
    assert all(before >= after for before, after in pairwise(joint))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("method", ["eagle", "medusa"])
@pytest.mark.parametrize("eager", [False, True])
def test_tokens_on_a_gpu_are_those_of_no_drafts(bigrams: Path, heads: Heads, method: str, eager: bool) -> None:
    given = {"device": "cuda", "batch_invariant": True, "enforce_eager": eager, "max_model_len": 160}
    llm = speculating(bigrams, {"method": method, "model": str(heads(method)), **TREE}, **given)
    runs = branched_runs(llm)
    for temperature in (0.0, 0.7):
        assert answers(llm, temperature) == answers(LLM(bigrams, **given), temperature)
    assert len(runs) > 20 and llm.engine.stats().accepted_tokens > 60


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("eager", [False, True])
def test_trees_that_only_a_gpu_knows_give_the_tokens_of_no_drafts(bigrams: Path, heads: Heads, eager: bool) -> None:
    """They are queued behind what is being verified. In fp32, where rounding seldom decides between tokens."""
    memory = {"kv_cache_memory_bytes": 256 << 20, "max_num_seqs": 8}
    given = {"device": "cuda", "dtype": "float32", "enforce_eager": eager, "max_model_len": 160, **memory}
    llm = speculating(bigrams, {"method": "eagle", "model": str(heads("eagle")), **TREE}, **given)
    plain, runs, queued = LLM(bigrams, **given), unknown_runs(llm), trees_queued(llm)
    num_same = num_answers = 0
    for temperature in (0.0, 0.7):
        for first in (0, 2, 4):
            few = prompts()[first : first + 2], params(temperature)[first : first + 2]
            found, expected = (
                [one.token_ids for output in each.generate(*few) for one in output.outputs] for each in (llm, plain)
            )
            num_same += sum(map(eq, found, expected))
            num_answers += len(expected)
    stats = llm.engine.stats()
    assert num_same >= num_answers - 2, f"{num_same} of {num_answers} answers"
    assert len(runs) > 20 and len(queued) > 20 and stats.accepted_tokens > 60 and stats.held_blocks == 0
    assert not any(is_unknown(run.parents) for run in runs)


def unknown_runs(llm: LLM) -> list[Any]:
    """The runs whose trees only the device knows, from now on."""
    runner, runs = llm.engine.executor.runner, list[Any]()  # type: ignore[attr-defined]
    launch = runner._launch

    def listen(plan: Any) -> Any:
        runs.extend(run for run in plan.runs if is_unknown(run.parents))
        return launch(plan)

    runner._launch = listen
    return runs


def trees_queued(llm: LLM) -> list[int]:
    """How many trees are queued together behind what is being verified, from now on."""
    chain, counts = llm.engine.executor.runner.proposer._methods[0][1]._program.chain, list[int]()  # type: ignore[attr-defined]
    grow = chain.grow_behind

    def listen(batch: Any, roots: Any, shape: Any, keeper: Any, verified: Any) -> Any:
        counts.append(len(keeper.rows))
        return grow(batch, roots, shape, keeper, verified)

    chain.grow_behind = listen
    return counts
