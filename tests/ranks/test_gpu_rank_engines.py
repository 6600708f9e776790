"""Engines whose ranks share a GPU: with batch_invariant, the tokens of one rank, for all that a rank divides.

    python -m pytest tests/ranks/test_gpu_rank_engines.py

A rank's process takes some seconds to start, so each case is one model, and one engine of two ranks."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM, Qwen3NextForCausalLM

from engine import test_gpu_latent, test_gpu_states
from engine.gpu_serving import BLOCK, KV_HEADS, LAYERS, NUM_NEW, VOCAB, Tokens, engine, run, save_llama
from engine.test_gpu_adapters import EVERYWHERE, give
from engine.test_head_speculation import answers, speculating
from models import head_twins
from models.plain_adapters import write_adapter
from quire import LLM
from quire.core.params import SamplingParams
from quire.core.request import Request
from quire.ops.kv_spec import KVSpec

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

RANKS = 2


def save_mixtral(folder: Path) -> Path:
    torch.manual_seed(1)
    sizes = {"hidden_size": 512, "intermediate_size": 768, "num_hidden_layers": 2, "vocab_size": VOCAB}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 512}
    experts = {"num_local_experts": 7, "num_experts_per_tok": 2, "sliding_window": None}
    config = MixtralConfig(**sizes, **heads, **experts, initializer_range=0.1)
    MixtralForCausalLM(config).save_pretrained(folder)
    return folder


def save_wide(folder: Path) -> Path:
    """So many outputs that the sums of half of them would be divided otherwise than those of all."""
    torch.manual_seed(2)
    sizes = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 1, "vocab_size": VOCAB}
    heads = {"num_attention_heads": 16, "num_key_value_heads": 4, "max_position_embeddings": 512}
    LlamaForCausalLM(LlamaConfig(**sizes, **heads, initializer_range=0.05)).save_pretrained(folder)
    return folder


def save_three_kv_heads(folder: Path) -> Path:
    """One for a rank, two for the other."""
    torch.manual_seed(5)
    sizes = {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 2, "vocab_size": VOCAB}
    heads = {"num_attention_heads": 9, "num_key_value_heads": 3, "max_position_embeddings": 512}
    LlamaForCausalLM(LlamaConfig(**sizes, **heads, initializer_range=0.1)).save_pretrained(folder)
    return folder


def save_next(folder: Path) -> Path:
    torch.manual_seed(3)
    Qwen3NextForCausalLM(test_gpu_states.MODELS["qwen3-next"]()).save_pretrained(folder)
    return folder


CASES: dict[str, tuple[Callable[[Path], Path], dict[str, Any]]] = {
    "MoE": (save_mixtral, {}),
    "MoE, whole experts": (save_mixtral, {"enable_expert_parallel": True}),
    "MoE in int4": (save_mixtral, {"quantization": "int4"}),
    "MoE in fp8, whole experts": (save_mixtral, {"quantization": "fp8", "enable_expert_parallel": True}),
    "MLA": (lambda folder: test_gpu_latent.save(folder, 1), {}),
    "states": (save_next, {}),
    "three KV heads": (save_three_kv_heads, {}),
    "wide": (save_wide, {}),
    "fp8": (save_wide, {"quantization": "fp8"}),
    "int4": (save_wide, {"quantization": "int4"}),
    "w4a8": (save_wide, {"quantization": "w4a8"}),
}


def requests(**more: Any) -> list[Request]:
    make = np.random.default_rng(3)
    params = SamplingParams(max_tokens=NUM_NEW, temperature=0.8, seed=1, ignore_eos=True)
    prompts = [make.integers(0, VOCAB, length).tolist() for length in (7, 130, 33, 1)]
    return [Request(id=f"r{number}", prompt_ids=ids, params=params, **more) for number, ids in enumerate(prompts)]


def tokens_of(path: Path, size: int, **options: Any) -> Tokens:
    with engine(path, batch_invariant=True, tensor_parallel_size=size, enforce_eager=True, **options) as served:
        return run(served, requests())


@pytest.mark.parametrize("name", CASES)
def test_ranks_give_the_tokens_of_one(tmp_path: Path, name: str) -> None:
    save, options = CASES[name]
    path = save(tmp_path)
    assert tokens_of(path, RANKS, **options) == tokens_of(path, 1, **options)


def test_a_gguf_file(tiny_model: Path, tmp_path: Path) -> None:
    """Of Q4_K and Q6_K."""
    from quire.quantize.command import CalibrationOptions, quantize
    from quire.quantize.gptq import GPTQOptions
    from quire.quantize.plan import QuantizeOptions
    from quire.quantize.run import QuantizeRun

    floats, path = save_wide(tmp_path / "floats"), tmp_path / "model.gguf"
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tiny_model / name, floats / name)
    made = QuantizeRun(floats, path, QuantizeOptions("Q4_K_M"))
    quantize(made, CalibrationOptions(measured_tokens=0), None, GPTQOptions(), lambda phase, done, total: None)
    assert tokens_of(path, RANKS) == tokens_of(path, 1)


def test_each_request_has_its_adapter(tmp_path: Path) -> None:
    """Three adapters in two slots, with all layers adapted, and some."""
    path = save_llama(tmp_path / "model", 64)
    model = LlamaForCausalLM.from_pretrained(path)
    layers = {"all": dict.fromkeys(EVERYWHERE, 64), "some": {"k_proj": 5, "down_proj": 2}, "last": {"down_proj": 8}}
    adapters = {
        name: write_adapter(model, tmp_path / name, of_layers, seed)
        for seed, (name, of_layers) in enumerate(layers.items())
    }
    wanted = [
        Request(id=f"{name}-{request.id}", prompt_ids=request.prompt_ids, params=request.params, adapter=name)
        for name in ("", *adapters)
        for request in requests()
    ]
    found = []
    for size in (1, RANKS):
        given = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 64, "tensor_parallel_size": size}
        with engine(path, batch_invariant=True, enforce_eager=True, **given) as served:
            give(served, adapters)
            found.append(run(served, wanted))
    assert found[0] == found[1]
    assert len({tuple(tokens) for tokens in found[0].values()}) == len(wanted)


def test_swapped_sequences_go_on(tmp_path: Path) -> None:
    """Each rank swaps its own part of a block."""
    path, block_bytes = save_llama(tmp_path, 64), KVSpec(LAYERS, KV_HEADS, 64, BLOCK, "bfloat16").block_bytes
    wanted = [replace(request, id=f"{number}-{request.id}") for number in range(3) for request in requests()]
    with engine(path, batch_invariant=True, enforce_eager=True) as served:
        expected = run(served, wanted)
    tight = {"kv_cache_memory_bytes": 24 * block_bytes, "swap_space": 0.5, "tensor_parallel_size": RANKS}
    with engine(path, batch_invariant=True, **tight) as served:
        assert run(served, wanted) == expected
        assert served.stats().preemptions > 0


def test_what_repeats_is_drafted(tmp_path: Path) -> None:
    params = SamplingParams(temperature=0.0, seed=1, max_tokens=NUM_NEW, ignore_eos=True, allowed_token_ids=[5, 6])
    wanted = [Request(id="a", prompt_ids=[5, 6] * 8, params=params)]
    path = save_llama(tmp_path, 64)
    with engine(path, batch_invariant=True, enforce_eager=True) as served:
        expected = run(served, wanted)
    drafts = {"spec_method": "ngram", "spec_tokens": 4, "tensor_parallel_size": RANKS}
    with engine(path, batch_invariant=True, **drafts) as served:
        assert run(served, wanted) == expected
        assert served.stats().drafts > 0


@pytest.fixture(scope="module")
def target(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With the widths that tests' heads have, and KV heads for two ranks."""
    folder = tmp_path_factory.mktemp("target")
    torch.manual_seed(7)
    config = LlamaConfig(
        **{**head_twins.LAYER, "num_hidden_layers": head_twins.LAYERS, "initializer_range": 0.2, "bos_token_id": 1}
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tiny_model / name, folder / name)
    return folder


@pytest.mark.parametrize("name", ["EAGLE", "EAGLE-3", "Medusa", "a draft model"])
def test_heads_and_draft_models_change_no_token(target: Path, tmp_path: Path, name: str) -> None:
    """EAGLE-3's head has a vocabulary of its own. The draft model is the target."""
    given: dict[str, Any] = {"device": "cuda", "batch_invariant": True, "enforce_eager": True, "max_model_len": 128}
    given |= {"kv_cache_memory_bytes": 64 << 20}
    if name == "a draft model":
        config: dict[str, Any] = {"model": str(target), "num_speculative_tokens": 3}
    else:
        method, write, _ = head_twins.FORMATS[name]
        config = {"method": method, "model": str(write(tmp_path))}
    plain = LLM(target, **given)
    expected = answers(plain)
    plain.engine.stop()
    llm = speculating(target, config, tensor_parallel_size=RANKS, **given)
    found, accepted = answers(llm), llm.engine.stats().accepted_tokens
    llm.engine.stop()
    assert found == expected and accepted > 5
