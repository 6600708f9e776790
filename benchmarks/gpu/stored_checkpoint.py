"""Random weights in the types that files have: Q4_K_M as llama.cpp mixes it, or the MXFP4 of gpt-oss's experts.

What `load_format="dummy"` gives is floats. Here matrices in blocks are 64 random rows over and over."""

from functools import cache
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire.executors.local import LocalExecutor
from quire.ops.tensors import BF16, StorageType, StoredTensor
from quire.planning.formats import find_format
from quire.planning.shape_checkpoint import ShapeCheckpoint
from quire.planning.stored_types import config_format
from quire.quantize.gguf_types import ENCODERS
from quire.weights.checkpoint import Checkpoint
from quire.weights.dummy_checkpoint import STANDARD_DEVIATION
from quire.weights.huggingface import read_config

ROWS = 64  # that differ


class StoredExecutor(LocalExecutor):
    stored: str | None = None  # as `quire plan --format` has it; None: what config.json's quantization_config says

    def _open(self) -> Checkpoint:
        config = read_config(Path(self.path))
        kept = None if self.stored else config_format(config, Path(self.path))
        type_of = kept.type_of if kept else find_format(self.stored or "bfloat16")
        checkpoint: Any = RandomWeights(config=config, type_of=type_of, num_layers=config.int("num_hidden_layers"))
        return checkpoint  # type: ignore[no-any-return]


class RandomWeights(ShapeCheckpoint):
    def tensor(self, name: str) -> StoredTensor:
        found = ShapeCheckpoint.tensor(self, name)
        if found.type.block > 1:
            return RandomTensor(name, found.shape, found.type, _rows(found.type, found.shape))
        zeros = np.broadcast_to(np.uint8(0), (prod(found.shape[:-1]), 2 * found.shape[-1]))
        return StoredTensor(name, found.shape, BF16, zeros, dummy=True)


class RandomTensor(StoredTensor):
    def transposed(self) -> StoredTensor:
        *outer, rows, columns = self.shape
        shape = (*outer, columns, rows)
        return RandomTensor(self.name, shape, self.type, _rows(self.type, shape))


def _rows(kind: StorageType, shape: tuple[int, ...]) -> NDArray[np.uint8]:
    return _few_rows(kind, shape[-1])[np.arange(prod(shape[:-1])) % ROWS]


@cache
def _few_rows(kind: StorageType, columns: int) -> NDArray[np.uint8]:
    values = np.random.default_rng(columns).standard_normal((ROWS, columns), np.float32) * np.float32(
        STANDARD_DEVIATION
    )
    return ENCODERS[kind.name](values.reshape(-1, kind.block), None).reshape(ROWS, -1)
