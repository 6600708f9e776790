"""The families that are Llama with experts (MoE) but for a few features: one row a family, as in llama_families.py."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from quire.models.layer_patterns import (
    SparseLayers,
    Windows,
    experts_after_dense,
    experts_by_step,
    experts_in_range,
    window_above,
    window_everywhere,
    window_if_used,
    window_refused,
)
from quire.models.llama_families import LlamaFamily, granite_scales
from quire.models.routing import grouped_sigmoid, sigmoid_top_k, softmax_top_k, sparsemixer
from quire.ops.opset import Routing
from quire.weights.config import CheckpointConfig


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """What checkpoints call the router and the experts. A name without `{}` is one tensor of all experts."""

    router: str
    gate_up: tuple[str, ...]
    down: str


QWEN_EXPERTS = ExpertNames(
    "mlp.gate", ("mlp.experts.{}.gate_proj", "mlp.experts.{}.up_proj"), "mlp.experts.{}.down_proj"
)
MIXTRAL_EXPERTS = ExpertNames(
    "block_sparse_moe.gate",
    ("block_sparse_moe.experts.{}.w1", "block_sparse_moe.experts.{}.w3"),
    "block_sparse_moe.experts.{}.w2",
)
GRANITE_EXPERTS = ExpertNames(
    "block_sparse_moe.router.layer",
    ("block_sparse_moe.input_linear.weight",),
    "block_sparse_moe.output_linear.weight",
)
GRANITE_GGUF_EXPERTS = replace(MIXTRAL_EXPERTS, router=GRANITE_EXPERTS.router)


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeFamily(LlamaFamily):
    """What a family does otherwise than Llama and, in its experts, than Qwen-MoE."""

    windows: Windows = window_if_used
    routing: Callable[[CheckpointConfig], Routing] = softmax_top_k
    sparse: SparseLayers = experts_by_step
    experts: tuple[ExpertNames, ...] = (QWEN_EXPERTS,)  # the first, unless another is what is stored
    correction: str | None = None  # where `e_score_correction_bias` is, which corrects the scores experts are chosen by
    correction_is_row: bool = False  # it is stored as [1, experts]
    num_shared_key: str | None = None  # the key that counts shared experts; None: their size is given
    shared: str = "mlp.shared_expert"  # the experts that every token goes to, as one feed-forward layer
    shared_gate: str | None = "mlp.shared_expert_gate"  # scales what they add, where there is one


DOTS = MoeFamily(  # and GLM-4.5, Solar Open
    keys={"num_local_experts": "n_routed_experts", "intermediate_size": "moe_intermediate_size"},
    defaults={"use_qk_norm": True},
    qk_norms="heads",
    qk_norms_key="use_qk_norm",
    routing=grouped_sigmoid,
    sparse=experts_after_dense,
    correction="mlp.gate",
    num_shared_key="n_shared_experts",
    shared="mlp.shared_experts",
    shared_gate=None,
)
PHI = MoeFamily(
    windows=window_everywhere, layer_norm=True, head_bias=True, routing=sparsemixer, experts=(MIXTRAL_EXPERTS,)
)

FAMILIES: Mapping[str, MoeFamily] = {
    "MixtralForCausalLM": MoeFamily(
        defaults={"norm_topk_prob": True}, windows=window_everywhere, experts=(MIXTRAL_EXPERTS,)
    ),
    "Qwen2MoeForCausalLM": MoeFamily(windows=window_refused, qkv_bias=True),
    "Qwen3MoeForCausalLM": MoeFamily(default_window=4096, qk_norms="heads"),
    "OlmoeForCausalLM": MoeFamily(expects={"clip_qkv": (None,)}, qk_norms="rows"),
    "MiniMaxM2ForCausalLM": MoeFamily(
        expects={"scoring_func": ("sigmoid", None), "qk_norm_type": ("per_layer", None)},
        qk_norms="rows",
        routing=sigmoid_top_k,
        experts=(MIXTRAL_EXPERTS,),
        correction="block_sparse_moe",
    ),
    "DeepseekForCausalLM": MoeFamily(  # the first DeepSeek-MoE
        keys={"num_local_experts": "n_routed_experts"},
        expects={"scoring_func": ("softmax", None), "moe_layer_freq": (1, None)},
        sparse=experts_after_dense,
        num_shared_key="n_shared_experts",
        shared="mlp.shared_experts",
        shared_gate=None,
    ),
    "PhimoeForCausalLM": PHI,
    "PhiMoEForCausalLM": PHI,  # as its authors spell it
    "Dots1ForCausalLM": replace(DOTS, windows=window_above, default_window=4096),
    "SolarOpenForCausalLM": replace(DOTS, defaults={"use_qk_norm": False}, out_bias=False),
    "Glm4MoeForCausalLM": replace(
        DOTS,
        defaults={"partial_rotary_factor": 0.5, "first_k_dense_replace": 1, "use_qk_norm": False},
        out_bias=False,
    ),
    "Ernie4_5_MoeForCausalLM": MoeFamily(
        keys={"num_experts": "moe_num_experts", "num_experts_per_tok": "moe_k"},
        defaults={"norm_topk_prob": True},
        expects={"use_bias": (False, None)},
        rope_interleaved=True,
        sparse=experts_in_range,
        correction="mlp.moe_statics",
        correction_is_row=True,
        num_shared_key="moe_num_shared_experts",
        shared="mlp.shared_experts",
        shared_gate=None,
    ),
    "GraniteMoeForCausalLM": MoeFamily(
        defaults={"norm_topk_prob": True}, scales=granite_scales, experts=(GRANITE_EXPERTS, GRANITE_GGUF_EXPERTS)
    ),
}
