"""The op set: the contract between models and backends. Models call nothing else; a backend implements all of it.

Three backends implement it. `ops/reference` computes eagerly in plain torch and is the specification. `ops/native`
records a forward pass once and replays the recording in C++ on a CPU. `ops/gpu` launches Triton kernels and captures
them in CUDA graphs. A model cannot tell them apart.

Activations are matrices of one row a token (`Value`): [tokens, columns], in fp32 (bf16 or fp16 on a GPU). Weights are
`PackedWeight`: only their backend looks inside. T is the number of tokens of a step.

Only attention mixes rows, and only those of one sequence. No op sums in an order that depends on the rows of other
sequences: a token's result is bitwise the same whatever else is in the batch. (On a GPU, where `batch_invariant` is
set.)

What the ops take and give has files of its own: `step_batch`, `op_arguments`, `program`, `sampler`. All of it can be
imported from here."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from quire.ops.kv_spec import KVCache, KVSpec
from quire.ops.op_arguments import Activation, Keep, Mamba2Weights, MambaWeights, Routing, Wkv7Weights, quantization_of
from quire.ops.program import (
    Chain,
    GrownTree,
    HiddenStates,
    Program,
    ProgramSpec,
    TreeKeeper,
    TreeRoots,
    TreeShape,
    VerifiedLines,
    VerifiedRuns,
)
from quire.ops.sampler import Masks, Sampler
from quire.ops.step_batch import WORD_BITS, Float32, Int32, Int64, StepBatch, Value
from quire.ops.tensors import LoraDelta, PackedExperts, PackedHeads, PackedWeight, StoredTensor
from quire.ops.timer import Timer

if TYPE_CHECKING:
    from quire.ops.ranks.cuts import Cut

__all__ = [
    "WORD_BITS",
    "Activation",
    "Chain",
    "Float32",
    "GrownTree",
    "HiddenStates",
    "Int32",
    "Int64",
    "Keep",
    "LoraSlots",
    "Mamba2Weights",
    "MambaWeights",
    "Masks",
    "OpSet",
    "Program",
    "ProgramSpec",
    "Routing",
    "Sampler",
    "StepBatch",
    "TreeKeeper",
    "TreeRoots",
    "TreeShape",
    "Value",
    "VerifiedLines",
    "VerifiedRuns",
    "Wkv7Weights",
    "quantization_of",
]


class LoraSlots(Protocol):
    """LoRA adapters of one linear layer, in a fixed number of slots, empty at first."""

    def pack(self, parts: Sequence[LoraDelta | None]) -> Any:
        """One adapter's matrices for each part of the layer (None: it has none), as `put` takes them. Thread-safe."""

    def put(self, slot: int, packed: Any) -> None:
        """Fill the slot, for the steps that run from now on; None empties it."""


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
        """The vocabulary of a head that has logits for some tokens only: output i is token tokens[i]; see `logits`."""

    def new_cache(self, spec: KVSpec, num_blocks: int, num_host_blocks: int = 0) -> KVCache: ...

    def new_hidden_states(self, num_rows: int, num_columns: int) -> HiddenStates: ...

    def new_sampler(self, num_rows: int, vocab_size: int) -> Sampler: ...

    def new_timer(self) -> Timer: ...

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

    def rope_angles(self, positions: Value, frequencies: Any, group: int = 1) -> Value:
        """-> [T, rotary_dim]: cos of position * frequency, then sin; positions are rounded down to a multiple of
        `group`. Once a step."""

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

    def write_tokens(self, x: Value, batch: Any, layer: int, first: int = 0) -> None:
        """Compressed attention: store x [T, n] in the columns from `first` on of what the layer keeps of each token
        (`KVSpec.compressed`). Columns 0 .. head_dim are the key, and the value, of all heads."""

    def pool_group(self, batch: Any, layer: int, first: int, columns: int, bias: Any, overlap: bool) -> Value:
        """-> [T, columns]: for a token that ends a group of the layer, the mean of vectors of the group's tokens,
        weighted by a softmax over the tokens, of gates [columns] plus bias [group, columns]; zeros for the others.

        Of each token, the vector is in the columns from `first` on, and then the gates. With `overlap`, both have twice
        the columns, and so has the bias: the softmax is over the tokens of the group before, with the first half of
        their columns, and those of the group itself, with the second half. The first group has none before."""

    def write_entry(self, x: Value, batch: Any, layer: int, part: int) -> None:
        """Store the rows of x [T, n] whose tokens end a group, as part 0 or 1 of the group's entry."""

    def top_entries(self, q: Value, weights: Value, batch: Any, layer: int, top_k: int) -> Value:
        """`top_positions` among the entries of the groups that end at a token or before it, whose keys are part 1."""

    def compressed_attention(
        self, q: Value, batch: Any, layer: int, scale: float, window: int, sinks: Any, chosen: Value | None = None
    ) -> Value:
        """q [T, heads * head_dim] -> [T, heads * head_dim]. A token attends to itself and the window - 1 positions
        before it, and to part 0 of the entries of groups that end there or before: to all, or, of `top_entries`, to
        the `chosen`. sinks [heads]: as in `paged_attention`."""

    def stream_weights(self, x: Value, scale: Any, base: Any, streams: int, eps: float, iterations: int) -> Value:
        """Hyper-connections: x [T, (2 + streams) * streams] -> [T, (2 + streams) * streams], with three parts of
        columns p, q and m: sigmoid(scale[0] * p + base) + eps; 2 * sigmoid(scale[1] * q + base); and the matrix
        [streams, streams] softmax(scale[2] * m + base) over the columns of each row, plus eps, made doubly stochastic:
        its columns are divided by their sums + eps and then, `iterations` - 1 times, its rows and its columns. With
        x and base of `streams` columns: the first part alone."""

    def merge_streams(self, x: Value, weights: Value) -> Value:
        """x [T, streams * n], weights [T, streams] -> [T, n]: the weighted sum of the streams."""

    def update_streams(self, x: Value, y: Value, post: Value, mixing: Value) -> Value:
        """x [T, streams * n], y [T, n], post [T, streams], mixing [T, streams * streams] -> [T, streams * n]: stream i
        is post[i] * y + the sum over streams j of mixing[j, i] * x[j]."""

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
        chosen: Value | None = None,
    ) -> Value:
        """x [T, n], router_logits [T, experts] -> [T, n]: the sum over the chosen experts of weight * down(
        activate_and_mul(gate_up(x))), the best expert first. `correction` [experts]: see `Routing`. Where `gate_up` has
        as many outputs as `down` has inputs, there is no gate: weight * down(activate(gate_up(x))). `chosen` [T,
        top_k]: these experts, in this order, whatever their scores; their weights are of their scores."""

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

    def bounded_decay(self, x: Value, bias: Any, rate: Any, bound: float) -> Value:
        """exp(bound * sigmoid(rate * (x + bias))), element by element: a decay that is never below exp(bound), for
        bounds below 0. bias, rate [columns]."""

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
