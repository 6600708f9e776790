"""Step times of this machine, as they were fitted to steps that it ran: seconds by number of tokens, and what attention
adds."""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from quire.ops.gpu.graph_sizes import MAX_CAPTURED_SEQS, PREFILL_GRAPH_SIZES, decode_graph_sizes
from quire.planning.step_times import StepWork

# Shares of the most tokens a second, between which a GPU becomes slower. (An H200 with an 8B model in bf16.)
HOT = (0.2, 0.65)
SPLIT = (64, 256)  # cached tokens of a sequence: from none that are split to all
OF_GPU = ("per_longest", "mixed", "most", "slow_token", "slow_decode", "slow_read", "split")
DECODE_SIZES = tuple(decode_graph_sizes(MAX_CAPTURED_SEQS))


def padded(num_tokens: int, sizes: Sequence[int]) -> int:
    """The size of the CUDA graph that runs so many tokens; beyond the largest, none does."""
    index = bisect_left(sizes, num_tokens)
    return sizes[index] if index < len(sizes) else num_tokens


def size_of(work: StepWork, graphs: bool) -> int:
    """The tokens that a step computes, with those that it is padded with."""
    if not graphs:
        return work.num_tokens
    return padded(work.num_tokens, PREFILL_GRAPH_SIZES if work.num_chunks else DECODE_SIZES)


def hotness(work: StepWork, most: float) -> float:
    """How much of what a GPU can slow down it does, for what it computed just before: from 0 to 1. `most`: tokens a
    second."""
    low, high = HOT
    return min(1.0, max(0.0, (work.recent / most - low) / (high - low))) if most else 0.0


def split_share(num_rows: int, num_read: int) -> float:
    """How many contexts of sequences that decode are split among programs, whose results are merged then: from 0 to 1.
    Of few sequences, fewer programs wait for each other."""
    low, high = SPLIT
    return min(1.0, 0.3 * num_rows) * min(1.0, max(0.0, (num_read / max(1, num_rows) - low) / (high - low)))


def read_alone(work: StepWork, shared: float) -> tuple[int, float]:
    """Of a step with prompts: cached tokens that sequences which decode read; and that, with shared ones as the share
    that they cost."""
    alone = work.num_read - work.num_chunk_read
    return alone, alone - (1 - shared) * min(work.num_shared, alone)


@dataclass(frozen=True, slots=True)
class Curve:
    """Linear between knots, and beyond the last."""

    knots: tuple[float, ...]  # tokens
    seconds: tuple[float, ...]  # of each knot

    def at(self, tokens: float) -> float:
        knots, seconds = self.knots, self.seconds
        i = min(max(bisect_left(knots, tokens), 1), len(knots) - 1)
        low, left = seconds[i - 1], knots[i - 1]
        return low + (seconds[i] - low) * (tokens - left) / (knots[i] - left)

    def within(self, tokens: float) -> float:
        """The value at `tokens`; beyond the first and the last knot, the value there."""
        return self.at(min(max(tokens, self.knots[0]), self.knots[-1]))

    def scaled(self, factor: float) -> "Curve":
        return Curve(self.knots, tuple(factor * seconds for seconds in self.seconds))

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> "Curve":
        return cls(tuple(map(float, values["knots"])), tuple(map(float, values["seconds"])))


@dataclass(frozen=True, slots=True)
class FittedTimes:
    """Piecewise linear in the number of tokens, since few tokens are bound by memory and many by compute. Steps that
    only decode have a curve of their own, and what a cached token adds to them depends on how many sequences there are.
    Those with prompts are linear in the cached tokens that are read, in pairs of queries and keys, and in sampled rows.

    On a GPU a step takes what the CUDA graph takes that it is padded to. Beside prompts, sequences that decode read at
    the price of steps that only decode, and the longest prompt takes some time by itself. A GPU that has computed much
    just before is slower: its clock is lower."""

    decode: Curve
    prefill: Curve
    decode_read: Curve  # seconds of a cached token, by the tokens of a step that only decodes
    per_read: float  # and of one with prompts
    per_pair: float
    per_row: float
    shared: float = 0.0  # what a cached token costs that another sequence reads too, as a share of one that none does
    graphs: bool = False
    per_longest: float = 0.0  # of a cached token of the prompt that has most, on a GPU
    mixed: float = 0.0  # that sequences which decode add to a step with prompts, on a GPU
    most: float = 0.0  # tokens a second of steps with prompts, on a GPU that is not slowed down
    slow_token: float = 0.0  # of a token of a step with prompts, on a GPU that is
    slow_decode: float = 0.0  # of a step that only decodes
    slow_read: float = 0.0  # of a cached token of such a step
    split: float = 0.0  # that attention takes longer where contexts are split among programs

    def num_read(self, work: StepWork) -> float:
        """Cached tokens, shared ones as the share that they cost. On a CPU they are read once; beside prompts, what
        each sequence computes of them is among the pairs."""
        share = self.shared if self.graphs or not work.num_chunks else 0.0
        return work.num_read - (1 - share) * work.num_shared

    def seconds(self, work: StepWork) -> float:
        tokens = size_of(work, self.graphs)
        read = self.num_read(work)
        if not work.num_chunks:
            slower = (self.slow_decode + self.slow_read * read) * hotness(work, self.most)
            split = self.split * split_share(work.num_rows, work.num_read)
            return max(1e-6, self.decode.at(tokens) + self.decode_read.within(tokens) * read + slower + split)
        if self.graphs:
            return max(1e-6, self.prefill.at(tokens) + self._beside_prompts(work, tokens))
        extra = self.per_read * read + self.per_pair * work.num_pairs + self.per_row * work.num_rows
        return max(1e-6, self.prefill.at(tokens) + extra)

    def _beside_prompts(self, work: StepWork, tokens: int) -> float:
        alone, read = read_alone(work, self.shared)
        attention = self.decode_read.within(padded(work.num_rows, DECODE_SIZES)) * read + (self.mixed if alone else 0.0)
        attention += self.per_read * work.num_chunk_read + self.per_pair * (work.num_pairs - alone)
        slower = self.slow_token * tokens * hotness(work, self.most)
        attention += self.split * split_share(work.num_rows, alone)
        return attention + self.per_longest * work.longest + self.per_row * work.num_rows + slower

    def scaled(self, factor: float) -> "FittedTimes":
        return replace(
            self, decode=self.decode.scaled(factor), prefill=self.prefill.scaled(factor),
            decode_read=self.decode_read.scaled(factor), per_read=factor * self.per_read,
            per_pair=factor * self.per_pair, per_row=factor * self.per_row, per_longest=factor * self.per_longest,
            mixed=factor * self.mixed, slow_token=factor * self.slow_token, slow_decode=factor * self.slow_decode,
            slow_read=factor * self.slow_read, split=factor * self.split,
        )  # fmt: skip

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> "FittedTimes":
        """What `as_json` gave."""
        decode, prefill = Curve.of(values["decode"]), Curve.of(values["prefill"])
        per_read, per_pair, per_row = (float(values[name]) for name in ("per_read", "per_pair", "per_row"))
        if "decode_read" in values:
            decode_read, shared = Curve.of(values["decode_read"]), float(values["shared"])
            of_gpu = [float(values.get(name, 0.0)) for name in OF_GPU]
            return cls(
                decode, prefill, decode_read, per_read, per_pair, per_row, shared, bool(values["graphs"]), *of_gpu
            )
        return _of_earlier(decode, prefill, per_read, per_pair, per_row)


def _of_earlier(decode: Curve, prefill: Curve, per_read: float, per_pair: float, per_row: float) -> FittedTimes:
    """Earlier files have one price for what all steps read, pair and sample: a step that decodes has as many rows as
    tokens, and as many pairs as it reads."""
    with_rows = tuple(seconds + per_row * knot for knot, seconds in zip(decode.knots, decode.seconds, strict=True))
    read = per_read + per_pair
    return FittedTimes(
        Curve(decode.knots, with_rows), prefill, Curve((0.0, 1.0), (read, read)), per_read, per_pair, per_row,
        per_pair / read if read else 0.0,
    )  # fmt: skip
