"""Tiny random models, and runners for them."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from quire.models import bamba, deepseek, lfm2, llama
from quire.models.config import ModelConfig
from quire.models.indexer import IndexerShape
from quire.models.loading import TensorSpecs
from quire.models.mamba2_mixer import Mamba2Shape
from quire.models.rope import RopeSpec
from quire.ops.kv_spec import ConvSpec, IndexSpec, WindowSpec
from quire.ops.opset import OpSet, Routing
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
    max_length=64,
    eps=1e-5,
    rope=RopeSpec("default", 10000.0, 8, 64, {}),
    windows=(0, 9),
    rotated=(True, True),
)
LATENT_CONFIG = deepseek.DeepseekConfig(
    architecture="DeepseekV3ForCausalLM",
    hidden=48,
    layers=2,
    heads=6,
    kv_heads=1,
    head_dim=24,
    latent=16,
    nope_dim=12,
    rope_dim=8,
    rope_interleaved=True,
    split_kv_b=False,
    value_dim=12,
    q_lora_rank=20,
    intermediate=80,
    vocab=97,
    max_position=64,
    max_length=64,
    eps=1e-5,
    rope=RopeSpec("default", 10000.0, 8, 64, {}),
    scale=0.2,
    windows=(0, 0),
    attention_bias=False,
    tied=False,
    num_dense=1,
    num_experts=4,
    expert_size=24,
    shared_size=24,
    routing=Routing(2, "sigmoid", True, 1.5),
    num_mtp_layers=0,
)
SPARSE_CONFIG = replace(
    LATENT_CONFIG,
    q_lora_rank=24,
    index=IndexSpec(columns=16, top_k=5),
    indexer=IndexerShape(4, 16, LATENT_CONFIG.rope_dim, interleaved=False, own=(True,) * LATENT_CONFIG.layers),
)
HYBRID_CONFIG = lfm2.Lfm2Config(
    architecture="Lfm2ForCausalLM",
    family=lfm2.FAMILY,
    hidden=48,
    layers=3,
    heads=6,
    kv_heads=2,
    head_dim=8,
    intermediate=80,
    vocab=97,
    max_position=64,
    max_length=64,
    eps=1e-5,
    rope=RopeSpec("default", 10000.0, 8, 64, {}),
    windows=(0, 0, 0),
    rotated=(True, True, True),
    qk_norms="heads",
    kinds=("conv", "full_attention", "conv"),
    conv_bias=True,
    conv=ConvSpec(2, 48, 4),
)
MAMBA = Mamba2Shape(heads=4, head_dim=24, groups=2, columns=12, taps=4)
SLOTTED_CONFIG = bamba.BambaConfig(
    architecture="BambaForCausalLM",
    family=bamba.FAMILY,
    hidden=48,
    layers=3,
    heads=6,
    kv_heads=2,
    head_dim=8,
    intermediate=80,
    vocab=97,
    max_position=64,
    max_length=64,
    eps=1e-5,
    rope=RopeSpec("default", 10000.0, 4, 64, {}),
    windows=(0, 0, 0),
    rotated=(True, True, True),
    kinds=("mamba", "full_attention", "mamba"),
    states=MAMBA.states(2),
    mamba=MAMBA,
)
BLOCK_SIZE = 4
WINDOWS = (9, 7)  # of the Mistral
MIXED_WINDOWS = (9, 0)  # of the Gemma
MAX_LEN = 64
NATIVE = "native"
BACKENDS = ["torch", NATIVE]


class RandomCheckpoint:
    """Tensors in memory."""

    def __init__(self, config: ModelConfig, groups: list[tuple[str, TensorSpecs]]) -> None:
        rng = np.random.default_rng(7)
        self.arrays = {
            prefix + name: rng.normal(0.0 if len(shape) > 1 else 0.7, 0.3, shape).astype(np.float32)
            for prefix, group in groups
            for want in group.values()
            for name, shape in want.shapes()
        }
        self.path = Path("random")
        self.config = CheckpointConfig(self.path, {"architectures": [config.architecture]})
        self.nbytes = sum(array.nbytes for array in self.arrays.values())

    def names(self) -> list[str]:
        return list(self.arrays)

    def shape(self, name: str) -> tuple[int, ...]:
        return self.arrays[name].shape

    def tensor(self, name: str) -> StoredTensor:
        array = self.arrays[name]
        return StoredTensor(name, array.shape, F32, array.reshape(-1, array.shape[-1]).view(np.uint8))

    def drop_pages(self) -> None: ...


def make_ops(backend: str) -> OpSet:
    if backend == "native":
        from quire.ops.native import NativeOps

        return NativeOps()
    from quire.ops.reference import TorchOps

    return TorchOps()


def random_llama(ops: OpSet, config: llama.LlamaConfig = CONFIG) -> Any:
    groups = [("", llama.top_specs(config))]
    groups += [(f"model.layers.{layer}.", llama.layer_specs(config)) for layer in range(config.layers)]
    return llama.load(ops, RandomCheckpoint(config, groups), config, MAX_LEN)


def random_mistral(ops: OpSet) -> Any:
    return random_llama(ops, replace(CONFIG, windows=WINDOWS))


def random_lfm2(ops: OpSet) -> Any:
    groups = [("", llama.top_specs(HYBRID_CONFIG))]
    layers = lfm2.layer_specs(HYBRID_CONFIG, flat=False)
    groups += [(f"model.layers.{layer}.", specs) for layer, specs in enumerate(layers)]
    return lfm2.load(ops, RandomCheckpoint(HYBRID_CONFIG, groups), HYBRID_CONFIG, MAX_LEN)


def random_bamba(ops: OpSet) -> Any:
    groups = [("", llama.top_specs(SLOTTED_CONFIG))]
    layers = bamba.layer_specs(SLOTTED_CONFIG)
    groups += [(f"model.layers.{layer}.", specs) for layer, specs in enumerate(layers)]
    return bamba.load(ops, RandomCheckpoint(SLOTTED_CONFIG, groups), SLOTTED_CONFIG, MAX_LEN)


def random_sparse(ops: OpSet) -> Any:
    return random_deepseek(ops, SPARSE_CONFIG)


def random_deepseek(ops: OpSet, config: deepseek.DeepseekConfig = LATENT_CONFIG) -> Any:
    groups = [("", deepseek.top_specs(config))]
    groups += [(f"model.layers.{layer}.", deepseek.layer_specs(config, layer)) for layer in range(config.layers)]
    return deepseek.load(ops, RandomCheckpoint(config, groups), config, MAX_LEN)


def random_gemma(ops: OpSet) -> Any:
    return random_llama(ops, replace(CONFIG, windows=MIXED_WINDOWS))


MODELS = {"llama": random_llama, "mistral": random_mistral, "gemma": random_gemma, "deepseek": random_deepseek}
SPARSE = {"sparse": random_sparse}  # its drafts are chains, not trees
HYBRIDS = {"lfm2": random_lfm2}  # with states in blocks
SLOTTED = {"bamba": random_bamba}  # with states in slots


def make_runner(
    backend: str,
    num_blocks: int,
    num_host_blocks: int,
    max_rows: int,
    model_name: str = "llama",
    num_slots: int = 0,
    num_pages: int = 0,
    **options: Any,
) -> Runner:
    ops = make_ops(backend)
    model = (MODELS | SPARSE | HYBRIDS | SLOTTED)[model_name](ops)
    spec = kv_spec(model.config, BLOCK_SIZE, "float32")
    if spec.states:
        spec = replace(spec, states=replace(spec.states, num_slots=num_slots))
    if num_pages:
        spec = replace(spec, windows=WindowSpec((0,), MIXED_WINDOWS[0], num_pages))
    size = KVSize(spec, num_blocks, num_host_blocks, MAX_LEN)
    return Runner(ops, model, size, max_rows=max_rows, max_tokens=MAX_LEN, **options)
