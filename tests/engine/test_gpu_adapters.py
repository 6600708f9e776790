"""An engine on a GPU in which every request may have an adapter of its own."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from engine.gpu_serving import BLOCK, KV_HEADS, LAYERS, NUM_NEW, VOCAB, Tokens, check_tokens, engine, run, save_llama
from models.plain_adapters import merge_adapter, write_adapter
from quire.core.errors import UnknownModel
from quire.core.params import SamplingParams
from quire.core.request import Request
from quire.engine.engine import Engine
from quire.ops.kv_spec import KVSpec

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

GREEDY = SamplingParams(temperature=0, seed=0, max_tokens=NUM_NEW, ignore_eos=True)
DRAWN = replace(GREEDY, temperature=0.9, top_p=0.9, seed=5)
HEAD_DIM = 64
EVERYWHERE = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
RANKS = {
    "wide": dict.fromkeys(EVERYWHERE, 64),
    "odd": {"k_proj": 5, "down_proj": 2, "gate_proj": 12},
    "last": {"down_proj": 8},
}
NAMES = ("", *RANKS)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llama(tmp_path_factory.mktemp("llama"), HEAD_DIM)


@pytest.fixture(scope="module")
def adapters(path: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("adapters")
    model = LlamaForCausalLM.from_pretrained(path)
    return {name: write_adapter(model, folder / name, ranks, seed) for seed, (name, ranks) in enumerate(RANKS.items())}


def requests(*kinds: SamplingParams) -> list[Request]:
    """The same prompts with each adapter, and without."""
    make = torch.Generator().manual_seed(3)
    prompts = [torch.randint(0, VOCAB, (length,), generator=make).tolist() for length in (7, 130)]
    return [
        Request(id=f"{name}-{number}-{kind}", prompt_ids=prompt, params=params, adapter=name)
        for number, prompt in enumerate(prompts)
        for name in NAMES
        for kind, params in enumerate(kinds)
    ]


def give(served: Engine, adapters: dict[str, Path]) -> None:
    for name, folder in adapters.items():
        served.add_adapter(name, served.executor.load_adapter(folder))


OPTIONS = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 64}  # fewer slots than adapters


def test_each_request_is_answered_with_its_adapter(path: Path, adapters: dict[str, Path]) -> None:
    """As by transformers with the adapter merged into the weights."""
    wanted = requests(GREEDY)
    with engine(path, dtype="float32", **OPTIONS) as served:
        give(served, adapters)
        tokens = run(served, wanted)
    assert len({tuple(found) for found in tokens.values()}) == len(wanted), "adapters that change nothing test nothing"
    for name in NAMES:
        merged = LlamaForCausalLM.from_pretrained(path).eval()
        if name:
            merge_adapter(merged, adapters[name])
        check_tokens(tokens, [request for request in wanted if request.adapter == name], merged.to("cuda"), None)


@pytest.fixture(scope="module")
def alone(path: Path, adapters: dict[str, Path]) -> Tokens:
    with engine(path, batch_invariant=True, **OPTIONS) as served:
        give(served, adapters)
        return {request.id: run(served, [request])[request.id] for request in requests(GREEDY, DRAWN)}


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"max_loras": 3},
        {"enforce_eager": True},
        {"max_num_batched_tokens": 48},
        {"enable_prefix_caching": True},
        {"kv_cache_memory_bytes": 24 * KVSpec(LAYERS, KV_HEADS, HEAD_DIM, BLOCK, "bfloat16").block_bytes},
    ],
    ids=["together", "all at once", "op by op", "chunked", "cached", "preempted"],
)
def test_whatever_happens_the_answers_are_the_same(
    path: Path, adapters: dict[str, Path], alone: Tokens, given: dict[str, object]
) -> None:
    with engine(path, batch_invariant=True, **{**OPTIONS, **given}) as served:
        give(served, adapters)
        assert run(served, requests(GREEDY, DRAWN)) == alone
        assert served.record is not None and bool(served.record.scheduler.preemptions) == (
            "kv_cache_memory_bytes" in given
        )
        if given.get("enable_prefix_caching"):
            assert run(served, requests(GREEDY, DRAWN)) == alone


def test_adapters_come_and_go(path: Path, adapters: dict[str, Path], alone: Tokens) -> None:
    """The slot of one that went is another's."""
    with engine(path, batch_invariant=True, **{**OPTIONS, "max_loras": 1}) as served:
        for name in ("odd", "wide", "last"):
            give(served, {name: adapters[name]})
            wanted = [request for request in requests(GREEDY) if request.adapter in ("", name)]
            assert run(served, wanted) == {request.id: alone[request.id] for request in wanted}
            served.remove_adapter(name)
            with pytest.raises(UnknownModel, match=f"no adapter `{name}`"):
                served.submit(wanted[-1])
