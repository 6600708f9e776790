"""Layers with states through the GPU's op set beside the plain one: chunks, company, and states in blocks."""

from typing import Any

import numpy as np
import pytest
import torch

from quire.ops.gpu.opset import GpuOps
from quire.ops.kv_spec import ConvSpec, KVSpec, StateSpec
from quire.ops.opset import Activation, Mamba2Weights, OpSet, ProgramSpec, StepBatch, Wkv7Weights
from quire.ops.reference import TorchOps
from quire.ops.tensors import stored_floats

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BLOCK, NUM_BLOCKS, MAX_TOKENS, NUM_SLOTS = 4, 12, 32, 5
HEADS, KEY_DIM, VALUE_DIM, CHANNELS = 2, 8, 12, 40
QKV = 2 * KEY_DIM * HEADS + VALUE_DIM * HEADS
Sequence = tuple[list[int], int, int]  # ids, how many of them are computed, number


def random(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).normal(size=shape).astype(np.float32)


class DeltaNet:
    """A convolution, norms of heads, the delta rule, and a gated norm."""

    spec = KVSpec(1, 1, 8, BLOCK, "float32", states=StateSpec(1, (HEADS, KEY_DIM, VALUE_DIM), QKV, 3, NUM_SLOTS))
    sizes = (QKV, HEADS, HEADS, VALUE_DIM * HEADS)

    def __init__(self, ops: OpSet) -> None:
        vectors = (random(KEY_DIM), random(HEADS), np.abs(random(HEADS)), random(VALUE_DIM))
        self.norm, self.bias, self.rate, self.out_norm = (ops.vector(stored_floats("v", v)) for v in vectors)
        self.conv = ops.conv_weight(stored_floats("conv", random(QKV, 3)))

    def forward(self, ops: OpSet, x: Any, batch: Any) -> Any:
        qkv, decay, beta, gate = ops.split(x, self.sizes)
        mixed = ops.activate(ops.causal_conv(qkv, self.conv, None, batch, 0), Activation.SILU)
        q, k, v = ops.split(mixed, (KEY_DIM * HEADS, KEY_DIM * HEADS, VALUE_DIM * HEADS))
        q, k = (ops.rms_norm(part, self.norm, 1e-3) for part in (q, k))
        beta, decay = ops.activate(beta, Activation.SIGMOID), ops.decay(decay, self.bias, self.rate)
        y = ops.delta_rule(q, k, v, decay, beta, batch, 0, KEY_DIM)
        return ops.mul(ops.rms_norm(y, self.out_norm, 1e-5), ops.activate(gate, Activation.SILU))


class KimiDelta:
    """The delta rule with a bounded decay for each row of a state."""

    spec = KVSpec(1, 1, 8, BLOCK, "float32", states=StateSpec(1, (HEADS, KEY_DIM, VALUE_DIM), 1, 1, NUM_SLOTS))
    sizes = (KEY_DIM * HEADS, KEY_DIM * HEADS, VALUE_DIM * HEADS, KEY_DIM * HEADS, HEADS)

    def __init__(self, ops: OpSet) -> None:
        vectors = (random(KEY_DIM), random(KEY_DIM * HEADS), np.abs(random(KEY_DIM * HEADS)))
        self.norm, self.bias, self.rate = (ops.vector(stored_floats("v", v)) for v in vectors)

    def forward(self, ops: OpSet, x: Any, batch: Any) -> Any:
        q, k, v, decay, beta = ops.split(x, self.sizes)
        q, k = (ops.rms_norm(part, self.norm, 1e-3) for part in (q, k))
        beta, decay = ops.activate(beta, Activation.SIGMOID), ops.bounded_decay(decay, self.bias, self.rate, -5.0)
        return ops.delta_rule(q, k, v, decay, beta, batch, 0, KEY_DIM)


class Mamba2:
    """A recurrence of Mamba 2, gated, and normed in groups."""

    spec = KVSpec(1, 1, 8, BLOCK, "float32", states=StateSpec(1, (HEADS, KEY_DIM, VALUE_DIM), 1, 1, NUM_SLOTS))
    sizes = (VALUE_DIM * HEADS, HEADS, KEY_DIM, KEY_DIM, VALUE_DIM * HEADS)

    def __init__(self, ops: OpSet) -> None:
        vectors = (-np.abs(random(HEADS)), random(HEADS), random(HEADS))
        self.weights = Mamba2Weights(*(ops.vector(stored_floats("v", v)) for v in vectors))
        self.norm = ops.vector(stored_floats("norm", random(VALUE_DIM * HEADS)))

    def forward(self, ops: OpSet, x: Any, batch: Any) -> Any:
        x, dt, b, c, gate = ops.split(x, self.sizes)
        y = ops.mul(ops.mamba2_scan(x, dt, b, c, self.weights, batch, 0), ops.activate(gate, Activation.SILU))
        return ops.rms_norm(y, self.norm, 1e-5, 2)


class BlockConv:
    """Two convolutions with states in blocks, as in LFM2."""

    spec = KVSpec(1, 1, 8, BLOCK, "float32", conv=ConvSpec(2, CHANNELS, 4))
    sizes = (CHANNELS, CHANNELS)

    def __init__(self, ops: OpSet) -> None:
        self.conv = ops.conv_weight(stored_floats("conv", random(CHANNELS, 4)))
        self.bias = ops.vector(stored_floats("bias", random(CHANNELS)))

    def forward(self, ops: OpSet, x: Any, batch: Any) -> Any:
        x, gate = ops.split(x, self.sizes)
        x = ops.causal_conv(ops.mul(x, gate), self.conv, self.bias, batch, 0)
        return ops.mul(gate, ops.causal_conv(x, self.conv, None, batch, 1))


class TimeMixing:
    """Two token shifts, whose states lie side by side, and the time mixing of RWKV 7."""

    width = HEADS * KEY_DIM
    states = StateSpec(1, (HEADS, KEY_DIM, KEY_DIM), 6 * width, 2, NUM_SLOTS)
    spec = KVSpec(1, 1, 8, BLOCK, "float32", states=states)
    sizes = (5 * width,)

    def __init__(self, ops: OpSet) -> None:
        vectors = [random(self.width) * 0.3 + 0.1 * number for number in range(5)]
        self.weights = Wkv7Weights(*(ops.vector(stored_floats("v", v)) for v in vectors), heads=HEADS, eps=1e-4)
        self.shift = ops.conv_weight(stored_floats("shift", random(5 * self.width, 2)))
        self.last_shift = ops.conv_weight(stored_floats("shift", random(self.width, 2)))

    def forward(self, ops: OpSet, x: Any, batch: Any) -> Any:
        r, w, k, v, a = ops.split(ops.causal_conv(x, self.shift, None, batch, 0), (self.width,) * 5)
        mixed = ops.wkv7(r, w, k, v, ops.activate(a, Activation.SIGMOID), self.weights, batch, 0)
        return ops.causal_conv(mixed, self.last_shift, None, batch, 0, first=5 * self.width)


LAYERS = {
    "time mixing": TimeMixing,
    "delta net": DeltaNet,
    "kimi delta": KimiDelta,
    "mamba2": Mamba2,
    "convolutions in blocks": BlockConv,
}


class Layer:
    def __init__(self, ops: Any, name: str) -> None:
        kind: Any = LAYERS[name]
        layer, table = kind(ops), ops.table(stored_floats("table", random(50, sum(kind.sizes))))

        def forward(ops: OpSet, batch: Any) -> Any:
            return ops.rows(layer.forward(ops, ops.embedding(batch.ids, table), batch), batch)

        self.has_slots = kind.spec.states is not None
        self.program = ops.compile(
            forward, ops.new_cache(kind.spec, NUM_BLOCKS), ProgramSpec(MAX_TOKENS, 4, MAX_TOKENS)
        )

    def run(self, *sequences: Sequence) -> list[np.ndarray]:
        """The rows of all ids that are not computed yet. Sequence i has blocks 4 i .. 4 i + 4, and slot i."""
        counts = [len(ids) - start for ids, start, _ in sequences]
        starts = np.cumsum([0, *counts]).astype(np.int32)
        positions = np.concatenate([np.arange(start, len(ids)) for ids, start, _ in sequences]).astype(np.int32)
        tables = np.array([[4 * number + i for i in range(4)] for _, _, number in sequences], np.int32)
        owner = np.repeat(np.arange(len(sequences)), counts)
        states = [(end, n if start else -1, n) for end, (_, start, n) in zip(starts[1:], sequences, strict=True)]
        batch = StepBatch(
            ids=np.concatenate([ids[start:] for ids, start, _ in sequences]).astype(np.int32),
            positions=positions,
            slots=(tables[owner, positions // BLOCK] * BLOCK + positions % BLOCK).astype(np.int32),
            seq_starts=starts,
            context_lens=np.array([len(ids) for ids, _, _ in sequences], np.int32),
            block_tables=tables,
            logit_rows=np.arange(starts[-1], dtype=np.int32),
            states=np.array(states, np.int32) if self.has_slots else None,
        )
        rows = self.program.run(batch).cpu().numpy().copy()
        return np.split(rows, starts[1:-1])


def ids_of(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 50, length).tolist()


@pytest.mark.parametrize("name", LAYERS)
def test_rows_are_those_of_the_plain_op_set_in_chunks_and_in_company(name: str) -> None:
    ids, others = ids_of(1, 11), ids_of(2, 7)
    (whole,) = Layer(TorchOps(threads=1), name).run((ids, 0, 0))
    layer = Layer(GpuOps(DEVICE, dtype="float32", batch_invariant=True), name)
    (found,) = layer.run((ids, 0, 0))
    np.testing.assert_allclose(found, whole, rtol=1e-4, atol=1e-5 * np.abs(whole).max())
    layer.run((others[:2], 0, 2))
    chunks = [
        layer.run((ids[:3], 0, 1), (others[:5], 2, 2))[0],
        layer.run((others[:6], 5, 2), (ids[:4], 3, 1))[1],
        layer.run((ids[:9], 4, 1))[0],
        layer.run((ids[:10], 9, 1), (others, 6, 2))[0],
        layer.run((ids, 10, 1))[0],
    ]
    np.testing.assert_array_equal(np.concatenate(chunks), found)
