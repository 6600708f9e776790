"""The op set: all that a model file may ask for, and all that a backend must give.

Two backends implement it. `ops/torch` computes eagerly in plain torch and is the specification; `ops/native` records
what a forward pass asks for, once, and replays the recording in C++. A model cannot tell them apart.

Activations are fp32 matrices of one row a token (`Value`): [tokens, columns]. Weights are `PackedWeight`, never
looked into here. No op mixes rows except attention, and none of them sums in an order that depends on rows of
other sequences: a token's result is bitwise the same whatever else is in the batch.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from quire.core.errors import BadCheckpoint
from quire.core.watermark import Watermark
from quire.ops.tensors import LowRank, PackedExperts, PackedHeads, PackedWeight, StoredTensor

Value = Any  # a torch tensor [tokens, columns], or a recorded one
Int32 = NDArray[np.int32]
Float32 = NDArray[np.float32]


@dataclass(slots=True)
class StepBatch:
    """A step as flat arrays: T tokens of S sequences, R of which need logits."""

    ids: Int32  # [T]
    positions: Int32  # [T]
    slots: Int32  # [T] where the token's K and V are written: block * block_size + offset
    seq_starts: Int32  # [S + 1] the sequence's tokens are seq_starts[s] .. seq_starts[s + 1]
    context_lens: Int32  # [S] tokens to attend to, those of this step included
    block_tables: Int32  # [S, W] block ids; entries past ceil(context_len / block_size) are not read
    logit_rows: Int32  # [R] tokens whose logits are wanted
    adapters: Int32 | None = None  # [T] the slot of the token's adapter, or -1; None: no token has one
    source_lens: Int32 | None = None  # [S] tokens of the source, where a sequence has one
    source_tables: Int32 | None = None  # [S, W] the blocks its keys and values are in

    @property
    def num_tokens(self) -> int:
        return len(self.ids)


KV_DTYPES = ("float16", "bfloat16", "float32", "int8")
GPU_KV_DTYPES = (*KV_DTYPES, "fp8")


@dataclass(frozen=True, slots=True)
class KVSpec:
    """The shape of the paged cache. A block holds `block_size` tokens of every layer.

    A token has a key and a value of `head_dim` numbers for each KV head. With `latent` it has one vector instead, which
    all query heads share: `latent` numbers that serve as key and as value, and the rest, which serve as key alone.

    In int8 the key of one token and head is `head_dim` codes of -127 .. 127 times a unit in fp32, max|k| / 127; so is
    the value. Where one of the two is not finite, both units are NaN. fp8 is e4m3 without a unit: 448 stands for all
    that is greater."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: str  # of GPU_KV_DTYPES; a latent cache is not kept in int8
    latent: int = 0

    def __post_init__(self) -> None:
        assert not self.latent or (self.num_kv_heads == 1 and self.latent < self.head_dim and self.dtype != "int8")

    @property
    def value_dim(self) -> int:
        """Columns of a value."""
        return self.latent or self.head_dim

    @property
    def block_bytes(self) -> int:
        vectors = 1 if self.latent else 2
        return vectors * self.num_layers * self.num_kv_heads * self.block_size * self._head_bytes

    @property
    def _head_bytes(self) -> int:
        """Of the key, or the value, of one token and head."""
        if self.dtype == "int8":
            return -(-self.head_dim // 16) * 16 + 4  # the codes, which kernels take in sixteens, and their unit
        return self.head_dim * {"float16": 2, "bfloat16": 2, "float32": 4, "fp8": 1}[self.dtype]


class KVCache(Protocol):
    """The pages: `num_blocks` of them, and `num_host_blocks` more to swap to."""

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks, (source, target) each."""

    def swap_out(self, pairs: Sequence[tuple[int, int]]) -> None:
        """(block, host block) each."""

    def swap_in(self, pairs: Sequence[tuple[int, int]]) -> None:
        """(host block, block) each."""


@dataclass(frozen=True, slots=True)
class RowParams:
    """What the sampler must know of a row: `SamplingParams` without text, lengths or counts of samples."""

    seed: int
    sample: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed: tuple[int, ...] | None = None
    banned: tuple[tuple[int, ...], ...] = ()  # sequences of ids whose last id is never drawn after the others
    stop_ids: tuple[int, ...] = ()  # not drawn while the output is shorter than min_tokens
    min_tokens: int = 0
    num_logprobs: int = -1  # -1: none; 0: of the drawn token; k: and of the k most likely
    num_candidates: int = 0  # beam search: nothing is drawn, that many best continuations are returned
    watermark: Watermark | None = None


@dataclass(frozen=True, slots=True)
class Masks:
    """Which tokens may be drawn, for some of a step's lines of logits."""

    lines: Sequence[int]  # [M]
    bits: NDArray[np.uint32]  # [M, ceil(vocab / 32)]: token t is bit t % 32 of word t / 32


@dataclass(slots=True)
class Sample:
    """One row's next token: its id, or CANDIDATES or BROKEN; and [(id, logprob, rank)] as asked for."""

    token: int
    logprobs: list[tuple[int, float, int]]  # the drawn token first, then the most likely ones; or the candidates


CANDIDATES = -1  # nothing was drawn: the best continuations were asked for
BROKEN = (
    -2
)  # nothing could be drawn: no logit of a permitted token is a number above -inf. That request ends as an error
GREEDY_BELOW = 1e-5  # a temperature under it takes the most likely token


class Sampler(Protocol):
    """Draws tokens for rows, and remembers each row's tokens for penalties.

    The order of work on a row's logits: the step's mask; the watermark; logit_bias, allowed, banned, min_tokens;
    repetition, then frequency and presence penalties, all in fp32; (logprobs are taken of the *raw* logits)
    temperature; top_k; top_p; min_p; typical_p, each on what the one before has left. Then one uniform number from
    Philox4x32-10 with key = seed and counter = (position, sample) picks among the survivors in the order of their ids,
    by cumulative probability: weights are integers, so sums are exact. Ties between logits go to the lower id
    everywhere. If everything is masked, the best raw logit among those that mask and `allowed` leave is taken. A NaN
    counts as -inf. Candidates have the log_softmax after temperature, without the filters; masked tokens are not among
    them, and count in its sum all the same.
    docs/sampling.md defines each step."""

    def admit(self, row: int, params: RowParams, tokens: Sequence[int], num_prompt: int) -> None:
        """Take a free row. `tokens` is all that is known: after a preemption, the prompt and the output so far. An id
        outside the vocabulary is a ValueError (stop_ids apart: what is not there is not drawn)."""

    def retire(self, row: int) -> None: ...

    def draw(self, logits: Any, rows: Sequence[int], masks: Masks | None = None) -> list[Sample]:
        """logits [R, vocab] fp32; line i belongs to rows[i], which differ. `masks` hold for this step alone. The drawn
        token, if there is one, is appended to what is known of the row."""

    def begin(self, logits: Any, rows: Sequence[int], masks: Masks | None = None) -> "Callable[[], list[Sample]]":
        """`draw`, for those who have something else to do meanwhile: call what it returns to wait for the tokens. The
        next step may be run before."""

    def verify(
        self, logits: Any, rows: Sequence[int], drafts: Sequence[Sequence[int]], masks: Masks | None = None
    ) -> "Callable[[], list[list[Sample]]]":
        """`begin`, where tokens that may follow are guessed: rows[i] has a line for its next token and one behind each
        of drafts[i], side by side. Its tokens are drawn one after the other, each as `draw` would, as long as they are
        the drafts: the first that is not is its last, and what lies behind is passed over. -> a list for each row"""

    def logprobs(self, logits: Any, targets: Sequence[int], num_top: int) -> list[list[tuple[int, float, int]]]:
        """For prompt logprobs: of line i the target's (id, logprob, rank) and then the `num_top` most likely ones."""


class Activation(IntEnum):
    SILU = 0  # x * sigmoid(x)
    GELU = 1  # x * P(a standard normal is below x)
    GELU_TANH = 2  # its approximation: 0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3)))
    RELU = 3
    RELU_SQUARED = 4
    QUICK_GELU = 5  # x * sigmoid(1.702 x)
    TANH = 6
    CLAMPED_SWIGLU = 7  # min(x, 7) * sigmoid(1.702 min(x, 7)); what it is multiplied with is kept in -7 .. 7, plus 1
    ELU = 8  # x above zero, exp(x) - 1 below


@dataclass(frozen=True, slots=True)
class Routing:
    """Which experts a token goes to, and with which weights. Ties go to the lower expert.

    Scores are the softmax or the sigmoid of the router's logits. The `top_k` best experts are chosen by score, or by
    score + correction. With groups, only experts of the `top_groups` best of `num_groups` neighbouring groups can be
    chosen; a group is as good as the best, or the best two together, of what its experts are chosen by. An expert's
    weight is its score (never corrected), divided by the sum over the chosen where `renormalize`, times `scale`.
    (A softmax over the chosen logits only is a softmax over all, renormalized.)

    With `near`, the `top_k` greatest logits are chosen, never corrected. The weight of one is its share of a softmax
    over those not chosen before it whose logit x is near it, the best of them: best - x <= near * max(|x|, best);
    times `scale`."""

    top_k: int
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    renormalize: bool = False
    scale: float = 1.0
    num_groups: int = 1
    top_groups: int = 1
    group_score: Literal["best", "best two"] = "best"
    near: float = 0.0

    def check(self, num_experts: int) -> None:
        """That many experts can be chosen."""
        size = num_experts // self.num_groups
        if num_experts % self.num_groups or not 1 <= self.top_k <= self.top_groups * size <= num_experts:
            raise BadCheckpoint(
                f"{self.top_k} of {num_experts} experts are chosen, from {self.top_groups} of {self.num_groups} groups"
            )
        if self.group_score == "best two" and self.num_groups > 1 and size < 2:
            raise BadCheckpoint(f"groups of {size} expert are judged by their best two")


class Keep(Enum):
    """What of a matrix is to be kept where matrices are quantized while they are loaded."""

    NOTHING = 0  # what the user asked for
    EIGHT_BITS = 1  # heads: a token's logits come out of them as they are
    ALL = 2  # routers: who computes at all hangs on them


def quantization_of(asked: str | None, keep: Keep) -> str | None:
    if keep is Keep.NOTHING or asked is None:
        return asked
    return "int8" if keep is Keep.EIGHT_BITS else None


class LoraSlots(Protocol):
    """What adapters add to one linear layer: a low rank matrix each, in a fixed number of slots, empty at first."""

    def pack(self, parts: Sequence[LowRank | None]) -> Any:
        """What one adapter adds to each of the layer's parts, as `put` takes it. In any thread."""

    def put(self, slot: int, packed: Any) -> None:
        """Into the slot, for the steps that are run from now on; None empties it."""


class Program(Protocol):
    """A forward pass bound to its weights and cache."""

    def run(self, batch: StepBatch) -> Any:
        """-> logits [R, vocab] fp32, valid until the next run."""


class OpSet(Protocol):
    # -- when a model is loaded ------------------------------------------------------------------------------------

    def pack(
        self,
        parts: Sequence[StoredTensor],
        bias: Sequence[StoredTensor] | None = None,
        keep: Keep = Keep.NOTHING,
    ) -> PackedWeight:
        """Stack the parts' rows into one matrix. The parts may be stored in different types. `keep` is for backends
        that quantize matrices on the way."""

    def pack_experts(
        self, experts: Sequence[Sequence[StoredTensor]], biases: Sequence[Sequence[StoredTensor]] | None = None
    ) -> PackedExperts:
        """One matrix an expert, each stacked of parts as in `pack`; all have one shape."""

    def pack_heads(self, heads: Sequence[StoredTensor]) -> PackedHeads:
        """One matrix a head, of floats; all have one shape."""

    def new_slots(self, num_inputs: int, sizes: Sequence[int], num_slots: int, max_rank: int) -> LoraSlots:
        """For a linear layer of parts with `sizes` outputs, and adapters of up to that rank."""

    def vector(self, tensor: StoredTensor) -> Any:
        """A norm weight or the like, in fp32."""

    def table(self, tensor: StoredTensor) -> Any:
        """An embedding table to gather rows from, left where it is stored."""

    def biases(self, table: Float32) -> Any:
        """[heads, 2n + 1]: what a score gains by the distance of the key; see `paged_attention`."""

    def frequencies(self, inv_freq: Float32, scale: float) -> Any:
        """Rotary frequencies [rotary_dim / 2]; cos and sin are multiplied by `scale`."""

    def new_cache(self, spec: KVSpec, num_blocks: int, num_host_blocks: int = 0) -> KVCache: ...

    def new_sampler(self, num_rows: int, vocab_size: int) -> Sampler: ...

    def compile(
        self,
        forward: "Callable[[Any, Any], Value]",
        cache: KVCache,
        max_tokens: int,
        max_rows: int,
        max_model_len: int,
        sampler: Sampler | None = None,
        sources: bool = False,
    ) -> Program:
        """`forward(ops, batch)` returns the logits, for batches of at most `max_tokens` of at most `max_rows` sequences
        of at most `max_model_len`. `batch` has the fields of `StepBatch`, to be handed to ops and never looked into.

        An id below zero stands for the token that `sampler` drew last for row ~id. `sources`: whether sequences have
        sources, or are some."""

    # -- in a forward pass -----------------------------------------------------------------------------------------

    def embedding(self, ids: Value, table: Any) -> Value:
        """ids: batch.ids, or batch.positions where positions are learned -> [T, columns]"""

    def rms_norm(self, x: Value, weight: Any, eps: float) -> Value:
        """x / sqrt(mean(x * x) + eps) * weight, for every len(weight) neighbouring columns by themselves: a row, or
        the heads of q or k."""

    def layer_norm(self, x: Value, weight: Any, bias: Any, eps: float, groups: int = 1) -> Value:
        """(x - mean) / sqrt(variance + eps) * weight + bias, for every columns / groups neighbouring columns by
        themselves. weight and bias [columns of a group], or [columns], or None."""

    def linear(self, x: Value, w: PackedWeight) -> Value:
        """x [T, inputs] -> x @ w.T + bias [T, outputs]"""

    def adapt(self, y: Value, x: Value, slots: Any, batch: Any) -> Value:
        """y [T, outputs] + scale * x @ a.T @ b.T of the adapter in slot batch.adapters[t], for each row t that has one.
        May work in place: y is what a linear layer made of x, and not used afterwards."""

    def linear_heads(self, x: Value, w: PackedHeads) -> Value:
        """x [T, heads * inputs] -> [T, heads * outputs]: the columns of every head times its own matrix."""

    def split(self, x: Value, sizes: Sequence[int]) -> tuple[Value, ...]:
        """Views of neighbouring columns."""

    def rope_angles(self, positions: Value, frequencies: Any) -> Value:
        """-> [T, rotary_dim]: cos of position * frequency, then sin; once a step."""

    def rope(self, x: Value, angles: Value, head_dim: int) -> Value:
        """Rotate the first rotary_dim columns of every head of x [T, heads * head_dim], pairing column i with column
        i + rotary_dim / 2. May work in place: x is not used afterwards."""

    def write_kv(self, k: Value, v: Value, batch: Any, layer: int) -> None:
        """Store k and v [T, kv_heads * head_dim] in the layer's pages at batch.slots."""

    def paged_attention(
        self,
        q: Value,
        batch: Any,
        layer: int,
        head_dim: int,
        scale: float,
        window: int = 0,
        softcap: float = 0.0,
        slopes: Any = None,
        sinks: Any = None,
        biases: Any = None,
    ) -> Value:
        """q [T, heads * head_dim] -> [T, heads * head_dim]. Causal; query heads share KV heads in neighbouring
        groups. With `window`, a position sees only itself and the window - 1 before it. Scores are q . k * scale;
        with `softcap`, softcap * tanh(scores / softcap); with `slopes`, a vector [heads], plus slope * (position of
        the key - position of the query); with `biases` [heads, 2n + 1], plus what stands n + that distance in, which
        is -n or n where it is less or more. With `sinks`, a vector [heads], the softmax has one score more, which
        stands for a value of zeros."""

    def cross_attention(self, q: Value, batch: Any, layer: int, head_dim: int, scale: float) -> Value:
        """q [T, heads * head_dim] -> [T, heads * head_dim]: every token attends to all of its sequence's source, whose
        keys and values are in the layer's pages of batch.source_tables. Heads and scores as above."""

    def attention(
        self,
        q: Value,
        k: Value,
        v: Value,
        batch: Any,
        head_dim: int,
        scale: float,
        causal: bool = False,
        window: int = 0,
        biases: Any = None,
    ) -> Value:
        """q [T, heads * head_dim], k and v [T, kv_heads * head_dim] -> [T, heads * head_dim]: the tokens of a sequence
        attend to those of the same sequence in this step, and no cache is read or written. With `causal`, to those up
        to themselves; with `window`, to those less than `window` positions away. Heads and scores as above."""

    def write_latent(self, latent: Value, turned: Value, batch: Any, layer: int) -> None:
        """Store latent [T, spec.latent], and turned behind it, in the layer's pages at batch.slots."""

    def mla_attention(self, q_latent: Value, q_turned: Value, batch: Any, layer: int, scale: float) -> Value:
        """q_latent [T, heads * latent], q_turned [T, heads * (head_dim - latent)] -> [T, heads * latent]. Causal. A
        head's query is its part of the one and then its part of the other; it meets the whole vectors of a latent
        cache, and what it takes from them is their first `latent` columns."""

    def activate(self, x: Value, kind: Activation) -> Value:
        """Of every number."""

    def activate_and_mul(self, x: Value, kind: Activation) -> Value:
        """x [T, 2n] -> activate(x[:, :n]) * x[:, n:]"""

    def moe(
        self,
        x: Value,
        router_logits: Value,
        gate_up: PackedExperts,
        down: PackedExperts,
        routing: Routing,
        kind: Activation,
        correction: Any = None,
    ) -> Value:
        """x [T, n], router_logits [T, experts] -> [T, n]: sum over the chosen experts of weight * down(
        activate_and_mul(gate_up(x))), the best one first. `correction`: a vector [experts], see Routing."""

    def mul_sigmoid(self, x: Value, gate: Value) -> Value:
        """x [T, n] * sigmoid(gate [T, 1])"""

    def scale(self, x: Value, factor: float) -> Value: ...

    def scale_by_position(self, x: Value, positions: Value, growth: float, length: int) -> Value:
        """x [T, n] * (1 + growth * log(1 + floor(position / length))). May work in place: x is not used afterwards."""

    def clamp(self, x: Value, most: float) -> Value:
        """Numbers below -most become -most, those above most become most."""

    def add(self, x: Value, y: Value) -> Value: ...

    def logits(self, x: Value, head: PackedWeight, batch: Any, softcap: float = 0.0) -> Value:
        """Rows batch.logit_rows of x -> [R, vocab]; with `softcap`, softcap * tanh(logits / softcap)."""

    def rows(self, x: Value, batch: Any) -> Value:
        """Rows batch.logit_rows of x, as they are: what a forward pass returns that ends in vectors, not in logits."""
