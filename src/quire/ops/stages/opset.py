"""StageOps: a backend's op set, with the weights and the KV cache of one stage."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from quire.ops.kv_spec import KVCache, KVSpec
from quire.ops.opset import HiddenStates, Keep, LoraSlots, Program, ProgramSpec
from quire.ops.part_cache import PartCache
from quire.ops.ranks.lora import bind_slots
from quire.ops.ranks.opset import RankOps
from quire.ops.stages.forward import BindingOps, StageForward
from quire.ops.stages.parts import StagePart
from quire.ops.stages.trace import PRESENT, absent_experts, absent_heads, absent_weight
from quire.ops.tensors import LoraDelta, PackedExperts, PackedHeads, PackedWeight, StoredTensor


class StageOps:
    """Weights are numbered in the order in which they are packed, as in the trace that the part comes from."""

    part: StagePart

    def __init__(self, ops: Any) -> None:
        self.backend = ops
        self.received: HiddenStates | None = None  # what `compile` lets the program read; of the first stage: None

    def begin(self, part: StagePart) -> None:
        """The weights of a model that is divided so come next."""
        self.part = part
        self._num_weights = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.backend, name)

    def _is_own(self) -> bool:
        """Whether the next weight belongs to this stage."""
        self._num_weights += 1
        return self._num_weights - 1 in self.part.weights

    def pack(
        self, parts: Sequence[StoredTensor], bias: Sequence[StoredTensor] | None = None, keep: Keep = Keep.NOTHING
    ) -> PackedWeight:
        packed: PackedWeight = self.backend.pack(parts, bias, keep) if self._is_own() else absent_weight(parts)
        return packed

    def pack_experts(
        self, experts: Sequence[Sequence[StoredTensor]], biases: Sequence[Sequence[StoredTensor]] | None = None
    ) -> PackedExperts:
        own = self._is_own()
        packed: PackedExperts = self.backend.pack_experts(experts, biases) if own else absent_experts(experts)
        return packed

    def pack_heads(self, heads: Sequence[StoredTensor]) -> PackedHeads:
        packed: PackedHeads = self.backend.pack_heads(heads) if self._is_own() else absent_heads(heads)
        return packed

    def table(self, tensor: StoredTensor) -> Any:
        """Of another stage, too, it is something: models leave out what is None, and every stage counts the same."""
        return self.backend.table(tensor) if self._is_own() else PRESENT

    def new_slots(self, num_inputs: int, sizes: Sequence[int], num_slots: int, max_rank: int) -> "StageSlots":
        return StageSlots(lambda: self.backend.new_slots(num_inputs, sizes, num_slots, max_rank))

    def bind_slots(
        self, forward: "Callable[[Any, Any], Any]", slots: Mapping[PackedWeight, "StageSlots"], batch: Any
    ) -> None:
        """Let this stage's layers have their slots, where no forward pass may run before adapters are loaded.
        `forward`: with adapters. `batch`: a symbolic one."""
        forward(StageForward(BindingOps(), self.part, batch), batch)
        bind_slots({w: one.own for w, one in slots.items() if one.own is not None})

    def own_spec(self, spec: KVSpec) -> KVSpec:
        """Of this process's part of a cache. `spec`: of all layers."""
        own = self.part.own_spec(spec)
        return self.backend.own_spec(own) if isinstance(self.backend, RankOps) else own

    def new_cache(self, spec: KVSpec, num_blocks: int, num_host_blocks: int = 0) -> "StageCache":
        """`spec`: of all layers."""
        return StageCache(spec, self.backend.new_cache(self.part.own_spec(spec), num_blocks, num_host_blocks))

    def compile(self, forward: "Callable[[Any, Any], Any]", cache: KVCache, spec: ProgramSpec) -> Program:
        assert isinstance(cache, StageCache), "the cache was made by another op set"
        assert spec.hidden is None and not spec.sources, "a model in stages has no head that drafts, and no encoder"
        spec = replace(spec, hidden=self.received)
        program: Program = self.backend.compile(self._own_part(forward), cache.own, spec)
        return program

    def _own_part(self, forward: "Callable[[Any, Any], Any]") -> "Callable[[Any, Any], Any]":
        return lambda ops, batch: forward(StageForward(ops, self.part, batch), batch)

    def room(self, forward: "Callable[[Any, Any], Any]", spec: KVSpec, max_tokens: int, sources: bool = False) -> int:
        """Bytes that the device has for this stage's part of the KV cache. `spec`: of all layers."""
        given = self._own_part(forward), self.part.own_spec(spec), max_tokens, sources
        return int(self.backend.room(*given, hidden=self.received))


class StageCache(PartCache):
    """This stage's layers of every block and window page, and of every state, if it has any with states."""

    def __init__(self, spec: KVSpec, own: Any) -> None:
        super().__init__(spec, own)
        if own.spec.states is None:
            self.copy_states = self.swap_states_out = self.swap_states_in = lambda pairs: None


class StageSlots:
    """LoRA adapters of one linear layer. The forward pass tells whether the layer is this stage's: `bind`, before
    adapters are packed."""

    def __init__(self, new_slots: Callable[[], LoraSlots]) -> None:
        self._new_slots = new_slots
        self.own: LoraSlots | None = None  # of another stage: None

    def bind(self) -> LoraSlots:
        self.own = self.own or self._new_slots()
        return self.own

    def pack(self, parts: Sequence[LoraDelta | None]) -> Any:
        return self.own.pack(parts) if self.own else None

    def put(self, slot: int, packed: Any) -> None:
        if self.own:
            self.own.put(slot, packed)
