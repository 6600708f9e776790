"""EAGLE-3 (Li et al., 2025, arXiv 2503.01840): one decoder layer over the states of a low, a middle and a high layer.

Training-time test: the layer is unrolled over its own outputs, so that it is taught what it meets when it drafts. Step
0 of all starts is one causal pass over the target's states. In step s a start has its own output of step s - 1 instead,
and attends to step 0 of the text up to itself and to its own steps."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import sqrt
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.train.options import TrainError
from quire.train.target import TargetModel, TargetStates
from quire.train.trainable_head import TextBatch, in_fp16, shifted, trainable

DEFAULT_VOCABULARY = 8192
NUM_AUX = 3
MIN_SCALE = 1e-3  # of a column that is always zero


@dataclass(frozen=True, slots=True)
class Eagle3Shape:
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int  # of the target
    eps: float
    rope_theta: float
    max_position: int
    architecture: str  # of the target


def aux_layers(asked: Sequence[int], num_layers: int) -> tuple[int, ...]:
    """Layer n stands for what it gets; the number of layers for what the final norm gets."""
    if not asked:
        if num_layers < NUM_AUX - 1:
            raise TrainError(
                f"EAGLE-3 gets the states of {NUM_AUX} layers, and the model has {num_layers}", "use medusa"
            )
        usual = (2, num_layers // 2, num_layers - 3)  # as EAGLE and speculators have it
        return usual if usual[0] < usual[1] < usual[2] else tuple(range(num_layers - 2, num_layers + 1))
    if len(asked) != NUM_AUX or sorted(set(asked)) != list(asked) or not 0 <= asked[0] <= asked[-1] <= num_layers:
        raise TrainError(
            f"--aux-layers is {','.join(map(str, asked))}",
            f"give {NUM_AUX} in ascending order, from 0 to {num_layers}, such as 2,{num_layers // 2},{num_layers - 3}",
        )
    return tuple(asked)


def state_scales(target: TargetModel, layers: Sequence[int], batch: TextBatch) -> Tensor:
    """[NUM_AUX * hidden]: the root mean square of each column of the states, over what the model has written."""
    joined = _joined(target.hidden_states(batch.ids, layers), layers)[batch.written]
    return joined.square().mean(dim=0).sqrt().clamp(min=MIN_SCALE)


def _joined(states: TargetStates, layers: Sequence[int]) -> Tensor:
    return torch.cat([states.layers[layer] for layer in layers], dim=-1).float()


class Eagle3Head:
    """The residual of the layer is the normed state (`norm_before_residual`): states have outliers in the thousands.

    For the same reason `fc.weight` is trained for states that are divided by `scales`; the published one has them in
    it."""

    def __init__(
        self, target: TargetModel, vocabulary: Sequence[int], layers: Sequence[int], num_drafts: int,
        scales: Tensor, intermediate: int | None = None, seed: int = 0,
    ) -> None:  # fmt: skip
        c = target.config
        self.shape = Eagle3Shape(
            hidden=c.hidden, intermediate=intermediate or c.intermediate, heads=c.heads, kv_heads=c.kv_heads,
            head_dim=c.head_dim, vocab=c.vocab, eps=c.eps, rope_theta=c.rope.theta, max_position=c.max_position,
            architecture=c.architecture,
        )  # fmt: skip
        self.layers: Sequence[int] = layers
        self.num_drafts = num_drafts
        self.vocabulary = torch.tensor(vocabulary, device=target.device)
        self._embedding, self._scales = target.embedding, scales
        self.weights = trainable(self._initial(target, seed), target.device)

    def _initial(self, target: TargetModel, seed: int) -> dict[str, Tensor]:
        """The layer adds nothing at first, and the LM head is the target's."""
        s, generator = self.shape, torch.Generator().manual_seed(seed)

        def random(outputs: int, inputs: int) -> Tensor:
            return torch.randn(outputs, inputs, generator=generator) / sqrt(inputs)

        layer = {
            "self_attn.q_proj": random(s.heads * s.head_dim, 2 * s.hidden),
            "self_attn.k_proj": random(s.kv_heads * s.head_dim, 2 * s.hidden),
            "self_attn.v_proj": random(s.kv_heads * s.head_dim, 2 * s.hidden),
            "self_attn.o_proj": torch.zeros(s.hidden, s.heads * s.head_dim),
            "mlp.gate_proj": random(s.intermediate, s.hidden),
            "mlp.up_proj": random(s.intermediate, s.hidden),
            "mlp.down_proj": torch.zeros(s.hidden, s.intermediate),
            **{name: torch.ones(s.hidden) for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm")},
        }
        norm = target.norm if isinstance(target.norm, Tensor) else torch.ones(s.hidden)
        return {
            "fc.weight": random(s.hidden, NUM_AUX * s.hidden),
            **{f"layers.0.{name}.weight": weight for name, weight in layer.items()},
            "norm.weight": norm.cpu(),
            "lm_head.weight": target.head.packed[self.vocabulary].cpu(),
        }

    def drafts(self, ids: Tensor, states: TargetStates) -> Iterator[tuple[Tensor, Tensor]]:
        w = self.weights
        x = F.linear(_joined(states, self.layers) / self._scales, w["fc.weight"])
        kv: list[tuple[Tensor, Tensor]] = []  # of each step
        for step in range(self.num_drafts):
            x = self._layer(x, F.embedding(shifted(ids, 1 + step), self._embedding), kv)
            yield self._norm(x, "norm"), w["lm_head.weight"]

    def _layer(self, x: Tensor, embedded: Tensor, kv: list[tuple[Tensor, Tensor]]) -> Tensor:
        hidden = self._norm(x, "layers.0.hidden_norm")
        both = torch.cat([self._norm(embedded, "layers.0.input_layernorm"), hidden], dim=-1)
        q, k, v = (
            self._linear(both, f"self_attn.{name}_proj").unflatten(-1, (-1, self.shape.head_dim)) for name in "qkv"
        )
        q, k, v = (heads.transpose(1, 2) for heads in (q, k, v))  # [sequences, heads, length, head_dim]
        kv.append((self._rotate(k, len(kv)), v))
        attended = self._attend(self._rotate(q, len(kv) - 1), kv)
        h = hidden + self._linear(attended, "self_attn.o_proj")
        normed = self._norm(h, "layers.0.post_attention_layernorm")
        gated = F.silu(self._linear(normed, "mlp.gate_proj")) * self._linear(normed, "mlp.up_proj")
        return h + self._linear(gated, "mlp.down_proj")

    def _attend(self, q: Tensor, kv: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
        (k, v), *own = kv
        length = q.shape[2]
        q = q.unflatten(1, (self.shape.kv_heads, -1)) / sqrt(self.shape.head_dim)  # [n, kv heads, group, length, dim]
        unseen = torch.ones(length, length, dtype=torch.bool, device=q.device).triu(1)
        scores = (q @ k[:, :, None].transpose(-1, -2)).masked_fill(unseen, float("-inf"))
        scores = torch.cat([scores, *((q * k[:, :, None]).sum(-1, keepdim=True) for k, _ in own)], dim=-1)
        shares = scores.float().softmax(dim=-1).to(v.dtype)
        out = shares[..., :length] @ v[:, :, None]
        for step, (_, v) in enumerate(own):
            out = out + shares[..., length + step, None] * v[:, :, None]
        return out.flatten(1, 2).transpose(1, 2).flatten(2)

    def _rotate(self, heads: Tensor, step: int) -> Tensor:
        """Position i + step, in fp32; column c is paired with column c + head_dim / 2."""
        half = self.shape.head_dim // 2
        powers = torch.arange(half, device=heads.device, dtype=torch.float32) / half
        positions = torch.arange(heads.shape[2], device=heads.device, dtype=torch.float32) + step
        angles = positions[:, None] * self.shape.rope_theta**-powers
        a, b = heads.float().split(half, dim=-1)
        rotated = torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], dim=-1)
        return rotated.to(heads.dtype)

    def _norm(self, x: Tensor, name: str) -> Tensor:
        x = x.float()
        return x * torch.rsqrt((x * x).mean(dim=-1, keepdim=True) + self.shape.eps) * self.weights[f"{name}.weight"]

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return F.linear(x, self.weights[f"layers.0.{name}.weight"])

    def published(self) -> dict[str, Tensor]:
        """Draft token n is token n + d2t[n] of the target; t2d says which tokens can be drafted."""
        vocabulary = self.vocabulary.cpu()
        drafted = torch.zeros(self.shape.vocab, dtype=torch.bool)
        drafted[vocabulary] = True
        maps = {"d2t": vocabulary - torch.arange(len(vocabulary)), "t2d": drafted}
        return {**in_fp16({**self.weights, "fc.weight": self.weights["fc.weight"] / self._scales}), **maps}

    def config(self, verifier: str) -> dict[str, Any]:
        s = self.shape
        layer = {
            "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": s.hidden,
            "intermediate_size": s.intermediate, "num_hidden_layers": 1, "num_attention_heads": s.heads,
            "num_key_value_heads": s.kv_heads, "head_dim": s.head_dim, "hidden_act": "silu", "rms_norm_eps": s.eps,
            "rope_theta": s.rope_theta, "max_position_embeddings": s.max_position, "vocab_size": s.vocab,
            "attention_bias": False, "mlp_bias": False, "tie_word_embeddings": False,
        }  # fmt: skip
        proposal = {"proposal_type": "greedy", "speculative_tokens": self.num_drafts}
        return {
            "architectures": ["Eagle3Speculator"],
            "speculators_model_type": "eagle3",
            "draft_vocab_size": len(self.vocabulary),
            "target_hidden_size": s.hidden,
            "norm_before_residual": True,
            "norm_before_fc": False,
            "eagle_aux_hidden_state_layer_ids": list(self.layers),
            "tie_word_embeddings": False,
            "torch_dtype": "float16",
            "transformer_layer_config": layer,
            "speculators_config": {
                "algorithm": "eagle3",
                "default_proposal_method": "greedy",
                "proposal_methods": [proposal],
                "verifier": {"name_or_path": verifier, "architectures": [s.architecture]},
            },
        }
