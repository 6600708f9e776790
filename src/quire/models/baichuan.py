"""Baichuan 1 and 2: Llama with q, k and v in one tensor. 13B has ALiBi instead of rope. The rows of Baichuan 2's head
are normalized to length 1. GGUF files have q, k and v as three tensors, and the head already normalized."""

import numpy as np

from quire.models import llama
from quire.models.alibi import alibi_slopes
from quire.models.llama import LlamaConfig
from quire.models.loading import Linear, LoadedModel
from quire.ops.dequantize import dequantize
from quire.ops.opset import OpSet
from quire.ops.tensors import F16, F32, StoredTensor
from quire.weights.checkpoint import Checkpoint
from quire.weights.config import CheckpointConfig
from quire.weights.delegating_checkpoint import DelegatingCheckpoint

BAICHUAN_2_VOCAB = 125_696  # nothing else in config.json tells Baichuan 2
MIN_NORM = 1e-7  # of a row of the head


def config(hf: CheckpointConfig) -> LlamaConfig:
    has_alibi = "max_position_embeddings" not in hf
    if has_alibi:
        hf = hf.with_values({"max_position_embeddings": hf.int("model_max_length")})
    fields = llama.config_fields(hf)
    if has_alibi:
        fields |= {"rotated": (False,) * fields["layers"], "slopes": alibi_slopes(fields["heads"])}
    return LlamaConfig(**fields)


def load(ops: OpSet, checkpoint: Checkpoint, config: LlamaConfig, max_model_len: int) -> LoadedModel:
    if "model.layers.0.self_attn.q_proj.weight" in checkpoint.names():
        return llama.load(ops, checkpoint, config, max_model_len)
    specs = {**llama.layer_specs(config), "qkv": Linear({"self_attn.W_pack": 3 * config.hidden}, config.hidden)}
    if config.vocab == BAICHUAN_2_VOCAB:
        checkpoint = NormalizedHead(checkpoint)
    return llama.load_layers(ops, checkpoint, config, max_model_len, [specs] * config.layers)


class NormalizedHead(DelegatingCheckpoint):
    """A checkpoint whose head has rows (or, with axis 0, columns) of length 1, in fp32 if it is stored so, else in
    fp16."""

    def __init__(self, checkpoint: Checkpoint, axis: int = 1) -> None:
        super().__init__(checkpoint)
        self._axis = axis

    def tensor(self, name: str) -> StoredTensor:
        tensor = super().tensor(name)
        if name != "lm_head.weight":
            return tensor
        rows = dequantize(tensor)
        rows = rows / np.maximum(np.linalg.norm(rows, axis=self._axis, keepdims=True), MIN_NORM)
        kind = F32 if tensor.type is F32 else F16
        stored = rows.astype(np.float32 if kind is F32 else np.float16)
        return StoredTensor(name, tensor.shape, kind, stored.view(np.uint8))
