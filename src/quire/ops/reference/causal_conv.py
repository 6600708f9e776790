"""Causal convolution, one sequence after the other, with states in the blocks of the cache or in slots."""

from collections.abc import Sequence

import torch
from torch import Tensor

from quire.ops.reference.cache import TorchCache
from quire.ops.reference.states import segments, state_in


def causal_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    cache: TorchCache,
    layer: int,
    seq_starts: Sequence[int],
    context_lens: Sequence[int],
    block_tables: Tensor,
) -> Tensor:
    """x [T, channels], weight [taps, channels], bias [channels] -> [T, channels]"""
    out, size, rows = torch.empty_like(x), cache.spec.block_size, len(weight) - 1
    states = cache.states[layer]  # [blocks, rows, channels]
    for seq, context_len in enumerate(context_lens):
        inputs = x[seq_starts[seq] : seq_starts[seq + 1]]
        start = context_len - len(inputs)
        state = states[block_tables[seq, (start - 1) // size]] if start else x.new_zeros(rows, x.shape[1])
        known = torch.cat([state, inputs])  # row i is position start - rows + i
        out[seq_starts[seq] : seq_starts[seq + 1]] = convolve(known, weight, bias)
        for end in range(start + 1, context_len + 1):
            if end % size == 0 or end == context_len:
                states[block_tables[seq, (end - 1) // size]] = known[end - start : end - start + rows]
    return out


def conv_in_slots(
    x: Tensor, weight: Tensor, bias: Tensor | None, slots: Tensor, states: Sequence[Sequence[int]]
) -> Tensor:
    """The convolution with states [slots, taps - 1, channels] beside the blocks; `states`: segments of the step."""
    out, rows = torch.empty_like(x), len(weight) - 1
    for first, end, source, target in segments(states):
        known = torch.cat([state_in(slots, source), x[first:end]])
        out[first:end] = convolve(known, weight, bias)
        slots[target] = known[len(known) - rows :]
    return out


def convolve(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """inputs [taps - 1 + n, channels] -> [n, channels]"""
    taps = len(weight)
    n = len(inputs) - taps + 1
    out = inputs.new_zeros(n, inputs.shape[1]) if bias is None else bias.expand(n, -1)
    for tap in range(taps):
        out = out + weight[tap] * inputs[tap : tap + n]
    return out
