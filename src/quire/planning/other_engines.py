"""Where Quire is not the right engine, and which one is: one row a reason, true of this version."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from quire.planning.plan import Plan

NOT_CUDA = {"mi300x": "vLLM or SGLang on ROCm", "apple-m3-max": "MLX or llama.cpp, which use its GPU"}


@dataclass(frozen=True, slots=True)
class Reason:
    applies: "Callable[[Plan], bool]"
    sentence: "Callable[[Plan], str]"


REASONS = (
    Reason(
        lambda plan: plan.setup.num_devices > 1 or _needs_several(plan),
        lambda plan: "Quire has only been run on one GPU; for several in production, choose vLLM or SGLang",
    ),
    Reason(
        lambda plan: plan.hardware.name in NOT_CUDA,
        lambda plan: (
            f"Quire's GPU kernels need NVIDIA's CUDA; for {plan.hardware.name} choose {NOT_CUDA[plan.hardware.name]}"
        ),
    ),
)


def choose_another(plan: "Plan") -> list[str]:
    """Sentences; empty where Quire serves this plan."""
    return [reason.sentence(plan) for reason in REASONS if reason.applies(plan)]


def _needs_several(plan: "Plan") -> bool:
    return plan.hardware.is_gpu and plan.memory.total - plan.memory.kv_cache > plan.room
