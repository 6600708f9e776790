"""`batch_invariant`: a token's logits, to the last bit, however it came to be computed. On a GPU, or interpreted.

The interpreter's products are numpy's, whose sums differ with a tile's shape: there, steps have at most 16 tokens."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from quire.models.registry import family
from quire.ops.gpu.opset import GpuOps
from quire.ops.kv_spec import KVSpec
from quire.ops.opset import ProgramSpec, StepBatch
from quire.weights.checkpoint import open_checkpoint

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
BLOCK, VOCAB, NUM_SEQS = 8, 64, 4
LENGTH = 300 if ON_GPU else 11  # of the sequence that is looked at
MAX_LEN = LENGTH + 4
HEAD_DIMS = (64, 128) if ON_GPU else (16,)
DTYPES = ("bfloat16", "float32") if ON_GPU else ("float16", "float32")

Chunk = tuple[int, int, int]  # sequence, first position, tokens


@dataclass
class Program:
    """The model on pages of its own, and the tokens of some sequences."""

    program: Any
    ids: np.ndarray  # [NUM_SEQS, MAX_LEN]

    def logits(self, steps: list[list[Chunk]]) -> dict[tuple[int, int], torch.Tensor]:
        """Of all tokens of the steps, by sequence and position."""
        width = -(-MAX_LEN // BLOCK)
        tables = np.random.default_rng(len(steps)).permutation(NUM_SEQS * width).astype(np.int32).reshape(-1, width)
        found = {}
        for step in steps:
            places = [(seq, position) for seq, first, count in step for position in range(first, first + count)]
            seqs, positions = (np.array(column, np.int32) for column in zip(*places, strict=True))
            starts = np.cumsum([0, *(count for _, _, count in step)]).astype(np.int32)
            batch = StepBatch(
                ids=self.ids[seqs, positions],
                positions=positions,
                slots=(tables[seqs, positions // BLOCK] * BLOCK + positions % BLOCK).astype(np.int32),
                seq_starts=starts,
                context_lens=np.array([first + count for _, first, count in step], np.int32),
                block_tables=np.ascontiguousarray(tables[[seq for seq, _, _ in step]]),
                logit_rows=np.arange(starts[-1], dtype=np.int32),
            )
            found.update(zip(places, self.program.run(batch).cpu().clone(), strict=True))
        return found


@pytest.fixture(scope="module", params=HEAD_DIMS)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four query heads for each of the KV heads, rows that fill no tile, a bias nowhere."""
    head_dim = request.param
    torch.manual_seed(head_dim)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=8 * head_dim if ON_GPU else 64,
        intermediate_size=1344 if ON_GPU else 64,
        num_hidden_layers=3 if ON_GPU else 1,
        num_attention_heads=8 if ON_GPU else 2,
        num_key_value_heads=2 if ON_GPU else 1,
        head_dim=head_dim,
        max_position_embeddings=512,
        initializer_range=0.1,
    )
    folder = tmp_path_factory.mktemp("llama")
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def compiled(
    path: Path, dtype: str, quantization: str | None = None, kept: str | None = None, invariant: bool = True
) -> Program:
    ops = GpuOps(DEVICE, dtype=dtype, quantization=quantization, batch_invariant=invariant)
    checkpoint = open_checkpoint(path)
    kind = family(checkpoint.config.architecture)
    config = kind.config(checkpoint.config)
    model = kind.load(ops, checkpoint, config, MAX_LEN)
    spec = KVSpec(config.layers, config.kv_heads, config.head_dim, BLOCK, kept or dtype)
    cache = ops.new_cache(spec, NUM_SEQS * -(-MAX_LEN // BLOCK))
    program = ops.compile(model.forward, cache, ProgramSpec(NUM_SEQS * MAX_LEN, NUM_SEQS, MAX_LEN))
    return Program(program, np.random.default_rng(5).integers(0, VOCAB, (NUM_SEQS, MAX_LEN)).astype(np.int32))


def cut(length: int, size: int) -> list[list[Chunk]]:
    return [[(0, first, min(size, length - first))] for first in range(0, length, size)]


def in_company() -> list[list[Chunk]]:
    """Beside prompts, chunks and decoding sequences, in a row that is not the first."""
    if not ON_GPU:
        return [
            [(2, 0, 5), (0, 0, 7), (1, 0, 1)],
            [(1, 1, 1), (2, 5, 1), (0, 7, 1), (3, 0, 9)],
            [(0, 8, 3), (2, 6, 1)],
        ]
    half = LENGTH // 2
    return [
        [(2, 0, 200), (0, 0, half), (1, 0, 1)],
        *([(1, 1 + i, 1), (2, 200 + i, 1), (0, half + i, 1), (3, i, 1)] for i in range(5)),
        [(3, 5, 290), (0, half + 5, LENGTH - half - 5), (2, 205, 1)],
    ]


def check(program: Program) -> None:
    whole = program.logits([[(0, 0, LENGTH)]])
    assert all(row.isfinite().all() for row in whole.values())
    assert not torch.equal(whole[0, LENGTH - 1], whole[0, LENGTH - 2])
    ways = {"in company": in_company()}
    if ON_GPU:
        ways |= {"in chunks": cut(LENGTH, 61), "token by token": cut(LENGTH, 1)}
    else:
        ways["in chunks, then token by token"] = [[(0, 0, 5)], [(0, 5, 4)], [(0, 9, 1)], [(0, 10, 1)]]
    for way, steps in ways.items():
        found = program.logits(steps)
        differing = [position for seq, position in whole if not torch.equal(found[seq, position], whole[seq, position])]
        assert not differing, f"{way}: other bits at positions {differing[:5]}, {len(differing)} in all"


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_token_has_the_same_logits_however_it_is_computed(checkpoint: Path, dtype: str) -> None:
    check(compiled(checkpoint, dtype))


@pytest.mark.parametrize(
    ("quantization", "kept"),
    [("int8", "int8"), *([("int4", None), ("w8a8", None), ("w4a8", None), ("fp8", "fp8")] if ON_GPU else [])],
)
def test_so_it_has_with_codes(checkpoint: Path, quantization: str, kept: str | None) -> None:
    check(compiled(checkpoint, DTYPES[0], quantization, kept))


@pytest.mark.skipif(not ON_GPU, reason="needs a GPU: sums on the host differ less")
def test_without_it_bits_differ(checkpoint: Path) -> None:
    """Or else the tests above would show nothing."""
    program = compiled(checkpoint, "bfloat16", invariant=False)
    whole, single = program.logits([[(0, 0, LENGTH)]]), program.logits(cut(LENGTH, 1))
    assert any(not torch.equal(whole[place], single[place]) for place in whole)
