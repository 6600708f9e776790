"""Baichuan 1 and 2: Llama with q, k and v in one tensor. 13B does not rotate: its scores fall with the distance. The
rows of Baichuan 2's head are divided by their lengths. GGUF files have three tensors, and rows as they are to be."""

import numpy as np

from quire.models import llama
from quire.models.alibi import alibi_slopes
from quire.models.llama import LlamaConfig
from quire.models.loading import Linear, LoadedModel
from quire.models.renamed_checkpoint import RenamedCheckpoint
from quire.ops.dequantize import dequantize
from quire.ops.opset import OpSet
from quire.ops.tensors import F16, F32, StoredTensor
from quire.weights.checkpoint import Checkpoint
from quire.weights.config import CheckpointConfig

SECOND_VOCAB = 125_696  # nothing else says that it is Baichuan 2
LEAST_LENGTH = 1e-7  # of a row


def config(hf: CheckpointConfig) -> LlamaConfig:
    falling = "max_position_embeddings" not in hf
    if falling:
        hf = hf.with_values({"max_position_embeddings": hf.int("model_max_length")})
    numbers = llama.config_fields(hf)
    if falling:
        numbers |= {"rotated": (False,) * numbers["layers"], "slopes": alibi_slopes(numbers["heads"])}
    return LlamaConfig(**numbers)


def load(ops: OpSet, checkpoint: Checkpoint, config: LlamaConfig, max_model_len: int) -> LoadedModel:
    if "model.layers.0.self_attn.q_proj.weight" in checkpoint.names():
        return llama.load(ops, checkpoint, config, max_model_len)
    names = {**llama.layer_specs(config), "qkv": Linear({"self_attn.W_pack": 3 * config.hidden}, config.hidden)}
    if config.vocab == SECOND_VOCAB:
        checkpoint = HeadNormed(checkpoint, {name: name for name in checkpoint.names()})
    return llama.load_layers(ops, checkpoint, config, max_model_len, [names] * config.layers)


class HeadNormed(RenamedCheckpoint):
    """With rows of length 1 in the head: in fp16, if it was stored in no more bits."""

    def tensor(self, name: str) -> StoredTensor:
        tensor = super().tensor(name)
        if name != "lm_head.weight":
            return tensor
        rows = dequantize(tensor)
        rows = rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), LEAST_LENGTH)
        kind = F32 if tensor.type is F32 else F16
        stored = rows.astype(np.float32 if kind is F32 else np.float16)
        return StoredTensor(name, tensor.shape, kind, stored.view(np.uint8))
