"""A plan: what a model needs on a machine, what it can reach there, what that costs, and what to do about it."""

from dataclasses import dataclass, replace

from quire.ops.opset import KVSpec
from quire.planning.advice import Advice, advise
from quire.planning.cost import Cost
from quire.planning.hardware import Hardware
from quire.planning.memory import KVVariant, Load, MemoryPlan, kv_variants, plan_memory, users_that_fit
from quire.planning.planned_model import PlannedModel
from quire.planning.roofline import StepCeiling, step_ceiling
from quire.planning.step_counter import StepShape

CONTEXTS = (2048, 4096, 8192, 16384, 32768, 65536, 131072)  # of the table of users
BATCHES = (1, 8, 32, 128)  # of the table of decode steps


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything a report shows. Times are ceilings: no engine is faster."""

    model: PlannedModel
    kv: KVSpec
    load: Load
    hardware: Hardware
    tp: int
    memory: MemoryPlan  # of all devices together
    prefill: StepCeiling  # of one prompt
    decode: list[StepCeiling]  # by batch size, in the middle of an output
    users_by_context: list[tuple[int, int]]
    variants: list[KVVariant]
    cost: Cost
    advice: list[Advice]

    @property
    def room(self) -> int:
        """Bytes of all devices, 90 % of a GPU's."""
        return int(self.tp * self.hardware.memory * (0.9 if self.hardware.is_gpu else 1.0))

    @property
    def fits(self) -> bool:
        return self.memory.total <= self.room

    @property
    def at_load(self) -> StepCeiling:
        """The decode step in which every user has a sequence."""
        return next(step for step in self.decode if step.shape.num_seqs == self.load.users)

    @property
    def tokens_per_second(self) -> float:
        """Output tokens of all users, while the device computes their prompts too."""
        one_request = self.load.output * self.at_load.seconds / self.load.users + self.prefill.seconds
        return self.load.output / one_request


def make_plan(
    model: PlannedModel, kv: KVSpec, load: Load, hardware: Hardware, *, tp: int = 1, price: float | None = None,
    lora_rank: int = 0, num_loras: int = 0, eight_bit: bool = False,
) -> Plan:  # fmt: skip
    memory = plan_memory(
        model, kv, load, lora_rank=lora_rank, num_loras=num_loras, on_gpu=hardware.is_gpu,
        max_num_batched_tokens=8192 if hardware.is_gpu else 512,
    )  # fmt: skip
    middle = load.prompt + load.output // 2

    def ceiling(shape: StepShape) -> StepCeiling:
        return step_ceiling(model, kv, hardware, shape, tp=tp, eight_bit=eight_bit)

    batches = sorted({*BATCHES, load.users})
    empty = replace(load, users=1)
    fixed = plan_memory(model, kv, empty, on_gpu=hardware.is_gpu).total - plan_memory(model, kv, empty).kv_cache
    room = int(tp * hardware.memory * (0.9 if hardware.is_gpu else 1.0)) - fixed
    contexts = [context for context in CONTEXTS if context <= model.config.max_length] or [model.config.max_length]
    plan = Plan(
        model=model,
        kv=kv,
        load=load,
        hardware=hardware,
        tp=tp,
        memory=memory,
        prefill=ceiling(StepShape(1, load.prompt, load.prompt)),
        decode=[ceiling(StepShape(batch, 1, middle)) for batch in batches],
        users_by_context=[(context, users_that_fit(model, kv, context, room)) for context in contexts],
        variants=kv_variants(model, kv.block_bytes / kv.block_size / _numbers(kv)),
        cost=Cost(0, tp, 0, 0),
        advice=[],
    )
    rate = plan.tokens_per_second
    cost = Cost(hardware.price if price is None else price, tp, rate * load.prompt / load.output, rate)
    return replace(plan, cost=cost, advice=advise(plan))


def _numbers(kv: KVSpec) -> int:
    """Numbers of one token in the cache."""
    return (1 if kv.latent else 2) * kv.num_layers * kv.num_kv_heads * kv.head_dim
