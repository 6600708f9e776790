# mypy: allow-untyped-defs, allow-untyped-decorators, allow-incomplete-defs
"""The greatest logit of every tile of every line; on the way, what a row's parameters do to its logits.

Steps 1 to 3 of docs/sampling.md, in fp32, rounded operation by operation. A line that needs none is not copied."""

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
from quire.ops.gpu.sampling.softmax_weights import packed


def find_peaks(job: Job) -> None:
    """Fills job.peaks and, where lines are edited, job.edits."""
    edits = job.edits
    _find_peaks[(job.tiles, job.lines)](
        job.logits,
        job.logits.stride(0),
        job.rows,
        job.params,
        job.bias,
        job.marks,
        job.before,
        job.peaks,
        edits.logits if edits else None,
        edits.allowed_peaks if edits else None,
        job.vocab,
        TILE=job.split.tile,
        EDITED=edits is not None,
        HAS_BIAS=job.bias is not None,
        HAS_MARKS=job.marks is not None,
        WATERMARKS=job.before is not None,
        num_warps=job.split.warps,
        enable_fp_fusion=False,
    )


@triton.jit
def _find_peaks(
    logits,  # [lines, vocab]
    stride,
    rows,  # [lines]
    fields,
    bias,
    marks,
    before,  # [rows]
    peaks,  # [lines, tiles]
    edited,
    allowed_peaks,
    vocab,
    TILE: tl.constexpr,
    EDITED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_MARKS: tl.constexpr,
    WATERMARKS: tl.constexpr,
):
    tile, line = tl.program_id(0), tl.program_id(1)
    row = tl.load(rows + line).to(tl.int64)
    if row < 0:
        return
    ids = tile * TILE + tl.arange(0, TILE)
    known = ids < vocab
    x = tl.load(logits + line.to(tl.int64) * stride + ids, mask=known, other=float("-inf")).to(tl.float32)
    x = tl.where(x == x, x, float("-inf"))
    at = fields + row * FIELDS
    if EDITED and needs_edits(at):
        flags = tl.load(at + FLAGS)
        if HAS_BIAS:
            b = tl.load(bias + row * vocab + ids, mask=known & ((flags & BIASED) != 0), other=0.0)
            x = tl.where(b == float("-inf"), float("-inf"), x)
        allowed = x
        if WATERMARKS:
            word = watermark_word(tl.load(at + WATERMARK_KEY), tl.load(before + row), ids)
            green = ((flags & WATERMARKED) != 0) & (word.to(tl.int64) < tl.load(at + GREEN_BELOW))
            delta = tl.load(at + DELTA).to(tl.float64, bitcast=True).to(tl.float32)
            x = tl.where(green, x + delta, x)
        if HAS_BIAS:
            x = tl.where(b == b, tl.where(b == float("-inf"), x, x + b), float("-inf"))
        if HAS_MARKS:
            marked = (flags & (PENALIZED | STOPPED_LATER)) != 0
            mark = tl.load(marks + row * vocab + ids, mask=known & marked, other=0)
            num_output = tl.load(at + NUM_TOKENS) - tl.load(at + NUM_PROMPT)
            stopped = ((mark & STOP) != 0) & (num_output < tl.load(at + MIN_TOKENS))
            x = tl.where(stopped, float("-inf"), x)
            repetition = tl.load(at + REPETITION).to(tl.float64, bitcast=True).to(tl.float32)
            frequency = tl.load(at + FREQUENCY).to(tl.float64, bitcast=True).to(tl.float32)
            presence = tl.load(at + PRESENCE).to(tl.float64, bitcast=True).to(tl.float32)
            count = mark & (STOP - 1)
            penalized = tl.where(x > 0.0, tl.div_rn(x, tl.zeros_like(x) + repetition), x * repetition)
            x = tl.where((mark & SEEN) != 0, penalized, x)
            x = tl.where(count > 0, x - frequency * count.to(tl.float32) - presence, x)
        tl.store(edited + line.to(tl.int64) * vocab + ids, x, mask=known)
        tl.store(allowed_peaks + line * tl.num_programs(0) + tile, tl.max(packed(allowed, ids), axis=0))
    tl.store(peaks + line * tl.num_programs(0) + tile, tl.max(packed(x, ids), axis=0))
