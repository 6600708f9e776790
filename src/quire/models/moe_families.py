"""The families that are Llama with experts (MoE) but for a few features: one row a family, as in llama_families.py."""

from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, replace
from typing import Any

from quire.core.errors import Unsupported
from quire.models.layer_patterns import (
    SparseLayers,
    Windows,
    experts_after_dense,
    experts_as_listed,
    experts_by_step,
    experts_in_range,
    rope_in_windows,
    rope_only_in_windows,
    window_above,
    window_by_pattern,
    window_everywhere,
    window_if_used,
    window_refused,
)
from quire.models.llama_families import (
    GRANITE_SWA,
    POST_NORMS,
    LlamaFamily,
    granite_scales,
    root_of_hidden,
)
from quire.models.routing import grouped_sigmoid, sigmoid_top_k, softmax_top_k, sparsemixer
from quire.ops.opset import Activation, Routing
from quire.weights.config import CheckpointConfig


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """What checkpoints call the router and the experts. A name without `{}` is one tensor of all experts."""

    router: str
    gate_up: tuple[str, ...]
    down: str
    shared_gate_up: tuple[str, ...] = ("gate_proj", "up_proj")  # of the shared experts
    transposed: bool = False  # tensors of all experts are [experts, inputs, outputs]

    def is_stored(self, prefix: str, stored: Container[str]) -> bool:
        """Whether the tensor is stored in the layer of this prefix."""
        return prefix + (f"{self.down.format(0)}.weight" if "{}" in self.down else self.down) in stored


QWEN_EXPERTS = ExpertNames(
    "mlp.gate", ("mlp.experts.{}.gate_proj", "mlp.experts.{}.up_proj"), "mlp.experts.{}.down_proj"
)
STACKED_EXPERTS = ExpertNames("mlp.gate", ("mlp.experts.gate_up_proj",), "mlp.experts.down_proj", transposed=True)
MIXTRAL_EXPERTS = ExpertNames(
    "block_sparse_moe.gate",
    ("block_sparse_moe.experts.{}.w1", "block_sparse_moe.experts.{}.w3"),
    "block_sparse_moe.experts.{}.w2",
)
GRANITE_EXPERTS = ExpertNames(
    "block_sparse_moe.router.layer",
    ("block_sparse_moe.input_linear.weight",),
    "block_sparse_moe.output_linear.weight",
    ("input_linear",),
)
ROUTER_EXPERTS = replace(QWEN_EXPERTS, router="mlp.router.gate")
GRANITE_5_EXPERTS = ExpertNames(  # as transformers 5 names them
    "block_sparse_moe.router",
    ("block_sparse_moe.experts.gate_up_proj",),
    "block_sparse_moe.experts.down_proj",
    ("input_linear",),
)
ARIA_EXPERTS = ExpertNames("mlp.router", ("mlp.experts.fc1.weight",), "mlp.experts.fc2.weight", transposed=True)
GRANITE_GGUF_EXPERTS = replace(MIXTRAL_EXPERTS, router=GRANITE_EXPERTS.router)


AFMOE_NORMS = {
    "attn_norm": "input_layernorm",
    "post_attn_norm": "post_attention_layernorm",
    "mlp_norm": "pre_mlp_layernorm",
    "post_mlp_norm": "post_mlp_layernorm",
}


def mup_scales(hf: CheckpointConfig) -> dict[str, float]:
    return {"embed_scale": root_of_hidden(hf) if hf.bool("mup_enabled", False) else 1.0}


def minimax_m3_keys(hf: CheckpointConfig) -> CheckpointConfig:
    """The sizes under the names of Qwen-MoE. Attention is sparse beyond the blocks of tokens that an indexer chooses,
    which are the longest context."""
    sparse = hf.section("sparse_attention_config")
    block = sparse.int("sparse_block_size", hf.int("index_block_size", 128))
    longest = block * sparse.int("sparse_topk_blocks", hf.int("index_topk_blocks", 16))
    size = hf.int("intermediate_size")
    values: dict[str, Any] = {
        "layer_types": None,
        "moe_intermediate_size": size,
        "intermediate_size": hf.int("dense_intermediate_size", size),
        "max_position_embeddings": min(hf.int("max_position_embeddings"), longest),
    }
    if "mlp_layer_types" not in hf and isinstance(listed := hf.get("moe_layer_freq"), list):
        values["mlp_layer_types"] = ["sparse" if experts else "dense" for experts in listed]
    return hf.with_values(values)


def alike_in_all_layers(hf: CheckpointConfig) -> CheckpointConfig:
    """HunYuan may list a number for each layer; those of published models are all the same."""
    for key in ("num_experts_per_tok", "moe_intermediate_size", "num_shared_expert"):
        if isinstance(listed := hf.get(key), list):
            if len(set(listed)) != 1:
                raise Unsupported(f"{hf.source}: {key} is {listed}", "one number for all layers is supported")
            hf = hf.with_values({key: listed[0]})
    size = hf.int("num_shared_expert", 1) * hf.int("moe_intermediate_size", hf.int("intermediate_size"))
    return hf.with_values({"shared_expert_intermediate_size": size})


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeFamily(LlamaFamily):
    """What a family does otherwise than Llama and, in its experts, than Qwen-MoE."""

    windows: Windows = window_if_used
    routing: Callable[[CheckpointConfig], Routing] = softmax_top_k
    normed_head_key: str | None = None  # the key that says whether columns of the head are divided by their length
    sparse: SparseLayers = experts_by_step
    experts: tuple[ExpertNames, ...] = (QWEN_EXPERTS,)  # the first, unless another is what is stored
    correction: str | None = None  # where `correction_name` is, which corrects the scores experts are chosen by
    correction_name: str = "e_score_correction_bias"
    correction_is_row: bool = False  # whether the correction is stored as [1, experts]
    num_shared_key: str | None = None  # the key that counts shared experts; None: their size is given
    shared: str = "mlp.shared_expert"  # the experts that every token goes to, as one feed-forward layer
    shared_down: str = "down_proj"
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

WITH_SHARED = MoeFamily(num_shared_key="num_shared_experts", shared="mlp.shared_experts", shared_gate=None)
GRANITE = MoeFamily(
    defaults={"norm_topk_prob": True},
    scales=granite_scales,
    experts=(GRANITE_EXPERTS, GRANITE_GGUF_EXPERTS, GRANITE_5_EXPERTS),
)
GRANITE_SHARED = replace(
    GRANITE,
    keys={"shared_expert_intermediate_size": "shared_intermediate_size"},
    shared="shared_mlp",
    shared_down="output_linear",
    shared_gate=None,
)
BAILING = replace(
    WITH_SHARED,
    keys={"qkv_bias": "use_qkv_bias", "n_routed_experts": "num_experts"},
    sparse=experts_after_dense,
    renamed={
        "model.word_embeddings.": "model.embed_tokens.",
        ".attention.query_key_value.": ".self_attn.qkv_proj.",
        ".attention.dense.": ".self_attn.o_proj.",
        ".attention.query_layernorm.": ".self_attn.q_norm.",
        ".attention.key_layernorm.": ".self_attn.k_norm.",
    },
    normed_head_key="norm_head",
)
BAILING_2 = replace(
    BAILING,
    defaults={"use_qk_norm": True},
    expects={"score_function": ("sigmoid", None)},
    qk_norms="heads",
    qk_norms_key="use_qk_norm",
    routing=grouped_sigmoid,
    correction="mlp.gate",
    correction_name="expert_bias",
)

FAMILIES: Mapping[str, MoeFamily] = {
    "MixtralForCausalLM": MoeFamily(
        defaults={"norm_topk_prob": True}, windows=window_everywhere, experts=(MIXTRAL_EXPERTS,)
    ),
    "Qwen2MoeForCausalLM": MoeFamily(windows=window_refused, qkv_bias=True),
    "Qwen3MoeForCausalLM": MoeFamily(default_window=4096, qk_norms="heads", experts=(QWEN_EXPERTS, STACKED_EXPERTS)),
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
    "MiniMaxM3VLForCausalLM": MoeFamily(
        keys={"n_routed_experts": "num_local_experts", "shared_expert_intermediate_size": "shared_intermediate_size"},
        expects={"swiglu_limit": (7.0, None), "swiglu_alpha": (1.702, None)},
        adapt=minimax_m3_keys,
        activations=dict.fromkeys(("silu", "swigluoai", None), Activation.CLAMPED_SWIGLU),
        norm_offset=1.0,
        qk_norms="heads",
        unused=(r".*\.self_attn\.index(er\.|_).*",),
        routing=grouped_sigmoid,
        sparse=experts_as_listed,
        experts=(MIXTRAL_EXPERTS,),
        correction="block_sparse_moe",
        shared="block_sparse_moe.shared_experts",
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
    "GraniteMoeForCausalLM": GRANITE,
    "GraniteMoeSharedForCausalLM": GRANITE_SHARED,
    "GraniteMoeSWAForCausalLM": replace(
        GRANITE_SHARED,
        adapt=GRANITE_SWA.adapt,
        windows=GRANITE_SWA.windows,
        default_window=GRANITE_SWA.default_window,
        rotated=GRANITE_SWA.rotated,
        local_rope=True,
        sinks=GRANITE_SWA.sinks,
    ),
    "FlexOlmoForCausalLM": MoeFamily(qk_norms="rows", norms=POST_NORMS),
    "HunYuanMoEV1ForCausalLM": MoeFamily(
        keys={"num_experts_per_tok": "moe_topk"},
        defaults={"norm_topk_prob": True},
        adapt=alike_in_all_layers,
        rope_alpha=True,
        qk_norms="heads",
        qk_norms_after_rope=True,
        q_norm="self_attn.query_layernorm",
        k_norm="self_attn.key_layernorm",
        experts=(replace(QWEN_EXPERTS, router="mlp.gate.wg"),),
        shared="mlp.shared_mlp",
        shared_gate=None,
    ),
    "HYV3ForCausalLM": replace(
        WITH_SHARED,
        keys={"n_routed_experts": "num_experts", "routed_scaling_factor": "router_scaling_factor"},
        defaults={"first_k_dense_replace": 1},
        qk_norms="heads",
        routing=grouped_sigmoid,
        sparse=experts_as_listed,
        experts=(ROUTER_EXPERTS,),
        correction="mlp",
        correction_name="expert_bias",
        shared="mlp.shared_mlp",
    ),
    "ExaoneMoeForCausalLM": replace(
        WITH_SHARED,
        keys={"n_routed_experts": "num_experts"},
        defaults={"sliding_window_pattern": 4, "first_k_dense_replace": 1},
        expects={"rope_local_scaling": (None,)},
        windows=window_by_pattern,
        default_window=4096,
        rotated=rope_in_windows,
        qk_norms="heads",
        routing=grouped_sigmoid,
        sparse=experts_as_listed,
        correction="mlp",
    ),
    "AfmoeForCausalLM": replace(
        WITH_SHARED,
        keys={
            "n_routed_experts": "num_experts",
            "first_k_dense_replace": "num_dense_layers",
            "routed_scaling_factor": "route_scale",
            "sliding_window_pattern": "global_attn_every_n_layers",
        },
        defaults={"sliding_window_pattern": 4, "first_k_dense_replace": 1},
        expects={"score_func": ("sigmoid", None), "route_norm": (True, None)},
        scales=mup_scales,
        windows=window_by_pattern,
        default_window=1024,
        rotated=rope_only_in_windows,
        qk_norms="heads",
        gate="self_attn.gate_proj",
        norms=AFMOE_NORMS,
        routing=grouped_sigmoid,
        sparse=experts_after_dense,
        experts=(ROUTER_EXPERTS,),
        correction="mlp",
        correction_name="expert_bias",
    ),
    "FlintForCausalLM": MoeFamily(
        defaults={"mlp_only_layers": [0, 1]},
        rotated=rope_only_in_windows,
        qk_norms="heads",
        sinks="softmax_offset",
        routing=sigmoid_top_k,
        shared_gate=None,
    ),
    "MellumForCausalLM": MoeFamily(
        defaults={"norm_topk_prob": True},
        expects={"rope_local_scaling": (None,)},
        local_rope=True,
        qk_norms="heads",
        sparse=experts_as_listed,
    ),
    "AriaTextForCausalLM": MoeFamily(
        keys={"num_experts": "moe_num_experts", "num_experts_per_tok": "moe_topk"},
        defaults={"norm_topk_prob": True},
        experts=(ARIA_EXPERTS,),
        num_shared_key="moe_num_shared_experts",
        shared="mlp.shared_experts",
        shared_gate=None,
    ),
    "BailingMoeForCausalLM": BAILING,
    "BailingMoeV2ForCausalLM": BAILING_2,
    "SarvamMoEForCausalLM": BAILING_2,  # its authors take the mean off the correction, which changes no choice
    "Param2MoEForCausalLM": BAILING_2,
}
