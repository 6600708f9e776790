"""Weights of some layers in host memory, or on disk, where a GPU has no room for all of them."""

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.core.errors import BadRequest, Unsupported
from quire.executors.backends import new_ops
from quire.executors.draft_checkpoint import DraftCheckpoint, HeadCheckpoint
from quire.executors.local import LocalExecutor
from quire.executors.options import ExecutorOptions
from quire.executors.pipeline.stage_model import trace_model
from quire.models.config import ModelConfig
from quire.models.draft_head import DraftHead
from quire.models.loading import LoadedModel
from quire.models.registry import Family
from quire.ops.kv_spec import KVSpec
from quire.ops.stages.trace import ModelTrace
from quire.runtime.available_memory import available_memory
from quire.weights.checkpoint import Checkpoint

if TYPE_CHECKING:
    from quire.ops.gpu.offload import OffloadOps

log = logging.getLogger("quire.engine")

HOST_SHARE = 0.8  # of the free memory of the host that weights may take
NUM_BUFFERED = 2  # layers that the device has buffers for
# Bits of a weight that is quantized while it is loaded, with its scales.
QUANTIZED_BITS = {"fp8": 8.0, "int8": 8.13, "int4": 4.25, "nf4": 4.5}
FLOAT_BYTES = {"float32": 4.0, "float16": 2.0, "bfloat16": 2.0}


class OffloadExecutor(LocalExecutor):
    """`options.offload_weight_bytes`: what the device need not hold."""

    def __init__(self, path: str | Path, options: ExecutorOptions) -> None:
        _check(options)
        super().__init__(path, options)

    def _new_ops(self, options: ExecutorOptions, config: ModelConfig) -> "OffloadOps":
        from quire.ops.gpu.copies import HostStore
        from quire.ops.gpu.offload import OffloadOps

        ops = new_ops(options)
        folder = Path(options.offload_folder).expanduser() if options.offload_folder else None
        self._store = HostStore(ops.device, int(HOST_SHARE * available_memory()), folder)
        return OffloadOps(ops, self._store)

    def _load_model(
        self, family: Family, checkpoint: Checkpoint, config: ModelConfig, spec: KVSpec, max_model_len: int
    ) -> LoadedModel:
        traced = trace_model(family, checkpoint, config, max_model_len)
        num_bytes = expected_bytes(self.options, sum(traced.sizes), checkpoint.nbytes)
        layers = choose_layers(traced, config.layers, num_bytes, self.options.offload_weight_bytes)
        self._ops.begin(layers)
        model = super()._load_model(family, checkpoint, config, spec, max_model_len)
        freed, kept = self._ops.place(), self._store
        log.info(
            "%d of %d layers are offloaded: %.2f GiB in host memory, %.2f on disk; the GPU holds %.2f less",
            len(layers),
            config.layers,
            (kept.num_bytes - kept.disk_bytes) / 2**30,
            kept.disk_bytes / 2**30,
            freed / 2**30,
        )
        if kept.on_disk:
            self._ops.backend.graphs = False  # a thread reads the disk, which no graph can wait for
        return model

    def _load_draft(self, draft: DraftCheckpoint | HeadCheckpoint) -> LoadedModel | DraftHead:
        """Load what drafts, whose weights all stay on the device."""
        return draft.load(self._ops.backend, self._model)

    @property
    def _draft_ops(self) -> Any:
        return self._ops.backend


def expected_bytes(options: ExecutorOptions, num_weights: int, stored_bytes: int) -> float:
    """The bytes of the matrices on the device: as they are stored, unless they are converted. No weight is loaded
    yet."""
    if bits := QUANTIZED_BITS.get(options.quantization or ""):
        return num_weights * bits / 8
    floats = num_weights * FLOAT_BYTES[options.gpu_dtype]  # wider ones are converted
    return min(stored_bytes, floats) if stored_bytes else floats


def choose_layers(
    traced: ModelTrace, num_layers: int, model_bytes: float, offloaded_bytes: int
) -> list[tuple[int, list[int]]]:
    """(number, weights) of the layers to offload: as few as free so many bytes beside the buffers, at equal distances,
    so that the layers between them compute while one is copied."""
    if not traced.layers.keys() >= {*range(num_layers + 1)}:
        raise Unsupported("the layers of this model are not told apart", "leave out offload_weights")
    weights = {layer: _own_weights(traced, layer) for layer in range(num_layers)}
    scale = model_bytes / max(sum(traced.sizes), 1)
    layer_bytes = scale * sum(traced.sizes[number] for own in weights.values() for number in own) / num_layers
    most = (num_layers - NUM_BUFFERED) * layer_bytes
    if offloaded_bytes > most:
        raise BadRequest(
            f"offload_weights is {offloaded_bytes / 2**30:.2f} GiB, and {num_layers} layers of about "
            f"{layer_bytes / 2**30:.3f} GiB less two buffers are {max(most, 0) / 2**30:.2f}",
            f"use at most {max(most, 0) / 2**30:.2f}",
            param="offload_weights",
        )
    count = min(num_layers, NUM_BUFFERED - int(-offloaded_bytes // layer_bytes))
    chosen = [layer for layer in range(num_layers) if (layer + 1) * count // num_layers > layer * count // num_layers]
    return [(layer, weights[layer]) for layer in chosen]


def _own_weights(traced: ModelTrace, layer: int) -> list[int]:
    """The weights of a layer that no other layer has; embedding tables are left out."""
    others = set[int]().union(*(one.weights for index, one in traced.layers.items() if index != layer))
    return sorted(number for number in traced.layers[layer].weights - others if traced.kinds[number] != "table")


def _check(options: ExecutorOptions) -> None:
    if options.backend == "native":
        raise Unsupported("offload_weights is for GPUs: on a CPU, weights are in main memory", "leave it out")
    if options.tensor_parallel_size > 1:
        raise Unsupported("offload_weights with several ranks", "leave out tensor_parallel_size")
