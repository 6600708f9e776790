"""Ceilings: how long a step takes at least, by the bytes it moves and the operations it does."""

from dataclasses import dataclass
from typing import Literal

from quire.ops.kv_spec import KVSpec
from quire.planning.hardware import Hardware
from quire.planning.planned_model import PlannedModel
from quire.planning.step_counter import OpCount, StepShape


@dataclass(frozen=True, slots=True)
class StepCeiling:
    """A step on one device, or on `tp` devices that share every matrix."""

    shape: StepShape
    count: OpCount
    memory_seconds: float
    compute_seconds: float
    link_seconds: float

    @property
    def seconds(self) -> float:
        return max(self.memory_seconds, self.compute_seconds) + self.link_seconds

    @property
    def bound(self) -> Literal["memory", "compute", "links"]:
        if self.link_seconds > max(self.memory_seconds, self.compute_seconds):
            return "links"
        return "memory" if self.memory_seconds >= self.compute_seconds else "compute"

    @property
    def intensity(self) -> float:
        """Operations a byte of memory."""
        return self.count.flops / self.count.nbytes


def step_ceiling(
    model: PlannedModel, kv: KVSpec, hardware: Hardware, shape: StepShape, *, tp: int = 1, eight_bit: bool = False
) -> StepCeiling:
    """`eight_bit`: matmuls run in fp8 or int8 where the device has it."""
    count = model.step(shape, kv).count.total
    flops = hardware.flops_8bit if eight_bit and hardware.flops_8bit else hardware.flops
    moved = count.nbytes
    sent = all_reduce_bytes(model, shape.num_tokens, tp) if tp > 1 else 0.0
    return StepCeiling(
        shape,
        count,
        memory_seconds=moved / tp / hardware.bandwidth,
        compute_seconds=count.flops / tp / flops,
        link_seconds=sent / hardware.link if sent else 0.0,
    )


def all_reduce_bytes(model: PlannedModel, num_tokens: int, tp: int) -> float:
    """Bytes that each of `tp` devices sends in a step: two ring all-reduces a layer, of 16-bit hidden states."""
    return 2 * model.config.layers * 2 * (tp - 1) / tp * num_tokens * model.config.hidden * 2


def pipeline_bubble(num_stages: int, num_microbatches: int) -> float:
    """The share of the time in which a stage of a pipeline waits."""
    return (num_stages - 1) / (num_microbatches + num_stages - 1)
