# mypy: allow-untyped-defs, allow-untyped-decorators, allow-incomplete-defs
"""The selective scan of Mamba (1): every channel has a state of its own, [columns], and shares b and c with the others.

Tokens are taken one after the other, in fp32, by one program for some channels: the same bits in steps of any size."""

import triton
import triton.language as tl
from torch import Tensor

from quire.ops.gpu.states.functions import softplus
from quire.ops.gpu.states.linear_attention import new_output
from quire.ops.gpu.states.segments import DeviceSegments
from quire.ops.opset import MambaWeights

CHANNELS = 64  # of one warp, with up to 32 columns
STATE_NUMBERS = 2048


def mamba_scan(
    x: Tensor, dt: Tensor, b: Tensor, c: Tensor, weights: MambaWeights, slots: Tensor, segments: DeviceSegments
) -> Tensor:
    """x and dt [T, channels], b and c [T, columns], slots [slots, columns, channels] -> [T, channels]. Rows may be
    strided."""
    _, columns, channels = slots.shape
    assert x.shape == dt.shape == (len(x), channels) and b.shape == c.shape == (len(x), columns), f"{x.shape}"
    assert all(value.stride(1) == 1 for value in (x, dt, b, c)) and slots.is_contiguous()
    assert weights.a.shape == (columns, channels) and weights.a.is_contiguous(), f"{weights.a.shape}"
    out = new_output(x, segments)
    rows = triton.next_power_of_2(columns)
    block = max(min(CHANNELS, STATE_NUMBERS // rows), 1)
    if len(x):
        _mamba_kernel[(segments.num_chains, triton.cdiv(channels, block))](
            x,
            dt,
            b,
            c,
            *(value.stride(0) for value in (x, dt, b, c)),
            weights.a,
            weights.skip,
            slots,
            out,
            segments.table,
            segments.chain_starts,
            columns,
            channels,
            ROWS=rows,
            BLOCK=block,
            num_warps=1,
        )
    return out


@triton.jit
def _mamba_kernel(
    x, dt, b, c, x_stride, dt_stride, b_stride, c_stride, a, skip, slots, out, table, chain_starts, columns, channels,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    chain = tl.program_id(0)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = tl.arange(0, ROWS)
    is_row, is_channel = row < columns, channel < channels
    inside = is_row[:, None] & is_channel[None]
    place = row[:, None] * channels + channel[None]
    rates = tl.load(a + place, mask=inside, other=0.0)
    skipped = tl.load(skip + channel, mask=is_channel, other=0.0)
    for segment in range(tl.load(chain_starts + chain), tl.load(chain_starts + chain + 1)):
        first = tl.load(table + 4 * segment).to(tl.int64)
        end = tl.load(table + 4 * segment + 1).to(tl.int64)
        source = tl.load(table + 4 * segment + 2).to(tl.int64)
        target = tl.load(table + 4 * segment + 3).to(tl.int64)
        tl.debug_barrier()  # the segment before may have written what this one reads
        state = tl.load(slots + source * columns * channels + place, mask=inside & (source >= 0), other=0.0)
        x_next = tl.load(x + first * x_stride + channel, mask=is_channel, other=0.0)
        dt_next = tl.load(dt + first * dt_stride + channel, mask=is_channel, other=0.0)
        b_next = tl.load(b + first * b_stride + row, mask=is_row, other=0.0)
        c_next = tl.load(c + first * c_stride + row, mask=is_row, other=0.0)
        for token in range(first, end):
            x_token, delta = x_next.to(tl.float32), softplus(dt_next.to(tl.float32))
            b_token, c_token = b_next.to(tl.float32), c_next.to(tl.float32)
            more = token + 1 < end  # the next token is on its way while this one is computed
            x_next = tl.load(x + (token + 1) * x_stride + channel, mask=is_channel & more, other=0.0)
            dt_next = tl.load(dt + (token + 1) * dt_stride + channel, mask=is_channel & more, other=0.0)
            b_next = tl.load(b + (token + 1) * b_stride + row, mask=is_row & more, other=0.0)
            c_next = tl.load(c + (token + 1) * c_stride + row, mask=is_row & more, other=0.0)
            state = tl.exp(rates * delta[None]) * state + b_token[:, None] * (delta * x_token)[None]
            result = tl.sum(c_token[:, None] * state, axis=0) + skipped * x_token
            tl.store(out + token * channels + channel, result.to(out.dtype.element_ty), mask=is_channel)
        tl.store(slots + target * columns * channels + place, state, mask=inside & (target >= 0))
