# mypy: allow-untyped-defs, allow-untyped-decorators, allow-incomplete-defs
"""Causal convolutions whose states are in slots, or in the blocks of the cache: the last `taps - 1` inputs, in fp32.

The sum of an output runs from the newest input to the oldest, in fp32, in every kernel: outputs have the same bits in
steps of any size. Products are added by `tl.fma`: a compiler that may choose which of two products to fuse chooses
differently in two kernels. Outputs are computed before states are written, since a state is often written where it was
read."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.ops.gpu.activation import activate
from quire.ops.gpu.states.segments import DeviceSegments
from quire.ops.opset import Activation

CHANNELS = 512  # a program, where it has one token
TILE_TOKENS, TILE_CHANNELS = 16, 128
STATE_CHANNELS = 1024


def causal_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    slots: Tensor,
    segments: DeviceSegments,
    activation: Activation | None = None,
) -> Tensor:
    """x [T, channels], rows may be strided; weight [taps, channels], bias [channels], slots [slots, taps - 1,
    channels], of any strides but the last -> [T, channels], activated."""
    (T, channels), taps = x.shape, len(weight)
    assert x.stride(1) == 1 and weight.shape == (taps, channels) and weight.is_contiguous(), f"{weight.shape}"
    assert slots.shape[1:] == (taps - 1, channels) and slots.stride(2) == 1, f"{slots.shape} of {taps} x {channels}"
    out = torch.empty(T, channels, dtype=x.dtype, device=x.device)
    if T == 0:
        return out
    strides = slots.stride(0), slots.stride(1)
    given = (x, x.stride(0), weight, weight if bias is None else bias, slots, *strides, out, channels)
    options = {"TAPS": taps, "HAS_BIAS": bias is not None, "ACTIVATION": -1 if activation is None else int(activation)}
    if segments.single:
        block = min(CHANNELS, triton.next_power_of_2(channels))
        _step_kernel[(T, triton.cdiv(channels, block))](*given, segments.table, **options, BLOCK=block, num_warps=4)
        return out
    grid = triton.cdiv(T, TILE_TOKENS), triton.cdiv(channels, TILE_CHANNELS)
    _outputs_kernel[grid](*given, segments.before, T, **options, BLOCK_T=TILE_TOKENS, BLOCK=TILE_CHANNELS, num_warps=4)
    if taps > 1:
        _write_states(x, slots, segments)
    return out


def _write_states(x: Tensor, slots: Tensor, segments: DeviceSegments) -> None:
    channels, taps = x.shape[1], slots.shape[1] + 1
    block = min(STATE_CHANNELS, triton.next_power_of_2(channels))
    parts, given = (
        triton.cdiv(channels, block),
        (x, x.stride(0), slots, slots.stride(0), slots.stride(1), channels, segments.table),
    )
    _near_states_kernel[(segments.num_chains, parts)](
        *given, segments.chain_starts, segments.num_near, TAPS=taps, BLOCK=block, num_warps=4
    )
    _far_states_kernel[(len(segments.table), parts)](*given, segments.before, TAPS=taps, BLOCK=block, num_warps=4)


@triton.jit
def _step_kernel(
    x, x_stride, weight, bias, slots, slot_stride, row_stride, out, channels, table,
    TAPS: tl.constexpr, HAS_BIAS: tl.constexpr, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One token a segment: its output, then its state."""
    token = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < channels
    source = tl.load(table + 4 * token + 2).to(tl.int64)
    target = tl.load(table + 4 * token + 3).to(tl.int64)
    own = tl.load(x + token * x_stride + channel, mask=inside, other=0.0).to(tl.float32)
    total = own * tl.load(weight + (TAPS - 1) * channels + channel, mask=inside, other=0.0)
    old = slots + source * slot_stride + channel
    for back in tl.static_range(1, TAPS):
        value = tl.load(old + (TAPS - 1 - back) * row_stride, mask=inside & (source >= 0), other=0.0)
        scale = tl.load(weight + (TAPS - 1 - back) * channels + channel, mask=inside, other=0.0)
        total = tl.fma(value, scale, total)
    _store_output(out + token * channels, total, bias, channel, inside, inside, HAS_BIAS, ACTIVATION)
    new = slots + target * slot_stride + channel
    for row in tl.static_range(TAPS - 2):
        value = tl.load(old + (row + 1) * row_stride, mask=inside & (source >= 0), other=0.0)
        tl.debug_barrier()  # every thread has read its row before the one below it is written
        tl.store(new + row * row_stride, value, mask=inside & (target >= 0))
    if TAPS > 1:
        tl.debug_barrier()
        tl.store(new + (TAPS - 2) * row_stride, own, mask=inside & (target >= 0))


@triton.jit(do_not_specialize=["num_tokens"])
def _outputs_kernel(
    x, x_stride, weight, bias, slots, slot_stride, row_stride, out, channels, before, num_tokens,
    TAPS: tl.constexpr, HAS_BIAS: tl.constexpr, ACTIVATION: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A tile of tokens: each goes back token by token, and then through the rows of the state it began from."""
    token = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_token, is_channel = token < num_tokens, channel < channels
    inside = is_token[:, None] & is_channel[None]
    own = tl.load(x + token[:, None] * x_stride + channel[None], mask=inside, other=0.0).to(tl.float32)
    total = own * tl.load(weight + (TAPS - 1) * channels + channel, mask=is_channel, other=0.0)[None]
    at, in_step = token, is_token
    slot = tl.full([BLOCK_T], -1, tl.int64)
    row = tl.full([BLOCK_T], TAPS - 1, tl.int64)
    for back in tl.static_range(1, TAPS):
        previous = tl.load(before + at, mask=in_step, other=-1).to(tl.int64)
        slot = tl.where(in_step & (previous < 0), -2 - previous, slot)
        in_step = in_step & (previous >= 0)
        at = tl.where(in_step, previous, at)
        row = tl.where(in_step, row, row - 1)
        in_slot = is_token & ~in_step & (slot >= 0)
        new = tl.load(
            x + at[:, None] * x_stride + channel[None], mask=in_step[:, None] & is_channel[None], other=0.0
        ).to(tl.float32)
        places = slot * slot_stride + row * row_stride
        old = tl.load(slots + places[:, None] + channel[None], mask=in_slot[:, None] & is_channel[None], other=0.0)
        scale = tl.load(weight + (TAPS - 1 - back) * channels + channel, mask=is_channel, other=0.0)
        total = tl.fma(new + old, scale[None], total)
    outputs = out + token[:, None] * channels
    _store_output(outputs, total, bias, channel[None], is_channel[None], inside, HAS_BIAS, ACTIVATION)


@triton.jit
def _store_output(out, total, bias, channel, is_channel, inside, HAS_BIAS: tl.constexpr, ACTIVATION: tl.constexpr):
    if HAS_BIAS:
        total += tl.load(bias + channel, mask=is_channel, other=0.0)
    if ACTIVATION >= 0:
        total = activate(total, ACTIVATION)
    tl.store(out + channel, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _near_states_kernel(
    x,
    x_stride,
    slots,
    slot_stride,
    row_stride,
    channels,
    table,
    chain_starts,
    num_near,
    TAPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """States that keep rows of the state before, one after the other: each may be read by the next."""
    chain = tl.program_id(0)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < channels
    begin = tl.load(chain_starts + chain)
    for segment in range(begin, begin + tl.load(num_near + chain)):
        first = tl.load(table + 4 * segment)
        end = tl.load(table + 4 * segment + 1)
        source = tl.load(table + 4 * segment + 2).to(tl.int64)
        target = tl.load(table + 4 * segment + 3).to(tl.int64)
        old = slots + source * slot_stride + channel
        new = slots + target * slot_stride + channel
        for row in tl.static_range(TAPS - 1):
            token = end - (TAPS - 1) + row
            kept = tl.load(
                old + (row + end - first) * row_stride, mask=inside & (token < first) & (source >= 0), other=0.0
            )
            read = tl.load(x + token.to(tl.int64) * x_stride + channel, mask=inside & (token >= first), other=0.0)
            tl.debug_barrier()  # every thread has read its row before the one below it is written
            tl.store(new + row * row_stride, kept + read.to(tl.float32), mask=inside & (target >= 0))
        tl.debug_barrier()


@triton.jit
def _far_states_kernel(
    x, x_stride, slots, slot_stride, row_stride, channels, table, before, TAPS: tl.constexpr, BLOCK: tl.constexpr
):
    """States that are inputs of this step alone."""
    segment = tl.program_id(0)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    token = tl.load(table + 4 * segment + 1) - 1
    target = tl.load(table + 4 * segment + 3).to(tl.int64)
    oldest = token
    for _ in tl.static_range(TAPS - 2):
        oldest = tl.where(oldest >= 0, tl.load(before + tl.maximum(oldest, 0)), -1)
    if (oldest >= 0) & (target >= 0):
        for back in tl.static_range(TAPS - 1):
            value = tl.load(x + token.to(tl.int64) * x_stride + channel, mask=channel < channels, other=0.0)
            row = target * slot_stride + (TAPS - 2 - back) * row_stride
            tl.store(slots + row + channel, value.to(tl.float32), mask=channel < channels)
            token = tl.maximum(tl.load(before + token), 0)
