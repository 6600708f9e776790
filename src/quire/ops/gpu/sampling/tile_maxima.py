# mypy: allow-untyped-defs, allow-untyped-decorators, allow-incomplete-defs
"""The greatest logit of every tile of every line, after the edits of the row's parameters.

The edits are steps 1 to 3 of docs/sampling.md, in fp32, rounded operation by operation. A line without edits is not
copied."""

import triton
import triton.language as tl

from quire.ops.gpu.sampling.job import (
    BIASED,
    DELTA,
    FIELDS,
    FLAGS,
    FREQUENCY,
    GREEN_BELOW,
    MIN_TOKENS,
    NUM_PROMPT,
    NUM_TOKENS,
    PENALIZED,
    PRESENCE,
    REPETITION,
    SEEN,
    STOP,
    STOPPED_LATER,
    WATERMARK_KEY,
    WATERMARKED,
    Job,
    needs_edits,
)
from quire.ops.gpu.sampling.philox import watermark_word
from quire.ops.gpu.sampling.softmax_weights import pack


def find_tile_maxima(job: Job) -> None:
    """Fill job.tile_maxima and, where lines are edited, job.edits."""
    edits = job.edits
    _tile_maxima_kernel[(job.tiles, job.lines)](
        job.line_args,
        job.bias,
        job.marks,
        job.last,
        edits.allowed_maxima if edits else None,
        job.vocab,
        **job.options,
    )


@triton.jit
def _tile_maxima_kernel(
    lines,  # LineArgs; edited and tile_maxima are written
    bias,  # [rows, vocab], or None
    marks,  # [rows, vocab], or None
    last,  # [rows], or None
    allowed_maxima,  # [lines, tiles]
    vocab,
    TILE: tl.constexpr,
    EDITED: tl.constexpr,
):
    tile, line = tl.program_id(0), tl.program_id(1)
    row = tl.load(lines.rows + line).to(tl.int64)
    if row < 0:
        return
    ids = tile * TILE + tl.arange(0, TILE)
    known = ids < vocab
    x = tl.load(lines.logits + line.to(tl.int64) * lines.stride + ids, mask=known, other=float("-inf")).to(tl.float32)
    x = tl.where(x == x, x, float("-inf"))
    row_params = lines.params + row * FIELDS
    if EDITED and needs_edits(row_params):
        flags = tl.load(row_params + FLAGS)
        if bias is not None:
            b = tl.load(bias + row * vocab + ids, mask=known & ((flags & BIASED) != 0), other=0.0)
            x = tl.where(b == float("-inf"), float("-inf"), x)
        allowed = x
        if last is not None:
            word = watermark_word(tl.load(row_params + WATERMARK_KEY), tl.load(last + row), ids)
            green = ((flags & WATERMARKED) != 0) & (word.to(tl.int64) < tl.load(row_params + GREEN_BELOW))
            delta = tl.load(row_params + DELTA).to(tl.float64, bitcast=True).to(tl.float32)
            x = tl.where(green, x + delta, x)
        if bias is not None:
            x = tl.where(b == b, tl.where(b == float("-inf"), x, x + b), float("-inf"))
        if marks is not None:
            marked = (flags & (PENALIZED | STOPPED_LATER)) != 0
            mark = tl.load(marks + row * vocab + ids, mask=known & marked, other=0)
            num_output = tl.load(row_params + NUM_TOKENS) - tl.load(row_params + NUM_PROMPT)
            stopped = ((mark & STOP) != 0) & (num_output < tl.load(row_params + MIN_TOKENS))
            x = tl.where(stopped, float("-inf"), x)
            repetition = tl.load(row_params + REPETITION).to(tl.float64, bitcast=True).to(tl.float32)
            frequency = tl.load(row_params + FREQUENCY).to(tl.float64, bitcast=True).to(tl.float32)
            presence = tl.load(row_params + PRESENCE).to(tl.float64, bitcast=True).to(tl.float32)
            count = mark & (STOP - 1)
            penalized = tl.where(x > 0.0, tl.div_rn(x, tl.zeros_like(x) + repetition), x * repetition)
            x = tl.where((mark & SEEN) != 0, penalized, x)
            x = tl.where(count > 0, x - frequency * count.to(tl.float32) - presence, x)
        tl.store(lines.edited + line.to(tl.int64) * vocab + ids, x, mask=known)
        tl.store(allowed_maxima + line * tl.num_programs(0) + tile, tl.max(pack(allowed, ids), axis=0))
    tl.store(lines.tile_maxima + line * tl.num_programs(0) + tile, tl.max(pack(x, ids), axis=0))
