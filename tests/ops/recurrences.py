"""Random recurrences with a matrix as their state, and their plain twins."""

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from quire.ops.gpu.states.linear_attention import Decays, Gates
from quire.ops.gpu.states.segments import DeviceSegments, segments_on_device
from quire.ops.opset import Mamba2Weights, StepBatch
from quire.ops.reference import linear_attention, mamba

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NUM_SLOTS = 9
Segments = list[tuple[int, int, int]]  # (end, source, target)
KINDS = ["gated", "kimi", "lightning", "mamba2"]


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def on_device(segments: Segments, taps: int = 1) -> DeviceSegments:
    num_tokens, nothing = segments[-1][0], np.zeros(0, np.int32)
    ids = np.zeros(num_tokens, np.int32)
    batch = StepBatch(ids, ids, ids, nothing, nothing, nothing, nothing, states=np.array(segments, np.int32))
    return segments_on_device(batch, taps, torch.device(DEVICE))


def assert_close(found: Tensor, expected: Tensor, bound: float = 1e-5) -> None:
    torch.testing.assert_close(found, expected, rtol=10 * bound, atol=bound * float(expected.abs().max()))


class Attention:
    """Random inputs of a recurrence, and its plain twin."""

    def __init__(self, kind: str, shape: tuple[int, int, int, int], num_tokens: int, seed: int = 0) -> None:
        key_heads, heads, key_dim, value_dim = shape
        self.kind, self.heads = kind, heads
        self.q = randn(num_tokens, key_heads * key_dim, seed=seed) / key_dim**0.5
        self.k = F.normalize(randn(num_tokens, key_heads, key_dim, seed=seed + 1), dim=-1).flatten(1)
        self.v = randn(num_tokens, heads * value_dim + 3, seed=seed + 2)[:, 3:]  # rows are strided
        num_decays = heads * key_dim if kind == "kimi" else heads
        self.raw = randn(num_tokens, num_decays, seed=seed + 3)
        self.beta = randn(num_tokens, heads, seed=seed + 4).sigmoid() * 2
        self.rates = randn(heads, seed=seed + 5).abs() + 0.01
        self.dt_bias, self.skip = randn(heads, seed=seed + 6), randn(heads, seed=seed + 7)
        self.slots = randn(NUM_SLOTS, heads, key_dim, value_dim, seed=seed + 8)

    @property
    def gates(self) -> Gates:
        if self.kind == "lightning":
            return Gates(Decays.HEAD, torch.exp(-self.rates))
        if self.kind == "mamba2":
            return Gates(Decays.MAMBA2, self.raw, None, self.dt_bias, -self.rates, self.skip, 0.05, 2.0)
        kind = Decays.ROW if self.kind == "kimi" else Decays.TOKEN
        return Gates(kind, -F.softplus(self.raw), self.beta)

    def run(self, attend: Any, segments: Segments, first: int = 0, slots: Tensor | None = None) -> Tensor:
        tokens = slice(first, first + segments[-1][0])
        gates = self.gates
        if gates.kind != Decays.HEAD:
            gates = Gates(
                gates.kind, gates.decay[tokens], None if gates.beta is None else gates.beta[tokens], gates.dt_bias,
                gates.a, gates.skip, gates.min_delta, gates.max_delta,
            )  # fmt: skip
        given = self.q[tokens], self.k[tokens], self.v[tokens]
        return attend(*given, gates, self.slots if slots is None else slots, on_device(segments))

    def expected(self, slots: Tensor, segments: Segments) -> Tensor:
        n = segments[-1][0]
        q, k, v = (x[:n].cpu().double() for x in (self.q, self.k, self.v))
        if self.kind == "mamba2":
            vectors = [x.cpu().double() for x in (-self.rates, self.dt_bias, self.skip)]
            weights = Mamba2Weights(*vectors, self.q.shape[1] // slots.shape[2], (0.05, 2.0))
            return mamba.mamba2_scan(v, self.raw[:n].cpu().double(), k, q, weights, slots, segments)
        gates = self.gates
        decay = gates.decay.expand(n, -1) if gates.kind == Decays.HEAD else torch.exp(gates.decay[:n])
        beta = None if gates.beta is None else gates.beta[:n].cpu().double()
        return linear_attention.attend_states(q, k, v, decay.cpu().double(), beta, slots, segments)

    def check(self, attend: Any, segments: Segments, bound: float = 1e-5) -> None:
        expected_slots = self.slots.cpu().double()
        expected = self.expected(expected_slots, segments)
        found = self.run(attend, segments)
        assert_close(found.cpu().double(), expected, bound)
        assert_close(self.slots.cpu().double(), expected_slots, bound)
