"""Tiny random checkpoints of every family, made by transformers, against transformers."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, MistralConfig, Phi3Config, Qwen2Config, Qwen3Config, SmolLM3Config
from transformers.models.auto import AutoModelForCausalLM

from quire.models.registry import family
from quire.ops.opset import KVSpec, OpSet, StepBatch
from quire.weights.checkpoint import open_checkpoint

BLOCK_SIZE = 4
MAX_LEN = 64
PROMPT = [3, 17, 17, 80, 5, 41, 9, 22, 64, 1, 33, 90, 2, 2, 50, 71, 6, 8, 95, 13]
TINY = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_LEN,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "initializer_range": 0.4,  # wide enough that every part of the model moves the logits
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 10000.0}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
    "rope_theta": 500.0,
}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0 + i / 8 for i in range(8)],
    "long_factor": [2.0 + i / 4 for i in range(8)],
    "original_max_position_embeddings": 8,  # both the prompt and the served length are longer
    "rope_theta": 10000.0,
}
CASES: dict[str, tuple[type, dict[str, Any]]] = {
    "llama": (LlamaConfig, {}),
    "heads-9-of-3": (LlamaConfig, {"hidden_size": 72, "num_attention_heads": 9, "num_key_value_heads": 3}),
    "heads-5-of-1": (LlamaConfig, {"hidden_size": 80, "num_attention_heads": 5, "num_key_value_heads": 1}),
    "mha": (LlamaConfig, {"num_key_value_heads": 4}),
    "tied": (LlamaConfig, {"tie_word_embeddings": True}),
    "biases": (LlamaConfig, {"attention_bias": True, "mlp_bias": True}),
    "head-dim": (LlamaConfig, {"head_dim": 32}),
    "linear": (LlamaConfig, {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}}),
    "dynamic": (LlamaConfig, {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}}),
    "yarn": (LlamaConfig, {"rope_parameters": YARN}),
    "llama3": (LlamaConfig, {"rope_parameters": LLAMA3}),
    "longrope": (LlamaConfig, {"rope_parameters": LONGROPE}),
    "mistral": (MistralConfig, {"sliding_window": None}),
    "mistral-window": (MistralConfig, {"sliding_window": 7}),
    "qwen2": (Qwen2Config, {}),
    "qwen2-window": (Qwen2Config, {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
    "qwen3": (Qwen3Config, {"head_dim": 24}),
    "qwen3-window": (
        Qwen3Config,
        {
            "head_dim": 16,
            "use_sliding_window": True,
            "sliding_window": 5,
            "max_window_layers": 1,
            "attention_bias": True,
        },
    ),
    "smollm3": (SmolLM3Config, {"num_hidden_layers": 4, "no_rope_layer_interval": 2}),
    "phi3": (Phi3Config, {}),
    "phi3-window": (Phi3Config, {"sliding_window": 6, "partial_rotary_factor": 0.5}),
}


@dataclass
class Theirs:
    """A checkpoint, and what transformers makes of it."""

    path: Path
    prefill: np.ndarray  # [len(PROMPT), vocab]
    generated: list[int]  # PROMPT and 32 greedy tokens


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Theirs]:
    @cache
    def make(name: str) -> Theirs:
        cls, options = CASES[name]
        torch.manual_seed(sum(map(ord, name)))
        model = AutoModelForCausalLM.from_config(cls(**{**TINY, **options})).eval()
        for parameter in model.parameters():
            if parameter.dim() == 1:  # norms start as ones and biases as zeros: a test of them needs other values
                torch.nn.init.normal_(parameter, mean=0.5, std=0.5)
        path = tmp_path_factory.mktemp(name)
        model.save_pretrained(path)
        with torch.inference_mode():
            prefill = model(torch.tensor([PROMPT])).logits[0].numpy()
            generated = model.generate(torch.tensor([PROMPT]), max_new_tokens=32, do_sample=False, pad_token_id=0)
        return Theirs(path, prefill, generated[0].tolist())

    return make


def backends() -> list[Any]:
    native = "native"
    return ["torch", native]


def make_ops(backend: str) -> OpSet:
    if backend == "native":
        from quire.ops.native import NativeOps

        return NativeOps()
    from quire.ops.torch import TorchOps

    return TorchOps()


def compute(ops: OpSet, path: Path) -> Callable[[list[int], int], np.ndarray]:
    """-> a function of (ids, start): the logits of all ids from `start` on, those before being in the cache."""
    checkpoint = open_checkpoint(path)
    module = family(checkpoint.config.architecture)
    config = module.config(checkpoint.config)
    model = module.load(ops, checkpoint, config, MAX_LEN)
    cache = ops.new_cache(KVSpec(config.layers, config.kv_heads, config.head_dim, BLOCK_SIZE, "float32"), 20)
    program = ops.compile(model.forward, cache, MAX_LEN)
    table = np.random.default_rng(0).permutation(20).astype(np.int32)[: MAX_LEN // BLOCK_SIZE]

    def run(ids: list[int], start: int) -> np.ndarray:
        positions = np.arange(start, len(ids), dtype=np.int32)
        batch = StepBatch(
            ids=np.array(ids[start:], np.int32),
            positions=positions,
            slots=table[positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE,
            seq_starts=np.array([0, len(positions)], np.int32),
            context_lens=np.array([len(ids)], np.int32),
            block_tables=table[None],
            logit_rows=np.arange(len(positions), dtype=np.int32),
        )
        return np.asarray(program.run(batch)).copy()

    return run


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("backend", backends())
def test_logits_and_greedy_tokens_are_those_of_transformers(
    checkpoints: Callable[[str], Theirs], backend: str, name: str
) -> None:
    theirs = checkpoints(name)
    ours = compute(make_ops(backend), theirs.path)
    logits = ours(PROMPT, 0)
    np.testing.assert_allclose(logits, theirs.prefill, rtol=1e-3, atol=1e-4 * np.abs(theirs.prefill).max())

    ids = list(PROMPT)
    for _ in range(32):
        ids.append(int(logits[-1].argmax()))
        logits = ours(ids, len(ids) - 1)
    assert ids == theirs.generated
