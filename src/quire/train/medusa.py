"""Medusa (Cai et al., 2024, arXiv 2401.10774): a head for each draft, over the target's last hidden state alone."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.train.target import TargetModel, TargetStates
from quire.train.trainable_head import in_fp16, trainable


class MedusaHeads:
    """Head n is a residual block, x + silu(linear(x)), and an LM head of its own."""

    layers: Sequence[int] = ()

    def __init__(self, target: TargetModel, vocabulary: Sequence[int], num_drafts: int) -> None:
        self._config, self.num_drafts = target.config, num_drafts
        self.vocabulary = torch.tensor(vocabulary, device=target.device)
        hidden = target.config.hidden
        weights = {}
        for head in range(num_drafts):
            weights[f"medusa_head.{head}.0.linear.weight"] = torch.zeros(hidden, hidden)
            weights[f"medusa_head.{head}.0.linear.bias"] = torch.zeros(hidden)
            weights[f"medusa_head.{head}.1.weight"] = target.head.packed[self.vocabulary].cpu()
        self.weights = trainable(weights, target.device)

    def drafts(self, ids: Tensor, states: TargetStates) -> Iterator[tuple[Tensor, Tensor]]:
        x, w = states.last.float(), self.weights
        for head in range(self.num_drafts):
            prefix = f"medusa_head.{head}"
            linear = F.linear(x, w[f"{prefix}.0.linear.weight"], w[f"{prefix}.0.linear.bias"])
            yield x + F.silu(linear), w[f"{prefix}.1.weight"]

    def published(self) -> dict[str, Tensor]:
        """`token_map`, where the vocabulary is cut: the token ids of the LM heads' outputs."""
        cut = {} if len(self.vocabulary) == self._config.vocab else {"token_map": self.vocabulary.cpu()}
        return {**in_fp16(self.weights), **cut}

    def config(self, verifier: str) -> dict[str, Any]:
        return {
            "architectures": ["MedusaModel"],
            "model_type": "medusa",
            "base_model_name_or_path": verifier,
            "medusa_num_heads": self.num_drafts,
            "medusa_num_layers": 1,
            "num_heads": self.num_drafts,  # vLLM's names of the two
            "num_hidden_layers": 1,
            "hidden_size": self._config.hidden,
            "vocab_size": self._config.vocab,
            "truncated_vocab_size": len(self.vocabulary),
            "medusa_fc_bias": True,
            "torch_dtype": "float16",
        }
