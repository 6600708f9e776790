"""A model as a plan sees it: its sizes, its weights by tensor, and what a step of it takes. Nothing is loaded."""

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

from quire.models.config import ModelConfig
from quire.models.registry import family
from quire.ops.opset import KVSpec
from quire.planning.packed_bytes import PackedFormat
from quire.planning.step_counter import StepCounter, StepShape, count_step
from quire.planning.weight_counter import CountedTensor, WeightCounter
from quire.runtime.kv import kv_spec
from quire.weights.checkpoint import Checkpoint


@dataclass(frozen=True, slots=True)
class PlannedModel:
    """A model counted for one backend."""

    name: str
    config: ModelConfig
    tensors: list[CountedTensor]
    forward: Callable[[Any, Any], Any]

    @property
    def weight_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def num_parameters(self) -> int:
        """Each stored number once: a tied head is the embedding table."""
        tables = {tensor.name for tensor in self.tensors if tensor.is_table}
        counted = (tensor for tensor in self.tensors if tensor.is_table or tensor.name not in tables)
        return sum(prod(tensor.shape) for tensor in counted)

    def kv_spec(self, dtype: str, block_size: int = 16) -> KVSpec:
        return kv_spec(self.config, block_size, dtype)

    def step(self, shape: StepShape, kv: KVSpec) -> StepCounter:
        return count_step(self.forward, kv, shape)


def plan_model(
    name: str, checkpoint: Checkpoint, packing: PackedFormat, quantization: str | None = None
) -> PlannedModel:
    """Count the weights of a checkpoint, from the shapes and types of its tensors."""
    model_family = family(checkpoint.config.architecture)
    config = model_family.config(checkpoint.config)
    counter = WeightCounter(packing, quantization)
    loaded = model_family.load(counter, checkpoint, config, config.max_position)  # type: ignore[arg-type]
    return PlannedModel(name, config, counter.tensors, loaded.forward)
