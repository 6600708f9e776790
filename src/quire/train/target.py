"""The target model in plain torch: the reference op set over whole sequences, which keeps what its layers get."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.core.errors import Unsupported
from quire.models.llama import LlamaConfig
from quire.models.registry import family, read_model_config
from quire.ops.ranks.cuts import Cut
from quire.ops.reference.attention import attention
from quire.ops.reference.opset import TorchOps
from quire.ops.tensors import PackedWeight, StoredTensor
from quire.weights.checkpoint import Checkpoint

DTYPES = {"cpu": torch.float32, "cuda": torch.bfloat16}
LOGIT_ROWS = 4096  # whose logits are computed at once


@dataclass(frozen=True, slots=True)
class TargetBatch:
    """What a forward pass asks of its batch: sequences of one length, one behind the other."""

    ids: Tensor  # [sequences * length]
    positions: Tensor
    num_sequences: int


class TargetOps(TorchOps):
    """Whole sequences without a cache. The input of a layer is the last sum (or embedding) before its keys."""

    def __init__(self, device: str, dtype: Any) -> None:
        super().__init__(device)
        self.dtype = dtype
        self.layers: Sequence[int] = ()  # whose inputs are kept
        self.layer_inputs: dict[int, Tensor] = {}
        self._num_layers = 0  # so far
        self.logit_cap = 0.0
        self._sum: Any = None
        self._kv: tuple[Any, Any] = (None, None)

    def _tensor(self, stored: StoredTensor) -> Tensor:
        return super()._tensor(stored).to(self.dtype)

    def embedding(self, ids: Tensor, table: Tensor, cut: Cut | None = None) -> Tensor:
        self._sum = super().embedding(ids, table, cut)
        return self._sum

    def scale(self, x: Tensor, factor: float) -> Tensor:
        scaled = super().scale(x, factor)
        if x is self._sum:
            self._sum = scaled
        return scaled

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        self._sum = super().add(x, y)
        return self._sum

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, groups: int = 1) -> Tensor:
        return super().rms_norm(x.float(), weight.float(), eps, groups).to(self.dtype)

    def layer_norm(self, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, groups: int = 1) -> Tensor:
        vectors = [None if vector is None else vector.float() for vector in (weight, bias)]
        return super().layer_norm(x.float(), vectors[0], vectors[1], eps, groups).to(self.dtype)

    def write_kv(self, k: Tensor, v: Tensor, batch: Any, layer: int) -> None:
        self._keep_input(layer)
        self._kv = (k, v)

    def _keep_input(self, layer: int) -> None:
        if layer in self.layers:
            self.layer_inputs[layer] = self._sum
        self._num_layers = layer + 1

    def paged_attention(
        self, q: Tensor, batch: Any, layer: int, head_dim: int, scale: float, window: int = 0, softcap: float = 0.0,
        slopes: Tensor | None = None, sinks: Tensor | None = None, biases: Tensor | None = None, group: int = 0,
        skipped: int = 0,
    ) -> Tensor:  # fmt: skip
        q, k, v = (x.unflatten(0, (batch.num_sequences, -1)).unflatten(-1, (-1, head_dim)) for x in (q, *self._kv))
        windowed = 0 < abs(window) < q.shape[1]
        if windowed or softcap or slopes is not None or sinks is not None or biases is not None:
            sequences = zip(q, k, v, strict=True)
            out = torch.stack([attention(*s, scale, window, softcap, slopes, sinks, True, biases) for s in sequences])
        else:
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True).transpose(1, 2)
        return out.flatten(0, 1).flatten(1).to(self.dtype)

    def logits(
        self, x: Tensor, head: PackedWeight, batch: Any, softcap: float = 0.0, vocabulary: Any = None,
        cut: Cut | None = None,
    ) -> Tensor:  # fmt: skip
        """The last hidden states instead of logits, which are computed where they are needed."""
        self._keep_input(self._num_layers)
        self.logit_cap = softcap
        return x


@dataclass(frozen=True, slots=True)
class TargetStates:
    """The hidden states of sequences side by side, padded to one length."""

    layers: dict[int, Tensor]  # layer -> what it gets [sequences, length, hidden]; the last is what the final norm gets
    last: Tensor  # [sequences, length, hidden]: what the LM head gets


def target_config(checkpoint: Checkpoint) -> LlamaConfig:
    architecture = checkpoint.config.architecture
    config = read_model_config(family(architecture), checkpoint.config)
    if not isinstance(config, LlamaConfig):
        raise Unsupported(f"a draft head for a `{architecture}`", "the families that are like Llama can have one")
    return config


class TargetModel:
    """A model of a Llama-like family, ready to be run over whole sequences."""

    def __init__(self, checkpoint: Checkpoint, device: str, max_length: int) -> None:
        config = target_config(checkpoint)
        self.config, self.device = config, device
        self._ops: Any = TargetOps(device, DTYPES[device])
        model_family = family(checkpoint.config.architecture)
        self._model = model_family.load(self._ops, checkpoint, config, min(max_length, config.max_length))
        top = self._model.weights[0]
        self.embedding: Tensor = top["embed"]  # [vocab, hidden]
        self.head: PackedWeight = top["head"]
        self.norm: Any = top["norm"]  # of the last hidden states

    @property
    def dtype(self) -> Any:
        return self._ops.dtype

    def hidden_states(self, ids: Tensor, layers: Sequence[int]) -> TargetStates:
        """ids [sequences, length]"""
        num_sequences, length = ids.shape
        positions = torch.arange(length, device=ids.device).repeat(num_sequences)
        self._ops.layers = layers
        with torch.no_grad():
            last = self._model.forward(self._ops, TargetBatch(ids.flatten(), positions, num_sequences))
        shape = (num_sequences, length)
        kept = {layer: self._ops.layer_inputs[layer].unflatten(0, shape) for layer in layers}
        self._ops.layer_inputs.clear()
        return TargetStates(kept, last.unflatten(0, shape))

    def probabilities(self, last: Tensor, vocabulary: Tensor) -> Tensor:
        """last [rows, hidden] -> [rows, vocabulary]: of the tokens in `vocabulary`, among all."""
        with torch.no_grad():
            parts = [self._probabilities(rows, vocabulary) for rows in last.split(LOGIT_ROWS)]
        return torch.cat(parts)

    def _probabilities(self, last: Tensor, vocabulary: Tensor) -> Tensor:
        logits = F.linear(last, self.head.packed, self.head.bias).float()
        if cap := self._ops.logit_cap:
            logits = cap * torch.tanh(logits / cap)
        chosen = logits if len(vocabulary) == logits.shape[1] else logits[:, vocabulary]
        return (chosen - logits.logsumexp(dim=-1, keepdim=True)).exp()
