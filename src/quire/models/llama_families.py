"""The families that are Llama but for a few features: one row a family.

To add a family, write its row in FAMILIES, with only what differs from Llama, and its line in registry.py. To read it
from GGUF as well, add a row to weights/gguf/names.py."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from math import sqrt
from typing import Any, Literal

from quire.core.errors import BadCheckpoint, Unsupported
from quire.models.activations import NAMES as ACTIVATION_NAMES
from quire.models.layer_patterns import (
    Rotation,
    Windows,
    full_attention,
    rope_as_listed,
    rope_by_theta,
    rope_everywhere,
    rope_in_windows,
    window_by_pattern,
    window_everywhere,
    window_except_every,
    window_in_upper_layers,
    window_refused,
)
from quire.ops.opset import Activation
from quire.weights.config import CheckpointConfig

# Fields of LlamaLayer -> tensor names: norms before attention and feed-forward, after them, or both.
PRE_NORMS = {"attn_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
POST_NORMS = {"post_attn_norm": "post_attention_layernorm", "post_mlp_norm": "post_feedforward_layernorm"}
GEMMA_NORMS = {**POST_NORMS, "attn_norm": "input_layernorm", "mlp_norm": "pre_feedforward_layernorm"}
OURO_NORMS = {**PRE_NORMS, "post_attn_norm": "input_layernorm_2", "post_mlp_norm": "post_attention_layernorm_2"}
GLM4_NORMS = {**PRE_NORMS, "post_attn_norm": "post_self_attn_layernorm", "post_mlp_norm": "post_mlp_layernorm"}


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaFamily:
    """What a family does otherwise than Llama, whose row is all defaults."""

    # -- config.json
    keys: Mapping[str, str] = field(default_factory=dict)  # Llama's key -> the family's own key for it
    defaults: Mapping[str, Any] = field(default_factory=dict)  # key -> its value where config.json has none
    # Key -> the values that are supported. With None among them, the key may be missing.
    expects: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    adapt: Callable[[CheckpointConfig], CheckpointConfig] | None = None  # what the three above cannot express
    # Supported values of `hidden_act` -> activation. With None among them, the key may be missing.
    activations: Mapping[str | None, Activation] = field(default_factory=lambda: {"silu": Activation.SILU})
    scales: Callable[[CheckpointConfig], Mapping[str, float]] | None = None  # -> factors and caps of LlamaConfig

    loops_key: str | None = None  # the key that says how often the layers run

    # -- attention
    bidirectional: bool = False  # tokens see those after them, too
    bidirectional_key: str | None = None  # the key that says so
    windows: Windows = full_attention  # where `layer_types` does not list them
    default_window: int = 0  # where config.json has no `sliding_window`; a null means that there is none
    rotated: Rotation = rope_everywhere
    alibi: bool = False  # scores fall with distance, by slopes; queries and keys have no rope
    rope_interleaved: bool = False  # the checkpoint has the two columns of a rotary pair side by side
    rope_reversed: bool = False  # queries and keys are rotated the other way round
    rope_alpha: bool = False  # `alpha` of a dynamic rope scaling is a fixed NTK factor
    spare_rope_factors: bool = False  # GGUF files have some for columns that are not rotated, too
    local_rope: bool = False  # layers with a window rotate by `rope_local_base_freq`, without scaling
    query_scaling: bool = False  # queries are scaled by their position: `llama_4_scaling_beta`
    bias_key: str = "use_bias"  # the key that gives all linear layers biases
    qkv_bias: bool = False  # where config.json does not say
    out_bias: bool = True  # the output projection has a bias where `attention_bias` is set
    head_bias: bool = False  # the head has a bias where `lm_head_bias` is set
    qk_norms: Literal["none", "heads", "rows"] = "none"  # of every head, or of the whole of q and k
    qk_norms_key: str | None = None  # the key that says whether there are any
    qk_norms_after_rope: bool = False
    sinks: str | None = None  # the tensor of `self_attn` with a sink for each head
    gate: str | None = None  # a linear layer of the input, which multiplies the output of attention
    gate_activation: Activation = Activation.SIGMOID  # of that layer's outputs

    # -- tensors
    unused: tuple[str, ...] = ()  # patterns of tensor names that are not read
    renamed: Mapping[str, str] = field(default_factory=dict)  # substring of tensor names -> Llama's
    norms: Mapping[str, str] = field(default_factory=lambda: PRE_NORMS)  # field of LlamaLayer -> tensor
    layer_norm: bool = False  # norms are layer norms, not RMS norms
    norm_bias: bool = True  # layer norms have biases
    norm_offset: float = 0.0  # added to stored norm weights
    stored_norms: bool = True  # norms have weights
    norm_offsets: Mapping[str, float] = field(default_factory=dict)  # of fields of LlamaLayer whose offset is another
    # Fields of LlamaLayer -> tensor names: norms of what the output and the down projection get.
    sub_norms: Mapping[str, str] = field(default_factory=dict)
    q_norm: str = "self_attn.q_norm"
    k_norm: str = "self_attn.k_norm"
    kv: str | None = None  # the tensor of k and v, where they are one
    kv_by_head: bool = False  # in it, the value of each head stands behind its key
    fused_qkv: bool = False  # q, k and v are always one tensor; else only if that tensor is stored
    grouped_qkv: bool = False  # in that tensor, each key head stands behind the query heads that share it
    gate_up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")  # one name: gate and up are one tensor
    down: str = "mlp.down_proj"
    down_bias: bool = False  # the down projection has a bias, whatever the others have
    gated: bool = True  # the feed-forward layer has a gate; else `gate_up` names the up projection


def translate(hf: CheckpointConfig, family: LlamaFamily) -> CheckpointConfig:
    """The configuration in Llama's keys. What is not supported fails here, by name."""
    hf = hf.with_values({llamas: hf.get(key) for llamas, key in family.keys.items() if llamas not in hf and key in hf})
    hf = hf.with_values({key: value for key, value in family.defaults.items() if key not in hf})
    if family.default_window and not hf.is_given("sliding_window"):
        hf = hf.with_values({"sliding_window": family.default_window})
    for key, allowed in family.expects.items():
        hf.expect(key, *allowed)
    return hf if family.adapt is None else family.adapt(hf)


# -- what a row needs code for -----------------------------------------------------------------------------------------


def granite_scales(hf: CheckpointConfig) -> dict[str, float]:
    divisor = hf.float("logits_scaling", 1.0)
    if divisor == 0:
        raise BadCheckpoint("logits_scaling is 0, and logits are divided by it")
    return {
        "embed_scale": hf.float("embedding_multiplier", 1.0),
        "score_scale": hf.float("attention_multiplier", 1.0),
        "residual_scale": hf.float("residual_multiplier", 1.0),
        "logit_scale": 1 / divisor,
    }


def minicpm_scales(hf: CheckpointConfig) -> dict[str, float]:
    return {
        "embed_scale": hf.float("scale_emb", 1.0),
        "residual_scale": hf.float("scale_depth", 1.0) / sqrt(hf.int("num_hidden_layers")),
        "logit_scale": hf.float("dim_model_base", 1.0) / hf.int("hidden_size"),
    }


def teleflm_scales(hf: CheckpointConfig) -> dict[str, float]:
    factor = hf.float("mup_scale_factor", 1.0)
    if factor == 0:
        raise BadCheckpoint("mup_scale_factor is 0, and logits are divided by it")
    return {"embed_scale": hf.float("input_mult", 1.0), "logit_scale": hf.float("output_mult", 1.0) / factor}


def hyperclova_scales(hf: CheckpointConfig) -> dict[str, float]:
    """Scales as Granite's, but logits are multiplied, and scores are scaled as in Llama by default."""
    scales = granite_scales(hf) | {"logit_scale": hf.float("logits_scaling", 1.0)}
    return scales if "attention_multiplier" in hf else {key: scales[key] for key in scales if key != "score_scale"}


def root_of_hidden(hf: CheckpointConfig) -> float:
    return sqrt(hf.int("hidden_size"))


def gemma_scales(hf: CheckpointConfig) -> dict[str, float]:
    return {
        "embed_scale": root_of_hidden(hf),
        "score_cap": hf.float("attn_logit_softcapping", 0.0),
        "logit_cap": hf.float("final_logit_softcapping", 0.0),
    }


def gemma2_scales(hf: CheckpointConfig) -> dict[str, float]:
    """Gemma 2 and 3 may scale scores by another width than that of a head."""
    scales = gemma_scales(hf)
    if "query_pre_attn_scalar" in hf:
        width = hf.float("query_pre_attn_scalar")
        if width <= 0:
            raise BadCheckpoint(f"{hf.source}: query_pre_attn_scalar is {width}, and it must be above 0")
        scales["score_scale"] = 1 / sqrt(width)
    return scales


def thetas_by_kind(hf: CheckpointConfig) -> CheckpointConfig:
    """Granite SWA lists a theta for each layer. Layers with a window must share one, and so must the others."""
    thetas, kinds = hf.list("layer_rope_theta", []), hf.list("layer_types", [])
    found: dict[str, set[float]] = {"full_attention": set(), "sliding_attention": set()}
    for kind, theta in zip(kinds, thetas, strict=False):
        found.setdefault(str(kind), set()).update({float(theta)} - {0.0})
    for kind, values in found.items():
        if len(values) > 1:
            listed = ", ".join(f"{theta:g}" for theta in sorted(values))
            raise Unsupported(
                f"{hf.source}: layer_rope_theta has {listed} for {kind}", "one for each kind is supported"
            )
    keys = {"rope_theta": found["full_attention"], "rope_local_base_freq": found["sliding_attention"]}
    return hf.with_values({key: values.pop() for key, values in keys.items() if values})


# -- the table ---------------------------------------------------------------------------------------------------------

GELU_TANH = ("gelu_pytorch_tanh", "gelu", None)  # configurations of Gemma 1 say "gelu" for the approximation
NANBEIGE_OPTIONS = (
    *("qk_layernorm", "emb_neighbor_num", "insert_ngram_layer_idx", "ngram_insert_all_layers", "loop_middle_layers"),
    *("enable_double_loop_split", "loop_share_kv", "enable_hyper_connection", "enable_mhc", "enable_depth_attention"),
)
GEMMA = LlamaFamily(
    defaults={"tie_word_embeddings": True},
    expects={
        "hidden_activation": GELU_TANH,
        "use_bidirectional_attention": (False, None),
        "rope_local_scaling": (None,),
    },
    activations=dict.fromkeys(GELU_TANH, Activation.GELU_TANH),
    scales=gemma_scales,
    norm_offset=1.0,
)
GEMMA2 = replace(GEMMA, scales=gemma2_scales, windows=window_except_every(2), default_window=4096, norms=GEMMA_NORMS)
GEMMA3_DEFAULTS = {
    "vocab_size": 262_208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131_072,
    "rope_theta": 1_000_000.0,
    "rope_local_base_freq": 10_000.0,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "sliding_window_pattern": 6,
    "tie_word_embeddings": True,
}
GRANITE_SWA = LlamaFamily(
    defaults={"tie_word_embeddings": True},
    adapt=thetas_by_kind,
    scales=granite_scales,
    windows=window_except_every(4, first=True),
    default_window=128,
    rotated=rope_by_theta,
    local_rope=True,
    sinks="sinks",
)
QWEN2 = LlamaFamily(windows=window_in_upper_layers, default_window=4096, qkv_bias=True)
GLM = LlamaFamily(
    defaults={"partial_rotary_factor": 0.5}, rope_interleaved=True, out_bias=False, gate_up=("mlp.gate_up_proj",)
)
OLMO2 = LlamaFamily(expects={"rope_local_scaling": (None,)}, qk_norms="rows", norms=POST_NORMS)

FAMILIES: Mapping[str, LlamaFamily] = {
    "LlamaForCausalLM": LlamaFamily(),
    "CwmForCausalLM": LlamaFamily(windows=window_except_every(4, first=True), default_window=8192),
    "SeedOssForCausalLM": LlamaFamily(),
    "MistralForCausalLM": LlamaFamily(windows=window_everywhere, default_window=4096),
    "MinistralForCausalLM": LlamaFamily(windows=window_everywhere, default_window=4096),
    "Ministral3ForCausalLM": LlamaFamily(windows=window_everywhere, query_scaling=True),
    "Phi3ForCausalLM": LlamaFamily(windows=window_everywhere, fused_qkv=True, gate_up=("mlp.gate_up_proj",)),
    "Qwen2ForCausalLM": QWEN2,
    "MiMoForCausalLM": QWEN2,
    "Qwen3ForCausalLM": LlamaFamily(windows=window_in_upper_layers, default_window=4096, qk_norms="heads"),
    "SmolLM3ForCausalLM": LlamaFamily(windows=window_refused, rotated=rope_as_listed),
    "Ernie4_5ForCausalLM": LlamaFamily(rope_interleaved=True),
    "HeliumForCausalLM": LlamaFamily(rope_interleaved=True, out_bias=False),
    "HunYuanDenseV1ForCausalLM": LlamaFamily(
        rope_alpha=True,
        qk_norms="heads",
        qk_norms_after_rope=True,
        q_norm="self_attn.query_layernorm",
        k_norm="self_attn.key_layernorm",
    ),
    "MaincoderForCausalLM": LlamaFamily(rope_interleaved=True, qk_norms="heads", qk_norms_after_rope=True),
    "ArceeForCausalLM": LlamaFamily(
        defaults={"hidden_act": "relu2"}, activations=dict(ACTIVATION_NAMES), gated=False, gate_up=("mlp.up_proj",)
    ),
    "InternLM2ForCausalLM": LlamaFamily(
        keys={"attention_bias": "bias"},
        renamed={
            "output.": "lm_head.",
            "model.tok_embeddings.": "model.embed_tokens.",
            ".attention_norm.": ".input_layernorm.",
            ".attention.wqkv.": ".self_attn.qkv_proj.",
            ".attention.wo.": ".self_attn.o_proj.",
            ".ffn_norm.": ".post_attention_layernorm.",
            ".feed_forward.w1.": ".mlp.gate_proj.",
            ".feed_forward.w3.": ".mlp.up_proj.",
            ".feed_forward.w2.": ".mlp.down_proj.",
        },
        fused_qkv=True,
        grouped_qkv=True,
    ),
    "InternLM3ForCausalLM": LlamaFamily(bias_key="bias"),
    "NanbeigeForCausalLM": LlamaFamily(
        expects=dict.fromkeys(NANBEIGE_OPTIONS, (False, 0, [], None)), loops_key="num_loops"
    ),
    "OuroForCausalLM": LlamaFamily(
        defaults={"total_ut_steps": 4},
        expects={
            "early_exit_threshold": (1.0, None),
            "early_exit_step": (None,),
            "use_sliding_window": (False, None),
        },
        loops_key="total_ut_steps",
        norms=OURO_NORMS,
        unused=(r"model\.[a-z]+_exit_gate\..*",),
    ),
    "ExaoneForCausalLM": LlamaFamily(
        keys={
            "hidden_act": "activation_function",
            "num_hidden_layers": "num_layers",
            "rms_norm_eps": "layer_norm_epsilon",
        },
        renamed={
            "transformer.wte.": "model.embed_tokens.",
            "transformer.ln_f.": "model.norm.",
            "transformer.h.": "model.layers.",
            ".ln_1.": ".input_layernorm.",
            ".attn.attention.out_proj.": ".self_attn.o_proj.",
            ".attn.attention.": ".self_attn.",
            ".ln_2.": ".post_attention_layernorm.",
            ".mlp.c_fc_0.": ".mlp.gate_proj.",
            ".mlp.c_fc_1.": ".mlp.up_proj.",
            ".mlp.c_proj.": ".mlp.down_proj.",
        },
    ),
    "Exaone4ForCausalLM": replace(
        OLMO2,
        defaults={"sliding_window_pattern": 4},
        windows=window_by_pattern,
        default_window=4096,
        rotated=rope_in_windows,
        qk_norms="heads",
    ),
    "Olmo2ForCausalLM": OLMO2,
    "Olmo3ForCausalLM": replace(OLMO2, windows=window_except_every(4), default_window=4096, local_rope=True),
    "GlmForCausalLM": GLM,
    "Glm4ForCausalLM": replace(GLM, norms=GLM4_NORMS),
    "GraniteForCausalLM": LlamaFamily(scales=granite_scales),
    "GraniteSWAForCausalLM": GRANITE_SWA,
    "HyperCLOVAXForCausalLM": LlamaFamily(
        expects={"use_post_norm": (True, None)},
        scales=hyperclova_scales,
        norms={**PRE_NORMS, "post_attn_norm": "post_norm1", "post_mlp_norm": "post_norm2"},
    ),
    "TeleFLMForCausalLM": LlamaFamily(scales=teleflm_scales),
    "PanguEmbeddedForCausalLM": LlamaFamily(keys={"attention_bias": "bias"}),
    "MiniCPMForCausalLM": LlamaFamily(scales=minicpm_scales),
    "GemmaForCausalLM": GEMMA,
    "Gemma2ForCausalLM": GEMMA2,
    "VaultGemmaForCausalLM": replace(
        GEMMA2, norms={"attn_norm": "input_layernorm", "mlp_norm": "pre_feedforward_layernorm"}
    ),
    "Gemma3ForCausalLM": replace(
        GEMMA2,
        defaults=GEMMA3_DEFAULTS,
        expects={key: values for key, values in GEMMA2.expects.items() if key != "use_bidirectional_attention"},
        bidirectional_key="use_bidirectional_attention",  # EmbeddingGemma
        windows=window_by_pattern,
        local_rope=True,
        qk_norms="heads",
    ),
}
