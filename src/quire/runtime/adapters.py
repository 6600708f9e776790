"""LoRA: what adapters add to the linear layers of a model, in slots that steps choose from.

Every family's forward pass serves: `AdaptedOps` wraps the op set and follows each linear layer by what the adapters of
the batch's rows add to it."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

from quire.core.errors import BadRequest, Unsupported
from quire.models.loading import LoadedModel
from quire.ops.opset import LoraSlots, OpSet, Value
from quire.ops.tensors import LinearLayer, LoraDelta, PackedWeight
from quire.weights.gguf.adapter import read_gguf_adapter
from quire.weights.peft import listed, read_adapter

Slots = Mapping[PackedWeight, LoraSlots]

# Prefixes of a decoder's list of layers, as published or wrapped. A vision tower has layers, too.
WRAPPERS = {"model", "language_model", "text_model", "transformer", "gpt_neox", "decoder"}

_NUMBERED = re.compile(r"(?P<outside>(?:[^.]+\.)*?)(?P<inside>[^.]+\.\d+\..+)")


@dataclass(frozen=True, slots=True)
class LoadedAdapter:
    """An adapter, as the slots of each linear layer take it."""

    packed: Mapping[PackedWeight, Any]
    digest: str  # of its numbers: what is computed with equal ones is equal


class AdaptedOps:
    """An op set, except that linear layers are adapted."""

    def __init__(self, ops: Any, slots: Slots, batch: Any) -> None:
        self._ops, self._slots, self._batch = ops, slots, batch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ops, name)

    def linear(self, x: Value, w: PackedWeight) -> Value:
        y = self._ops.linear(x, w)
        return self._ops.adapt(y, x, self._slots[w], self._batch) if w in self._slots else y


class LoraAdapters:
    """The adapters of one model. `load` may be called in any thread, the other methods between steps."""

    def __init__(self, ops: OpSet, model: LoadedModel, num_slots: int, max_rank: int) -> None:
        self._max_rank = max_rank
        self._layers: dict[str, list[tuple[PackedWeight, int]]] = {}  # by name: matrices, and which part
        self.slots: dict[PackedWeight, LoraSlots] = {}
        for w in model.linears:
            sizes = [layer.num_outputs for layer in w.layers]
            self.slots[w] = ops.new_slots(w.num_inputs, sizes, num_slots, max_rank)
            for part, layer in enumerate(w.layers):
                self._layers.setdefault(_inside(layer.name), []).append((w, part))
        self._held: dict[str, LoadedAdapter] = {}
        self._forward = model.forward
        self._heads = {"num_attention_heads": model.config.heads, "num_key_value_heads": model.config.kv_heads}

    def forward(self, ops: OpSet, batch: Any) -> Value:
        """The model's forward pass, with adapters."""
        return self._forward(AdaptedOps(ops, self.slots, batch), batch)

    def load(self, path: Path) -> LoadedAdapter:
        """Read an adapter and pack it for its slots. Raises if it does not fit this model."""
        tensors = read_gguf_adapter(path, self._heads) if path.is_file() else read_adapter(path)
        if unknown := [name for name in tensors if _inside(name) not in self._layers]:
            known = sorted({name.rsplit(".", 1)[1] for name in self._layers})
            raise Unsupported(
                f"{path} adapts what this model does not have as linear layers: {listed(unknown)}",
                f"those that can be adapted are {', '.join(known)}",
            )
        if len({_inside(name) for name in tensors}) < len(tensors):
            raise Unsupported(f"{path} adapts a layer under two names", f"it has {listed(list(tensors))}")
        if high := [f"{name} ({added.rank})" for name, added in tensors.items() if added.rank > self._max_rank]:
            raise BadRequest(
                f"{path} has ranks above max_lora_rank, which is {self._max_rank}: {listed(high)}",
                f"let max_lora_rank be {max(added.rank for added in tensors.values())}",
                param="max_lora_rank",
            )
        parts: dict[PackedWeight, list[LoraDelta | None]] = {}
        for name, added in tensors.items():
            for w, part in self._layers[_inside(name)]:
                parts.setdefault(w, [None] * len(w.layers))[part] = _fitting(path, added, w, w.layers[part])
        return LoadedAdapter({w: self.slots[w].pack(each) for w, each in parts.items()}, _digest(tensors))

    def add(self, key: str, loaded: LoadedAdapter) -> None:
        self._held[key] = loaded

    def remove(self, key: str) -> None:
        """A slot it is in stays as it is until another takes it."""
        del self._held[key]

    def put(self, slot: int, key: str) -> None:
        loaded = self._held[key]
        for w, slots in self.slots.items():
            slots.put(slot, loaded.packed.get(w))


def _digest(tensors: Mapping[str, LoraDelta]) -> str:
    digest = blake2b(digest_size=16)
    for name, added in sorted(tensors.items()):
        digest.update(f"{name} {added.scale!r} {added.a.type} {added.a.shape} {added.b.type} {added.b.shape}".encode())
        digest.update(added.a.data.tobytes())
        digest.update(added.b.data.tobytes())
    return digest.hexdigest()


def _inside(name: str) -> str:
    """A layer's name within its list of layers: prefixes differ with how the model is wrapped."""
    match = _NUMBERED.fullmatch(name)
    if match is None or not set(match["outside"].split(".")[:-1]) <= WRAPPERS:
        return name
    return match["inside"]


def _fitting(path: Path, added: LoraDelta, w: PackedWeight, layer: LinearLayer) -> LoraDelta:
    """With its outputs in the order of the packed matrix."""
    for tensor, axis, size in ((added.a, 1, w.num_inputs), (added.b, 0, layer.num_stored)):
        if tensor.shape[axis] != size:
            raise Unsupported(
                f"{path}: tensor {tensor.name!r} is {[*tensor.shape]}, and {layer.name} is "
                f"{[layer.num_stored, w.num_inputs]}",
                "the adapter belongs to another model",
            )
    return added if layer.order is None else replace(added, b=added.b.ordered(layer.order))
