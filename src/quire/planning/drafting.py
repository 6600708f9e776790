"""What drafts, as a plan sees it: a smaller model, or a head with one layer like the target's."""

from dataclasses import dataclass

from quire.ops.kv_spec import KVSpec
from quire.planning.hardware import Hardware
from quire.planning.memory import sequence_bytes
from quire.planning.planned_model import PlannedModel
from quire.planning.step_counter import StepShape
from quire.planning.step_times import RooflineTimes, roofline_times


@dataclass(frozen=True, slots=True)
class Draft:
    """Proposes `num_tokens` draft tokens a step. `is_head`: `model` and `kv` are the target's own, and it has one such
    layer; the matrix of the logits and the embeddings are the target's."""

    model: PlannedModel
    kv: KVSpec
    num_tokens: int
    is_head: bool = False

    @property
    def name(self) -> str:
        return "a head of one layer" if self.is_head else self.model.name

    @property
    def method(self) -> str:
        """The method as `--speculative-config` calls it."""
        return "eagle" if self.is_head else "draft_model"

    @property
    def weight_bytes(self) -> int:
        if not self.is_head:
            return self.model.weight_bytes
        tables = sum(tensor.nbytes for tensor in self.model.tensors if tensor.is_table)
        logits = self.model.step(StepShape(1, 1, 1), self.kv).count.ops["head"].weight_bytes
        return int(self.model.weight_bytes - tables - logits) // self.model.config.layers

    def cache_bytes(self, users: int, context: int) -> int:
        layers = self.model.config.layers if self.is_head else 1
        return users * sequence_bytes(self.model, self.kv, context) // layers

    def block_bytes(self, target: KVSpec) -> int:
        """The bytes that as many tokens as a block of the target has take in the cache of what drafts."""
        layers = self.model.config.layers if self.is_head else 1
        return self.kv.block_bytes * target.block_size // (self.kv.block_size * layers)

    @property
    def step_share(self) -> float:
        """The bytes that a step of a head reads, as a share of those of the model's step."""
        logits = self.model.step(StepShape(1, 1, 1), self.kv).count
        return (self.weight_bytes + logits.ops["head"].weight_bytes) / logits.total.weight_bytes

    def times(self, hardware: Hardware, eight_bit: bool) -> RooflineTimes:
        """The times of its steps on one device: what drafts is not divided among several."""
        return roofline_times(self.model, self.kv.dtype, hardware, eight_bit=eight_bit, is_head=self.is_head)
