"""The first layers of a model on the CPU, the others on the GPU: for models that are larger than its memory.

A step goes through the CPU's layers, then through the GPU's. One step is in flight at a time: the CPU reads the weights
of its layers once for all sequences, which is what takes longest."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from quire.core.errors import BadRequest, Unsupported
from quire.executors.backends import new_ops
from quire.executors.local import MAX_DEFAULT_CACHE_BYTES, LocalExecutor
from quire.executors.options import ExecutorOptions
from quire.executors.pipeline.stage_model import trace_model
from quire.models.config import ModelConfig, Seq2SeqConfig
from quire.models.loading import LoadedModel
from quire.models.registry import Family
from quire.ops.kv_spec import KVSpec
from quire.ops.native.recorder import SymbolicBatch
from quire.ops.opset import OpSet
from quire.ops.stages.parts import divide_at
from quire.ops.stages.two_devices import TwoDeviceOps
from quire.runtime.adapters import LoadedAdapter, LoraAdapters
from quire.runtime.available_memory import available_memory
from quire.weights.checkpoint import Checkpoint

HINT = "leave out cpu_layers and gpu_layers"


class CpuLayersExecutor(LocalExecutor):
    """`options.backend` has the last layers, the CPU's the first `cpu_layers`."""

    def __init__(self, path: str | Path, options: ExecutorOptions, cpu_layers: int) -> None:
        self.cpu_layers = cpu_layers
        _check(options)
        super().__init__(path, options)

    def _new_ops(self, options: ExecutorOptions, config: ModelConfig) -> TwoDeviceOps:
        _check_model(config, self.cpu_layers, options.has_drafts)
        return TwoDeviceOps(new_ops(replace(options, backend="native")), new_ops(options))

    def _load_model(
        self, family: Family, checkpoint: Checkpoint, config: ModelConfig, spec: KVSpec, max_model_len: int
    ) -> LoadedModel:
        parts = divide_at(trace_model(family, checkpoint, config, max_model_len), config.layers, self.cpu_layers)
        self._ops.begin_both(parts, self.options.max_step_tokens)
        self._first_model: LoadedModel = family.load(self._ops.first, checkpoint, config, max_model_len)
        self._ops.first_forward = self._first_model.forward
        return super()._load_model(family, checkpoint, config, spec, max_model_len)

    @property
    def weight_bytes(self) -> int:
        return super().weight_bytes + self._first_model.weight_bytes

    @property
    def _ahead(self) -> int:
        """The CPU's layers need the tokens that the GPU has sampled."""
        return 0

    @property
    def _has_window_pages(self) -> bool:
        """One device may have more of the layers with a window than of the others: blocks are whole."""
        return False

    def _gpu_room(self, spec: KVSpec) -> int:
        """Of the KV cache of all layers, of which each device has its own."""
        if self.options.kv_cache_memory_bytes is not None:
            return self.options.kv_cache_memory_bytes
        cpu = min(available_memory() // (2 * self._num_engines), MAX_DEFAULT_CACHE_BYTES)
        rooms = {self._ops.first.part: cpu, self._ops.part: super()._gpu_room(spec)}
        return min(int(room * spec.block_bytes // part.own_spec(spec).block_bytes) for part, room in rooms.items())

    def _new_adapters(self, ops: OpSet, model: LoadedModel) -> LoraAdapters | None:
        if not self.options.max_loras:
            return None
        sizes = self.options.max_loras, self.options.max_lora_rank
        first = LoraAdapters(self._ops.first, self._first_model, *sizes)
        self._ops.first_forward = first.forward
        adapters = AdaptersOfTwo(ops, model, *sizes, first)
        self._ops.bind_slots(adapters.forward, adapters.slots, SymbolicBatch())
        return adapters

    def stop(self) -> None:
        super().stop()
        self._first_model = None  # type: ignore[assignment]


class AdaptersOfTwo(LoraAdapters):
    """LoRA adapters of the layers of both devices."""

    def __init__(self, ops: OpSet, model: LoadedModel, num_slots: int, max_rank: int, first: LoraAdapters) -> None:
        super().__init__(ops, model, num_slots, max_rank)
        self._first = first

    def load(self, path: Path) -> LoadedAdapter:
        last, first = super().load(path), self._first.load(path)
        return LoadedAdapter({**last.packed, **first.packed}, last.digest)

    def add(self, key: str, loaded: LoadedAdapter) -> None:
        super().add(key, loaded)
        self._first.add(key, loaded)

    def remove(self, key: str) -> None:
        super().remove(key)
        self._first.remove(key)

    def put(self, slot: int, key: str) -> None:
        super().put(slot, key)
        self._first.put(slot, key)


def _check(options: ExecutorOptions) -> None:
    """Refuse what two devices cannot do."""
    given: dict[str, Any] = {"kv_disk_path": options.kv_disk_path, "kv_transfer_config": options.kv_transfer}
    if names := [name for name, value in given.items() if value]:
        raise Unsupported(f"{' and '.join(names)} with layers on the CPU and on the GPU", f"leave out {names[0]}")
    if options.kv_cache_dtype == "fp8":
        raise Unsupported("kv_cache_dtype is `fp8`, and the CPU has no such numbers", "use int8")
    if options.tensor_parallel_size > 1:
        raise Unsupported("layers on the CPU and on the GPU with several ranks", "leave out tensor_parallel_size")
    if options.speculation is not None and (options.speculation.model or options.speculation.head):
        raise Unsupported(
            "a draft model or a head, with layers on the CPU and on the GPU", "use the speculative method ngram"
        )


def _check_model(config: ModelConfig, cpu_layers: int, drafts: bool) -> None:
    if isinstance(config, Seq2SeqConfig):
        raise Unsupported(f"a `{config.architecture}`, which has an encoder, is not divided by layers", HINT)
    if config.states is not None:
        raise Unsupported("a model with recurrent states is not divided by layers", HINT)
    if config.conv is not None and drafts:
        raise Unsupported(
            f"speculative decoding with a `{config.architecture}` with layers on the CPU and on the GPU",
            "leave out speculative_config",
        )
    if not 1 <= cpu_layers < config.layers:
        raise BadRequest(
            f"cpu_layers is {cpu_layers}, and the model has {config.layers} layers",
            f"use 1 to {config.layers - 1}, or device cpu",
            param="cpu_layers",
        )
