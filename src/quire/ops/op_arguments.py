"""What ops are told beside their values: activations, routing, weights of recurrences, precisions to keep."""

from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import Any, Literal

from quire.core.errors import BadCheckpoint


class Activation(IntEnum):
    """The numbers are those of the kernels."""

    SILU = 0  # x * sigmoid(x)
    GELU = 1  # x * normal_cdf(x)
    GELU_TANH = 2  # the tanh approximation: 0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3)))
    RELU = 3
    RELU_SQUARED = 4
    QUICK_GELU = 5  # x * sigmoid(1.702 x)
    TANH = 6
    CLAMPED_SWIGLU = 7  # gpt-oss: min(x, 7) * sigmoid(1.702 min(x, 7)), times clamp(up, -7, 7) + 1
    ELU = 8  # x above zero, exp(x) - 1 below
    SIGMOID = 9
    SOFTPLUS = 10  # log(1 + exp(x))


@dataclass(frozen=True, slots=True)
class Routing:
    """Top-k routing of an MoE layer: the experts of a token, and their weights. Ties go to the lower expert.

    Scores are the softmax, the sigmoid or sqrt(log(1 + exp(logit))) of the router's logits. The `top_k` experts with
    the greatest score are chosen, or with the greatest score + correction. With groups, only experts of the
    `top_groups` best of `num_groups` groups of neighbours can be chosen; a group is ranked by its best expert, or by
    the sum of its best two. An expert's weight is its score (never corrected), divided by the sum over the chosen
    experts where `renormalize`, times `scale`. (A softmax over the chosen logits alone is a renormalized softmax over
    all.)

    With `sparsemixer_threshold` (PhiMoE), the `top_k` greatest logits are chosen, one after the other, never corrected.
    The weight of each is its share of a softmax over the logits x that are not chosen yet and near the best of them:
    best - x <= threshold * max(|x|, best); times `scale`.

    With `weigh_inputs` (Llama 4), a weight multiplies the input of its expert instead of the output.

    The last `num_zero` of the experts (LongCat) have no matrices: they pass on their input.

    With `limit` (Step 3.5), the two factors of a gated activation are clamped to -limit .. limit; with `gate_limit`,
    the activated one to -gate_limit .. gate_limit instead."""

    top_k: int
    scoring: Literal["softmax", "sigmoid", "sqrt softplus"] = "softmax"
    renormalize: bool = False
    scale: float = 1.0
    num_groups: int = 1
    top_groups: int = 1
    group_score: Literal["best", "best two"] = "best"
    sparsemixer_threshold: float = 0.0  # 0: off
    weigh_inputs: bool = False
    num_zero: int = 0
    limit: float = 0.0  # 0: none
    gate_limit: float = 0.0  # 0: `limit`

    def check(self, num_experts: int) -> None:
        """Raise unless `top_k` of `num_experts` experts can be chosen."""
        size = num_experts // self.num_groups
        if num_experts % self.num_groups or not 1 <= self.top_k <= self.top_groups * size <= num_experts:
            raise BadCheckpoint(
                f"{self.top_k} of {num_experts} experts are chosen, from {self.top_groups} of {self.num_groups} groups"
            )
        if self.group_score == "best two" and self.num_groups > 1 and size < 2:
            raise BadCheckpoint(f"groups are ranked by their best two experts, and each has {size}")


@dataclass(frozen=True, slots=True, eq=False)
class Mamba2Weights:
    """Vectors of `OpSet.vector`, one number a head."""

    a: Any  # below zero
    dt_bias: Any
    skip: Any
    groups: int = 1  # neighbouring heads of one share its b and c
    dt_limit: tuple[float, float] = (0.0, float("inf"))


@dataclass(frozen=True, slots=True, eq=False)
class MambaWeights:
    """`a` is below zero: [columns, channels], of `OpSet.biases`; `skip` [channels], of `OpSet.vector`."""

    a: Any
    skip: Any


@dataclass(frozen=True, slots=True, eq=False)
class Wkv7Weights:
    """Vectors of `OpSet.vector`, one number a column of all heads."""

    remove_scale: Any
    learn_scale: Any
    bonus: Any
    norm: Any
    norm_bias: Any
    heads: int
    eps: float  # of the norm of each head's output


class Keep(Enum):
    """The precision that a matrix keeps when weights are quantized while they are loaded."""

    NOTHING = 0  # the weight is quantized as the user asked
    EIGHT_BITS = 1  # LM heads: their error goes straight into the logits
    ALL = 2  # routers: their error changes which experts compute


def quantization_of(requested: str | None, keep: Keep) -> str | None:
    """The quantization of a matrix that keeps `keep`. None: it stays in floats."""
    if keep is Keep.NOTHING or requested is None:
        return requested
    return "int8" if keep is Keep.EIGHT_BITS else None
