"""The op set: the contract between models and backends. Models call nothing else; a backend implements all of it.

Three backends implement it. `ops/reference` computes eagerly in plain torch and is the specification. `ops/native`
records a forward pass once and replays the recording in C++ on a CPU. `ops/gpu` launches Triton kernels and captures
them in CUDA graphs. A model cannot tell them apart.

Activations are matrices of one row a token (`Value`): [tokens, columns], in fp32 (bf16 or fp16 on a GPU). Weights are
`PackedWeight`: only their backend looks inside. T is the number of tokens of a step.

Only attention mixes rows, and only those of one sequence. No op sums in an order that depends on the rows of other
sequences: a token's result is bitwise the same whatever else is in the batch. (On a GPU, where `batch_invariant` is
set.)"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from quire.core.errors import BadCheckpoint
from quire.core.plan import SampledRow
from quire.ops.kv_spec import KVCache, KVSpec
from quire.ops.row_params import RowParams
from quire.ops.tensors import LoraDelta, PackedExperts, PackedHeads, PackedWeight, StoredTensor

if TYPE_CHECKING:
    from quire.ops.ranks.cuts import Cut

Value = Any  # [tokens, columns]: a torch tensor, or a recorded or deferred one
Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]
Float32 = NDArray[np.float32]
TreeNode = tuple[int, int, float]  # token, parent (a node before it, or -1), probability after the parent
WORD_BITS = 64  # of a word of `StepBatch.ancestors`


@dataclass(slots=True)
class StepBatch:
    """A step as flat arrays: T tokens of S sequences, R of which need logits.

    The tokens of a sequence are at the last places of its context. `ancestors` makes a tree of the places behind some
    text, of this step and of steps before it: bit j of a token's word says that the token sees the j-th of them. A
    token sees itself, its ancestors, and all places before the tree. Its position is then that of a text without the
    tokens it does not see; so the tree begins at place position + 1 - the bits of the word, the same for all tokens of
    a sequence. Words of sequences with more than WORD_BITS tokens are not read: a token sees all tokens before it."""

    ids: Int32  # [T]
    positions: Int32  # [T]
    slots: Int32  # [T] where the token's K and V are written: block * block_size + offset
    seq_starts: Int32  # [S + 1] the tokens of sequence s are seq_starts[s] .. seq_starts[s + 1]
    context_lens: Int32  # [S] tokens to attend to, including the tokens of this step
    block_tables: Int32  # [S, W] block ids; entries past ceil(context_len / block_size) are not read
    logit_rows: Int32  # [R] tokens that need logits
    adapters: Int32 | None = None  # [T] the slot of the token's LoRA adapter, or -1; None: no token has one
    source_lens: Int32 | None = None  # [S] tokens of the encoder's output, in encoder-decoder models
    source_tables: Int32 | None = None  # [S, W] the blocks of its keys and values
    ancestors: Int64 | None = None  # [T] words; None: no tree, every token sees the tokens before it
    hidden_rows: Int32 | None = None  # [T] the row of the `HiddenStates` that the token reads, in heads that draft
    states: Int32 | None = None  # [G, 3] segments of tokens, of models with recurrent states; see `StateSpec`

    @property
    def num_tokens(self) -> int:
        return len(self.ids)


@dataclass(frozen=True, slots=True)
class Masks:
    """Which tokens may be sampled, for some of a step's lines of logits: structured output."""

    lines: Sequence[int]  # [M]
    bits: NDArray[np.uint32]  # [M, ceil(vocab / 32)]: token t is bit t % 32 of word t / 32


class Sampler(Protocol):
    """Samples tokens for rows, and remembers each row's tokens for its penalties.

    A row's logits go through these steps, in this order. Each filter sees what the one before it leaves.

    1. The step's mask.
    2. The watermark; then logit_bias, allowed, banned, min_tokens, no_repeat_ngram.
    3. Repetition, then frequency and presence penalties, then DRY. All edits are in fp32.
    4. The filters in the row's order, by default top_n_sigma; temperature; top_k; top_p; min_p; typical_p; xtc. Or
       temperature and mirostat.
    5. A race picks among the rest (ops/race.py): every token has an exponential number, a function of (seed, sample,
       position, id), and the least number divided by its weight wins. Weights are integers, so sums are exact.

    Ties between logits go to the lower id. NaN counts as -inf. If every token is masked, the best raw logit among those
    that mask and `allowed` permit is taken. Logprobs are those of the raw logits. Candidates have the log_softmax after
    temperature, without the filters; masked tokens are no candidates, but count in its sum.
    docs/sampling.md defines each step."""

    def admit(
        self, row: int, params: RowParams, tokens: Sequence[int] | Int32, num_prompt: int, mu: float | None = None
    ) -> None:
        """Take a free row. `tokens` are the prompt and, after a preemption, the output so far; `mu` is then the one
        that the row's last `SampledRow` had. An id outside the vocabulary is a ValueError (except in stop_ids, where it
        has no effect)."""

    def retire(self, row: int) -> None:
        """Free a row."""

    def draw(self, logits: Any, rows: Sequence[int], masks: Masks | None = None) -> list[SampledRow]:
        """logits [R, vocab] fp32; line i belongs to rows[i], which differ. `masks` hold for this step alone. A sampled
        token is appended to the row's tokens."""

    def begin(self, logits: Any, rows: Sequence[int], masks: Masks | None = None) -> "Callable[[], list[SampledRow]]":
        """`draw` without waiting: the result waits for the tokens. The next step may run before that."""

    def verify(
        self,
        logits: Any,
        rows: Sequence[int],
        drafts: Sequence[Sequence[int]],
        masks: Masks | None = None,
        parents: Sequence[Sequence[int]] | None = None,
    ) -> "Callable[[], list[SampledRow]]":
        """`begin` for speculative decoding: rows[i] has a line for its next token and one after each of drafts[i], side
        by side. Its tokens are sampled one after the other, each as `draw` would, as long as they equal the drafts; the
        first that differs is the last. A draft below zero is one that this sampler keeps: ~(row + number * num_rows),
        with number 1 for the first of a row.

        Where parents[i] is not empty, drafts[i] are a tree (core/draft_tree.py): sampling goes on at the line of the
        child whose token was sampled, the first of several."""

    def logprobs(self, logits: Any, targets: Sequence[int], num_top: int) -> list[list[tuple[int, float, int]]]:
        """For prompt logprobs: (id, logprob, rank) of each line's target, then of its `num_top` most likely tokens."""


class Activation(IntEnum):
    """The numbers are those of the kernels."""

    SILU = 0  # x * sigmoid(x)
    GELU = 1  # x * normal_cdf(x)
    GELU_TANH = 2  # the tanh approximation: 0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3)))
    RELU = 3
    RELU_SQUARED = 4
    QUICK_GELU = 5  # x * sigmoid(1.702 x)
    TANH = 6
    CLAMPED_SWIGLU = 7  # gpt-oss: min(x, 7) * sigmoid(1.702 min(x, 7)), times clamp(up, -7, 7) + 1
    ELU = 8  # x above zero, exp(x) - 1 below
    SIGMOID = 9


@dataclass(frozen=True, slots=True)
class Routing:
    """Top-k routing of an MoE layer: the experts of a token, and their weights. Ties go to the lower expert.

    Scores are the softmax or the sigmoid of the router's logits. The `top_k` experts with the greatest score are
    chosen, or with the greatest score + correction. With groups, only experts of the `top_groups` best of `num_groups`
    groups of neighbours can be chosen; a group is ranked by its best expert, or by the sum of its best two. An expert's
    weight is its score (never corrected), divided by the sum over the chosen experts where `renormalize`, times
    `scale`. (A softmax over the chosen logits alone is a renormalized softmax over all.)

    With `sparsemixer_threshold` (PhiMoE), the `top_k` greatest logits are chosen, one after the other, never corrected.
    The weight of each is its share of a softmax over the logits x that are not chosen yet and near the best of them:
    best - x <= threshold * max(|x|, best); times `scale`.

    With `weigh_inputs` (Llama 4), a weight multiplies the input of its expert instead of the output.

    The last `num_zero` of the experts (LongCat) have no matrices: they pass on their input.

    With `limit` (Step 3.5), the two factors of a gated activation are clamped to -limit .. limit."""

    top_k: int
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    renormalize: bool = False
    scale: float = 1.0
    num_groups: int = 1
    top_groups: int = 1
    group_score: Literal["best", "best two"] = "best"
    sparsemixer_threshold: float = 0.0  # 0: off
    weigh_inputs: bool = False
    num_zero: int = 0
    limit: float = 0.0  # 0: none

    def check(self, num_experts: int) -> None:
        """Raise unless `top_k` of `num_experts` experts can be chosen."""
        size = num_experts // self.num_groups
        if num_experts % self.num_groups or not 1 <= self.top_k <= self.top_groups * size <= num_experts:
            raise BadCheckpoint(
                f"{self.top_k} of {num_experts} experts are chosen, from {self.top_groups} of {self.num_groups} groups"
            )
        if self.group_score == "best two" and self.num_groups > 1 and size < 2:
            raise BadCheckpoint(f"groups of {size} expert are judged by their best two")


@dataclass(frozen=True, slots=True, eq=False)
class Mamba2Weights:
    """Vectors of `OpSet.vector`, one number a head."""

    a: Any  # below zero
    dt_bias: Any
    skip: Any
    groups: int = 1  # neighbouring heads of one share its b and c
    dt_limit: tuple[float, float] = (0.0, float("inf"))


@dataclass(frozen=True, slots=True, eq=False)
class MambaWeights:
    """`a` is below zero: [columns, channels], of `OpSet.biases`; `skip` [channels], of `OpSet.vector`."""

    a: Any
    skip: Any


@dataclass(frozen=True, slots=True, eq=False)
class Wkv7Weights:
    """Vectors of `OpSet.vector`, one number a column of all heads."""

    remove_scale: Any
    learn_scale: Any
    bonus: Any
    norm: Any
    norm_bias: Any
    heads: int
    eps: float  # of the norm of each head's output


class Keep(Enum):
    """The precision that a matrix keeps when weights are quantized while they are loaded."""

    NOTHING = 0  # it is quantized as the user asked
    EIGHT_BITS = 1  # LM heads: their error goes straight into the logits
    ALL = 2  # routers: their error changes which experts compute


def quantization_of(requested: str | None, keep: Keep) -> str | None:
    """The quantization of a matrix that keeps `keep`. None: it stays in floats."""
    if keep is Keep.NOTHING or requested is None:
        return requested
    return "int8" if keep is Keep.EIGHT_BITS else None


class LoraSlots(Protocol):
    """LoRA adapters of one linear layer, in a fixed number of slots, empty at first."""

    def pack(self, parts: Sequence[LoraDelta | None]) -> Any:
        """One adapter's matrices for each part of the layer (None: it has none), as `put` takes them. Thread-safe."""

    def put(self, slot: int, packed: Any) -> None:
        """Fill the slot, for the steps that run from now on; None empties it."""


class Program(Protocol):
    """A forward pass bound to its weights and cache."""

    takes_trees: bool  # whether a batch may have `ancestors`, and a token then has the bits that a chain would give it
    kept: Any  # [T, columns] the hidden states that the last run kept (`OpSet.keep`), valid until the next; or None
    chain: "Chain | None"  # where steps may follow each other without the host

    def run(self, batch: StepBatch) -> Any:
        """-> logits [R, vocab] fp32, valid until the next run."""


class Chain(Protocol):
    """Steps of one token for each of these rows, drawn by the sampler that the program was compiled with; or steps of
    the nodes of a level of trees."""

    takes_trees: bool

    def takes(self, rows: Sequence[int], count: int, num_tokens: int) -> bool:
        """Whether so many tokens of these rows can be drawn without the host, after a step of `num_tokens`."""

    def run(self, batch: StepBatch, rows: Sequence[int], count: int, places: Int32, target: Any) -> None:
        """`batch` is the first of `count` steps: the positions of each row that have not been read, up to the one
        before its last token. Each later step computes one token of each row, the one that the step before sampled,
        with the hidden state that it kept: in places[i] for rows[i]. These `count` tokens are drafts that `target`, a
        sampler of the same op set, keeps. Nothing waits."""

    def read_drafts(self, row: int, count: int, target: Any) -> list[int]:
        """The tokens that were drafted for a row; waits for them."""

    def take_steps(self) -> list[tuple[int, float]]:
        """Of the runs that have ended since the last call, the rows of each step and the seconds that it took."""

    def grow(self, logits: Any, roots: "TreeRoots", shape: "TreeShape") -> "Callable[[], list[list[TreeNode]]]":
        """A tree of drafts for each sequence, from the logits [S, vocab] of the roots. Of each level, the nodes that
        are the likeliest with all before them are computed. Their children are the most likely tokens or, where tokens
        are sampled, the candidates that lead the race which will sample the token. The result waits, and has the nodes,
        level by level. If `takes_trees`."""


@dataclass(frozen=True, slots=True)
class TreeShape:
    num_levels: int
    top_k: int  # nodes of a level that are computed
    num_children: int  # of a node
    num_candidates: int  # for them: more than there are children where tokens are sampled


@dataclass(frozen=True, slots=True)
class TreeRoots:
    """S sequences behind which trees grow: nodes are computed at the places behind the text, one after the other."""

    positions: Int32  # [S] of the first level
    block_tables: Int32  # [S, W]
    hidden_rows: Int32  # [S] where the hidden state of the root is kept; those of nodes are kept behind it
    temperatures: Float32  # [S] 0: greedy
    keys: Int64  # [S, levels, 2] of the race (ops/race.py) of each level


class HiddenStates(Protocol):
    """Rows of hidden states, zero at first, that outlive the step that computed them."""

    def put(self, rows: Int32, program: Program, lines: Int32) -> None:
        """Copy `lines` of what the last run of the program kept to `rows`."""

    def load(self, values: Float32) -> None:
        """Copy values [n, columns] of the host to the first n rows."""


@dataclass(frozen=True, slots=True)
class ProgramSpec:
    """What a forward pass is compiled for: the largest step, and what it reads and writes beside its batch."""

    max_tokens: int  # of a step
    max_rows: int = 0  # sequences of a step
    max_model_len: int = 0
    sampler: Sampler | None = None  # an id below zero stands for the token that it sampled last for row ~id
    sources: bool = False  # the model is an encoder, or a decoder with cross-attention
    tree_nodes: int = 0  # drafts of a sequence that come as a tree, at most; 0: they are chains, and a tree is slower
    hidden: HiddenStates | None = None  # what `hidden_states` reads


class OpSet(Protocol):
    """What a backend implements. `Any` stands for values that only the backend looks into."""

    # -- when a model is loaded ------------------------------------------------------------------------------------

    def pack(
        self,
        parts: Sequence[StoredTensor],
        bias: Sequence[StoredTensor] | None = None,
        keep: Keep = Keep.NOTHING,
    ) -> PackedWeight:
        """Stack the rows of the parts into one matrix. Parts may be stored in different types. `keep` limits what
        backends that quantize while loading may do."""

    def pack_experts(
        self, experts: Sequence[Sequence[StoredTensor]], biases: Sequence[Sequence[StoredTensor]] | None = None
    ) -> PackedExperts:
        """One matrix an expert, each stacked as in `pack`; all have one shape."""

    def pack_heads(self, heads: Sequence[StoredTensor]) -> PackedHeads:
        """One matrix a head, in floats; all have one shape."""

    def new_slots(self, num_inputs: int, sizes: Sequence[int], num_slots: int, max_rank: int) -> LoraSlots:
        """Slots for adapters of at most `max_rank`, of a linear layer whose parts have `sizes` outputs."""

    def vector(self, tensor: StoredTensor) -> Any:
        """A vector of weights (of a norm, say), in fp32."""

    def table(self, tensor: StoredTensor) -> Any:
        """An embedding table to gather rows from. It may stay in the file."""

    def conv_weight(self, tensor: StoredTensor) -> Any:
        """The weight of a causal convolution, in fp32: stored as [channels, taps] or [channels, 1, taps], the oldest
        tap first."""

    def biases(self, table: Float32) -> Any:
        """Relative position biases [heads, 2n + 1]; see `paged_attention`."""

    def frequencies(self, inv_freq: Float32, scale: float) -> Any:
        """Rotary frequencies [rotary_dim / 2]; cos and sin are multiplied by `scale`."""

    def draft_vocabulary(self, tokens: Int32, vocab: int) -> Any:
        """Of a head that has logits for some tokens only: output i is token tokens[i]; see `logits`."""

    def new_cache(self, spec: KVSpec, num_blocks: int, num_host_blocks: int = 0) -> KVCache: ...

    def new_hidden_states(self, num_rows: int, num_columns: int) -> HiddenStates: ...

    def new_sampler(self, num_rows: int, vocab_size: int) -> Sampler: ...

    def compile(self, forward: "Callable[[Any, Any], Value]", cache: KVCache, spec: ProgramSpec) -> Program:
        """`forward(ops, batch)` returns the logits of a step. `batch` has the fields of `StepBatch`, to be handed to
        ops and never looked into."""

    # -- in a forward pass -----------------------------------------------------------------------------------------

    def embedding(self, ids: Value, table: Any) -> Value:
        """ids: batch.ids, or batch.positions for learned positions -> [T, columns]"""

    def rms_norm(self, x: Value, weight: Any, eps: float, groups: int = 1) -> Value:
        """x / sqrt(mean(x * x) + eps) * weight, separately for every len(weight) neighbouring columns: a whole row, or
        each head of q or k; with `groups`, for each of as many parts of these columns."""

    def layer_norm(self, x: Value, weight: Any, bias: Any, eps: float, groups: int = 1) -> Value:
        """(x - mean) / sqrt(variance + eps) * weight + bias, separately for each of `groups` groups of neighbouring
        columns. weight and bias [columns of a group], or [columns], or None."""

    def linear(self, x: Value, w: PackedWeight) -> Value:
        """x [T, inputs] -> x @ w.T + bias [T, outputs]"""

    def adapt(self, y: Value, x: Value, slots: Any, batch: Any) -> Value:
        """LoRA: y [T, outputs] + scale * x @ a.T @ b.T of the adapter in slot batch.adapters[t], for each row t that
        has one. y is the output of a linear layer for x. May work in place: y is not used afterwards."""

    def linear_heads(self, x: Value, w: PackedHeads) -> Value:
        """x [T, heads * inputs] -> [T, heads * outputs]: every head times its own matrix."""

    def split(self, x: Value, sizes: Sequence[int]) -> tuple[Value, ...]:
        """Views of neighbouring columns."""

    def rope_angles(self, positions: Value, frequencies: Any) -> Value:
        """-> [T, rotary_dim]: cos of position * frequency, then sin. Once a step."""

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
        """q [T, heads * head_dim] -> [T, heads * head_dim]. Causal; groups of neighbouring query heads share a KV head.

        Scores are q . k * scale. Options: `window`: a position sees only itself and the window - 1 before it; below
        zero, the positions of its own chunk of -window up to itself.
        `softcap`: softcap * tanh(scores / softcap). `slopes` [heads] (ALiBi): plus slope * d, where d is the position
        of the key minus that of the query. `biases` [heads, 2n + 1] (T5): plus biases[head, n + clamp(d, -n, n)].
        `sinks` [heads]: the softmax has one score more, whose value is zero."""

    def cross_attention(self, q: Value, batch: Any, layer: int, head_dim: int, scale: float) -> Value:
        """q [T, heads * head_dim] -> [T, heads * head_dim]: every token attends to its sequence's whole encoder output,
        whose keys and values are in the layer's pages at batch.source_tables. Heads and scores as in
        `paged_attention`."""

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
        """q [T, heads * head_dim], k and v [T, kv_heads * head_dim] -> [T, heads * head_dim]: attention without a
        cache. Tokens attend to the tokens of their sequence in this step; `causal`: to tokens up to themselves;
        `window`: to tokens less than `window` positions away. Heads and scores as in `paged_attention`."""

    def disentangled_attention(
        self, q: Value, k: Value, v: Value, by_query: Value, by_key: Value, rows: Int32, batch: Any, head_dim: int,
        scale: float,
    ) -> Value:  # fmt: skip
        """`attention` whose scores also read distances (DeBERTa): (q . k + by_query[row] + by_key[row]) * scale.

        by_query and by_key [T, heads * n]: numbers of the query's token and of the key's, one a row of a table of
        distances; rows [2m + 1]: the row of the distances -m .. m of a key before its query. No text is longer than
        m."""

    def write_latent(self, latent: Value, k_rope: Value, batch: Any, layer: int) -> None:
        """MLA: store latent [T, spec.latent] and the rotated rope part in the layer's pages at batch.slots."""

    def mla_attention(
        self, q_latent: Value, q_rope: Value, batch: Any, layer: int, scale: float, chosen: Value | None = None
    ) -> Value:
        """q_latent [T, heads * latent], q_rope [T, heads * (head_dim - latent)] -> [T, heads * latent]. Causal. The
        query of a head is its part of q_latent, then its part of q_rope. Keys are whole vectors of the latent cache;
        values are their first `latent` columns. `chosen`: of `top_positions`; a token sees these, and no others."""

    def write_index_key(self, k: Value, batch: Any, layer: int) -> None:
        """Sparse attention: store the indexer's keys [T, spec.index.columns] in the layer's pages at batch.slots."""

    def top_positions(self, q: Value, weights: Value, batch: Any, layer: int) -> Value:
        """q [T, heads * columns], weights [T, heads] -> [T, top_k]: the positions that each token attends to, of those
        up to its own, in ascending order; -1 where there are fewer. They have the greatest sums over heads of weight *
        max(0, q . k), where k is the indexer's key; of equal ones the lower position. `mla_attention` alone reads the
        result, in any layer."""

    def activate(self, x: Value, kind: Activation) -> Value:
        """Element by element."""

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
        """x [T, n], router_logits [T, experts] -> [T, n]: the sum over the chosen experts of weight * down(
        activate_and_mul(gate_up(x))), the best expert first. `correction` [experts]: see `Routing`. Where `gate_up` has
        as many outputs as `down` has inputs, there is no gate: weight * down(activate(gate_up(x)))."""

    def mul_sigmoid(self, x: Value, gate: Value) -> Value:
        """x [T, n] * sigmoid(gate [T, 1])"""

    def scale(self, x: Value, factor: float) -> Value:
        """x * factor"""

    def scale_by_position(self, x: Value, positions: Value, growth: float, length: int, offset: int = 0) -> Value:
        """x [T, n] * (1 + growth * log(1 + floor((position + offset) / length))). May work in place: x is not used
        afterwards."""

    def clamp(self, x: Value, limit: float) -> Value:
        """min(max(x, -limit), limit)"""

    def add(self, x: Value, y: Value) -> Value:
        """x + y"""

    def mul(self, x: Value, y: Value) -> Value:
        """x * y, element by element."""

    def causal_conv(self, x: Value, weight: Any, bias: Any, batch: Any, layer: int, first: int = 0) -> Value:
        """x [T, channels] -> [T, channels]: bias + the sum over taps of weight[tap] * the input of the token taps - 1 -
        tap positions before, the oldest first. weight: `conv_weight`'s. Inputs before position 0 are zeros.

        Inputs of earlier steps come from the state in the block of the position before the step. The states after the
        last token of each block and of the sequence are written to the blocks of these tokens. Sequences are taken in
        the order of the batch: one may continue a block that another before it fills in this step.

        If the cache has state slots (`KVSpec.states`), the states are there, and `layer` counts the layers that have
        them. Its channels are then those from `first` on, where a layer has several convolutions."""

    def mamba2_scan(
        self, x: Value, dt: Value, b: Value, c: Value, weights: "Mamba2Weights", batch: Any, layer: int
    ) -> Value:
        """x [T, heads * head_dim], dt [T, heads], b and c [T, groups * columns] -> [T, heads * head_dim], where the
        state of a layer is [heads, columns, head_dim].

        For each token and head, with d = softplus(dt + dt_bias), clamped to `dt_limit`: state = exp(a * d) * state +
        d * b x^T; the output is c^T state + skip * x."""

    def mamba_scan(
        self, x: Value, dt: Value, b: Value, c: Value, weights: "MambaWeights", batch: Any, layer: int
    ) -> Value:
        """x and dt [T, channels], b and c [T, columns] -> [T, channels], where the state of a layer is [columns,
        channels]. For each token and channel, with d = softplus(dt): state = exp(a * d) * state + d * b * x; the output
        is the sum over columns of c * state, and skip * x."""

    def decay(self, x: Value, bias: Any, rate: Any) -> Value:
        """exp(-rate * softplus(x + bias)), element by element: what a token leaves of a state. bias, rate [columns]."""

    def delta_rule(
        self, q: Value, k: Value, v: Value, decay: Value, beta: Value, batch: Any, layer: int, key_dim: int,
        tiled: bool = False,
    ) -> Value:  # fmt: skip
        """The gated delta rule. q and k [T, key_heads * key_dim], v [T, heads * value_dim] -> [T, heads * value_dim].

        A head has a state S [key_dim, value_dim], zero at first. Each token of a sequence, in order, changes it:
        S = decay * S; S = S + k (beta * (v - k . S))^T; its output is q . S. Neighbouring heads share q and k;
        with `tiled`, heads take those of the key heads in turn.
        decay [T, heads], or of each row of S [T, heads * key_dim] (Kimi delta attention); beta [T, heads]."""

    def linear_attention(self, q: Value, k: Value, v: Value, decay: Any, batch: Any, layer: int, key_dim: int) -> Value:
        """Lightning attention: as `delta_rule`, with S = decay * S + k v^T. decay [heads]: a vector, for all tokens."""

    def wkv7(
        self, r: Value, w: Value, k: Value, v: Value, a: Value, weights: "Wkv7Weights", batch: Any, layer: int
    ) -> Value:
        """The time mixing of RWKV 7. r, w, k, v and a [T, heads * n] -> [T, heads * n], where the state S of a layer is
        [heads, n, n], zero at first.

        For each token and head: u = k * remove_scale, divided by its length; decay = exp(-exp(-0.5) * sigmoid(w)); and
        k' = k * (1 + (a - 1) * learn_scale). Then S = decay * S + k' v^T - (u * a) (u . S)^T, with the S before on the
        right; the output is the layer norm of r . S, and (the sum of r * k' * bonus) * v."""

    def concat(self, parts: Sequence[Value]) -> Value:
        """The columns of all parts, side by side."""

    def tap(self, x: Value, index: int) -> None:
        """The hidden states that layer `index` reads; `layers`: those behind the last layer; `layers` + 1: behind the
        last norm. Nothing happens here: a wrapper of the op set may take them."""

    def keep(self, x: Value, batch: Any) -> None:
        """Let `Program.kept` be all rows of x after the step. At most once, before `logits`."""

    def hidden_states(self, batch: Any) -> Value:
        """Rows batch.hidden_rows of the `HiddenStates` that the program was compiled with -> [T, columns]"""

    def logits(self, x: Value, head: PackedWeight, batch: Any, softcap: float = 0.0, vocabulary: Any = None) -> Value:
        """Rows batch.logit_rows of x -> [R, vocab]; with `softcap`, softcap * tanh(logits / softcap). `vocabulary`: the
        head has the tokens of that `draft_vocabulary`, and all others are -inf."""

    def rows(self, x: Value, batch: Any) -> Value:
        """Rows batch.logit_rows of x: what a forward pass returns that ends in hidden states instead of logits."""

    # -- among ranks -----------------------------------------------------------------------------------------------
    #
    # Several processes may compute a model together (`ops/ranks`): each has some outputs of every matrix. The ops
    # above take a rank's part as `cut`, the last argument: of `embedding`, the rows of its table; of `logits`, the
    # outputs of its head; of `moe`, the columns of gate, of up and so of the hidden values that it computes, or as
    # `experts` the experts that it has. Their results are those of all ranks, but for a `moe` with a `cut`, which gives
    # the outputs that its `down` has. A rank may have some of the query heads that share a KV head: `paged_attention`
    # and `cross_attention` are told that `group` heads share each KV head, and that q begins with the head after the
    # first `skipped` of its group.

    def all_gather(self, x: Value, cuts: "Sequence[Cut]") -> Value:
        """x [T, n]: this rank's columns of each of some values that lie side by side -> all columns of all of them.
        Every rank calls it, in the same order of calls; two ranks may bring the same columns."""
