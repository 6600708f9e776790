"""What a step of a model takes: operations and bytes by kind of op, counted by running its forward pass on shapes."""

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from quire.ops.kv_spec import KVSpec, StateSpec
from quire.ops.native.liveness import assign_offsets, needed_for_logits
from quire.ops.native.recorder import RecordedLogits, Recorder, SymbolicBatch
from quire.ops.native.scan_recorder import RecordedColumns
from quire.ops.opset import Activation, Routing
from quire.ops.tensors import PackedExperts, PackedHeads, PackedWeight


@dataclass(frozen=True, slots=True)
class StepShape:
    """A step of `num_seqs` sequences that are alike: each computes `new_tokens` tokens, of which the last attends to
    `context` tokens, itself included, and has logits."""

    num_seqs: int
    new_tokens: int = 1
    context: int = 1

    @property
    def num_tokens(self) -> int:
        return self.num_seqs * self.new_tokens

    def attended(self, window: int = 0) -> int:
        """Pairs of a query and a key that one sequence computes: causal, within the window (or, at most, a chunk)."""
        start, limit = self.context - self.new_tokens, abs(window) or self.context
        full = max(0, min(self.new_tokens, limit - start))  # queries that see everything before them
        return full * start + full * (full + 1) // 2 + (self.new_tokens - full) * limit

    def read(self, window: int = 0) -> int:
        """Cached tokens that one sequence reads."""
        return min(self.context, (abs(window) or self.context) + self.new_tokens - 1)


@dataclass(slots=True)
class OpCount:
    """What one kind of op adds to a step. Activations are left out: they stay in a CPU's or a GPU's caches."""

    flops: float = 0
    weight_bytes: float = 0
    kv_bytes: float = 0  # read and written

    @property
    def nbytes(self) -> float:
        return self.weight_bytes + self.kv_bytes

    def add(self, other: "OpCount") -> None:
        self.flops += other.flops
        self.weight_bytes += other.weight_bytes
        self.kv_bytes += other.kv_bytes


@dataclass(slots=True)
class StepCount:
    """What a step takes, by kind of op."""

    ops: dict[str, OpCount] = field(default_factory=dict)

    @property
    def total(self) -> OpCount:
        total = OpCount()
        for count in self.ops.values():
            total.add(count)
        return total


Amount = Callable[[StepShape], OpCount]


class StepCounter(Recorder):
    """A recorder that also counts, in steps of any shape. Norms, rope and other ops of one number at a time are not
    counted: they are less than a hundredth of a model's operations."""

    def __init__(self, kv: KVSpec, shape: StepShape) -> None:
        super().__init__(kv)
        self._amounts: list[tuple[str, Amount]] = []  # of every op that counts: its kind, and what it takes
        self._kv, self._shape = kv, shape
        self._kv_bytes = kv.kv_bytes / kv.block_size / max(kv.num_layers, 1)  # of one token in one layer
        self._index_bytes = kv.index_bytes / kv.block_size / max(kv.num_layers, 1)
        self._arenas: dict[int, int] = {}  # bytes, by the tokens of a step
        self.vocab = self.head_inputs = 0
        self.integer_inputs = 0  # of the matrix of integers that has most: they are quantized for it
        self.experts: tuple[PackedExperts, PackedExperts, int] | None = None  # the largest: gate and up, down, top k

    def at(self, shape: StepShape) -> "StepCounter":
        """The same forward pass in steps of another shape: nothing is recorded again."""
        other = copy(self)
        vars(other).pop("count", None)
        other._shape = shape
        return other

    @cached_property
    def count(self) -> StepCount:
        """Of the whole forward pass, once it is recorded."""
        count = StepCount()
        for op, amount in self._amounts:
            count.ops.setdefault(op, OpCount()).add(amount(self._shape))
        return count

    def arena_bytes(self, max_tokens: int) -> int:
        """The bytes of activations on a CPU, for steps of at most `max_tokens`."""
        if max_tokens not in self._arenas:
            _, size = assign_offsets(self.uses, max_tokens, needed_for_logits(self.uses))
            self._arenas[max_tokens] = 4 * size
        return self._arenas[max_tokens]

    def written_arena_bytes(self, max_tokens: int, num_logits: int) -> int:
        """What steps write of it: values that only logits depend on have `num_logits` rows."""
        logits_only = needed_for_logits(self.uses)
        offsets, _ = assign_offsets(self.uses, max_tokens, logits_only)
        written = sorted(
            (offset, offset + storage.columns * (num_logits if storage in logits_only else max_tokens))
            for storage, offset in offsets.items()
        )
        total = end = 0
        for first, last in written:
            total += max(0, last - max(first, end))
            end = max(end, last)
        return 4 * total

    def expert_buffers(self, max_tokens: int) -> tuple[int, ...]:
        """Bytes of inputs, hidden values and outputs of the experts that tokens are routed to."""
        if self.experts is None:
            return (0,)
        gate_up, down, top_k = self.experts
        routes = max_tokens * top_k
        widest = max(gate_up.num_inputs, down.num_inputs)
        inputs = 2 * widest if _is_integer(gate_up) or _is_integer(down) else 4 * widest
        return routes * inputs, 4 * routes * gate_up.num_outputs, 4 * routes * down.num_outputs, 16 * routes

    def _note_inputs(self, w: PackedWeight) -> None:
        if _is_integer(w):
            self.integer_inputs = max(self.integer_inputs, w.num_inputs)

    def _add(self, op: str, amount: Amount) -> None:
        self._amounts.append((op, amount))

    def linear(self, x: RecordedColumns, w: PackedWeight) -> RecordedColumns:
        flops, nbytes = 2.0 * w.num_inputs * w.num_outputs, w.nbytes
        self._add("linear", lambda shape: OpCount(flops * shape.num_tokens, nbytes))
        self._note_inputs(w)
        return super().linear(x, w)

    def linear_heads(self, x: RecordedColumns, w: PackedHeads) -> RecordedColumns:
        flops, nbytes = 2.0 * w.num_heads * w.num_inputs * w.num_outputs, w.nbytes
        self._add("linear", lambda shape: OpCount(flops * shape.num_tokens, nbytes))
        return super().linear_heads(x, w)

    def moe(
        self, x: RecordedColumns, router_logits: RecordedColumns, gate_up: PackedExperts, down: PackedExperts,
        routing: Routing, kind: Activation, correction: Any = None, chosen: RecordedColumns | None = None,
    ) -> RecordedColumns:  # fmt: skip
        flops = 2.0 * routing.top_k * sum(w.num_inputs * w.num_outputs for w in (gate_up, down))
        nbytes, num_experts = gate_up.nbytes + down.nbytes, gate_up.num_experts

        def amount(shape: StepShape) -> OpCount:
            read = expected_experts(num_experts, routing.top_k, shape.num_tokens) / num_experts
            return OpCount(flops * shape.num_tokens, nbytes * read)

        self._add("experts", amount)
        if self.experts is None or gate_up.nbytes > self.experts[0].nbytes:
            self.experts = gate_up, down, routing.top_k
        return super().moe(x, router_logits, gate_up, down, routing, kind, correction, chosen)

    def logits(
        self, x: RecordedColumns, head: PackedWeight, batch: Any, softcap: float = 0.0, vocabulary: Any = None
    ) -> RecordedLogits:
        flops, nbytes = 2.0 * head.num_inputs * head.num_outputs, head.nbytes
        self._add("head", lambda shape: OpCount(flops * shape.num_seqs, nbytes))
        self.vocab, self.head_inputs = head.num_outputs, head.num_inputs
        self._note_inputs(head)
        return super().logits(x, head, batch, softcap, vocabulary)

    def write_kv(self, k: RecordedColumns, v: RecordedColumns, batch: Any, layer: int) -> None:
        self._add("attention", lambda shape: OpCount(kv_bytes=shape.num_tokens * self._kv_bytes))
        super().write_kv(k, v, batch, layer)

    def write_latent(self, latent: RecordedColumns, k_rope: RecordedColumns, batch: Any, layer: int) -> None:
        self._add("attention", lambda shape: OpCount(kv_bytes=shape.num_tokens * self._kv_bytes))
        super().write_latent(latent, k_rope, batch, layer)

    def paged_attention(
        self, q: RecordedColumns, batch: Any, layer: int, head_dim: int, scale: float, window: int = 0, *options: Any,
        **named: Any,
    ) -> RecordedColumns:  # fmt: skip
        columns = q.columns

        def amount(shape: StepShape) -> OpCount:
            flops = 4.0 * columns * shape.num_seqs * shape.attended(window)  # scores, then values
            return OpCount(flops, kv_bytes=shape.num_seqs * shape.read(window) * self._kv_bytes)

        self._add("attention", amount)
        return super().paged_attention(q, batch, layer, head_dim, scale, window, *options, **named)

    def _states(self, layer: int) -> StateSpec:
        """Every recurrence asks for its states: they are read and written once a step."""
        spec = super()._states(layer)
        flops, moved = 6.0 * spec.numbers, 2.0 * 4 * (spec.numbers + spec.conv_numbers)
        self._add("scan", lambda shape: OpCount(flops * shape.num_tokens, kv_bytes=moved * shape.num_seqs))
        return spec

    def mla_attention(
        self, q_latent: RecordedColumns, q_rope: RecordedColumns, batch: Any, layer: int, scale: float,
        chosen: RecordedColumns | None = None,
    ) -> RecordedColumns:  # fmt: skip
        """Sparse attention reads as many positions as a window of that length, elsewhere for each token."""
        window, flops = chosen.columns if chosen else 0, 4.0 * q_latent.columns + 2.0 * q_rope.columns

        def amount(shape: StepShape) -> OpCount:
            read = shape.num_seqs * shape.read(window) * self._kv_bytes
            return OpCount(flops * shape.num_seqs * shape.attended(window), kv_bytes=read)

        self._add("attention", amount)
        return super().mla_attention(q_latent, q_rope, batch, layer, scale, chosen)

    def compressed_attention(
        self, q: RecordedColumns, batch: Any, layer: int, scale: float, window: int, sinks: Any,
        chosen: RecordedColumns | None = None,
    ) -> RecordedColumns:  # fmt: skip
        """Tokens in a window, and entries as if they were in a window of that many."""
        group, columns = self._compressed(layer).group, q.columns
        most = chosen.columns * group if chosen else 0  # positions that the chosen entries are of
        vector_bytes = self._kv.layer_bytes / self._kv.block_size

        def amount(shape: StepShape) -> OpCount:
            pairs, read = float(shape.attended(window)), float(shape.read(window))
            if group:
                pairs, read = pairs + shape.attended(most) / group, read + shape.read(most) / group
            return OpCount(4.0 * columns * shape.num_seqs * pairs, kv_bytes=shape.num_seqs * read * vector_bytes)

        self._add("attention", amount)
        return super().compressed_attention(q, batch, layer, scale, window, sinks, chosen)

    def top_positions(self, q: RecordedColumns, weights: RecordedColumns, batch: Any, layer: int) -> RecordedColumns:
        columns = q.columns

        def amount(shape: StepShape) -> OpCount:
            read = shape.num_seqs * shape.context * self._index_bytes
            return OpCount(2.0 * columns * shape.num_seqs * shape.attended(), kv_bytes=read)

        self._add("attention", amount)
        return super().top_positions(q, weights, batch, layer)

    def cross_attention(
        self, q: RecordedColumns, batch: Any, layer: int, head_dim: int, scale: float, group: int = 0, skipped: int = 0
    ) -> RecordedColumns:
        columns = q.columns

        def amount(shape: StepShape) -> OpCount:
            read = shape.num_seqs * shape.context * self._kv_bytes
            return OpCount(4.0 * columns * shape.num_tokens * shape.context, kv_bytes=read)

        self._add("attention", amount)
        return super().cross_attention(q, batch, layer, head_dim, scale, group, skipped)

    def attention(
        self, q: RecordedColumns, k: RecordedColumns, v: RecordedColumns, batch: Any, head_dim: int, scale: float,
        causal: bool = False, window: int = 0, biases: Any = None,
    ) -> RecordedColumns:  # fmt: skip
        columns = q.columns

        def amount(shape: StepShape) -> OpCount:
            pairs = shape.attended(window) if causal else shape.new_tokens * shape.read(window)
            return OpCount(4.0 * columns * shape.num_seqs * pairs)

        self._add("attention", amount)
        return super().attention(q, k, v, batch, head_dim, scale, causal, window, biases)


_FLOATS = {"F32", "F16", "BF16", "F8_E4M3", "F8_E5M2", "FP8"}


def _is_integer(w: PackedWeight | PackedExperts) -> bool:
    """Whether a CPU multiplies it with quantized inputs."""
    return bool(w.packed - _FLOATS)


def count_step(forward: Callable[[Any, Any], Any], kv: KVSpec, shape: StepShape) -> StepCounter:
    counter = StepCounter(kv, shape)
    forward(counter, SymbolicBatch())
    return counter


def expected_experts(num_experts: int, top_k: int, num_tokens: int) -> float:
    """Experts that a step reads, if tokens choose theirs independently and evenly."""
    return float(num_experts * (1 - (1 - top_k / num_experts) ** num_tokens))
