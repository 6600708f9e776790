# mypy: allow-untyped-defs, allow-untyped-decorators, allow-incomplete-defs
"""What the sampling kernels share: the parameters of a row, a step's lines of logits, and scratch memory.

Scratch is written and read within one step, and never moves: captured graphs keep its address. [lines, tiles] is how
it is used; it was allocated for the smallest tile.

A *row* is permanent, a *line* is one of a step's rows of logits. A line whose row is negative is padding: no kernel
looks at it, and its token is 0.

A row's parameters lie side by side, 128 bytes a row, because a program reads all of one row's: one cache line."""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

# Columns of the parameters [num_rows, FIELDS] int64. Those marked f64 hold the bits of a double.
FIELDS = tl.constexpr(16)
SEED = tl.constexpr(0)
SAMPLE = tl.constexpr(1)
NUM_TOKENS = tl.constexpr(2)  # known so far, prompt included: the position of the token to draw
NUM_PROMPT = tl.constexpr(3)
MIN_TOKENS = tl.constexpr(4)
FLAGS = tl.constexpr(5)
TOP_K = tl.constexpr(6)  # 0: not limited
TOP_P = tl.constexpr(7)  # f64; 1: not limited
MIN_WEIGHT = tl.constexpr(8)  # what min_p leaves weighs this or more
INVERSE_TEMPERATURE = tl.constexpr(9)  # f64
REPETITION = tl.constexpr(10)  # f64, of the penalty rounded to fp32; so are the next two
FREQUENCY = tl.constexpr(11)
PRESENCE = tl.constexpr(12)
WATERMARK_KEY = tl.constexpr(13)
GREEN_BELOW = tl.constexpr(14)
DELTA = tl.constexpr(15)  # f64, rounded to fp32

# Bits of FLAGS.
GREEDY = tl.constexpr(1)
BIASED = tl.constexpr(2)  # the row's line of `bias` holds something
PENALIZED = tl.constexpr(4)  # its line of `marks` counts tokens
STOPPED_LATER = tl.constexpr(8)  # its line of `marks` has stop tokens, masked before min_tokens
WATERMARKED = tl.constexpr(16)

# A mark of a token: how often it is in the output, and two bits.
SEEN = tl.constexpr(1 << 30)  # in the prompt or the output
STOP = tl.constexpr(1 << 29)  # a stop token

MAX_TILES = tl.constexpr(512)  # of a line: 2**19 logits in the smallest tiles
NUM_BUCKETS = tl.constexpr(128)  # distances from the greatest logit are counted in that many classes


@dataclass(frozen=True, slots=True)
class Split:
    """How a vocabulary is divided among programs. Sums are exact, so it changes no result."""

    tile: int  # logits that one program looks at; at least one for each of its threads
    warps: int


@dataclass(frozen=True, slots=True)
class Edits:
    """Scratch of steps with edited lines."""

    logits: Tensor  # [lines, vocab] fp32, as the rows' parameters have changed them
    allowed_peaks: Tensor  # [lines, tiles] int64: of the raw logits that are allowed

    @classmethod
    def allocate(cls, lines: int, vocab: int, tiles: int, device: torch.device) -> "Edits":
        logits = torch.empty((lines, vocab), dtype=torch.float32, device=device)
        return cls(logits, torch.empty((lines, tiles), dtype=torch.int64, device=device))


@dataclass(frozen=True, slots=True)
class Filters:
    """Scratch of steps with top_k or top_p."""

    totals: Tensor  # [lines, tiles] int64: all weights
    counts: Tensor  # [lines, NUM_BUCKETS] int32: logits by their distance from the greatest; zeros between steps
    intervals: Tensor  # [lines, 2] fp32: where the cut is: distances from the greatest logit
    progress: Tensor  # [lines, 4] int32: see sample_filter.py
    kept_mass: Tensor  # [lines] int64: weight of what surely passes
    open_ids: Tensor  # [lines, capacity] int32: tokens that may or may not pass
    cutoffs: Tensor  # [lines, 2] int32: the last token that passes: its ordered logit, its id

    @classmethod
    def allocate(cls, lines: int, tiles: int, open_capacity: int, device: torch.device) -> "Filters":
        def empty(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        return cls(
            totals=empty(lines, tiles, dtype=torch.int64),
            counts=empty(lines, NUM_BUCKETS.value).zero_(),
            intervals=empty(lines, 2, dtype=torch.float32),
            progress=empty(lines, 4),
            kept_mass=empty(lines, dtype=torch.int64),
            open_ids=empty(lines, open_capacity),
            cutoffs=empty(lines, 2),
        )


@dataclass(frozen=True, slots=True)
class Job:
    """One step's lines, and all that its kernels need."""

    logits: Tensor  # [>= lines, vocab] fp32 or bf16; the last axis is contiguous
    rows: Tensor  # [>= lines] int32
    lines: int
    split: Split
    params: Tensor  # [num_rows, FIELDS] int64
    bias: Tensor | None  # [num_rows, vocab] fp32, where a row is BIASED: added; -inf: not allowed; NaN: banned
    marks: Tensor | None  # [num_rows, vocab] int32, where a row is PENALIZED or STOPPED_LATER
    before: Tensor | None  # [num_rows] int32, where a row is WATERMARKED: its last token
    peaks: Tensor  # [lines, tiles] int64: the greatest logit of each tile and its id, packed
    sums: Tensor  # [lines, tiles] int64: weights that may be drawn
    edits: Edits | None
    filters: Filters | None

    @property
    def vocab(self) -> int:
        return int(self.logits.shape[1])

    @property
    def tiles(self) -> int:
        return -(-self.vocab // self.split.tile)

    @property
    def options(self) -> dict[str, Any]:
        """Of every kernel that reads a line's logits."""
        return {
            "TILE": self.split.tile,
            "EDITED": self.edits is not None,
            "num_warps": self.split.warps,
            "enable_fp_fusion": False,
        }

    @property
    def source(self) -> tuple[Tensor | int | None, ...]:
        """Where a kernel finds a line's logits, for `load_line`, and how great they are."""
        edited = self.edits.logits if self.edits else None
        return self.logits, self.logits.stride(0), self.rows, self.params, edited, self.peaks


@triton.jit
def needs_edits(params_of_row):
    """Whether the row's next token is drawn from other logits than the raw ones."""
    at = params_of_row
    flags = tl.load(at + FLAGS)
    waiting = tl.load(at + NUM_TOKENS) - tl.load(at + NUM_PROMPT) < tl.load(at + MIN_TOKENS)
    return ((flags & (BIASED | PENALIZED | WATERMARKED)) != 0) | (((flags & STOPPED_LATER) != 0) & waiting)


@triton.jit
def load_line(logits, stride, edited, is_edited, line, ids, vocab, EDITED: tl.constexpr):
    """The logits that count, in fp32, NaN and ids outside the vocabulary as -inf."""
    known = ids < vocab
    if EDITED:
        x = tl.load(logits + line.to(tl.int64) * stride + ids, mask=known & (is_edited == 0), other=float("-inf"))
        y = tl.load(edited + line.to(tl.int64) * vocab + ids, mask=known & is_edited, other=float("-inf"))
        x = tl.where(is_edited, y, x.to(tl.float32))
    else:
        x = tl.load(logits + line.to(tl.int64) * stride + ids, mask=known, other=float("-inf")).to(tl.float32)
    return tl.where(x == x, x, float("-inf"))
