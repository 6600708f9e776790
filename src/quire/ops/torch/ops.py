"""The op set, eagerly and in plain torch: each op is one formula, and the specification of its kernels."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from quire.ops.dequantize import dequantize
from quire.ops.opset import Float32, KVCache, KVSpec, Sampler, StepBatch, Value
from quire.ops.tensors import PackedWeight, StoredTensor
from quire.ops.torch.attention import paged_attention
from quire.ops.torch.cache import TorchCache


@dataclass(frozen=True, slots=True)
class TorchBatch:
    """A `StepBatch` on the device, with the cache it reads and writes."""

    ids: Tensor
    positions: Tensor
    slots: Tensor
    seq_starts: list[int]
    context_lens: list[int]
    block_tables: Tensor
    logit_rows: Tensor
    cache: TorchCache


@dataclass(frozen=True, slots=True)
class Frequencies:
    inv_freq: Tensor  # [rotary_dim / 2]
    scale: float


class TorchOps:
    def __init__(self, device: str = "cpu", threads: int | None = None) -> None:
        self.device = device
        if threads is not None:
            torch.set_num_threads(threads)

    # -- when a model is loaded ------------------------------------------------------------------------------------

    def pack(self, parts: Sequence[StoredTensor], bias: Sequence[StoredTensor] | None = None) -> PackedWeight:
        weight = torch.cat([self._tensor(part) for part in parts])
        packed_bias = torch.cat([self._tensor(part) for part in bias]) if bias else None
        num_outputs, num_inputs = weight.shape
        return PackedWeight(num_outputs, num_inputs, weight.nbytes, weight, packed_bias)

    def vector(self, tensor: StoredTensor) -> Tensor:
        return self._tensor(tensor)

    def table(self, tensor: StoredTensor) -> Tensor:
        return self._tensor(tensor)

    def frequencies(self, inv_freq: Float32, scale: float) -> Frequencies:
        return Frequencies(torch.tensor(inv_freq, device=self.device), scale)

    def new_cache(self, spec: KVSpec, num_blocks: int, num_host_blocks: int = 0) -> TorchCache:
        return TorchCache(spec, num_blocks, num_host_blocks, self.device)

    def new_sampler(self, num_rows: int, vocab_size: int) -> Sampler:
        from quire.ops.torch.sampler import TorchSampler

        return TorchSampler(num_rows, vocab_size)

    def compile(
        self,
        forward: Callable[[Any, Any], Value],
        cache: KVCache,
        max_tokens: int,
        max_rows: int = 0,
        max_model_len: int = 0,
        sampler: Sampler | None = None,
    ) -> "TorchProgram":
        assert isinstance(cache, TorchCache)
        return TorchProgram(self, forward, cache, max_tokens)

    def _tensor(self, stored: StoredTensor) -> Tensor:
        return torch.tensor(dequantize(stored), device=self.device).reshape(stored.shape)

    # -- in a forward pass -----------------------------------------------------------------------------------------

    def embedding(self, ids: Tensor, table: Tensor) -> Tensor:
        return table[ids]

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return x * torch.rsqrt((x * x).mean(dim=-1, keepdim=True) + eps) * weight

    def linear(self, x: Tensor, w: PackedWeight) -> Tensor:
        return F.linear(x, w.packed, w.bias)

    def split(self, x: Tensor, sizes: Sequence[int]) -> tuple[Tensor, ...]:
        return tuple(x.split(list(sizes), dim=-1))

    def rope_angles(self, positions: Tensor, frequencies: Frequencies) -> Tensor:
        angles = positions[:, None].float() * frequencies.inv_freq
        return torch.cat([angles.cos(), angles.sin()], dim=-1) * frequencies.scale

    def rope(self, x: Tensor, angles: Tensor, head_dim: int) -> Tensor:
        rotary_dim = angles.shape[-1]
        cos, sin = angles[:, None].chunk(2, dim=-1)  # [T, 1, rotary_dim / 2] each
        heads = x.unflatten(-1, (-1, head_dim))  # [T, heads, head_dim]
        turning, rest = heads[..., :rotary_dim], heads[..., rotary_dim:]
        a, b = turning.chunk(2, dim=-1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], dim=-1).flatten(1)

    def write_kv(self, k: Tensor, v: Tensor, batch: TorchBatch, layer: int) -> None:
        shape = (-1, batch.cache.spec.head_dim)
        batch.cache.write(layer, batch.slots, k.unflatten(-1, shape), v.unflatten(-1, shape))

    def paged_attention(
        self, q: Tensor, batch: TorchBatch, layer: int, head_dim: int, scale: float, window: int = 0
    ) -> Tensor:
        heads = q.unflatten(-1, (-1, head_dim))
        return paged_attention(
            heads, batch.cache, layer, batch.seq_starts, batch.context_lens, batch.block_tables, scale, window
        ).flatten(1)

    def silu_and_mul(self, x: Tensor) -> Tensor:
        gate, up = x.chunk(2, dim=-1)
        return F.silu(gate) * up

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        return x + y

    def logits(self, x: Tensor, head: PackedWeight, batch: TorchBatch) -> Tensor:
        return self.linear(x[batch.logit_rows], head)


class TorchProgram:
    """Runs the forward pass as it is written, every step."""

    def __init__(self, ops: TorchOps, forward: Callable[[Any, Any], Value], cache: TorchCache, max_tokens: int) -> None:
        self._ops, self._forward, self._cache, self._max_tokens = ops, forward, cache, max_tokens

    def run(self, batch: StepBatch) -> Tensor:
        assert batch.num_tokens <= self._max_tokens, f"{batch.num_tokens} tokens, compiled for {self._max_tokens}"
        return self._forward(self._ops, self._on_device(batch))

    def _on_device(self, batch: StepBatch) -> TorchBatch:
        def index(array: np.ndarray) -> Tensor:
            return torch.from_numpy(array.astype(np.int64)).to(self._ops.device)

        return TorchBatch(
            ids=index(batch.ids),
            positions=index(batch.positions),
            slots=index(batch.slots),
            seq_starts=batch.seq_starts.tolist(),
            context_lens=batch.context_lens.tolist(),
            block_tables=index(batch.block_tables),
            logit_rows=index(batch.logit_rows),
            cache=self._cache,
        )
