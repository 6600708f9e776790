"""Drafts on a GPU, among steps that are planned ahead. With `batch_invariant` they change no bit; without, rounding may
decide between tokens that are nearly as likely, as it does in any other company.

    python -m pytest tests/engine/test_gpu_speculation.py"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.gpu_serving import BLOCK, KV_HEADS, LAYERS, NUM_NEW, VOCAB, Tokens, engine, run, save_llama
from fakes import make_drafts_free
from quire.core.params import SamplingParams
from quire.core.request import Request
from quire.core.watermark import Watermark
from quire.engine.engine import Engine
from quire.runtime.spec.ngram import Ngram
from runtime.oracle import oracle, tree_oracle

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

WISHES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "drawn": {"temperature": 0.9},
    "filtered": {"temperature": 0.9, "top_p": 0.9, "top_k": 40, "logprobs": 2},
    "penalized": {"temperature": 0.8, "repetition_penalty": 1.1, "frequency_penalty": 0.2},
    "typical": {"temperature": 0.8, "typical_p": 0.8},
    "marked": {"temperature": 0.8, "watermark": Watermark(delta=2.0)},
}


def requests() -> list[Request]:
    make = torch.Generator().manual_seed(3)
    return [
        Request(
            id=f"{name}-{length}",
            prompt_ids=torch.randint(0, VOCAB, (length,), generator=make).tolist(),
            params=SamplingParams(seed=7, max_tokens=NUM_NEW, ignore_eos=True, **wishes),
        )
        for name, wishes in WISHES.items()
        for length in (1, 17, 130)
    ]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llama(tmp_path_factory.mktemp("llama"), 64)


@pytest.fixture(scope="module")
def plain(path: Path) -> Tokens:
    with engine(path, batch_invariant=True) as served:
        return run(served, requests())


@contextmanager
def guessing(path: Path, answers: Tokens, trees: bool = False, **options: Any) -> Iterator[Engine]:
    """Nine guesses in ten are right, or stand in trees, and steps cost the same with them."""
    with engine(path, spec_method="ngram", **options) as served:
        texts = [[*request.prompt_ids, *answers[request.id]] for request in requests()]
        runner, speculation = served.executor._runner, served._scheduler.speculation  # type: ignore[attr-defined]
        runner.proposer = (tree_oracle if trees else oracle)(texts, VOCAB)
        make_drafts_free(speculation)
        yield served


def check_accepted(served: Engine) -> None:
    stats = served.stats()
    assert stats.accepted_tokens > 50 and 0.5 * stats.draft_tokens < stats.accepted_tokens < stats.draft_tokens


@pytest.mark.parametrize("eager", [False, True])
def test_drafts_change_no_token(path: Path, plain: Tokens, eager: bool) -> None:
    with guessing(path, plain, batch_invariant=True, enforce_eager=eager) as served:
        assert run(served, requests()) == plain
        check_accepted(served)


@pytest.mark.parametrize("swap_space", [0.0, 0.5])
def test_drafts_of_preempted_sequences_change_no_token(path: Path, plain: Tokens, swap_space: float) -> None:
    block_bytes = 2 * LAYERS * KV_HEADS * 64 * BLOCK * 2
    tight = {"kv_cache_memory_bytes": 30 * block_bytes, "swap_space": swap_space}
    with guessing(path, plain, batch_invariant=True, **tight) as served:
        assert run(served, requests()) == plain
        assert served.stats().preemptions > 0
        check_accepted(served)


def test_drafts_alone_and_one_after_the_other(path: Path, plain: Tokens) -> None:
    with guessing(path, plain, batch_invariant=True) as served:
        for request in requests():
            assert run(served, [request])[request.id] == plain[request.id]
        check_accepted(served)


def test_without_batch_invariance_most_tokens_are_the_same(path: Path) -> None:
    with engine(path, dtype="float32") as served:
        expected = run(served, requests())
    with guessing(path, expected, dtype="float32") as served:
        found = run(served, requests())
        check_accepted(served)
    same = sum(found[name] == expected[name] for name in expected)
    assert same >= len(expected) - 2


def test_what_repeats_is_guessed(path: Path) -> None:
    """With the method itself: a sequence that may draw two tokens only, and so repeats itself."""
    params = SamplingParams(temperature=0.0, seed=1, max_tokens=NUM_NEW, ignore_eos=True, allowed_token_ids=[5, 6])
    wanted = [Request(id="a", prompt_ids=[5, 6] * 8, params=params)]
    with engine(path, batch_invariant=True) as served:
        expected = run(served, wanted)
    with engine(path, batch_invariant=True, spec_method="ngram", spec_tokens=4) as served:
        assert run(served, wanted) == expected
        assert served.stats().drafts > 0


@pytest.mark.parametrize("swap_space", [None, 0.0, 0.5])
def test_trees_change_no_token(path: Path, plain: Tokens, swap_space: float | None) -> None:
    """Also of sequences that are preempted while their tree is verified."""
    block_bytes = 2 * LAYERS * KV_HEADS * 64 * BLOCK * 2
    tight = {} if swap_space is None else {"kv_cache_memory_bytes": 30 * block_bytes, "swap_space": swap_space}
    with guessing(path, plain, trees=True, batch_invariant=True, **tight) as served:
        assert run(served, requests()) == plain
        assert (served.stats().preemptions > 0) == (swap_space is not None)
        assert 50 < served.stats().accepted_tokens < served.stats().draft_tokens


@pytest.mark.parametrize("tree_nodes", [0, 31])
def test_trees_in_one_pass(path: Path, monkeypatch: pytest.MonkeyPatch, tree_nodes: int) -> None:
    """Without batch invariance, all nodes of a sequence are one tile: launched, and in graphs."""
    monkeypatch.setattr(Ngram, "tree_nodes", tree_nodes)
    with engine(path, dtype="float32") as served:
        expected = run(served, requests())
    with guessing(path, expected, trees=True, dtype="float32") as served:
        graphs = served.executor._runner.program._tree_graphs  # type: ignore[attr-defined]
        assert bool(graphs) == bool(tree_nodes)
        found = run(served, requests())
        assert 50 < served.stats().accepted_tokens < served.stats().draft_tokens
    same = sum(found[name] == expected[name] for name in expected)
    assert same >= len(expected) - 2
