"""The op set in plain torch, computed eagerly: each op is one formula, and the specification of its kernels."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from quire.ops.dequantize import dequantize
from quire.ops.kv_spec import KVCache, KVSpec
from quire.ops.opset import (
    Activation,
    Float32,
    Int32,
    Keep,
    Mamba2Weights,
    MambaWeights,
    ProgramSpec,
    Routing,
    Sampler,
    Value,
    Wkv7Weights,
)
from quire.ops.ranks.cuts import Cut
from quire.ops.reference.activations import ACTIVATIONS, activate_and_clamp
from quire.ops.reference.attention import disentangled_attention, paged_attention, self_attention
from quire.ops.reference.cache import TorchCache
from quire.ops.reference.causal_conv import causal_conv, conv_in_slots
from quire.ops.reference.compressed_attention import compressed_attention, pool_group, top_entries, write_entry
from quire.ops.reference.exchange import RankExchange
from quire.ops.reference.hyper_connections import merge_streams, stream_weights, update_streams
from quire.ops.reference.linear_attention import attend_states
from quire.ops.reference.lora import TorchLoraSlots, add_lora
from quire.ops.reference.mamba import mamba2_scan, mamba_scan
from quire.ops.reference.program import TorchBatch, TorchHiddenStates, TorchProgram
from quire.ops.reference.rope import Frequencies, rope_angles, rotate_heads
from quire.ops.reference.routing import choose_experts
from quire.ops.reference.sampler import TorchSampler
from quire.ops.reference.sparse_attention import sparse_attention, top_positions
from quire.ops.reference.wkv7 import wkv7
from quire.ops.tensors import PackedExperts, PackedHeads, PackedWeight, StoredTensor
from quire.ops.timer import ClockTimer, Timer

if TYPE_CHECKING:
    from quire.ops.ranks.group import RankGroup

__all__ = ["ACTIVATIONS", "TorchOps", "activate_and_clamp"]


class TorchOps:
    def __init__(self, device: str = "cpu", threads: int | None = None, group: "RankGroup | None" = None) -> None:
        """`group`: the ranks that compute together with this process."""
        self.device = device
        self._exchange = None if group is None else RankExchange(group)
        if threads is not None:
            torch.set_num_threads(threads)

    # -- when a model is loaded ------------------------------------------------------------------------------------

    def pack(
        self, parts: Sequence[StoredTensor], bias: Sequence[StoredTensor] | None = None, keep: Keep = Keep.NOTHING
    ) -> PackedWeight:
        weight = torch.cat([self._tensor(part) for part in parts])
        packed_bias = torch.cat([self._tensor(part) for part in bias]) if bias else None
        num_outputs, num_inputs = weight.shape
        return PackedWeight(num_outputs, num_inputs, weight.nbytes, weight, packed_bias)

    def pack_experts(
        self, experts: Sequence[Sequence[StoredTensor]], biases: Sequence[Sequence[StoredTensor]] | None = None
    ) -> PackedExperts:
        stacked = self._stack(experts)
        num_experts, num_outputs, num_inputs = stacked.shape
        packed_biases = None if biases is None else self._stack(biases)
        return PackedExperts(num_experts, num_outputs, num_inputs, stacked.nbytes, stacked, packed_biases)

    def _stack(self, experts: Sequence[Sequence[StoredTensor]]) -> Tensor:
        return torch.stack([torch.cat([self._tensor(part) for part in parts]) for parts in experts])

    def pack_heads(self, heads: Sequence[StoredTensor]) -> PackedHeads:
        stacked = torch.stack([self._tensor(head) for head in heads])
        num_heads, num_outputs, num_inputs = stacked.shape
        return PackedHeads(num_heads, num_outputs, num_inputs, stacked.nbytes, stacked)

    def new_slots(self, num_inputs: int, sizes: Sequence[int], num_slots: int, max_rank: int) -> TorchLoraSlots:
        return TorchLoraSlots(num_inputs, sizes, num_slots, max_rank, torch.device(self.device), torch.float32)

    def vector(self, tensor: StoredTensor) -> Tensor:
        return self._tensor(tensor)

    def table(self, tensor: StoredTensor) -> Tensor:
        return self._tensor(tensor)

    def conv_weight(self, tensor: StoredTensor) -> Tensor:
        return self._tensor(tensor).reshape(tensor.shape[0], -1).T.contiguous()

    def biases(self, table: Float32) -> Tensor:
        return torch.tensor(table, dtype=torch.float32, device=self.device)

    def frequencies(self, inv_freq: Float32, scale: float) -> Frequencies:
        return Frequencies(torch.tensor(inv_freq, device=self.device), scale)

    def draft_vocabulary(self, tokens: Int32, vocab: int) -> tuple[Tensor, int]:
        return torch.from_numpy(tokens.astype(np.int64)).to(self.device), vocab

    def new_hidden_states(self, num_rows: int, num_columns: int) -> TorchHiddenStates:
        return TorchHiddenStates(torch.zeros(num_rows, num_columns, device=self.device))

    def new_cache(self, spec: KVSpec, num_blocks: int, num_host_blocks: int = 0) -> TorchCache:
        return TorchCache(spec, num_blocks, num_host_blocks, self.device)

    def new_sampler(self, num_rows: int, vocab_size: int) -> Sampler:
        return TorchSampler(num_rows, vocab_size)

    def new_timer(self) -> Timer:
        return ClockTimer()

    def compile(self, forward: Callable[[Any, Any], Value], cache: KVCache, spec: ProgramSpec) -> TorchProgram:
        assert isinstance(cache, TorchCache) and (spec.sampler is None or isinstance(spec.sampler, TorchSampler))
        assert spec.hidden is None or isinstance(spec.hidden, TorchHiddenStates)
        return TorchProgram(self.device, partial(forward, self), cache, spec.max_tokens, spec.sampler, spec.hidden)

    def _tensor(self, stored: StoredTensor) -> Tensor:
        return torch.tensor(dequantize(stored), device=self.device).reshape(stored.shape)

    # -- in a forward pass -----------------------------------------------------------------------------------------

    def embedding(self, ids: Tensor, table: Tensor, cut: Cut | None = None) -> Tensor:
        if cut is None:
            return table[ids]
        own = (ids >= cut.first) & (ids < cut.first + cut.count)
        rows = table[(ids - cut.first).clamp(0, cut.count - 1)]
        return self._ranks.all_rows(rows, own)

    def all_gather(self, x: Tensor, cuts: Sequence[Cut]) -> Tensor:
        return self._ranks.all_columns(x, cuts)

    @property
    def _ranks(self) -> RankExchange:
        assert self._exchange is not None, "a part of a value, and there are no other ranks"
        return self._exchange

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, groups: int = 1) -> Tensor:
        parts = x.unflatten(-1, (-1, groups, len(weight) // groups))
        normed = parts * torch.rsqrt((parts * parts).mean(dim=-1, keepdim=True) + eps)
        return (normed * weight.view(groups, -1)).flatten(-3)

    def layer_norm(self, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, groups: int = 1) -> Tensor:
        parts = x.unflatten(-1, (groups, -1))  # [T, groups, columns of a group]
        centered = parts - parts.mean(dim=-1, keepdim=True)
        normed = centered * torch.rsqrt((centered * centered).mean(dim=-1, keepdim=True) + eps)
        if weight is not None:
            normed = normed * weight.view(-1, parts.shape[-1])
        if bias is not None:
            normed = normed + bias.view(-1, parts.shape[-1])
        return normed.flatten(-2)

    def linear(self, x: Tensor, w: PackedWeight) -> Tensor:
        return F.linear(x, w.packed, w.bias)

    def adapt(self, y: Tensor, x: Tensor, slots: TorchLoraSlots, batch: TorchBatch) -> Tensor:
        return y if batch.adapters is None else add_lora(y, x, slots, batch.adapters)

    def linear_heads(self, x: Tensor, w: PackedHeads) -> Tensor:
        heads = x.unflatten(-1, (w.num_heads, -1))  # [T, heads, inputs]
        return (heads.transpose(0, 1) @ w.packed.transpose(1, 2)).transpose(0, 1).flatten(1)

    def split(self, x: Tensor, sizes: Sequence[int]) -> tuple[Tensor, ...]:
        return tuple(x.split(list(sizes), dim=-1))

    def rope_angles(self, positions: Tensor, frequencies: Frequencies, group: int = 1) -> Tensor:
        return rope_angles(positions // group * group, frequencies)

    def rope(self, x: Tensor, angles: Tensor, head_dim: int) -> Tensor:
        return rotate_heads(x.unflatten(-1, (-1, head_dim)), angles).flatten(1)

    def write_kv(self, k: Tensor, v: Tensor, batch: TorchBatch, layer: int) -> None:
        shape = (-1, batch.cache.spec.head_dim)
        batch.cache.write(layer, batch.slots, k.unflatten(-1, shape), v.unflatten(-1, shape))

    def paged_attention(
        self,
        q: Tensor,
        batch: TorchBatch,
        layer: int,
        head_dim: int,
        scale: float,
        window: int = 0,
        softcap: float = 0.0,
        slopes: Tensor | None = None,
        sinks: Tensor | None = None,
        biases: Tensor | None = None,
        group: int = 0,
        skipped: int = 0,
    ) -> Tensor:
        heads = q.unflatten(-1, (-1, head_dim))
        runs = batch.seq_starts, batch.context_lens, batch.block_tables
        pages = heads, batch.cache, layer, *runs
        scoring = scale, window, softcap, slopes, sinks, biases
        return paged_attention(*pages, *scoring, **batch.trees, group=group, skipped=skipped).flatten(1)

    def cross_attention(
        self, q: Tensor, batch: TorchBatch, layer: int, head_dim: int, scale: float, group: int = 0, skipped: int = 0
    ) -> Tensor:
        assert batch.source_tables is not None, "the sequences of this step have no sources"
        heads = q.unflatten(-1, (-1, head_dim))
        runs = batch.seq_starts, batch.source_lens, batch.source_tables
        attended = paged_attention(
            heads, batch.cache, layer, *runs, scale, window=0, causal=False, group=group, skipped=skipped
        )
        return attended.flatten(1)

    def attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        batch: TorchBatch,
        head_dim: int,
        scale: float,
        causal: bool = False,
        window: int = 0,
        biases: Tensor | None = None,
    ) -> Tensor:
        q, k, v = (x.unflatten(-1, (-1, head_dim)) for x in (q, k, v))
        return self_attention(q, k, v, batch.seq_starts, scale, causal, window, biases).flatten(1)

    def disentangled_attention(
        self, q: Tensor, k: Tensor, v: Tensor, by_query: Tensor, by_key: Tensor, rows: Int32, batch: TorchBatch,
        head_dim: int, scale: float,
    ) -> Tensor:  # fmt: skip
        heads = q.shape[1] // head_dim
        q, k, v, by_query, by_key = (x.unflatten(-1, (heads, -1)) for x in (q, k, v, by_query, by_key))
        table = torch.from_numpy(rows.astype(np.int64)).to(self.device)
        return disentangled_attention(q, k, v, by_query, by_key, table, batch.seq_starts, scale).flatten(1)

    def write_latent(self, latent: Tensor, k_rope: Tensor, batch: TorchBatch, layer: int) -> None:
        batch.cache.write(layer, batch.slots, torch.cat([latent, k_rope], dim=-1)[:, None])

    def write_index_key(self, k: Tensor, batch: TorchBatch, layer: int) -> None:
        batch.cache.write_index_key(layer, batch.slots, k)

    def top_positions(self, q: Tensor, weights: Tensor, batch: TorchBatch, layer: int) -> Tensor:
        heads = q.unflatten(-1, (weights.shape[1], -1))
        return top_positions(
            heads, weights, batch.cache, layer, batch.seq_starts, batch.context_lens, batch.block_tables
        )

    def mla_attention(
        self,
        q_latent: Tensor,
        q_rope: Tensor,
        batch: TorchBatch,
        layer: int,
        scale: float,
        chosen: Tensor | None = None,
    ) -> Tensor:
        spec = batch.cache.spec
        parts = (q_latent, spec.latent), (q_rope, spec.head_dim - spec.latent)
        heads = torch.cat([x.unflatten(-1, (-1, size)) for x, size in parts], dim=-1)
        runs = batch.seq_starts, batch.context_lens, batch.block_tables
        pages = heads, batch.cache, layer, *runs
        if chosen is not None:
            return sparse_attention(*pages, scale, chosen).flatten(1)
        return paged_attention(*pages, scale, window=0, **batch.trees).flatten(1)

    def write_tokens(self, x: Tensor, batch: TorchBatch, layer: int, first: int = 0) -> None:
        batch.cache.write_tokens(layer, batch.slots, x, first)

    def pool_group(
        self, batch: TorchBatch, layer: int, first: int, columns: int, bias: Tensor, overlap: bool
    ) -> Tensor:
        return pool_group(batch, layer, first, columns, bias, overlap)

    def write_entry(self, x: Tensor, batch: TorchBatch, layer: int, part: int) -> None:
        write_entry(x, batch, layer, part)

    def top_entries(self, q: Tensor, weights: Tensor, batch: TorchBatch, layer: int, top_k: int) -> Tensor:
        return top_entries(q.unflatten(-1, (weights.shape[1], -1)), weights, batch, layer, top_k)

    def compressed_attention(
        self, q: Tensor, batch: TorchBatch, layer: int, scale: float, window: int, sinks: Tensor,
        chosen: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        heads = q.unflatten(-1, (len(sinks), -1))
        return compressed_attention(heads, batch, layer, scale, window, sinks, chosen).flatten(1)

    def stream_weights(
        self, x: Tensor, scale: Tensor, base: Tensor, streams: int, eps: float, iterations: int
    ) -> Tensor:
        return stream_weights(x, scale, base, streams, eps, iterations)

    def merge_streams(self, x: Tensor, weights: Tensor) -> Tensor:
        return merge_streams(x, weights)

    def update_streams(self, x: Tensor, y: Tensor, post: Tensor, mixing: Tensor) -> Tensor:
        return update_streams(x, y, post, mixing)

    def activate(self, x: Tensor, kind: Activation) -> Tensor:
        return ACTIVATIONS[kind](x)

    def activate_and_mul(self, x: Tensor, kind: Activation) -> Tensor:
        gate, up = x.chunk(2, dim=-1)
        if kind is Activation.CLAMPED_SWIGLU:
            up = up.clamp(-7, 7) + 1
        return ACTIVATIONS[kind](gate) * up

    def moe(
        self,
        x: Tensor,
        router_logits: Tensor,
        gate_up: PackedExperts,
        down: PackedExperts,
        routing: Routing,
        kind: Activation,
        correction: Tensor | None = None,
        chosen: Tensor | None = None,
        cut: Cut | None = None,
        experts: Cut | None = None,
    ) -> Tensor:
        ids, weights = choose_experts(router_logits, routing, correction, chosen)  # [T, top_k] each
        outputs = x.new_zeros(*ids.shape, down.num_outputs)  # of every route
        first = 0 if experts is None else experts.first
        own = (ids >= first) & (ids < first + gate_up.num_experts)
        is_gated = cut is not None or gate_up.num_outputs != down.num_inputs
        activate = self.activate_and_mul if is_gated else self.activate
        if routing.limit:
            activate = partial(activate_and_clamp, limit=routing.limit, gate_limit=routing.gate_limit)
        for expert in ids[own].unique().tolist():
            rows, ranks = (ids == expert).nonzero(as_tuple=True)
            biases = [None if w.biases is None else w.biases[expert - first] for w in (gate_up, down)]
            taken = x[rows] * weights[rows, ranks, None] if routing.weigh_inputs else x[rows]
            hidden = activate(F.linear(taken, gate_up.packed[expert - first], biases[0]), kind)
            hidden = hidden if cut is None else self.all_gather(hidden, [cut])
            outputs[rows, ranks] = F.linear(hidden, down.packed[expert - first], biases[1])
        if experts is not None:
            outputs = self._ranks.all_rows(outputs.flatten(0, 1), own.flatten()).view_as(outputs)
        if routing.num_zero:
            passed = ids >= router_logits.shape[1] - routing.num_zero
            outputs = torch.where(passed[..., None], x[:, None], outputs)
        return (outputs if routing.weigh_inputs else outputs * weights[..., None]).sum(dim=1)

    def mul_sigmoid(self, x: Tensor, gate: Tensor) -> Tensor:
        return x * gate.sigmoid()

    def scale(self, x: Tensor, factor: float) -> Tensor:
        return x * factor

    def scale_by_position(self, x: Tensor, positions: Tensor, growth: float, length: int, offset: int = 0) -> Tensor:
        return x * (1 + growth * torch.log1p(torch.floor((positions + offset) / length)))[:, None]

    def clamp(self, x: Tensor, limit: float) -> Tensor:
        return x.clamp(-limit, limit)

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        return x + y

    def mul(self, x: Tensor, y: Tensor) -> Tensor:
        return x * y

    def causal_conv(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, batch: TorchBatch, layer: int, first: int = 0
    ) -> Tensor:
        if batch.cache.slots is not None:
            slots = batch.cache.slots.conv[layer][:, :, first : first + x.shape[1]]
            return conv_in_slots(x, weight, bias, slots, batch.states)
        runs = batch.seq_starts, batch.context_lens, batch.block_tables
        return causal_conv(x, weight, bias, batch.cache, layer, *runs)

    def mamba2_scan(
        self, x: Tensor, dt: Tensor, b: Tensor, c: Tensor, weights: Mamba2Weights, batch: TorchBatch, layer: int
    ) -> Tensor:
        return mamba2_scan(x, dt, b, c, weights, batch.slots_of_states.recurrent[layer], batch.states)

    def decay(self, x: Tensor, bias: Tensor, rate: Tensor) -> Tensor:
        return torch.exp(-rate.double() * F.softplus((x + bias).double())).to(x.dtype)  # fp64 as in the sigmoid

    def bounded_decay(self, x: Tensor, bias: Tensor, rate: Tensor, bound: float) -> Tensor:
        return torch.exp(bound * torch.sigmoid((rate * (x + bias)).double())).to(x.dtype)

    def delta_rule(
        self, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, batch: TorchBatch, layer: int, key_dim: int,
        tiled: bool = False,
    ) -> Tensor:  # fmt: skip
        slots = batch.slots_of_states.recurrent[layer]
        return attend_states(q, k, v, decay, beta, slots, batch.states, tiled)

    def linear_attention(
        self, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, batch: TorchBatch, layer: int, key_dim: int
    ) -> Tensor:
        slots = batch.slots_of_states.recurrent[layer]
        return attend_states(q, k, v, decay.expand(len(v), -1), None, slots, batch.states)

    def wkv7(
        self, r: Tensor, w: Tensor, k: Tensor, v: Tensor, a: Tensor, weights: Wkv7Weights, batch: TorchBatch, layer: int
    ) -> Tensor:
        return wkv7(r, w, k, v, a, weights, batch.slots_of_states.recurrent[layer], batch.states)

    def mamba_scan(
        self, x: Tensor, dt: Tensor, b: Tensor, c: Tensor, weights: MambaWeights, batch: TorchBatch, layer: int
    ) -> Tensor:
        return mamba_scan(x, dt, b, c, weights, batch.slots_of_states.recurrent[layer], batch.states)

    def concat(self, parts: Sequence[Tensor]) -> Tensor:
        return torch.cat(list(parts), dim=-1)

    def tap(self, x: Tensor, index: int) -> None: ...

    def keep(self, x: Tensor, batch: TorchBatch) -> None:
        assert not batch.kept, "hidden states are kept once"
        batch.kept.append(x)

    def hidden_states(self, batch: TorchBatch) -> Tensor:
        assert batch.hidden is not None, "the step has no hidden states"
        return batch.hidden

    def logits(
        self,
        x: Tensor,
        head: PackedWeight,
        batch: TorchBatch,
        softcap: float = 0.0,
        vocabulary: tuple[Tensor, int] | None = None,
        cut: Cut | None = None,
    ) -> Tensor:
        logits = self.linear(x[batch.logit_rows], head)
        logits = logits if cut is None else self.all_gather(logits, [cut])
        logits = softcap * torch.tanh(logits / softcap) if softcap else logits
        if vocabulary is None:
            return logits
        tokens, size = vocabulary
        return logits.new_full((len(logits), size), -torch.inf).index_copy(1, tokens, logits)

    def rows(self, x: Tensor, batch: TorchBatch) -> Tensor:
        return x[batch.logit_rows]
