"""Llama with experts: Mixtral, Qwen2-MoE, Qwen3-MoE, OLMoE, GLM-4.5, MiniMax-M2, dots.llm1, Solar Open, ERNIE 4.5 and
Phi-3.5-MoE, which has layer norms.

A router sends each token to a few of many small feed-forward layers. Qwen2-MoE has one more that every token goes to,
through a gate, and GLM-4.5, dots.llm1, Solar Open and ERNIE one without; all but Mixtral, OLMoE, MiniMax-M2 and Solar
Open may leave some layers without experts. GLM-4.5, dots.llm1 and Solar Open choose experts as DeepSeek-V3 does."""

from collections.abc import Container
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from quire.core.errors import BadCheckpoint
from quire.models import llama
from quire.models.deepseek import predicting_layers, read_routing
from quire.models.llama import LlamaConfig
from quire.models.loading import Experts, LoadedModel, Matrix, Vector, Want, Wanted
from quire.ops.opset import Keep, OpSet, Routing, Value
from quire.ops.tensors import PackedExperts, PackedWeight
from quire.weights.checkpoint import Checkpoint
from quire.weights.config import CheckpointConfig

GLM, DOTS, SOLAR = "Glm4MoeForCausalLM", "Dots1ForCausalLM", "SolarOpenForCausalLM"
MINIMAX, ERNIE = "MiniMaxM2ForCausalLM", "Ernie4_5_MoeForCausalLM"
PHI = "PhimoeForCausalLM"
UNGATED = (GLM, DOTS, SOLAR, ERNIE)  # every token's own expert is added as it is


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeConfig(LlamaConfig):
    num_experts: int
    routing: Routing
    expert_size: int  # columns between an expert's two matrices; `intermediate` is that of layers without experts
    shared_size: int  # of the expert that every token goes to; 0: there is none
    sparse: tuple[bool, ...]  # for each layer: whether it has experts
    num_predicting: int = 0  # layers behind the last that guess further tokens: not read

    @property
    def corrected(self) -> bool:
        """Whether experts are chosen by corrected scores."""
        return self.routing.scoring == "sigmoid" or self.architecture == ERNIE


def config(hf: CheckpointConfig) -> MoeConfig:
    hf.expect("hidden_act", "silu")
    if hf.architecture == "OlmoeForCausalLM":
        hf.expect("clip_qkv", None)
    if hf.architecture in (GLM, DOTS, SOLAR):
        return MoeConfig(**_glm_numbers(hf))
    if hf.architecture == ERNIE:
        return MoeConfig(**_ernie_numbers(hf))
    if hf.architecture == MINIMAX:
        hf.expect("scoring_func", "sigmoid", None)
        hf.expect("qk_norm_type", "per_layer", None)
        return MoeConfig(**numbers(hf) | {"routing": Routing(hf.int("num_experts_per_tok"), "sigmoid", True)})
    if hf.architecture in (PHI, "PhiMoEForCausalLM"):
        hf = hf.with_values({"architectures": [PHI]})
        return MoeConfig(**numbers(hf) | _phi_numbers(hf))
    return MoeConfig(**numbers(hf))


def _phi_numbers(hf: CheckpointConfig) -> dict[str, Any]:
    top_k, near = hf.expect("num_experts_per_tok", 2), 2 * hf.float("router_jitter_noise", 0.01)
    return {"routing": Routing(top_k, near=near), "layer_norms": True, "head_bias": hf.bool("lm_head_bias", False)}


def _ernie_numbers(hf: CheckpointConfig) -> dict[str, Any]:
    layers, expert_size = hf.int("num_hidden_layers"), hf.int("moe_intermediate_size")
    first, last = hf.int("moe_layer_start_index", 1), hf.int("moe_layer_end_index", -1)
    every = hf.int("moe_layer_interval", 1)
    hf.expect("use_bias", False, None)
    hf = hf.with_values(
        {
            "num_experts": hf.int("moe_num_experts"),
            "num_experts_per_tok": hf.int("moe_k"),
            "norm_topk_prob": True,
            "shared_expert_intermediate_size": hf.int("moe_num_shared_experts", 0) * expert_size,
        }
    )
    inside = range(first, (layers if last == -1 else last + 1))
    sparse = tuple(layer in inside and (layer + 1) % max(every, 1) == 0 for layer in range(layers))
    return numbers(hf) | {"sparse": sparse}


def _glm_numbers(hf: CheckpointConfig) -> dict[str, Any]:
    expert_size = hf.int("moe_intermediate_size")
    dense = hf.int("first_k_dense_replace", 1 if hf.architecture == GLM else 0)
    turning = hf.get("partial_rotary_factor", 0.5 if hf.architecture == GLM else 1.0)
    hf = hf.with_values(
        {
            "num_local_experts": hf.int("n_routed_experts"),
            "partial_rotary_factor": turning,
            "shared_expert_intermediate_size": hf.int("n_shared_experts", 0) * expert_size,
            "intermediate_size": hf.int("intermediate_size", expert_size),
        }
    )
    common = numbers(hf)
    return common | {
        "out_bias": common["out_bias"] and hf.architecture == DOTS,
        "qk_norms": "heads" if hf.bool("use_qk_norm", hf.architecture == DOTS) else "none",
        "routing": read_routing(hf),
        "sparse": tuple(layer >= dense for layer in range(common["layers"])),
        "num_predicting": hf.int("num_nextn_predict_layers", 0),
    }


def numbers(hf: CheckpointConfig) -> dict[str, Any]:
    """The fields of MixtureConfig."""
    common = llama.numbers(hf)
    count = hf.int("num_local_experts" if "num_local_experts" in hf else "num_experts")
    top_k = hf.int("num_experts_per_tok")
    if not 1 <= top_k <= count:
        raise BadCheckpoint(f"num_experts_per_tok is {top_k}, and there are {count} experts")
    # Mixtral and Granite divide by the sum over the chosen; the others say whether they do.
    renormalize = hf.bool("norm_topk_prob", hf.architecture in ("MixtralForCausalLM", "GraniteMoeForCausalLM"))
    return common | {
        "windows": _windows(hf, common["layers"]),
        "qkv_bias": hf.bool("qkv_bias", common["out_bias"] or hf.architecture == "Qwen2MoeForCausalLM"),
        "qk_norms": QK_NORMS.get(hf.architecture, "none"),
        "num_experts": count,
        "routing": Routing(top_k, renormalize=renormalize),
        "expert_size": hf.int("moe_intermediate_size", common["intermediate"]),
        "shared_size": hf.int("shared_expert_intermediate_size", 0),
        "sparse": _sparse(hf, common["layers"]),
    }


QK_NORMS = {"Qwen3MoeForCausalLM": "heads", "OlmoeForCausalLM": "rows", MINIMAX: "rows"}


def _windows(hf: CheckpointConfig, layers: int) -> tuple[int, ...]:
    """Mixtral has one for all layers, and so has Qwen3-MoE, if it says so. Qwen2-MoE lists kinds of layers."""
    if "layer_types" in hf:
        return llama.listed_windows(hf, layers)
    if hf.architecture == "Qwen2MoeForCausalLM":
        hf.expect("use_sliding_window", False, None)
    everywhere = hf.architecture in ("MixtralForCausalLM", PHI) or hf.bool("use_sliding_window", False)
    return (hf.int("sliding_window", 0) if everywhere else 0,) * layers


def _sparse(hf: CheckpointConfig, layers: int) -> tuple[bool, ...]:
    dense, step = hf.list("mlp_only_layers", []), hf.int("decoder_sparse_step", 1)
    if step < 1:
        raise BadCheckpoint(f"decoder_sparse_step is {step}")
    return tuple(layer not in dense and (layer + 1) % step == 0 for layer in range(layers))


@dataclass(frozen=True, slots=True)
class ExpertNames:
    router: str
    gate_up: tuple[str, ...]
    down: str


MIXTRAL = ExpertNames(
    "block_sparse_moe.gate",
    ("block_sparse_moe.experts.{}.w1", "block_sparse_moe.experts.{}.w3"),
    "block_sparse_moe.experts.{}.w2",
)
GRANITE = ExpertNames(  # the experts of a layer in one tensor
    "block_sparse_moe.router.layer",
    ("block_sparse_moe.input_linear.weight",),
    "block_sparse_moe.output_linear.weight",
)
GRANITE_APART = replace(MIXTRAL, router=GRANITE.router)  # in GGUF files
OTHERS = ExpertNames("mlp.gate", ("mlp.experts.{}.gate_proj", "mlp.experts.{}.up_proj"), "mlp.experts.{}.down_proj")
NAMES = {
    "MixtralForCausalLM": (MIXTRAL,),
    MINIMAX: (MIXTRAL,),
    PHI: (MIXTRAL,),
    "GraniteMoeForCausalLM": (GRANITE, GRANITE_APART),
}
CORRECTIONS = {MINIMAX: "block_sparse_moe", ERNIE: "mlp.moe_statics"}  # where they are not with the router


def layer_names(c: MoeConfig, stored: Container[str]) -> list[Wanted]:
    dense = llama.layer_names(c)
    attention = {ours: want for ours, want in dense.items() if ours not in ("gate_up", "down")}
    experts = expert_names(c, _names(c, stored))
    return [{**attention, **experts} if sparse else dense for sparse in c.sparse]


def _names(c: MoeConfig, stored: Container[str]) -> ExpertNames:
    """Of the ways to name experts, the one that the first layer with experts is stored in."""
    usual, *others = NAMES.get(c.architecture, (OTHERS,))
    prefix = f"model.layers.{c.sparse.index(True)}." if True in c.sparse else ""
    return next((names for names in others if f"{prefix}{names.down.format(0)}.weight" in stored), usual)


def expert_names(c: MoeConfig, names: ExpertNames) -> Wanted:
    outputs = 2 * c.expert_size // len(names.gate_up)
    wanted: dict[str, Want] = {
        "router": Matrix({names.router: c.num_experts}, c.hidden, keep=Keep.ALL),
        "experts_gate_up": Experts(dict.fromkeys(names.gate_up, outputs), c.hidden, c.num_experts),
        "experts_down": Experts({names.down: c.hidden}, c.expert_size, c.num_experts),
    }
    if c.corrected:
        where = CORRECTIONS.get(c.architecture, names.router)
        wanted["correction"] = Vector(where, c.num_experts, "e_score_correction_bias", row=c.architecture == ERNIE)
    if c.shared_size:
        shared = "mlp.shared_experts" if c.architecture in UNGATED else "mlp.shared_expert"
        wanted |= {
            "gate_up": Matrix({f"{shared}.{part}_proj": c.shared_size for part in ("gate", "up")}, c.hidden),
            "down": Matrix({f"{shared}.down_proj": c.hidden}, c.shared_size),
        }
    if c.shared_size and c.architecture not in UNGATED:
        wanted["shared_gate"] = Matrix({"mlp.shared_expert_gate": 1}, c.hidden, keep=Keep.ALL)
    return wanted


@dataclass(frozen=True, slots=True)
class MoeLayer(llama.LlamaLayer):
    """`gate_up` and `down` are of a layer without experts, or of the one that every token goes to."""

    gate_up: Any = None
    down: Any = None
    router: PackedWeight | None = None
    experts_gate_up: PackedExperts | None = None
    experts_down: PackedExperts | None = None
    shared_gate: PackedWeight | None = None
    correction: Any = None


def load(ops: OpSet, checkpoint: Checkpoint, config: MoeConfig, max_model_len: int) -> LoadedModel:
    forward = partial(llama.forward, feed_forward=feed_forward)
    names = layer_names(config, set(checkpoint.names()))
    predicting = predicting_layers(config.layers, config.num_predicting)
    return llama.load_with(ops, checkpoint, config, max_model_len, forward, names, MoeLayer, predicting)


def feed_forward(c: MoeConfig, layer: MoeLayer, ops: OpSet, x: Value) -> Value:
    if layer.router is None:
        return llama.mlp(c, layer, ops, x)
    assert layer.experts_gate_up is not None and layer.experts_down is not None
    experts = (layer.experts_gate_up, layer.experts_down)
    mixed = ops.moe(x, ops.linear(x, layer.router), *experts, c.routing, c.activation, layer.correction)
    if layer.gate_up is None:
        return mixed
    shared = llama.mlp(c, layer, ops, x)
    gated = shared if layer.shared_gate is None else ops.mul_sigmoid(shared, ops.linear(x, layer.shared_gate))
    return ops.add(mixed, gated)
