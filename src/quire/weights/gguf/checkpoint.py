"""A GGUF file as a checkpoint: Hugging Face's names, keys and row order; tensors are views of the mapped file."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from quire.core.errors import BadCheckpoint, Unsupported
from quire.ops.dequantize import dequantize
from quire.ops.tensors import StoredTensor, stored_floats
from quire.weights.config import MAX_SIZES, CheckpointConfig
from quire.weights.gguf.architecture import GGUFArchitecture
from quire.weights.gguf.container import GGUFFile
from quire.weights.gguf.names import (
    LONGROPE_TENSORS,
    TensorName,
    find_architecture,
    longrope,
    translate_config,
    translate_name,
)
from quire.weights.gguf.splits import all_splits
from quire.weights.gguf.tensors import TensorEntry, half_split_order, read_directory, stored_tensor
from quire.weights.mapped_file import chained

EMBEDDING, TOKEN_TYPES = "token_embd.weight", "token_types.weight"
MAX_TENSORS = 1 << 20


class GGUFCheckpoint:
    def __init__(self, path: Path) -> None:
        self.path = path
        self._gguf = GGUFFile(path)
        metadata = CheckpointConfig(path, self._gguf.metadata)
        row = find_architecture(metadata)
        self._files: dict[str, GGUFFile] = {}  # by GGUF tensor name
        splits = all_splits(self._gguf)
        self._mapped = chained(split.file for split in splits)
        entries = self._read_directories(splits)
        row = row.of_file(entries)
        if EMBEDDING not in entries:
            raise BadCheckpoint(f"{path} has no tensor {EMBEDDING!r}")
        values = translate_config(row, metadata, entries)
        values["vocab_size"] = entries[EMBEDDING].num_rows  # the metadata's own count is often missing
        values["type_vocab_size"] = entries[TOKEN_TYPES].num_rows if TOKEN_TYPES in entries else 0
        self.nbytes = sum(entry.nbytes for entry in entries.values())
        factors = {key: entries.pop(name) for key, name in LONGROPE_TENSORS.items() if name in entries}
        if factors:
            lists = {key: dequantize(self._stored(entry)).ravel() for key, entry in factors.items()}
            values["rope_scaling"] = longrope(metadata, {key: numbers.tolist() for key, numbers in lists.items()})
        self.config = CheckpointConfig(path, values)
        self._entries: dict[str, tuple[TensorEntry, TensorName]] = {}  # by the name that Hugging Face has for it
        for entry in entries.values():
            self._add(entry, row)

    def _read_directories(self, splits: Sequence[GGUFFile]) -> dict[str, TensorEntry]:
        entries: dict[str, TensorEntry] = {}
        for split in splits:
            for name, entry in read_directory(split).items():
                if name in entries:
                    raise BadCheckpoint(f"{split.path}: tensor {name!r} is in {self._files[name].path.name}, too")
                entries[name], self._files[name] = entry, split
        return entries

    def _add(self, entry: TensorEntry, row: GGUFArchitecture) -> None:
        """One tensor, or those of all experts that it stacks."""
        translated = translate_name(row, entry.name)
        if translated is None:
            raise Unsupported(f"{self.path}: tensor {entry.name!r} is not one that {row.name} has")
        if "{}" not in translated.name:
            self._entries[translated.name] = (entry, translated)
            return
        if len(entry.shape) < 2 or entry.shape[0] > MAX_SIZES["expert_count"]:
            raise BadCheckpoint(f"{self.path}: tensor {entry.name!r} of shape {[*entry.shape]} does not stack experts")
        if len(self._entries) > MAX_TENSORS:
            raise BadCheckpoint(f"{self.path} has more than {MAX_TENSORS} tensors, those of experts counted one by one")
        for expert in range(entry.shape[0]):
            self._entries[translated.name.format(expert)] = (entry, replace(translated, expert=expert))

    def names(self) -> list[str]:
        return list(self._entries)

    def shape(self, name: str) -> tuple[int, ...]:
        entry, translated = self._find(name)
        if translated.expert is not None:
            return entry.shape[1:]
        return (1, entry.shape[-1]) if translated.one_row else entry.shape

    def tensor(self, name: str) -> StoredTensor:
        entry, translated = self._find(name)
        stored = replace(self._stored(entry), name=name)
        if translated.expert is not None:
            return stored.part(translated.expert, 1).squeezed()
        if translated.offset:
            return stored_floats(name, dequantize(stored).reshape(entry.shape) - np.float32(translated.offset))
        if translated.one_row:
            return replace(stored, shape=(1, entry.shape[-1]))
        if translated.heads_key is None:
            return stored
        order = self._half_split_order(entry, translated.heads_key)
        if len(entry.shape) == 1:  # a bias is small, and is reordered by copying
            itemsize = entry.row_bytes // entry.shape[0]
            return replace(stored, data=stored.data.reshape(-1, itemsize)[order].reshape(1, -1))
        return replace(stored, row_order=order)

    def drop_pages(self) -> None:
        for file in self._mapped:
            file.drop_pages()

    def _stored(self, entry: TensorEntry) -> StoredTensor:
        return stored_tensor(self._files[entry.name], entry)

    def _find(self, name: str) -> tuple[TensorEntry, TensorName]:
        if name not in self._entries:
            raise BadCheckpoint(f"{self.path} has no tensor {name!r}")
        return self._entries[name]

    def _half_split_order(self, entry: TensorEntry, heads_key: str) -> NDArray[np.int32]:
        num_rows = entry.shape[0]
        num_heads = self.config.int(heads_key)
        if "layer_key_heads" in self.config:  # layers differ in their number
            num_heads = num_rows // max(self.config.int("head_dim"), 1)
        order = half_split_order(num_rows, num_heads)
        if order is None:
            raise BadCheckpoint(
                f"{self.path}: tensor {entry.name!r} at offset {entry.offset} has {num_rows} rows, "
                f"which are not {num_heads} heads of an even number of rows"
            )
        return order
