"""A plan: what a model needs on a machine, what it can reach there, what that costs, and what to do about it."""

from dataclasses import dataclass, field
from math import ceil, inf

from quire.core.errors import BadRequest
from quire.ops.kv_spec import KVSpec
from quire.planning.cost import Cost
from quire.planning.drafting import Draft
from quire.planning.hardware import Hardware, usable_memory
from quire.planning.memory import (
    EngineLimits,
    KVVariant,
    Load,
    MemoryPlan,
)
from quire.planning.planned_model import PlannedModel
from quire.planning.roofline import StepCeiling, pipeline_bubble
from quire.planning.speculation import SpeculationTable
from quire.planning.step_counter import StepCounter


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """Where and how a model is to run."""

    hardware: Hardware
    tp: int = 1  # devices that share every matrix
    pp: int = 1  # stages of layers, one after the other
    limits: EngineLimits = field(default_factory=EngineLimits)
    price: float | None = None  # of one device for an hour; None: the usual one
    eight_bit: bool = False  # matmuls run in 8 bits
    rate: float | None = None  # requests a second that are to be served

    def __post_init__(self) -> None:
        for name in ("tp", "pp"):
            if getattr(self, name) < 1:
                raise BadRequest(f"{name} is {getattr(self, name)}", "it must be at least 1", param=name)
        if self.rate is not None and not 0 < self.rate < inf:
            raise BadRequest(f"rate is {self.rate}", "it must be above 0, and finite", param="rate")
        if self.pp > 1 and not self.hardware.is_gpu:
            raise BadRequest(f"pp is {self.pp}", f"{self.hardware.name} is one device", param="pp")

    @property
    def num_devices(self) -> int:
        return self.tp * self.pp


@dataclass(frozen=True, slots=True)
class Advice:
    """One thing to do. `gain`: how many times as many output tokens a second; 1: it is not about speed."""

    what: str
    flags: str
    why: str
    gain: float = 1.0


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything a report shows. Times are ceilings: no engine is faster."""

    model: PlannedModel
    kv: KVSpec
    load: Load
    setup: Setup
    memory: MemoryPlan  # of all devices together
    prefill: StepCeiling  # of one prompt
    decode: list[StepCeiling]  # by batch size, 1 first, in the middle of an output
    users_by_context: list[tuple[int, int]]
    max_users: int  # of the load's context, that fit
    variants: list[KVVariant]
    speculation: SpeculationTable
    cost: Cost
    advice: list[Advice]
    draft: Draft | None = None

    @property
    def hardware(self) -> Hardware:
        return self.setup.hardware

    @property
    def room(self) -> int:
        """Bytes of all devices, 90 % of a GPU's."""
        return usable_memory(self.hardware, self.setup.num_devices)

    @property
    def fits(self) -> bool:
        return self.memory.total <= self.room

    @property
    def at_load(self) -> StepCeiling:
        """The decode step in which every user has a sequence."""
        return next(step for step in self.decode if step.shape.num_seqs == self.load.users)

    @property
    def behind_windows(self) -> bool:
        """Whether layers with windows keep less than all tokens of this load."""
        whole = self.load.users * self.load.context * self.kv.block_bytes / self.kv.block_size
        return any(self.model.config.windows) and whole > self.memory.kv_cache

    @property
    def _one_token(self) -> StepCounter:
        return self.model.step(self.decode[0].shape, self.kv)

    @property
    def experts(self) -> tuple[int, int] | None:
        """The experts of the largest layer, and how many of them compute a token."""
        kept = self._one_token.experts
        return (kept[0].num_experts, kept[2]) if kept else None

    @property
    def active_parameters(self) -> float:
        """Weights that one token is multiplied by, those of the head included."""
        ops = self._one_token.count.ops
        return sum(ops[name].flops for name in ("linear", "experts", "head") if name in ops) / 2

    @property
    def bubble(self) -> float:
        """The bubble of a pipeline while it computes a prompt in chunks."""
        chunks = ceil(self.load.prompt / self.setup.limits.max_num_batched_tokens)
        return pipeline_bubble(self.setup.pp, chunks)

    @property
    def tokens_per_second(self) -> float:
        """Output tokens of all users, while the device computes their prompts too."""
        one_request = self.load.output * self.at_load.seconds / self.load.users + self.prefill.seconds
        return self.load.output / one_request * self.setup.pp * (1 - self.bubble)
