"""What several devices gain and cost: sharing every matrix (tensor parallel), or each with the whole model (data
parallel)."""

from dataclasses import dataclass, replace
from math import ceil
from typing import Literal

from quire.planning.plan import Plan, Setup
from quire.planning.planner import make_plan

DEGREES = (2, 4, 8)


@dataclass(frozen=True, slots=True)
class Degree:
    """Ceilings of the load of a plan on `devices` devices."""

    kind: Literal["tp", "dp"]
    devices: int
    bytes_per_device: int
    fits: bool
    ttft: float  # seconds, alone
    tpot: float  # seconds, with all users
    tokens_per_second: float  # output, of all devices
    gain: float  # tokens a second and device, beside those of one


def degrees(plan: Plan) -> list[Degree]:
    """The plan with more devices of its hardware, where a machine has several of it. With tp ranks send their hidden
    states to each other; with dp nothing is sent, and every device has all weights."""
    if not plan.hardware.is_gpu:
        return []
    one = make_plan(plan.model, plan.kv, plan.load, replace(plan.setup, tp=1, pp=1), plan.draft)
    rows = [_shared(one, count) for count in DEGREES if count <= plan.model.config.heads]
    return [*rows, *(_copied(one, count) for count in DEGREES if count <= plan.load.users)]


def _shared(one: Plan, devices: int) -> Degree:
    plan = make_plan(one.model, one.kv, one.load, replace(one.setup, tp=devices), one.draft)
    return _degree("tp", devices, plan, one, plan.memory.total // devices, plan.tokens_per_second)


def _copied(one: Plan, devices: int) -> Degree:
    setup: Setup = one.setup
    load = replace(one.load, users=ceil(one.load.users / devices))
    plan = make_plan(one.model, one.kv, load, setup, one.draft)
    return _degree("dp", devices, plan, one, plan.memory.total, devices * plan.tokens_per_second)


def _degree(kind: Literal["tp", "dp"], devices: int, plan: Plan, one: Plan, held: int, rate: float) -> Degree:
    return Degree(
        kind,
        devices,
        held,
        plan.fits,
        plan.prefill.seconds,
        plan.at_load.seconds,
        rate,
        rate / devices / one.tokens_per_second,
    )
