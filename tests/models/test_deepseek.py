"""Tiny random DeepSeek models, made by transformers, against transformers."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import DeepseekV2Config, DeepseekV3Config
from transformers.models.auto import AutoModelForCausalLM

from quire.models.registry import family
from quire.ops.opset import OpSet, StepBatch
from quire.runtime.kv import kv_spec
from quire.weights.checkpoint import open_checkpoint

BLOCK_SIZE = 4
MAX_LEN = 64
PROMPT = [3, 17, 17, 80, 5, 41, 9, 22, 64, 1, 33, 90, 2, 2, 50, 71, 6, 8, 95, 13]
TINY = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 112,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": MAX_LEN,
    "kv_lora_rank": 32,
    "q_lora_rank": 40,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 1.7,
    "first_k_dense_replace": 1,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "initializer_range": 0.3,  # wide enough that every part of the model moves the logits
}
YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "rope_theta": 10000.0,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 0.707,
}
DENSE = {"first_k_dense_replace": 3}
CASES: dict[str, tuple[type, dict[str, Any]]] = {
    "v2": (DeepseekV2Config, {"topk_method": "group_limited_greedy"}),
    "v2-lite": (DeepseekV2Config, {"q_lora_rank": None, "n_shared_experts": 2, "rope_parameters": YARN}),
    "v2-dense": (DeepseekV2Config, DENSE),
    "v2-biases": (DeepseekV2Config, {**DENSE, "attention_bias": True, "tie_word_embeddings": True}),
    "v2-biases-lite": (DeepseekV2Config, {**DENSE, "attention_bias": True, "q_lora_rank": None}),
    "v3": (DeepseekV3Config, {}),
    "v3-yarn": (DeepseekV3Config, {"rope_parameters": YARN, "q_lora_rank": None, "norm_topk_prob": False}),
    "v3-dense": (DeepseekV3Config, {**DENSE, "rope_interleave": False}),
    "v3-odd": (DeepseekV3Config, {**DENSE, "num_attention_heads": 5, "num_key_value_heads": 5, "kv_lora_rank": 20}),
    "v3-many-heads": (DeepseekV3Config, {**DENSE, "num_attention_heads": 40, "num_key_value_heads": 40}),
}
BACKENDS = ["torch", "native"]


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
        vectors = [p for p in model.parameters() if p.dim() == 1]
        vectors += [b for key, b in model.named_buffers() if "correction" in key]
        for vector in vectors:  # norms start as ones, biases and corrections as zeros: a test needs other values
            torch.nn.init.normal_(vector, mean=0.5, std=0.5)
        path = tmp_path_factory.mktemp(name)
        model.save_pretrained(path)
        with torch.inference_mode():
            prefill = model(torch.tensor([PROMPT])).logits[0].numpy()
            generated = model.generate(torch.tensor([PROMPT]), max_new_tokens=32, do_sample=False, pad_token_id=0)
        return Theirs(path, prefill, generated[0].tolist())

    return make


def make_ops(backend: str) -> OpSet:
    if backend == "native":
        from quire.ops.native import NativeOps

        return NativeOps()
    from quire.ops.torch import TorchOps

    return TorchOps()


def compute(ops: OpSet, path: Path, dtype: str = "float32") -> Callable[[list[int], int], np.ndarray]:
    """-> a function of (ids, start): the logits of all ids from `start` on, those before being in the cache."""
    checkpoint = open_checkpoint(path)
    module = family(checkpoint.config.architecture)
    config = module.config(checkpoint.config)
    model = module.load(ops, checkpoint, config, MAX_LEN)
    program = ops.compile(model.forward, ops.new_cache(kv_spec(config, BLOCK_SIZE, dtype), 20), MAX_LEN, 1, MAX_LEN)
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
@pytest.mark.parametrize("backend", BACKENDS)
def test_logits_and_greedy_tokens_are_those_of_transformers(
    checkpoints: Callable[[str], Theirs], backend: str, name: str
) -> None:
    theirs = checkpoints(name)
    ours = compute(make_ops(backend), theirs.path)
    logits = ours(PROMPT, 0)
    np.testing.assert_allclose(logits, theirs.prefill, rtol=1e-3, atol=1e-4 * np.abs(theirs.prefill).max())
    in_chunks = np.concatenate([ours(PROMPT[:end], start) for start, end in ((0, 7), (7, 8), (8, 20))])
    np.testing.assert_allclose(in_chunks, logits, rtol=1e-5, atol=1e-5)

    ids = list(PROMPT)
    for _ in range(32):
        ids.append(int(logits[-1].argmax()))
        logits = ours(ids, len(ids) - 1)
    assert ids == theirs.generated
