"""What degrees of pipeline parallel would cost and gain: predicted from data sheets and link speeds, for several GPUs.

Layers are divided as stages divide them, by tracing the forward pass. There are as many steps in flight as stages, each
of other users: a stage that has more to do than the others lets them wait."""

from dataclasses import dataclass
from math import ceil
from typing import Any

from quire.models.registry import family
from quire.ops.stages.parts import check_stages, divide
from quire.planning.hardware import usable_memory
from quire.planning.plan import Plan
from quire.planning.planned_model import PlannedModel
from quire.planning.roofline import pipeline_bubble, step_ceiling
from quire.planning.step_counter import StepShape
from quire.planning.words import counted

NUMBER_BYTES = 2  # of a hidden value on a GPU


@dataclass(frozen=True, slots=True)
class StagesPlan:
    """One number of stages."""

    plan: Plan  # of the same load on one device
    layers: list[int]  # of each stage
    shares: list[float]  # of the weights, of each stage
    stage_seconds: float  # of a micro-batch of all stages together, one after the other
    hop_seconds: float  # of its hidden states from a stage to the next

    @property
    def pp(self) -> int:
        return len(self.shares)

    @property
    def micro_batches(self) -> int:
        """Steps in flight."""
        return min(self.pp, self.plan.load.users)

    @property
    def device_bytes(self) -> int:
        """The bytes of the largest stage, which has the head where that is what makes it the largest."""
        memory = self.plan.memory
        own = memory.activations + memory.process
        return int(max(self.shares) * (memory.total - own)) + own

    @property
    def fits(self) -> bool:
        return self.device_bytes <= usable_memory(self.plan.hardware)

    @property
    def seconds(self) -> float:
        """Between two tokens of a user: a token goes through all stages, and waits for the largest of them."""
        whole = self.stage_seconds + (self.pp - 1) * self.hop_seconds
        return max(whole, self.micro_batches * max(self.shares) * self.stage_seconds)

    @property
    def bubble(self) -> float:
        """The share of the time in which a stage waits, of all stages."""
        return 1 - self.micro_batches * self.stage_seconds / self.pp / self.seconds

    @property
    def bubble_when_emptied(self) -> float:
        """The bubble of a pipeline that is emptied after every step of all users."""
        return pipeline_bubble(self.pp, self.micro_batches)


def stage_scaling(plan: Plan, degrees: list[int]) -> list[StagesPlan]:
    """`plan`: on one device."""
    return [_stages(plan, size) for size in degrees]


def _stages(plan: Plan, size: int) -> StagesPlan:
    model, load = plan.model, plan.load
    layers, shares, columns = stage_shares(model, size)
    shape = StepShape(ceil(load.users / min(size, load.users)), 1, load.prompt + load.output // 2)
    step = step_ceiling(model, plan.kv, plan.hardware, shape, eight_bit=plan.setup.eight_bit)
    sent = shape.num_tokens * columns * NUMBER_BYTES
    return StagesPlan(plan, layers, shares, step.seconds, sent / plan.hardware.link if sent else 0.0)


def stage_shares(model: PlannedModel, size: int) -> tuple[list[int], list[float], int]:
    """Layers of each stage, its share of the weights that steps read, and the most columns that one hands on."""
    from quire.executors.pipeline.stage_model import trace_model

    config = model.config
    check_stages(size, config.layers)
    module = family(model.checkpoint.config.architecture)
    traced = trace_model(module, model.checkpoint, config, config.max_position)
    parts = divide(traced, config.layers, size)
    weights = [sum(traced.sizes[number] for number in part.weights) for part in parts]
    columns = max(part.handed_columns for part in parts)
    return [part.end - part.first for part in parts], [weight / sum(weights) for weight in weights], columns


def as_text(degrees: list[StagesPlan]) -> str:
    plan = degrees[0].plan
    users, link = f"{counted(plan.load.users, 'user')} of {plan.load.context:,} tokens", plan.hardware.link / 1e9
    lines = [
        f"{plan.model.name} on {plan.hardware.name}, pipeline parallel: predicted from data sheets, not measured",
        f"  {users}; links of {link:,.0f} GB/s a device",
        f"  {'':>7}{'layers':>10}{'GiB':>10}{'':>10}{'':>9}{'':>8}{'bubble':>9}{'if emptied,':>14}",
        f"  {'devices':>7}{'at most':>10}{'at most':>10}{'':>10}{'TPOT ms':>9}{'gain':>8}{'':>9}{'(p-1)/(m+p-1)':>14}",
    ]
    for one in degrees:
        fits = "" if one.fits else " too large"
        lines.append(
            f"  {one.pp:>7}{max(one.layers):>10}{one.device_bytes / 2**30:>10.1f}{fits:<10}{1e3 * one.seconds:>9.2f}"
            f"{degrees[0].seconds / one.seconds:>7.2f}x{one.bubble:>9.0%}{one.bubble_when_emptied:>14.0%}"
        )
    return "\n".join(
        [
            *lines,
            "  m = p steps are in flight, of other users each: fewer users than devices let some of them wait",
            "  `python -m benchmarks.pipeline` measures the bubble of two stages on this machine's CPU",
        ]
    )


def as_json(degrees: list[StagesPlan]) -> list[dict[str, Any]]:
    return [
        {
            "pp": one.pp,
            "predicted": True,
            "layers": one.layers,
            "bytes_per_device": one.device_bytes,
            "fits": one.fits,
            "tpot_seconds": one.seconds,
            "gain": degrees[0].seconds / one.seconds,
            "bubble": one.bubble,
            "bubble_when_emptied": one.bubble_when_emptied,
        }
        for one in degrees
    ]
