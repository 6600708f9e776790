"""How routers choose experts: a function for each kind, from the keys of config.json. `Routing` defines each kind."""

from typing import Literal

from quire.ops.opset import Routing
from quire.weights.config import CheckpointConfig


def softmax_top_k(hf: CheckpointConfig) -> Routing:
    return Routing(hf.int("num_experts_per_tok"), renormalize=hf.bool("norm_topk_prob", False))


def sigmoid_top_k(hf: CheckpointConfig) -> Routing:
    return Routing(hf.int("num_experts_per_tok"), "sigmoid", renormalize=hf.bool("norm_topk_prob", True))


def sparsemixer(hf: CheckpointConfig) -> Routing:
    """Phi-3.5-MoE: a softmax over the logits near the greatest."""
    return Routing(hf.expect("num_experts_per_tok", 2), sparsemixer_threshold=2 * hf.float("router_jitter_noise", 0.01))


def grouped_softmax(hf: CheckpointConfig) -> Routing:
    """DeepSeek V2: a group is as good as its best expert."""
    hf.expect("scoring_func", "softmax", None)
    hf.expect("norm_topk_prob", False, None)
    groups, top_groups = hf.int("n_group", 1), hf.int("topk_group", 1)
    if hf.expect("topk_method", "greedy", "group_limited_greedy", None) != "group_limited_greedy":
        groups = top_groups = 1
    scale = hf.float("routed_scaling_factor", 1.0)
    routing = Routing(hf.int("num_experts_per_tok"), scale=scale, num_groups=groups, top_groups=top_groups)
    routing.check(hf.int("n_routed_experts"))
    return routing


def softmax_of_best_two(hf: CheckpointConfig) -> Routing:
    """Mistral 4: DeepSeek V3's routing by softmax scores, which are not corrected."""
    return _of_best_two(hf, "softmax")


def grouped_sigmoid(hf: CheckpointConfig) -> Routing:
    """DeepSeek V3: experts are chosen by corrected scores, and a group is as good as its best two."""
    hf.expect("scoring_func", "sigmoid", None)
    hf.expect("topk_method", "noaux_tc", None)
    return _of_best_two(hf, "sigmoid")


def _of_best_two(hf: CheckpointConfig, scoring: Literal["softmax", "sigmoid"]) -> Routing:
    routing = Routing(
        hf.int("num_experts_per_tok"),
        scoring,
        renormalize=hf.bool("norm_topk_prob", True),
        scale=hf.float("routed_scaling_factor", 1.0),
        num_groups=hf.int("n_group", 1),
        top_groups=hf.int("topk_group", 1),
        group_score="best two",
    )
    routing.check(hf.int("n_routed_experts"))
    return routing
