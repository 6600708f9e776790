"""The layout of safetensors files: in one, or in shards that an index lists."""

import json
from collections.abc import Sequence
from math import prod

from quire.quantize.output import FileLayout, PlannedTensor
from quire.weights.safetensors import ITEM_BITS

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
MAX_SHARD_BYTES = 5 * 10**9  # as transformers cuts


def planned(name: str, dtype: str, *shape: int) -> PlannedTensor:
    return PlannedTensor(name, dtype, shape, prod(shape) * ITEM_BITS[dtype] // 8)


def safetensors_layouts(
    tensors: Sequence[PlannedTensor], max_bytes: int = MAX_SHARD_BYTES
) -> tuple[list[FileLayout], dict[str, bytes]]:
    """The files, and an index where there are several."""
    shards: list[list[PlannedTensor]] = [[]]
    size = 0
    for tensor in tensors:
        if shards[-1] and size + tensor.nbytes > max_bytes:
            shards.append([])
            size = 0
        shards[-1].append(tensor)
        size += tensor.nbytes
    if len(shards) == 1:
        return [_layout(SINGLE, shards[0])], {}
    layouts = [
        _layout(f"model-{index:05}-of-{len(shards):05}.safetensors", shard) for index, shard in enumerate(shards, 1)
    ]
    index = {
        "metadata": {"total_size": sum(tensor.nbytes for tensor in tensors)},
        "weight_map": {name: layout.name for layout in layouts for name in layout.places},
    }
    return layouts, {INDEX: json.dumps(index, indent=2).encode()}


def _layout(name: str, tensors: Sequence[PlannedTensor]) -> FileLayout:
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    places, offset = {}, 0
    # Wide types first: every tensor is then aligned to its items, as safetensors' own writer has it.
    for tensor in sorted(tensors, key=lambda tensor: -ITEM_BITS[tensor.type]):
        end = offset + tensor.nbytes
        entries[tensor.name] = {"dtype": tensor.type, "shape": [*tensor.shape], "data_offsets": [offset, end]}
        places[tensor.name] = (offset, tensor.nbytes)
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    moved = {name: (len(header) + first, size) for name, (first, size) in places.items()}
    return FileLayout(name, header, moved, len(header) + offset)
