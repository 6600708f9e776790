"""A LoRA adapter in a GGUF file of llama.cpp: NAME.lora_a and NAME.lora_b for each adapted tensor, and alpha.

Converters permute the rows of B as they do those of the model."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from quire.core.errors import BadCheckpoint, Unsupported
from quire.ops.tensors import LoraDelta, StoredTensor
from quire.weights.config import CheckpointConfig
from quire.weights.gguf.architecture import GGUFArchitecture
from quire.weights.gguf.container import GGUFFile
from quire.weights.gguf.names import find_architecture, translate_name
from quire.weights.gguf.tensors import half_split_order, read_directory, stored_tensor
from quire.weights.peft import listed


def read_gguf_adapter(path: Path, heads: Mapping[str, int]) -> dict[str, LoraDelta]:
    """Linear layer -> its low-rank update, by the names of the published model. `heads`: head counts of the model, by
    the keys of its configuration."""
    gguf = GGUFFile(path)
    metadata = CheckpointConfig(path, gguf.metadata)
    metadata.expect("general.type", "adapter")
    metadata.expect("adapter.type", "lora")
    metadata.expect("adapter.alora.invocation_tokens", None)
    row = find_architecture(metadata)
    if row.constants.get("qkv_ungrouped"):
        raise Unsupported(f"{path} is an adapter of `{row.name}` in GGUF", "use the one that PEFT has saved")
    tensors = {name: stored_tensor(gguf, entry) for name, entry in read_directory(gguf).items()}
    names = {name.rpartition(".")[0] for name in tensors}
    if others := [name for name in tensors if not name.endswith((".weight.lora_a", ".weight.lora_b"))]:
        raise Unsupported(f"{path} has tensors beside lora_a and lora_b of linear layers: {listed(others)}")
    if alone := [name for name in names if not {f"{name}.lora_a", f"{name}.lora_b"} <= tensors.keys()]:
        raise BadCheckpoint(f"{path} has only one of lora_a and lora_b for {listed(alone)}")
    updates = {}
    alpha = metadata.float("adapter.lora.alpha", 0.0)
    for name in names:
        layer, b = _published(path, row, name, tensors[f"{name}.lora_b"], heads)
        a = tensors[f"{name}.lora_a"]
        if len(a.shape) != 2 or len(b.shape) != 2 or b.shape[1] != a.shape[0]:
            raise BadCheckpoint(f"{path}: {name}.lora_a is {[*a.shape]} and lora_b {[*b.shape]}")
        updates[layer] = LoraDelta(a, b, alpha / a.shape[0] if alpha else 1.0)
    return updates


def _published(
    path: Path, row: GGUFArchitecture, name: str, b: StoredTensor, heads: Mapping[str, int]
) -> tuple[str, StoredTensor]:
    """The layer's name and its B as in the published model."""
    translated = translate_name(row, name)
    if translated is None or "{}" in translated.name:
        raise Unsupported(f"{path}: {name} of `{row.name}` cannot be adapted")
    if translated.heads_key is not None:
        order = half_split_order(len(b.data), heads[translated.heads_key])
        if order is None:
            raise BadCheckpoint(f"{path}: {name}.lora_b has {len(b.data)} rows", "the adapter belongs to another model")
        b = replace(b, row_order=order)
    return translated.name.removesuffix(".weight"), b
