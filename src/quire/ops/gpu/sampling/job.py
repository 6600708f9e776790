# mypy: allow-untyped-defs, allow-untyped-decorators, allow-incomplete-defs
"""What the sampling kernels share: the parameters of a row, a step's lines of logits, and scratch memory.

Scratch is written and read within one step, and never moves: captured graphs keep its address. Shapes [lines, tiles]
are those of a step; the memory is allocated for the smallest tile.

A *row* is permanent, a *line* is one of a step's rows of logits. A line whose row is negative is padding: no kernel
reads it, and its token is 0.

A row's parameters are 128 contiguous bytes, one cache line, because a program reads all of them."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

# Columns of the parameters [num_rows, FIELDS] int64. Columns marked f64 hold the bits of a double.
FIELDS = tl.constexpr(16)
SEED = tl.constexpr(0)
SAMPLE = tl.constexpr(1)
NUM_TOKENS = tl.constexpr(2)  # so far, prompt included: the position of the token to sample
NUM_PROMPT = tl.constexpr(3)
MIN_TOKENS = tl.constexpr(4)
FLAGS = tl.constexpr(5)
TOP_K = tl.constexpr(6)  # 0: not limited
TOP_P = tl.constexpr(7)  # f64; 1: not limited
MIN_WEIGHT = tl.constexpr(8)  # of tokens that pass min_p
INVERSE_TEMPERATURE = tl.constexpr(9)  # f64
REPETITION = tl.constexpr(10)  # f64, rounded to fp32
FREQUENCY = tl.constexpr(11)  # f64, rounded to fp32
PRESENCE = tl.constexpr(12)  # f64, rounded to fp32
WATERMARK_KEY = tl.constexpr(13)
GREEN_BELOW = tl.constexpr(14)
DELTA = tl.constexpr(15)  # f64, rounded to fp32

# Bits of FLAGS.
GREEDY = tl.constexpr(1)
BIASED = tl.constexpr(2)  # the row has an entry in `bias`
PENALIZED = tl.constexpr(4)  # the row's entry in `marks` counts tokens
STOPPED_LATER = tl.constexpr(8)  # the row's entry in `marks` has stop tokens, masked before min_tokens
WATERMARKED = tl.constexpr(16)

# A mark of a token: how often it is in the output, and two bits.
SEEN = tl.constexpr(1 << 30)  # in the prompt or the output
STOP = tl.constexpr(1 << 29)  # a stop token

MAX_TILES = tl.constexpr(512)  # of a line: 2**19 logits in the smallest tiles
NUM_BUCKETS = tl.constexpr(128)  # of the histogram of distances from the greatest logit


@dataclass(frozen=True, slots=True)
class Split:
    """How a vocabulary is divided among programs. Sums are exact, so it changes no result."""

    tile: int  # logits a program reads; at least one for each of its threads
    warps: int


@dataclass(frozen=True, slots=True)
class Edits:
    """Scratch of steps whose logits are edited."""

    logits: Tensor  # [lines, vocab] fp32, edited
    allowed_maxima: Tensor  # [lines, tiles] int64: like `tile_maxima`, of the raw logits that are allowed

    @classmethod
    def allocate(cls, lines: int, vocab: int, tiles: int, device: torch.device) -> "Edits":
        logits = torch.empty((lines, vocab), dtype=torch.float32, device=device)
        return cls(logits, torch.empty((lines, tiles), dtype=torch.int64, device=device))


class Filters(NamedTuple):
    """Scratch of steps with top_k or top_p. Kernels take it as one argument."""

    totals: Tensor  # [lines, tiles] int64: all weights
    buckets: Tensor  # [lines, NUM_BUCKETS] int32: logits by their distance from the greatest; zeros between steps
    intervals: Tensor  # [lines, 2] fp32: the distances from the greatest logit between which the cutoff is
    progress: Tensor  # [lines, 4] int32: see filter.py
    kept_mass: Tensor  # [lines] int64: the weight of tokens that surely pass
    open_ids: Tensor  # [lines, capacity] int32: tokens that may or may not pass
    cutoffs: Tensor  # [lines, 2] int32: the last token that passes: its ordered key, its id

    @classmethod
    def allocate(cls, lines: int, tiles: int, open_capacity: int, device: torch.device) -> "Filters":
        def empty(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        return cls(
            totals=empty(lines, tiles, dtype=torch.int64),
            buckets=empty(lines, NUM_BUCKETS.value).zero_(),
            intervals=empty(lines, 2, dtype=torch.float32),
            progress=empty(lines, 4),
            kept_mass=empty(lines, dtype=torch.int64),
            open_ids=empty(lines, open_capacity),
            cutoffs=empty(lines, 2),
        )


class Scratch:
    """What a launch of so many lines writes and reads."""

    def __init__(self, lines: int, vocab: int, tiles: int, open_capacity: int, device: torch.device) -> None:
        self._shape, self._open_capacity, self._device = (lines, vocab, tiles), open_capacity, device
        self.tile_maxima, self.tile_times = torch.empty((2, lines, tiles), dtype=torch.int64, device=device)
        self.filters: Filters | None = None
        self.edits: Edits | None = None

    def reserve(self, filters: bool, edits: bool) -> None:
        lines, vocab, tiles = self._shape
        if filters and self.filters is None:
            self.filters = Filters.allocate(lines, tiles, self._open_capacity, self._device)
        if edits and self.edits is None:
            self.edits = Edits.allocate(lines, vocab, tiles, self._device)


class LineArgs(NamedTuple):
    """A step's lines as kernels take them: the logits that `load_line` reads, and their maxima."""

    logits: Tensor
    stride: int
    rows: Tensor
    depths: Tensor
    params: Tensor
    edited: Tensor | None
    tile_maxima: Tensor


@dataclass(frozen=True, slots=True)
class Job:
    """One step's lines, and all that its kernels need."""

    logits: Tensor  # [>= lines, vocab] fp32 or bf16; the last axis is contiguous
    rows: Tensor  # [>= lines] int32
    depths: Tensor  # [>= lines] int32: how many tokens after the row's next one a line samples
    lines: int
    split: Split
    params: Tensor  # [num_rows, FIELDS] int64
    bias: Tensor | None  # [num_rows, vocab] fp32, of rows that are BIASED: added; -inf: not allowed; NaN: banned
    marks: Tensor | None  # [num_rows, vocab] int32, of rows that are PENALIZED or STOPPED_LATER
    last: Tensor | None  # [num_rows] int32, of rows that are WATERMARKED: the last token
    tile_maxima: Tensor  # [lines, tiles] int64: the greatest logit of each tile and its id, packed
    tile_times: Tensor  # [lines, tiles] int64: when the first token of each tile finishes its race
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
        """Constants of every kernel that reads a line's logits."""
        return {
            "TILE": self.split.tile,
            "EDITED": self.edits is not None,
            "num_warps": self.split.warps,
            "enable_fp_fusion": False,
        }

    @property
    def line_args(self) -> LineArgs:
        edited = self.edits.logits if self.edits else None
        return LineArgs(
            self.logits, self.logits.stride(0), self.rows, self.depths, self.params, edited, self.tile_maxima
        )


@triton.jit
def needs_edits(row_params):
    """Whether the row's next token is sampled from other logits than the raw ones."""
    flags = tl.load(row_params + FLAGS)
    waiting = tl.load(row_params + NUM_TOKENS) - tl.load(row_params + NUM_PROMPT) < tl.load(row_params + MIN_TOKENS)
    return ((flags & (BIASED | PENALIZED | WATERMARKED)) != 0) | (((flags & STOPPED_LATER) != 0) & waiting)


@triton.jit
def load_line(lines, is_edited, line, ids, vocab, EDITED: tl.constexpr):
    """The logits to sample from, in fp32; NaN and ids outside the vocabulary become -inf. lines: LineArgs"""
    known = ids < vocab
    if EDITED:
        x = tl.load(
            lines.logits + line.to(tl.int64) * lines.stride + ids, mask=known & (is_edited == 0), other=float("-inf")
        )
        y = tl.load(lines.edited + line.to(tl.int64) * vocab + ids, mask=known & is_edited, other=float("-inf"))
        x = tl.where(is_edited, y, x.to(tl.float32))
    else:
        x = tl.load(lines.logits + line.to(tl.int64) * lines.stride + ids, mask=known, other=float("-inf"))
        x = x.to(tl.float32)
    return tl.where(x == x, x, float("-inf"))
