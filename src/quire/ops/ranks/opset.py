"""RankOps: a backend's op set, with this rank's part of every weight."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate, pairwise
from typing import Any, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from quire.core.errors import BadRequest
from quire.ops.kv_spec import KVCache, KVSpec, StateSpec
from quire.ops.opset import Float32, HiddenStates, Keep, Program, ProgramSpec, Sampler
from quire.ops.part_cache import PartCache
from quire.ops.ranks.cuts import Cut, RankIndex
from quire.ops.ranks.forward import RankExperts, RankForward, RankHeads, RankTable, RankWeight
from quire.ops.ranks.lora import RankSlots
from quire.ops.ranks.roles import Outputs, Roles
from quire.ops.tensors import PackedExperts, PackedHeads, PackedWeight, StoredTensor
from quire.ops.timer import Timer

Packed = TypeVar("Packed")


class RankOps:
    """Weights are numbered in the order in which they are packed, as in the trace that `roles` come from."""

    def __init__(self, ops: Any, index: RankIndex, expert_parallel: bool = False) -> None:
        """`ops`: of a backend that gathers among the ranks of its group. `expert_parallel`: a rank has whole experts,
        and not a part of each."""
        self.backend, self.index, self.expert_parallel = ops, index, expert_parallel
        self._roles = Roles()
        self._num_matrices = self._num_experts = self._num_tables = 0

    def for_model(self, roles: Roles) -> Self:
        """A copy of this op set for the weights, caches and programs of a model that has these roles."""
        ops = object.__new__(type(self))
        ops.__dict__.update(self.__dict__)
        ops._roles = roles
        ops._num_matrices = ops._num_experts = ops._num_tables = 0
        return ops

    def __getattr__(self, name: str) -> Any:
        return getattr(self.backend, name)

    def pack(
        self, parts: Sequence[StoredTensor], bias: Sequence[StoredTensor] | None = None, keep: Keep = Keep.NOTHING
    ) -> PackedWeight:
        outputs = self._roles.matrices[self._num_matrices]
        self._num_matrices += 1
        assert outputs.num_outputs == sum(part.num_rows for part in parts), f"{parts[0].name}: another one was traced"
        cuts = outputs.cuts(self.index)
        if all(cut.is_whole for cut in cuts) or self._separates_types(parts, outputs):
            return _as(RankWeight, self.backend.pack(parts, bias, keep))
        ranges = _ranges(cuts)
        own_bias = None if bias is None else _own_rows(bias, ranges)
        return _as(RankWeight, self.backend.pack(_own_rows(parts, ranges), own_bias, keep), cuts=cuts)

    def _separates_types(self, parts: Sequence[StoredTensor], outputs: Outputs) -> bool:
        """Whether a rank would have parts of some storage types only: matmuls that ranks prepare together are alike."""
        if len({(part.type.name, part.threshold) for part in parts}) == 1:
            return False
        size = self.index.size
        ranks = [_ranges(outputs.cuts(replace(self.index, rank=rank))) for rank in range(size)]
        return any(len({part.name for part in _own_rows(parts, ranges)}) < len(parts) for ranges in ranks)

    def pack_experts(
        self, experts: Sequence[Sequence[StoredTensor]], biases: Sequence[Sequence[StoredTensor]] | None = None
    ) -> PackedExperts:
        number, is_gate = self._num_experts, self._num_experts in self._roles.gates
        self._num_experts += 1
        if self.expert_parallel:
            return self._pack_own_experts(experts, biases)
        outputs = sum(part.num_rows for part in experts[0])
        cut = self.index.even(outputs // 2 if is_gate else outputs)
        if cut.is_whole or number in self._roles.undivided:
            return _as(RankExperts, self.backend.pack_experts(experts, biases))
        ranges = _ranges((cut, cut) if is_gate else (cut,))
        own = [_own_rows(parts, ranges) for parts in experts]
        own_biases = None if biases is None else [_own_rows(parts, ranges) for parts in biases]
        return _as(RankExperts, self.backend.pack_experts(own, own_biases), cut=cut)

    def _pack_own_experts(
        self, experts: Sequence[Sequence[StoredTensor]], biases: Sequence[Sequence[StoredTensor]] | None
    ) -> PackedExperts:
        cut = self.index.experts(len(experts))
        if len(experts) < self.index.size:
            raise BadRequest(
                f"enable_expert_parallel, and {len(experts)} experts for {self.index.size} ranks",
                f"use a tensor_parallel_size of 1 to {len(experts)}, or leave out enable_expert_parallel",
                param="enable_expert_parallel",
            )
        own = slice(cut.first, cut.first + cut.count)
        packed = self.backend.pack_experts(experts[own], biases and biases[own])
        return _as(RankExperts, packed, experts=cut)

    def pack_heads(self, heads: Sequence[StoredTensor]) -> PackedHeads:
        if self.index.size > len(heads):  # groups of heads, of which there may be few
            raise BadRequest(
                f"tensor_parallel_size is {self.index.size}, and the model's heads are in {len(heads)} groups, which "
                "stay whole",
                f"use 1 to {len(heads)}",
                param="tensor_parallel_size",
            )
        cut = self.index.heads(len(heads), len(heads), len(heads))
        packed = self.backend.pack_heads(heads[cut.first : cut.first + cut.count])
        return _as(RankHeads, packed, total_heads=len(heads))

    def table(self, tensor: StoredTensor) -> RankTable:
        of_ids = self._roles.tables[self._num_tables]
        self._num_tables += 1
        cut = self.index.even(tensor.shape[0])
        if not of_ids or cut.is_whole or not getattr(self.backend, "divides_tables", True):
            return RankTable(self.backend.table(tensor))
        return RankTable(self.backend.table(tensor.part(cut.first, cut.count)), cut)

    def new_slots(self, num_inputs: int, sizes: Sequence[int], num_slots: int, max_rank: int) -> RankSlots:
        return RankSlots(lambda own: self.backend.new_slots(num_inputs, own, num_slots, max_rank), sizes)

    def vector(self, tensor: StoredTensor) -> Any:
        return self.backend.vector(tensor)

    def conv_weight(self, tensor: StoredTensor) -> Any:
        cut = self.index.even(tensor.shape[0])
        return self.backend.conv_weight(tensor.part(cut.first, cut.count))

    def biases(self, table: Float32) -> Any:
        return self.backend.biases(table)

    def new_cache(self, spec: KVSpec, num_blocks: int, num_host_blocks: int = 0) -> "RankCache":
        """`spec`: of all ranks."""
        return RankCache(spec, self.backend.new_cache(self.own_spec(spec), num_blocks, num_host_blocks))

    def own_spec(self, spec: KVSpec, index: RankIndex | None = None) -> KVSpec:
        """The spec of a rank's part of a cache: of this one's, if none is named. A latent cache is the same on every
        rank."""
        index = index or self.index
        heads, own = self._roles.group * spec.num_kv_heads, spec
        if spec.num_layers:
            own = replace(own, num_kv_heads=index.kv_heads(spec.num_kv_heads, heads, spec.num_kv_heads).count)
        if spec.states is not None:
            own = replace(own, states=self._own_states(spec.states, index))
        if spec.conv is not None:
            own = replace(own, conv=replace(spec.conv, channels=index.even(spec.conv.channels).count))
        return own

    def _own_states(self, states: StateSpec, index: RankIndex) -> StateSpec:
        """This rank's part of states: some heads, or channels where a state has no heads (Mamba)."""
        *rows, columns = shape = states.shape
        if len(states.shape) == 1:
            pass  # of convolutions alone
        elif len(states.shape) == 2:
            shape = (*rows, index.even(columns).count)
        else:
            shape = (index.state_heads(rows[0], self._roles.state_groups).count, *rows[1:], columns)
        channels = sum(index.even(columns).count for _, columns in self._roles.convs)
        return replace(states, shape=shape, conv_channels=channels)

    def share_host_blocks(self, cache: "RankCache", num_host_blocks: int) -> "list[HostPart]":
        """Let the host blocks and host slots of all ranks lie in memory that they have in common. -> those of each;
        none where the device has pinned memory of its own for them"""
        if not hasattr(cache.own, "move_host"):
            return []
        size = self.index.size
        specs = [self.own_spec(cache.spec, replace(self.index, rank=rank)) for rank in range(size)]
        sizes = [num_host_blocks * spec.host_block_bytes + _slot_bytes(spec) for spec in specs]
        bounds = list(accumulate(sizes, initial=0))
        memory = self.backend.group.allocate(max(bounds[-1], 1))
        parts = [memory[first:end] for first, end in pairwise(bounds)]
        cache.own.move_host(parts[self.index.rank])
        return [HostPart.of(part, spec, num_host_blocks) for part, spec in zip(parts, specs, strict=True)]

    def new_sampler(self, num_rows: int, vocab_size: int) -> Sampler:
        sampler: Sampler = self.backend.new_sampler(num_rows, vocab_size)
        return sampler

    def new_timer(self) -> Timer:
        timer: Timer = self.backend.new_timer()
        return timer

    def compile(self, forward: "Callable[[Any, Any], Any]", cache: KVCache, spec: ProgramSpec) -> Program:
        assert isinstance(cache, RankCache), "the cache was made by another op set"
        program: Program = self.backend.compile(self._own_part(forward, cache.spec), cache.own, spec)
        return program

    def _own_part(self, forward: "Callable[[Any, Any], Any]", spec: KVSpec) -> "Callable[[Any, Any], Any]":
        group = self._roles.group
        return lambda ops, batch: forward(RankForward(ops, self.index, spec, group), batch)

    def room(
        self,
        forward: "Callable[[Any, Any], Any]",
        spec: KVSpec,
        max_tokens: int,
        sources: bool = False,
        hidden: HiddenStates | None = None,
    ) -> int:
        """Bytes that this rank's device has for its part of the KV cache. `spec`: of all ranks."""
        given = self._own_part(forward, spec), self.own_spec(spec), max_tokens, sources
        return int(self.backend.room(*given, hidden=hidden))


@dataclass(frozen=True, slots=True)
class HostPart:
    """One rank's part of host blocks [blocks, bytes], of their window pages [blocks, bytes] and of host slots [slots,
    bytes]."""

    blocks: NDArray[np.uint8]
    pages: NDArray[np.uint8]
    slots: NDArray[np.uint8]

    @classmethod
    def of(cls, memory: NDArray[np.uint8], spec: KVSpec, num_blocks: int) -> Self:
        """Blocks lie before slots."""
        end = num_blocks * spec.host_block_bytes
        num_slots, slot_bytes = (spec.states.num_host_slots, spec.states.host_slot_bytes) if spec.states else (0, 0)
        whole, slots = memory[:end].reshape(num_blocks, spec.host_block_bytes), memory[end:]
        blocks, pages = np.split(whole, [spec.block_bytes], axis=1)
        return cls(blocks, pages, slots.reshape(num_slots, slot_bytes))


def _slot_bytes(spec: KVSpec) -> int:
    """The bytes of all host slots."""
    return spec.states.num_host_slots * spec.states.host_slot_bytes if spec.states else 0


class RankCache(PartCache):
    """This rank's KV heads of every block and window page, and its heads of every state."""


def _as(kind: type[Packed], packed: Any, **more: Any) -> Packed:
    return kind(**{field.name: getattr(packed, field.name) for field in fields(packed)}, **more)


def _ranges(cuts: Sequence[Cut]) -> list[tuple[int, int]]:
    """(first, end) of this rank's rows, in a matrix whose fields are cut so."""
    starts = [0, *accumulate(cut.total for cut in cuts)]
    return [(start + cut.first, start + cut.first + cut.count) for start, cut in zip(starts, cuts, strict=False)]


def _own_rows(parts: Sequence[StoredTensor], ranges: Sequence[tuple[int, int]]) -> list[StoredTensor]:
    """The rows in `ranges` of tensors that are stacked. Others are not read."""
    own, start = [], 0
    for part in parts:
        size = part.shape[0]
        for first, end in ranges:
            low, high = max(first - start, 0), min(end - start, size)
            if low < high:
                own.append(part.part(low, high - low))
        start += size
    return own
