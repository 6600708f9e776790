"""The GPU's op set beside the plain one, on a GPU or in Triton's interpreter: logits, prefilled and decoded."""

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from quire.models.registry import family
from quire.ops.opset import KVSpec, StepBatch
from quire.ops.torch import TorchOps
from quire.ops.torch.gpu import GpuOps
from quire.weights.checkpoint import open_checkpoint

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LENGTH, BLOCK = 64, 8


def logits_of(ops, path, dtype, steps):
    """The logits of every step of [(ids, start)], one entry a sequence."""
    checkpoint = open_checkpoint(path)
    kind = family(checkpoint.config.architecture)
    config = kind.config(checkpoint.config)
    model = kind.load(ops, checkpoint, config, LENGTH)
    spec = KVSpec(config.layers, config.kv_heads, config.head_dim, BLOCK, dtype)
    num_seqs, width = len(steps[0]), LENGTH // BLOCK
    cache = ops.new_cache(spec, num_seqs * width)
    program = ops.compile(model.forward, cache, 64, num_seqs, LENGTH)
    tables = np.arange(num_seqs * width, dtype=np.int32).reshape(num_seqs, width)[:, ::-1].copy()
    found = []
    for step in steps:
        counts = [len(ids) for ids, _ in step]
        positions = np.concatenate([np.arange(start, start + len(ids)) for ids, start in step]).astype(np.int32)
        owner = np.repeat(np.arange(num_seqs), counts)
        starts = np.cumsum([0, *counts]).astype(np.int32)
        batch = StepBatch(
            ids=np.concatenate([ids for ids, _ in step]).astype(np.int32),
            positions=positions,
            slots=(tables[owner, positions // BLOCK] * BLOCK + positions % BLOCK).astype(np.int32),
            seq_starts=starts,
            context_lens=np.array([start + len(ids) for ids, start in step], np.int32),
            block_tables=tables,
            logit_rows=(starts[1:] - 1).astype(np.int32),
        )
        found.append(program.run(batch).float().cpu().numpy().copy())
    return np.concatenate(found)


def steps_of(vocab):
    random = np.random.default_rng(3)

    def ids(n):
        return random.integers(0, vocab, n)

    return [
        [(ids(9), 0), (ids(1), 0), (ids(17), 0)],  # prompts, one of a single token
        [(ids(1), 9), (ids(5), 1), (ids(1), 17)],  # a chunk between decoding sequences
        [(ids(1), 10), (ids(1), 6), (ids(1), 18)],  # only decoding
    ]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Rows of 64 and 128 weights: groups of codes fit."""
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
    torch.manual_seed(1)
    folder = tmp_path_factory.mktemp("llama")
    llama = LlamaForCausalLM(LlamaConfig(**shape, num_hidden_layers=2, vocab_size=256, max_position_embeddings=128))
    llama.save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("dtype", "quantization", "bound"),
    [("float32", None, 1e-5), ("float16", None, 5e-3), ("float16", "int8", 2e-2), ("float16", "int4", 0.3)],
)
def test_logits_are_those_of_plain_torch(model, dtype, quantization, bound):
    steps = steps_of(256)
    plain = logits_of(TorchOps(), model, "float32", steps)
    found = logits_of(GpuOps(DEVICE, dtype=dtype, quantization=quantization), model, "float32", steps)
    assert np.sqrt(np.mean((found - plain) ** 2) / np.mean(plain**2)) < bound


@pytest.mark.parametrize(("kept", "bound"), [("int8", 2e-2), ("fp8", 0.1)])  # three bits, rounded by the interpreter
def test_keys_and_values_may_be_codes(model, kept, bound):
    steps = steps_of(256)
    plain = logits_of(TorchOps(), model, kept, steps)
    found = logits_of(GpuOps(DEVICE, dtype="float32"), model, kept, steps)
    assert np.sqrt(np.mean((found - plain) ** 2) / np.mean(plain**2)) < bound
