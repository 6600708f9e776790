"""Makes the plan of a model on a machine."""

from dataclasses import replace

from quire.core.draft_budget import host_share
from quire.ops.kv_spec import KVSpec
from quire.planning.advice import advise
from quire.planning.cost import Cost
from quire.planning.drafting import Draft
from quire.planning.hardware import usable_memory
from quire.planning.memory import (
    Load,
    MemoryPlan,
    kv_variants,
    plan_memory,
    users_that_fit,
)
from quire.planning.plan import Plan, Setup
from quire.planning.planned_model import PlannedModel
from quire.planning.roofline import StepCeiling, step_ceiling
from quire.planning.speculation import NUM_DRAFTS, SpeculationTable
from quire.planning.step_counter import StepShape
from quire.planning.step_times import StepWork, roofline_times

CONTEXTS = (2048, 4096, 8192, 16384, 32768, 65536, 131072)  # of the table of users
BATCHES = (1, 8, 32, 128)  # of the table of decode steps


def make_plan(model: PlannedModel, kv: KVSpec, load: Load, setup: Setup, draft: Draft | None = None) -> Plan:
    hardware = setup.hardware
    memory = _memory(model, kv, load, setup, draft)
    middle = load.prompt + load.output // 2

    def ceiling(shape: StepShape) -> StepCeiling:
        return step_ceiling(model, kv, hardware, shape, tp=setup.tp, eight_bit=setup.eight_bit)

    decode = [ceiling(StepShape(batch, 1, middle)) for batch in sorted({*BATCHES, load.users})]
    one_user = replace(load, users=1)
    alone = _memory(model, kv, one_user, setup, draft)
    room = usable_memory(hardware, setup.num_devices) - (alone.total - alone.kv_cache)
    ahead = 1 if hardware.is_gpu else 0
    contexts = [context for context in CONTEXTS if context <= model.config.max_length] or [model.config.max_length]
    plan = Plan(
        model=model,
        kv=kv,
        load=load,
        setup=setup,
        memory=memory,
        prefill=ceiling(StepShape(1, load.prompt, load.prompt)),
        decode=decode,
        users_by_context=[(context, users_that_fit(model, kv, context, room, ahead)) for context in contexts],
        max_users=users_that_fit(model, kv, load.context, room, ahead),
        variants=kv_variants(model, kv.kv_bytes / kv.block_size / _numbers(kv)),
        speculation=_speculation(model, kv, load, setup, draft),
        cost=Cost(0, setup.num_devices, 0, 0),
        advice=[],
        draft=draft,
    )
    rate = plan.tokens_per_second
    price = hardware.price if setup.price is None else setup.price
    cost = Cost(price, setup.num_devices, rate * load.prompt / load.output, rate)
    return replace(plan, cost=cost, advice=advise(plan))


def _memory(model: PlannedModel, kv: KVSpec, load: Load, setup: Setup, draft: Draft | None) -> MemoryPlan:
    """The memory of all devices together: each has a process and activations of its own."""
    hardware = setup.hardware
    memory = plan_memory(model, kv, load, limits=setup.limits, on_gpu=hardware.is_gpu, process=hardware.process_bytes)
    held = 0
    if draft is not None:
        held = draft.weight_bytes + draft.cache_bytes(load.users, load.context)
    devices = setup.num_devices
    return replace(memory, draft=held, activations=devices * memory.activations, process=devices * memory.process)


def _speculation(model: PlannedModel, kv: KVSpec, load: Load, setup: Setup, draft: Draft | None) -> SpeculationTable:
    """What drafts would gain, by the step times that `quire simulate` computes, with every user decoding.

    With async scheduling, sequences that wait for their drafts miss the step that is planned meanwhile. Where a method
    is asked for the drafts of all, none has such a step."""
    middle = load.prompt + load.output // 2
    missed = 0.0 if not setup.hardware.is_gpu else 1.0 if draft is None else host_share(load.users)

    def step(users: int, num_drafts: int = 0) -> StepWork:
        work = StepWork(num_rows=users * (1 + num_drafts))
        work.add(middle - 1, 1 + num_drafts, num_drafts, num_runs=users)
        return work

    times = roofline_times(model, kv.dtype, setup.hardware, tp=setup.tp, eight_bit=setup.eight_bit)
    plain = times.seconds(step(load.users))
    counts = {*NUM_DRAFTS, *([draft.num_tokens] if draft is not None else [])}
    verify = {k: times.seconds(step(load.users, k)) / plain for k in sorted(counts)}
    draft_cost = 0.0
    if draft is not None:
        draft_cost = draft.times(setup.hardware, setup.eight_bit).seconds(step(load.users)) / plain
    return SpeculationTable(draft_cost, verify, missed)


def _numbers(kv: KVSpec) -> int:
    """Numbers of one token in the cache."""
    return (1 if kv.latent else 2) * max(kv.num_layers, 1) * kv.num_kv_heads * kv.head_dim
