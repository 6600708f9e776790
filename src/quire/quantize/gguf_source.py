"""The tensors that a GGUF output has: those of a GGUF file, or of a checkpoint in Hugging Face's layout, renamed and
reordered as converters do."""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from quire.core.errors import Unsupported
from quire.ops.tensors import StoredTensor, stored_floats
from quire.quantize.floats import Floats, read_floats
from quire.weights.checkpoint import Checkpoint
from quire.weights.config import CheckpointConfig
from quire.weights.gguf.architecture import GGUFArchitecture
from quire.weights.gguf.container import GGUFFile
from quire.weights.gguf.names import TensorName, find_architecture, translate_name
from quire.weights.gguf.splits import all_splits
from quire.weights.gguf.tensors import TensorEntry, half_split_order, read_directory, stored_tensor

FURTHER = "num_nextn_predict_layers"
NOT_CONVERTED = re.compile(r".*rotary_emb\.inv_freq|.*\.attention\.(bias|masked_bias)|.*\.attn\.(bias|masked_bias)")


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """A tensor under its name in GGUF; `published`: the tensors of Hugging Face's layout that it is made of."""

    name: str
    published: tuple[str, ...]
    shape: tuple[int, ...]
    parts: Callable[[], Sequence[StoredTensor]]  # stacked along the rows
    type: str | None = None  # as the file stores it; None: of another layout
    split: int = 0  # the file of the source that it is in

    @property
    def num_rows(self) -> int:
        return int(np.prod(self.shape[:-1]))

    def chunks(self, rows: int) -> Iterator[Floats]:
        """All rows as fp32, at most `rows` at once."""
        for part in self.parts():
            if len(part.shape) == 1 or part.num_rows <= rows:
                yield read_floats(part)
                continue
            flat = replace(part, shape=(part.num_rows, part.num_columns))
            for first in range(0, part.num_rows, rows):
                yield read_floats(flat.part(first, min(rows, part.num_rows - first)))


def of_gguf(path: Path) -> tuple[GGUFFile, list[GGUFTensor]]:
    first = GGUFFile(path)
    row = find_architecture(CheckpointConfig(path, first.metadata))
    tensors = []
    for index, split in enumerate(all_splits(first)):
        for name, entry in read_directory(split).items():
            translated = translate_name(row, name)
            experts = range(entry.shape[0]) if translated and "{}" in translated.name else (0,)
            published = tuple(translated.name.format(expert) for expert in experts) if translated else ()

            def parts(split: GGUFFile = split, entry: TensorEntry = entry) -> list[StoredTensor]:
                return [stored_tensor(split, entry)]

            tensors.append(GGUFTensor(name, published, entry.shape, parts, entry.type.name, index))
    return first, tensors


def of_checkpoint(checkpoint: Checkpoint, row: GGUFArchitecture) -> list[GGUFTensor]:
    """`row`: that of the architecture, in the tables by which GGUF is read."""
    config, stored = checkpoint.config, dict.fromkeys(checkpoint.names())
    tied = config.bool("tie_word_embeddings", False)
    names = _gguf_names(row, config.int("num_hidden_layers") + num_further_layers(checkpoint, row))
    tensors: list[GGUFTensor] = []
    for gguf_name, translated in names:
        experts = _expert_names(translated.name, stored) if "{}" in translated.name else [translated.name]
        if not experts or experts[0] not in stored or (tied and gguf_name == "output.weight"):
            continue
        shape = checkpoint.shape(experts[0])
        if translated.one_row and len(shape) == 2:
            shape = shape[1:]
        shape = (len(experts), *shape) if "{}" in translated.name else shape
        parts = _parts(checkpoint, translated, experts)
        tensors.append(GGUFTensor(gguf_name, tuple(experts), shape, parts))
    taken = {name for tensor in tensors for name in tensor.published} | ({"lm_head.weight"} if tied else set())
    if left := [name for name in stored if name not in taken and not NOT_CONVERTED.fullmatch(name)]:
        raise Unsupported(
            f"{checkpoint.path}: {len(left)} tensors have no name in GGUF, such as {left[0]!r}",
            "choose a format of Hugging Face's layout",
        )
    return sorted(tensors, key=_in_order)


def num_further_layers(checkpoint: Checkpoint, row: GGUFArchitecture) -> int:
    """How many layers behind the last, which predict further tokens, the checkpoint has beside the others."""
    if FURTHER not in row.keys:
        return 0
    config = checkpoint.config
    layers = config.int("num_hidden_layers")
    prefixes = [f"{row.layers}.{layers + index}." for index in range(config.int(FURTHER, 0))]
    return sum(any(name.startswith(prefix) for name in checkpoint.names()) for prefix in prefixes)


def _gguf_names(row: GGUFArchitecture, layers: int) -> list[tuple[str, TensorName]]:
    candidates = [*row.tensors]
    candidates += [
        f"blk.{layer}.{part}.{kind}"
        for layer in range(layers)
        for part in row.layer_tensors
        for kind in ("weight", "bias")
    ]
    return [(name, translated) for name in candidates if (translated := translate_name(row, name)) is not None]


def _expert_names(pattern: str, stored: dict[str, None]) -> list[str]:
    names: list[str] = []
    while (name := pattern.format(len(names))) in stored:
        names.append(name)
    return names


def _parts(
    checkpoint: Checkpoint, translated: TensorName, published: Sequence[str]
) -> Callable[[], Sequence[StoredTensor]]:
    def parts() -> Sequence[StoredTensor]:
        return [_converted(checkpoint, translated, checkpoint.tensor(name)) for name in published]

    return parts


def _converted(checkpoint: Checkpoint, translated: TensorName, tensor: StoredTensor) -> StoredTensor:
    """With rows interleaved and offsets added, as the reader expects to undo."""
    if translated.offset:
        values = read_floats(tensor).reshape(tensor.shape) + np.float32(translated.offset)
        return stored_floats(tensor.name, values)
    if translated.one_row and len(tensor.shape) == 2:
        return tensor.squeezed()
    if translated.heads_key is None:
        return tensor
    heads = checkpoint.config.int(translated.heads_key, checkpoint.config.int("num_attention_heads"))
    order = half_split_order(tensor.shape[0], heads)
    if order is None:
        raise Unsupported(f"tensor {tensor.name!r} of {tensor.shape[0]} rows is not {heads} heads")
    return tensor.ordered(np.argsort(order).astype(np.int32))


def _in_order(tensor: GGUFTensor) -> tuple[int, int]:
    """The table and the head, then layer by layer."""
    match = re.match(r"blk\.(\d+)\.", tensor.name)
    return (1, int(match[1])) if match else (0, 0)
