"""Weights that are copied to the device when their layer is near: never too early, never too late.

python -m pytest tests/models/test_offload.py (on a GPU, or with Triton's interpreter and plain torch)"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from models.gpu_steps import BLOCK, LENGTH, run_steps
from quire.core.errors import BadRequest, DoesNotFit, Unsupported
from quire.engine.options import EngineOptions
from quire.executors.offload import OffloadExecutor, choose_layers, expected_bytes
from quire.executors.options import ExecutorOptions
from quire.executors.pipeline.stage_model import trace_model
from quire.models.registry import family
from quire.ops.gpu import offload
from quire.ops.gpu.copies import DirectCopies, HostStore, ThreadCopies
from quire.ops.gpu.offload import OffloadOps
from quire.ops.gpu.opset import GpuOps
from quire.ops.reference import TorchOps
from quire.ops.stages.trace import BEFORE_LAYERS, LayerTrace, ModelTrace
from quire.runtime.kv import kv_spec
from quire.weights.checkpoint import open_checkpoint

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPE = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
SHAPE |= {"num_hidden_layers": 6, "vocab_size": 256, "max_position_embeddings": 128}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(1)
    folder = tmp_path_factory.mktemp("llama")
    LlamaForCausalLM(LlamaConfig(**SHAPE)).save_pretrained(folder)
    return folder


class LateCopies:
    """Copies that are done at the last moment: when the layer that reads them begins."""

    def __init__(self, device: Any) -> None:
        self._waiting: list[Any] = []

    def begin(self, pairs: Any) -> Any:
        self._waiting.append(pairs)
        return pairs

    def wait(self, copied: Any) -> None:
        while self._waiting:  # in order, as a stream copies
            pairs = self._waiting.pop(0)
            for target, source in pairs:
                target.copy_(source)
            if pairs is copied:
                return


def steps(vocab: int = 256) -> list[Any]:
    make = np.random.default_rng(3)
    return [
        [(make.integers(0, vocab, 5), 0), (make.integers(0, vocab, 1), 0)],
        [(make.integers(0, vocab, 1), 5), (make.integers(0, vocab, 3), 1)],
        [(make.integers(0, vocab, 1), 6), (make.integers(0, vocab, 1), 4)],
    ]


def logits(
    ops: Any, path: Path, layers: Sequence[int] = (), store: HostStore | None = None, num_steps: int = 3
) -> np.ndarray:
    checkpoint = open_checkpoint(path)
    kind = family(checkpoint.config.architecture)
    config = kind.config(checkpoint.config)
    traced = trace_model(kind, checkpoint, config, LENGTH)
    if layers:
        ops = OffloadOps(ops, store or HostStore(DEVICE, 2**30))
        ops.begin([(layer, sorted(traced.layers[layer].weights)) for layer in layers])
    loaded = kind.load(ops, checkpoint, config, LENGTH)
    if layers:
        ops.place()
    return run_steps(ops, loaded.forward, kv_spec(config, BLOCK, "float32"), steps()[:num_steps])


BACKENDS: dict[str, Callable[[], Any]] = {
    "torch": lambda: TorchOps(threads=1),
    "gpu": lambda: GpuOps(DEVICE, dtype="float32", overlap=False),
    "gpu int4": lambda: GpuOps(DEVICE, dtype="float16", quantization="int4", overlap=False),
}


@pytest.mark.parametrize("backend", [name for name in BACKENDS if DEVICE == "cpu" or name != "torch"])
def test_logits_are_those_of_weights_that_stay(model: Path, backend: str) -> None:
    num_steps = 1 if DEVICE == "cpu" else 3  # the interpreter is slow
    expected = logits(BACKENDS[backend](), model, num_steps=num_steps)
    np.testing.assert_array_equal(logits(BACKENDS[backend](), model, (1, 3, 5), num_steps=num_steps), expected)


@pytest.mark.skipif(DEVICE == "cuda", reason="the order of a stream is its own there")
@pytest.mark.parametrize("copies", [DirectCopies, LateCopies], ids=["at once", "at the last moment"])
@pytest.mark.parametrize("layers", [(0, 1, 2), (1, 2, 4), (0, 2, 5), (0, 1, 2, 3, 4, 5)])
def test_no_copy_is_too_early_or_too_late(
    model: Path, copies: type, layers: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = logits(TorchOps(threads=1), model)
    monkeypatch.setattr(offload, "DirectCopies", copies)
    np.testing.assert_array_equal(logits(TorchOps(threads=1), model, layers), expected)


def test_what_host_memory_does_not_hold_is_read_from_disk(model: Path, tmp_path: Path) -> None:
    ops: Callable[[], Any] = BACKENDS["torch" if DEVICE == "cpu" else "gpu"]
    expected = logits(ops(), model)
    store = HostStore(DEVICE, 100_000, tmp_path)
    backend = ops()
    backend.graphs = False
    np.testing.assert_array_equal(logits(backend, model, (0, 1, 2, 3, 4, 5), store), expected)
    assert 0 < store.num_bytes - store.disk_bytes <= 100_000 < store.disk_bytes
    assert not list(tmp_path.iterdir()), "the file has no name: it goes with the process"
    with pytest.raises(DoesNotFit, match=r"no room for .* of offloaded weights.*\n.*offload_folder"):
        logits(ops(), model, (0, 1, 2), HostStore(DEVICE, 100_000))
    with pytest.raises(BadRequest, match=r"offload_folder is .*missing, and weights cannot be written.*\n.*another"):
        logits(ops(), model, (0, 1, 2), HostStore(DEVICE, 0, tmp_path / "missing"))
    assert ThreadCopies is offload.ThreadCopies


def test_two_buffers_are_all_that_the_device_has(model: Path) -> None:
    """Weights lie in turn in one of them."""
    checkpoint = open_checkpoint(model)
    kind = family(checkpoint.config.architecture)
    config = kind.config(checkpoint.config)
    traced = trace_model(kind, checkpoint, config, LENGTH)
    ops = OffloadOps(TorchOps(threads=1), HostStore("cpu", 2**30))
    ops.begin([(layer, sorted(traced.layers[layer].weights)) for layer in range(6)])
    loaded = kind.load(ops, checkpoint, config, LENGTH)
    freed = ops.place()
    places = {w.packed.untyped_storage().data_ptr() for w in loaded.linears if w.num_outputs != 256}
    assert len(places) == 2
    layer = 4 * (64 * (64 + 64 + 64) + 3 * 64 * 128)
    assert freed == 4 * layer


def traced_layers(count: int) -> ModelTrace:
    trace = ModelTrace([100] * count + [50], kinds=["matrix"] * (count + 1))
    trace.layers = {index: LayerTrace({index}, {index}) for index in range(count)}
    trace.layers |= {BEFORE_LAYERS: LayerTrace(), count: LayerTrace({count})}
    return trace


def test_layers_are_chosen_at_equal_distances() -> None:
    """850 bytes, of which a layer has 100: two layers more than asked for, since two have buffers."""
    assert [layer for layer, _ in choose_layers(traced_layers(8), 8, 850, 200)] == [1, 3, 5, 7]
    assert [layer for layer, _ in choose_layers(traced_layers(8), 8, 850, 101)] == [1, 3, 5, 7]
    assert [layer for layer, _ in choose_layers(traced_layers(8), 8, 850, 100)] == [2, 5, 7]
    assert choose_layers(traced_layers(8), 8, 850, 600) == [(layer, [layer]) for layer in range(8)]
    with pytest.raises(BadRequest, match=r"8 layers of about .* less two buffers.*\n.*use at most"):
        choose_layers(traced_layers(8), 8, 850, 601)


def test_bytes_are_those_of_the_device() -> None:
    """A checkpoint of fp32 becomes bf16, one of 4 bits stays, and one may be quantized or have no weights at all."""
    options = ExecutorOptions(backend="cuda", offload_weight_bytes=1)
    assert expected_bytes(options, 1000, 4000) == 2000 == expected_bytes(options, 1000, 0)
    assert expected_bytes(options, 1000, 600) == 600
    assert expected_bytes(replace(options, quantization="int4"), 1000, 2000) == 531.25


def test_weights_that_layers_share_stay() -> None:
    trace = traced_layers(8)
    trace.layers[3].weights.add(4)
    chosen = dict(choose_layers(trace, 8, 850, 500))
    assert chosen[3] == [3] and chosen[4] == []


def test_what_cannot_be_offloaded_is_refused(model: Path) -> None:
    with pytest.raises(Unsupported, match=r"offload_weights is for GPUs.*\n.*leave it out"):
        OffloadExecutor(model, ExecutorOptions(offload_weight_bytes=1))
    with pytest.raises(BadRequest, match=r"layers are all on one GPU.*\n.*cpu_layers"):
        EngineOptions(offload_weights=1, cpu_layers=2)
    assert EngineOptions.of({"cpu_offload_gb": 2.5}).offload_weights == 2.5
