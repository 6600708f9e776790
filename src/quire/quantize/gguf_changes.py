"""Changes to a model on its way into a GGUF file: keys with another value, and layers that are left out."""

import re
import struct
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from quire.quantize.gguf_files import encoded
from quire.quantize.gguf_source import GGUFTensor
from quire.quantize.plan import QuantizeError
from quire.weights.gguf.container import ARRAY, BOOL, SCALARS, STRING

LAYER = re.compile(r"blk\.(\d+)\.(.+)")
ARRAY_HEADER = "<IIQ"  # an array's type, that of its items, and how many there are


def overridden(
    keys: Mapping[str, bytes], overrides: Sequence[tuple[str, bool | int | float | str]]
) -> dict[str, bytes]:
    """The keys that change, each with its type and value. One that is there keeps its type."""
    changed = {}
    for key, value in overrides:
        kind = struct.unpack_from("<I", keys[key])[0] if key in keys else None
        if kind == ARRAY:
            raise QuantizeError(f"--override-kv {key}: it is an array in the model", "scalar keys can be changed")
        is_other = isinstance(value, str) != (kind == STRING) or isinstance(value, bool) != (kind == BOOL)
        if kind is not None and is_other:
            raise QuantizeError(
                f"--override-kv {key}: {value!r} is not of the type that it has in the model", f"give {_kind(kind)}"
            )
        try:
            changed[key] = encoded(value) if kind in (None, STRING) else _scalar(int(kind), value)
        except (struct.error, OverflowError) as error:
            raise QuantizeError(f"--override-kv {key}: {value!r} does not fit its type", str(error)) from error
    return changed


def _scalar(kind: int, value: bool | int | float | str) -> bytes:
    assert not isinstance(value, str)
    if kind == BOOL:
        return struct.pack("<IB", BOOL, value)
    code = SCALARS[kind]
    return struct.pack(f"<I{code}", kind, float(value) if code in "fd" else int(value))


def _kind(kind: int) -> str:
    names = {STRING: "str", BOOL: "bool"}
    return f"{names.get(kind, 'float' if SCALARS.get(kind, '') in ('f', 'd') else 'int')}:VALUE"


def without_layers(
    tensors: Sequence[GGUFTensor], keys: dict[str, bytes], num_layers: int, pruned: Collection[int]
) -> list[GGUFTensor]:
    """The other layers are numbered anew, and `keys` have their count. Behind `num_layers` layers may lie some that
    predict further tokens: they stay."""
    if wrong := [layer for layer in pruned if layer >= num_layers]:
        raise QuantizeError(
            f"--prune-layers names layer {wrong[0]}, and there are 0 to {num_layers - 1}", "leave it out"
        )
    kept = [layer for layer in range(num_layers) if layer not in pruned]
    if not kept:
        raise QuantizeError(f"--prune-layers names all {num_layers} layers", "leave some")
    stored = {int(match[1]) for tensor in tensors if (match := LAYER.fullmatch(tensor.name))}
    kept += sorted(layer for layer in stored if layer >= num_layers)
    total = len(kept) + len(set(pruned))
    by_layer = [key for key, value in keys.items() if _array_length(value) == total and "tokenizer" not in key]
    if by_layer:
        raise QuantizeError(
            f"{by_layer[0]} has a value for each of {total} layers: layers cannot be left out", "keep all layers"
        )
    for key in keys:
        if key.endswith(".block_count"):
            keys[key] = encoded(len(kept))
    numbers = {layer: number for number, layer in enumerate(kept)}
    left = []
    for tensor in tensors:
        match = LAYER.fullmatch(tensor.name)
        if match is None:
            left.append(tensor)
        elif int(match[1]) in numbers:
            left.append(replace(tensor, name=f"blk.{numbers[int(match[1])]}.{match[2]}"))
    return left


def _array_length(value: bytes) -> int:
    if struct.unpack_from("<I", value)[0] != ARRAY:
        return 0
    length: int = struct.unpack_from(ARRAY_HEADER, value)[2]
    return length
