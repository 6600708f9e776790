# mypy: allow-untyped-defs, allow-untyped-decorators, allow-incomplete-defs
"""y = x @ w.T for weights quantized to 4 to 8 bits in groups, and 16-bit activations.

Quantized values go into the tensor cores as they are, small integers that bf16 holds exactly, and a group's scale is
applied to its sums: nothing is rounded but the result. Offsets are multiplied with the sum of the group's activations,
which a small kernel computes before. Where there are more than some rows and many scales, values are multiplied with
them while they are unpacked (`fold`), and rounded to 16 bits: the weights that `dequantize` gives. One row goes without
tensor cores, as 16-bit integers (grouped_gemv.py). On Hopper, few rows go through a kernel that is written for lanes
(grouped_few.py), and many rows in wider tiles, where all formats of integers are scaled before they are multiplied
(grouped_wide.py). From some hundred rows on, about a thousand there, it is cheaper to dequantize the whole matrix to 16
bits and use cuBLAS."""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from quire.ops.gpu.linear.dequantize import dequantize
from quire.ops.gpu.linear.few_config import few_config_of
from quire.ops.gpu.linear.grouped_config import GroupedConfig, grouped_config
from quire.ops.gpu.linear.grouped_gemv import GroupedGemvConfig, can_gemv, grouped_gemv, x_group
from quire.ops.gpu.linear.grouped_layout import GroupedWeight
from quire.ops.gpu.linear.grouped_scales import append, load_scales, offset_of, scale_of, scaled_planes, zeros_of
from quire.ops.gpu.linear.linear import PROGRAMS
from quire.ops.gpu.linear.quantize_rows import QuantizedRows, quantize_rows
from quire.ops.gpu.linear.split_k import finish, opaque, split_launch
from quire.ops.gpu.linear.unpack import asm_for, kernel_args, kernel_constants, take_planes, unpack, word_places
from quire.ops.gpu.linear.wide_config import wide_config_of
from quire.ops.gpu.overlap import overlap_options, prefetch, wait_for_inputs

MAX_KERNEL_ROWS = 256  # beyond it, dequantize and cuBLAS


def quantized_input(
    num_rows: int, weight: GroupedWeight, batch_invariant: bool = False
) -> tuple[torch.dtype, int] | None:
    """In which type x is wanted, and in which groups; None: as it is."""
    if few_config_of(num_rows, weight, batch_invariant) is not None:
        return torch.float16, weight.width
    if num_rows == 1 and can_gemv(weight) and not batch_invariant:
        return torch.int16, x_group(weight)
    return None


def grouped_linear(
    x: Tensor | QuantizedRows,
    weight: GroupedWeight,
    bias: Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
    *,
    batch_invariant: bool = False,
    tickets: Tensor | None = None,
    overlap: bool = False,
    all_outputs: int | None = None,
) -> Tensor:
    """x [M, K] bf16 or fp16 -> [M, N] in its dtype, or x as `quantized_input` says -> [M, N] in `dtype`.
    Batch invariant rows never see cuBLAS: their sums are a function of (N, K). `all_outputs`: as in `linear`."""
    if not isinstance(x, QuantizedRows):
        if len(x) == 0:
            return x.new_empty(0, weight.num_outputs)
        if (wanted := quantized_input(len(x), weight, batch_invariant)) is not None:
            dtype, x = x.dtype, quantize_rows(x, *wanted, overlap)
    if isinstance(x, QuantizedRows):
        return _of_quantized(x, weight, bias, dtype, overlap)
    if not batch_invariant and (wide := wide_config_of(x, weight)) is not None:
        from quire.ops.gpu.linear.grouped_wide import wide_kernel  # Gluon is not in every Triton

        return wide_kernel(x, weight, bias, wide, tickets, overlap)
    if len(x) > MAX_KERNEL_ROWS and not batch_invariant:
        return F.linear(x, dequantize(weight, x.dtype), None if bias is None else bias.to(x.dtype))
    config = grouped_config(len(x), weight, batch_invariant, all_outputs)
    return grouped_kernel(x, weight, bias, config, tickets, overlap)


def _of_quantized(
    x: QuantizedRows, weight: GroupedWeight, bias: Tensor | None, dtype: torch.dtype, overlap: bool
) -> Tensor:
    if x.q.dtype == torch.int16:
        return grouped_gemv(x, weight, bias, gemv_config(weight), dtype, overlap)
    from quire.ops.gpu.linear.grouped_few import few_kernel  # Gluon is not in every Triton

    few = few_config_of(len(x.q), weight)
    assert few is not None
    return few_kernel(x, weight, bias, few, dtype, overlap)


def gemv_config(weight: GroupedWeight) -> GroupedGemvConfig:
    """Few outputs make few programs, at most two on a multiprocessor, so each must have more loads in flight: a whole
    row before x is there, if registers hold it. Small groups have many scales, which take the registers of half of
    it."""
    if weight.num_outputs > 16 * 2 * PROGRAMS:
        return GroupedGemvConfig(32, 8, 1)
    depth = 4 if weight.num_chunks <= 16 else 2
    return GroupedGemvConfig(16, 8, depth if weight.group >= 64 else depth // 2)


def grouped_kernel(
    x: Tensor,
    weight: GroupedWeight,
    bias: Tensor | None,
    config: GroupedConfig,
    tickets: Tensor | None = None,
    overlap: bool = False,
) -> Tensor:
    (M, K), N = x.shape, weight.num_outputs
    assert weight.num_inputs == K and x.stride(1) == 1, f"x {x.shape} {x.stride()}, {weight.num_inputs} inputs"
    out = x.new_empty(M, N)
    launch = split_launch(config, out, bias, tickets)
    asm = asm_for(weight, x.dtype)
    x_sums = group_sums(x, weight, config.block_m, overlap) if weight.has_offsets and not config.fold else None
    _grouped_kernel[launch.grid](
        x,
        kernel_args(weight, asm),
        x_sums,
        launch.to,
        M,
        N,
        K,
        weight.num_chunks,
        x.stride(0),
        0 if x_sums is None else x_sums.stride(0),
        WHOLE_CHUNKS=K % weight.chunk == 0,
        FOLD=config.fold,
        HAS_OFFSETS=weight.has_offsets,
        OVERLAP=overlap,
        **config.launch_options,
        **kernel_constants(weight, asm),
        **launch.constants,
        **overlap_options(overlap),
    )
    return out


@triton.jit(do_not_specialize=["M"])
def _grouped_kernel(
    x_ptr,
    weight,  # GroupedArgs
    x_sum_ptr,
    to,  # OutputArgs
    M,
    N,
    K,
    chunks,
    x_stride,
    x_sum_stride,
    WHOLE_CHUNKS: tl.constexpr,
    SPLITS: tl.constexpr,
    SHARES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
    FOLD: tl.constexpr,
    HAS_OFFSETS: tl.constexpr,
    OVERLAP: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
    ZERO: tl.constexpr,
    CODEBOOK: tl.constexpr,
    ASM: tl.constexpr,
):
    outputs = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    tokens = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    rows = tl.minimum(outputs, N - 1).to(tl.int64)  # outputs past the end are computed and never stored
    columns = tl.arange(0, WIDTH)
    x_rows = x_ptr + tokens.to(tl.int64)[None, :] * x_stride
    present = (tokens < M)[None, :]
    split_chunks = tl.cdiv(chunks, SPLITS)
    TURNS: tl.constexpr = SPLITS // SHARES
    PLANES: tl.constexpr = 32 // BITS
    GROUPS: tl.constexpr = max(PLANES * WIDTH // GROUP, 1)  # a chunk
    DOTS: tl.constexpr = max(PLANES * WIDTH // 128, 1) if FOLD else GROUPS  # a chunk
    RUN: tl.constexpr = PLANES * WIDTH // DOTS  # inputs of a chunk that are multiplied at once
    like = tl.zeros((1,), x_ptr.dtype.element_ty)
    if OVERLAP:
        first_chunk = tl.minimum(tl.program_id(1) * TURNS * split_chunks, chunks - 1)
        prefetch(weight.words + word_places(rows, first_chunk, chunks, tl.arange(0, 2) * 32, WIDTH, CODEBOOK))
    wait_for_inputs(OVERLAP)

    total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for turn in range(TURNS):
        first = (tl.program_id(1) * TURNS + turn) * split_chunks
        sums = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        for chunk in tl.range(first, tl.minimum(first + split_chunks, chunks), num_stages=STAGES):
            scales = load_scales(weight, chunk, rows, N, GROUP, PLANES * WIDTH, HAS_OFFSETS or ZERO < 0)
            zeros = zeros_of(scales, GROUPS, ZERO)
            x_sums = ()
            if x_sum_ptr is not None:
                for number in tl.static_range(GROUPS):
                    x_sums = append(x_sums, tl.load(x_sum_ptr + (chunk * GROUPS + number) * x_sum_stride + tokens))
            offsets = word_places(rows, chunk, chunks, columns, WIDTH, CODEBOOK)
            words = tl.load(weight.words + offsets, eviction_policy="evict_first")
            high = None if weight.high is None else tl.load(weight.high + offsets, eviction_policy="evict_first")
            planes = unpack(words, high, zeros, like, weight.codebook, BITS, ZERO, CODEBOOK, ASM)
            if FOLD:
                planes = scaled_planes(planes, scales, GROUPS, HAS_OFFSETS)
            for number in tl.static_range(DOTS):
                k = (chunk * DOTS + number) * RUN + tl.arange(0, RUN)
                if WHOLE_CHUNKS:
                    x = tl.load(x_rows + k[:, None], mask=present, other=0.0)
                else:
                    x = tl.load(x_rows + k[:, None], mask=present & (k < K)[:, None], other=0.0)
                w = take_planes(planes, number * PLANES // DOTS, PLANES // DOTS)
                if FOLD:
                    # Not in flight while the loop goes on: the assembler would wait for every instruction of it.
                    sums = opaque(tl.dot(w, x, sums, input_precision="ieee"), ASM)
                else:
                    sums += tl.dot(w, x, input_precision="ieee") * scale_of(scales, number)[:, None]
                if x_sum_ptr is not None:
                    sums += offset_of(scales, number)[:, None] * x_sums[number][None, :]
        total += sums
    finish(total, to, outputs, tokens, N, M, SHARES)


def group_sums(x: Tensor, weight: GroupedWeight, tile: int, overlap: bool = False) -> Tensor:
    """x [M, K] -> the sums of every group's inputs, [groups, M] fp32, with zeros for the rest of a tile of tokens. A
    group that is longer than a chunk has one sum a chunk."""
    group = min(weight.group, weight.chunk)
    M, num_groups = triton.cdiv(len(x), tile) * tile, weight.num_chunks * weight.chunk // group
    sums = torch.empty(num_groups, M, dtype=torch.float32, device=x.device)
    block = 1024
    _group_sums[(M, triton.cdiv(num_groups * group, block))](
        x,
        sums,
        len(x),
        x.shape[1],
        num_groups,
        x.stride(0),
        GROUP=group,
        BLOCK=block,
        OVERLAP=overlap,
        **overlap_options(overlap),
    )
    return sums


@triton.jit(do_not_specialize=["M"])
def _group_sums(
    x_ptr, sum_ptr, M, K, num_groups, x_stride, GROUP: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr
):
    wait_for_inputs(OVERLAP)
    token = tl.program_id(0).to(tl.int64)
    k = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + token * x_stride + k, mask=(token < M) & (k < K), other=0.0).to(tl.float32)
    group = tl.program_id(1) * (BLOCK // GROUP) + tl.arange(0, BLOCK // GROUP)
    sums = tl.sum(tl.reshape(x, (BLOCK // GROUP, GROUP)), axis=1)
    tl.store(sum_ptr + group.to(tl.int64) * tl.num_programs(0) + token, sums, mask=group < num_groups)
