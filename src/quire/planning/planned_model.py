"""A model as a plan sees it: its sizes, its weights by tensor, and what a step of it takes. Nothing is loaded."""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from math import prod
from typing import Any

from quire.models.config import ModelConfig
from quire.models.registry import family
from quire.ops.kv_spec import KVSpec
from quire.ops.tensors import PackedWeight
from quire.planning.packed_bytes import PackedFormat
from quire.planning.step_counter import StepCounter, StepShape, count_step
from quire.planning.weight_counter import CountedTensor, WeightCounter
from quire.runtime.kv import kv_spec
from quire.weights.checkpoint import Checkpoint

_HEAD = re.compile(r"lm_head|embed")


@dataclass(frozen=True, slots=True)
class PlannedModel:
    """A model counted for one backend."""

    name: str
    config: ModelConfig
    tensors: list[CountedTensor]
    forward: Callable[[Any, Any], Any]
    linears: list[PackedWeight]  # that LoRA adapts
    allocations: list[int]  # bytes of every matrix, in the order of packing
    copies: list[int]  # bytes that are held beside each of these while it is packed
    table_bytes: int  # of embedding tables, as they are stored
    vector_bytes: int  # fp32: norms and biases
    checkpoint: Checkpoint
    _recorded: dict[KVSpec, StepCounter] = field(default_factory=dict)
    _steps: dict[tuple[StepShape, KVSpec], StepCounter] = field(default_factory=dict)

    @property
    def weight_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def num_parameters(self) -> int:
        """Each stored number once: a tied head is the embedding table."""
        tables = {tensor.name for tensor in self.tensors if tensor.is_table}
        counted = (tensor for tensor in self.tensors if tensor.is_table or tensor.name not in tables)
        return sum(prod(tensor.shape) for tensor in counted)

    @property
    def layer_bits(self) -> float:
        """Bits of a weight in the layers: heads and embeddings are often left in 16 bits."""
        layers = [t for t in self.tensors if len(t.shape) > 1 and not t.is_table and not _HEAD.search(t.name)]
        return 8 * sum(t.nbytes for t in layers) / max(sum(prod(t.shape) for t in layers), 1)

    def kv_spec(
        self, dtype: str, block_size: int = 16, checkpoint_dtype: str = "float32", drafts: bool = False
    ) -> KVSpec:
        return kv_spec(self.config, block_size, dtype, checkpoint_dtype=checkpoint_dtype, drafts=drafts)

    def step(self, shape: StepShape, kv: KVSpec) -> StepCounter:
        """Its forward pass is recorded once for each kind of KV cache."""
        if kv not in self._recorded:
            self._recorded[kv] = count_step(self.forward, kv, shape)
        if (shape, kv) not in self._steps:
            self._steps[shape, kv] = self._recorded[kv].at(shape)
        return self._steps[shape, kv]


def plan_model(
    name: str, checkpoint: Checkpoint, packing: PackedFormat, quantization: str | None = None
) -> PlannedModel:
    """Count the weights of a checkpoint, from the shapes and types of its tensors."""
    model_family = family(checkpoint.config.architecture)
    config = model_family.config(checkpoint.config)
    counter = WeightCounter(packing, quantization)
    loaded = model_family.load(counter, checkpoint, config, config.max_position)  # type: ignore[arg-type]
    vectors = sum(tensor.nbytes for tensor in counter.tensors if len(tensor.shape) == 1)
    return PlannedModel(
        name,
        config,
        counter.tensors,
        loaded.forward,
        linears=loaded.linears,
        allocations=counter.allocations,
        copies=counter.copies,
        table_bytes=counter.table_bytes,
        vector_bytes=vectors + counter.biases_bytes,
        checkpoint=checkpoint,
    )
