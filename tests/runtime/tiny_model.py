"""A tiny random model, and a runner for it."""

from pathlib import Path

import numpy as np

from quire.models import llama
from quire.models.rope import RopeSpec
from quire.ops.opset import OpSet
from quire.ops.tensors import F32, StoredTensor
from quire.runtime.kv import KVSize, kv_spec
from quire.runtime.runner import Runner
from quire.weights.config import CheckpointConfig

CONFIG = llama.LlamaConfig(
    architecture="LlamaForCausalLM",
    hidden=48,
    layers=2,
    heads=6,
    kv_heads=2,
    head_dim=8,
    intermediate=80,
    vocab=97,
    max_position=64,
    longest=64,
    eps=1e-5,
    rope=RopeSpec("default", 10000.0, 8, 64, {}),
    windows=(0, 9),
    rotated=(True, True),
)
BLOCK_SIZE = 4
MAX_LEN = 64
NATIVE = "native"
BACKENDS = ["torch", NATIVE]


class RandomCheckpoint:
    """The tensors of CONFIG, in memory."""

    def __init__(self) -> None:
        groups = [("", llama.top_names(CONFIG))]
        groups += [(f"model.layers.{layer}.", llama.layer_names(CONFIG)) for layer in range(CONFIG.layers)]
        rng = np.random.default_rng(7)
        self.arrays = {
            prefix + name: rng.normal(0.0 if len(shape) > 1 else 0.7, 0.3, shape).astype(np.float32)
            for prefix, group in groups
            for want in group.values()
            for name, shape in want.shapes()
        }
        self.path = Path("random")
        self.config = CheckpointConfig(self.path, {"architectures": [CONFIG.architecture]})
        self.nbytes = sum(array.nbytes for array in self.arrays.values())

    def names(self) -> list[str]:
        return list(self.arrays)

    def shape(self, name: str) -> tuple[int, ...]:
        return self.arrays[name].shape

    def tensor(self, name: str) -> StoredTensor:
        array = self.arrays[name]
        return StoredTensor(name, array.shape, F32, array.reshape(-1, array.shape[-1]).view(np.uint8))


def make_ops(backend: str) -> OpSet:
    if backend == "native":
        from quire.ops.native import NativeOps

        return NativeOps()
    from quire.ops.torch import TorchOps

    return TorchOps()


def make_runner(backend: str, num_blocks: int, num_host_blocks: int, max_rows: int) -> Runner:
    ops = make_ops(backend)
    model = llama.load(ops, RandomCheckpoint(), CONFIG, MAX_LEN)
    size = KVSize(kv_spec(CONFIG, BLOCK_SIZE, "float32"), num_blocks, num_host_blocks, MAX_LEN)
    return Runner(ops, model, size, max_rows=max_rows, max_tokens=MAX_LEN)
