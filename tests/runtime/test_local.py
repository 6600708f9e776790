"""One device in this process: from a folder on disk to drawn tokens."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from quire.core.errors import BadRequest, DoesNotFit, Unsupported
from quire.core.params import SamplingParams
from quire.core.plan import Admission, Run, StepOutput, StepPlan
from quire.executors.local import LocalExecutor
from quire.executors.options import ExecutorOptions
from quire.models import llama
from quire.weights.config import CheckpointConfig

VALUES = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "vocab_size": 50,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
}
BLOCK = 2 * 2 * 2 * 8 * 16 * 2  # keys and values, layers, heads, columns, tokens, bytes
NATIVE = "native"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    config = llama.config(CheckpointConfig(path, VALUES))
    groups = [("", llama.top_specs(config))]
    groups += [(f"model.layers.{layer}.", llama.layer_specs(config)) for layer in range(config.layers)]
    rng = np.random.default_rng(0)
    tensors = {
        prefix + name: rng.normal(0, 0.3, shape).astype(np.float32)
        for prefix, group in groups
        for want in group.values()
        for name, shape in want.shapes()
    }
    save_file(tensors, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(VALUES))
    return path


@pytest.mark.parametrize("backend", ["torch", NATIVE])
def test_starts_runs_and_stops(checkpoint: Path, backend: str) -> None:
    executor = LocalExecutor(checkpoint, ExecutorOptions(backend=backend, max_num_seqs=4, swap_space_bytes=3 * BLOCK))
    capacity = executor.allocate(executor.load())
    assert capacity.max_model_len == 128
    assert (capacity.num_blocks, capacity.num_host_blocks) == (4 * 8, 3)
    assert (capacity.vocab_size, capacity.cache_bytes) == (50, 4 * 8 * BLOCK)
    assert capacity.weight_bytes > 0
    admission = Admission(0, SamplingParams(temperature=0.0, seed=0), 0, [1, 2, 3], 3, [5], [])
    output = carry_out(executor, StepPlan(1, [Run(0, 0, 3)], admitted=[admission]))
    again = carry_out(executor, StepPlan(2, [Run(0, 3, 1)]))
    assert [len(out.sampled[0].tokens) for out in (output, again)] == [1, 1]
    executor.stop()


def carry_out(executor: LocalExecutor, plan: StepPlan) -> StepOutput:
    executor.submit(plan)
    return executor.collect()


def test_limits_are_told_before_the_weights_are_read(checkpoint: Path) -> None:
    with pytest.raises(BadRequest, match="129, and the model was made for 128"):
        LocalExecutor(checkpoint, ExecutorOptions(backend="torch", max_model_len=129)).load()
    with pytest.raises(DoesNotFit):
        LocalExecutor(
            checkpoint, ExecutorOptions(backend="torch", max_model_len=128, kv_cache_memory_bytes=7 * BLOCK)
        ).load()
    small = LocalExecutor(checkpoint, ExecutorOptions(backend="torch", kv_cache_memory_bytes=7 * BLOCK))
    assert small.allocate(small.load()).max_model_len == 7 * 16


def test_more_swap_space_than_memory(checkpoint: Path) -> None:
    with pytest.raises(DoesNotFit, match=r"swap_space is 1048576\.0 GiB, and .* GiB of memory are free"):
        LocalExecutor(checkpoint, ExecutorOptions(backend="torch", swap_space_bytes=2**50)).load()


def test_an_unknown_backend(checkpoint: Path) -> None:
    with pytest.raises(Unsupported, match="`abacus`"):
        LocalExecutor(checkpoint, ExecutorOptions(backend="abacus"))


def test_the_native_backend_does_not_import_torch(checkpoint: Path) -> None:
    program = (
        f"import sys; from quire.executors.local import LocalExecutor; executor = LocalExecutor({str(checkpoint)!r}); "
        "executor.allocate(executor.load()); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
