"""y = x @ w.T + bias for 16-bit weights, with the kernel that is fastest for the shape.

    rows of x      kernel     bound by
    1, 2           gemv       reading w, at the speed of a copy
    3, 4           gemv       the same, of small matrices; of others, multiplying is slower than reading
    .. 64          stream     reading w, through tensor cores
    more           cuBLAS     the tensor cores

A row's sums depend on the kernel, so they depend on the number of rows. `batch_invariant` takes `stream` for all of
them: which inputs are added in which order is then a function of (N, K) alone. It costs what gemv gains at a few rows,
and beyond 64 rows what cuBLAS gains over a plain tiled GEMM. fp32 is for comparisons: cuBLAS, or tiles of one size."""

from enum import StrEnum

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.ops.gpu.linear.gemv import MAX_GEMV_ROWS, GemvConfig, linear_gemv
from quire.ops.gpu.linear.stream import StreamConfig, linear_stream

MAX_STREAM_ROWS = 64
PROGRAMS = 132  # to fill a device: an H200's multiprocessors
MIN_SPLIT_INPUTS = 512
MAX_SPLITS = 8

# A thread loads the same columns of w and x: block_k is 256 for each warp.
GEMV = GemvConfig(block_n=4, block_k=2048, warps=8, ahead=1)  # one row or two
GEMV_NARROW = GemvConfig(block_n=4, block_k=1024, warps=4, ahead=2)  # one row, of which 2048 would be a part that idles
GEMV_SMALL = GemvConfig(block_n=8, block_k=1024, warps=4, ahead=2)  # one row: all programs are there at once
GEMV_ROWS = GemvConfig(block_n=8, block_k=1024, warps=4, ahead=1)  # three or four
GEMV_ROWS_WIDE = GemvConfig(block_n=4, block_k=512, warps=2, ahead=1)  # the same, where w has many rows
MANY_OUTPUTS = 5000
MAX_SMALL_WEIGHTS = 16 << 20  # of a matrix most of which programs load before x is there
MAX_GEMV_WEIGHTS = 52 << 20  # of a matrix that three or four rows are multiplied with
STREAM_BLOCK_K = 128  # for any number of rows: splits begin at multiples of it
# block_m: (block_n, warps, stages)
STREAM = {16: (64, 4, 5), 32: (64, 4, 4), 64: (64, 4, 3), 128: (128, 8, 3)}
STREAM_FP32 = StreamConfig(block_m=16, block_n=64, block_k=32, splits=1, serial=False, warps=4, stages=2)


class LinearKernel(StrEnum):
    GEMV = "gemv"
    STREAM = "stream"
    CUBLAS = "cublas"


def choose_kernel(M: int, N: int, K: int, batch_invariant: bool = False) -> LinearKernel:
    if batch_invariant:
        return LinearKernel.STREAM
    if M <= 2 or (M <= MAX_GEMV_ROWS and N * K <= MAX_GEMV_WEIGHTS):
        return LinearKernel.GEMV
    return LinearKernel.STREAM if M <= MAX_STREAM_ROWS else LinearKernel.CUBLAS


def linear(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None = None,
    *,
    batch_invariant: bool = False,
    tickets: Tensor | None = None,
    overlap: bool = False,
    all_outputs: int | None = None,
) -> Tensor:
    """x [M, K], w [N, K], bias [N] -> [M, N]; bf16 or fp16 with fp32 sums. `tickets` are those of
    `new_tickets`: without them, each call that needs some makes its own. With `overlap` it may start before x is
    there. `all_outputs`: of the matrix that w has some rows of, for sums in the order of the whole one."""
    (M, K), N = x.shape, w.shape[0]
    if M == 0 or (x.dtype == torch.float32 and not batch_invariant):
        return F.linear(x, w, bias)
    if x.dtype == torch.float32:
        return linear_stream(x, w, bias, STREAM_FP32, tickets, overlap)
    kernel = choose_kernel(M, N, K, batch_invariant)
    if kernel == LinearKernel.GEMV:
        return linear_gemv(x, w, bias, gemv_config(M, N, K), overlap)
    if kernel == LinearKernel.STREAM:
        return linear_stream(x, w, bias, stream_config(M, all_outputs or N, K), tickets, overlap)
    return F.linear(x, w, None if bias is None else bias.to(x.dtype))


def gemv_config(M: int, N: int, K: int) -> GemvConfig:
    if M == 1 and N * K <= MAX_SMALL_WEIGHTS:
        return GEMV_SMALL if K <= 2048 else GEMV_NARROW._replace(ahead=min(K // GEMV_NARROW.block_k, 3))
    if M <= 2:
        return GEMV_NARROW if M == 1 and K % GEMV.block_k else GEMV
    return GEMV_ROWS_WIDE if N >= MANY_OUTPUTS else GEMV_ROWS


def stream_config(M: int, N: int, K: int) -> StreamConfig:
    """`splits` depends on (N, K) alone. Where tokens alone make enough tiles, a program takes all splits in turn."""
    block_m = next(block for block in STREAM if block >= M or block == 128)
    block_n, warps, stages = STREAM[block_m]
    return StreamConfig(block_m, block_n, STREAM_BLOCK_K, num_splits(N, K), M > MAX_STREAM_ROWS, warps, stages)


def num_splits(N: int, K: int) -> int:
    """A power of two: about as many as give every multiprocessor two tiles of 64 outputs."""
    splits = min(2 * PROGRAMS // -(-N // 64), K // MIN_SPLIT_INPUTS, MAX_SPLITS)
    return 1 << max(splits, 1).bit_length() - 1
