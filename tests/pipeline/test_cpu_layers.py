"""The first layers of a model on the CPU's op set, the others on another: the tokens of one device."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig

from engine.same_bits import save_lfm2
from models.checking import TINY, random_model
from models.gpu_steps import BLOCK, LENGTH, logits_of, run_steps
from models.lora_files import adapter
from quire import LLM, LoRARequest, SamplingParams
from quire.core.errors import BadRequest, Unsupported
from quire.engine.engine import Engine
from quire.engine.options import EngineOptions
from quire.engine.start import executor_options, load_tokenizer
from quire.executors.cpu_layers import CpuLayersExecutor
from quire.executors.options import ExecutorOptions
from quire.executors.pipeline.stage_model import trace_model
from quire.models.registry import family
from quire.ops.gpu.opset import GpuOps
from quire.ops.native import NativeOps
from quire.ops.reference import TorchOps
from quire.ops.stages.parts import divide_at
from quire.ops.stages.two_devices import TwoDeviceOps
from quire.runtime.kv import kv_spec
from quire.weights.checkpoint import open_checkpoint
from ranks.processes import PROMPTS, texts


def llm_of(model: Path, backend: str, cpu_layers: int, **options: Any) -> LLM:
    """Without a GPU: the last layers have the op set `backend`."""
    llm = LLM(model, **options)
    llm.engine.stop()
    given = replace(executor_options(llm.options), backend=backend)
    tokenizer = load_tokenizer(model, llm.options)
    llm.engine = Engine(CpuLayersExecutor(model, given, cpu_layers), llm.options, lambda: tokenizer)
    return llm


@pytest.mark.parametrize("cpu_layers", [1, 3])
def test_layers_of_two_op_sets_give_the_tokens_of_one(deep_model: Path, cpu_layers: int) -> None:
    expected = texts(LLM(deep_model))
    few_blocks = {"kv_cache_memory_bytes": 130_000, "swap_space": 0.01}  # sequences are preempted
    llm = llm_of(deep_model, "native", cpu_layers, **few_blocks)
    assert texts(llm) == expected and llm.engine.stats().preemptions > 0
    assert llm.engine.capacity.weight_bytes == LLM(deep_model).engine.capacity.weight_bytes
    llm.engine.stop()


def test_hidden_states_go_from_one_op_set_to_another(deep_model: Path) -> None:
    """The CPU's layers, then those of plain torch: its logits are as near to torch's own as the CPU's are."""
    params = SamplingParams(max_tokens=1, temperature=0, logprobs=5)
    found = []
    for backend, cpu_layers in (("native", 0), ("torch", 2), ("native", 2)):
        llm = llm_of(deep_model, backend, cpu_layers) if cpu_layers else LLM(deep_model)
        outputs = llm.generate(PROMPTS, params)
        found.append(
            [{token: top.logprob for token, top in output.outputs[0].logprobs[0].items()} for output in outputs]
        )
        llm.engine.stop()
    assert found[0] == found[2] != found[1], "torch rounds otherwise"
    for ours, theirs in zip(found[0], found[1], strict=True):
        assert ours.keys() == theirs.keys()
        assert all(abs(ours[token] - theirs[token]) < 0.01 for token in ours)


def test_the_op_set_of_a_gpu_goes_on_where_the_cpu_ends(tmp_path: Path) -> None:
    """On a GPU, or with Triton's interpreter. Room for the KV cache is measured with its layers alone."""
    random_model(LlamaConfig(**{**TINY, "num_hidden_layers": 2}), seed=3).save_pretrained(tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    kind = family(checkpoint.config.architecture)
    config = kind.config(checkpoint.config)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    ops: Any = TwoDeviceOps(NativeOps(1), GpuOps(device, dtype="float32", graphs=False))
    ops.begin_both(divide_at(trace_model(kind, checkpoint, config, LENGTH), 2, 1), 64)
    ops.first_forward = kind.load(ops.first, checkpoint, config, LENGTH).forward
    loaded, spec = kind.load(ops, checkpoint, config, LENGTH), kv_spec(config, BLOCK, "float32")
    make = np.random.default_rng(2)
    steps = [
        [(make.integers(0, 96, 4), 0), (make.integers(0, 96, 1), 0)],
        [(make.integers(0, 96, 1), 4 - 3 * i) for i in (0, 1)],
    ]
    found = run_steps(ops, loaded.forward, spec, steps)
    expected = logits_of(TorchOps(threads=1), tmp_path, "float32", steps)
    np.testing.assert_allclose(found, expected, atol=2e-4)
    if device == "cuda":
        assert ops.room(loaded.forward, spec, 64) > 0


def test_adapters_are_on_both_devices(deep_model: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(deep_model)
    adapter(model, tmp_path / "lora", 3, r=4, lora_alpha=16, target_modules=["q_proj", "down_proj"])
    asked = [LoRARequest("lora", 1, str(tmp_path / "lora")), None]
    params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
    found = []
    for llm in (LLM(deep_model, enable_lora=True), llm_of(deep_model, "native", 2, enable_lora=True)):
        outputs = llm.generate(PROMPTS[:1] * 2, params, lora_request=asked)
        found.append([output.outputs[0].token_ids for output in outputs])
        llm.engine.stop()
    assert found[0] == found[1] and found[0][0] != found[0][1]


def test_states_of_convolutions_are_not_in_slots_of_two_devices(tiny_model: Path, tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match=r"decoding with a `Lfm2ForCausalLM` with layers.*\n.*speculative_config"):
        CpuLayersExecutor(save_lfm2(tiny_model, tmp_path), ExecutorOptions(verifies_drafts=True), 1).load()


def test_numbers_of_layers_are_checked(deep_model: Path, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(BadRequest, match=r"cpu_layers is 4, and the model has 4 layers.*\n.*1 to 3, or device cpu"):
        CpuLayersExecutor(deep_model, ExecutorOptions(), 4).load()
    with pytest.raises(Unsupported, match=r"kv_disk_path with layers on the CPU.*\n.*leave out kv_disk_path"):
        CpuLayersExecutor(deep_model, ExecutorOptions(kv_disk_path="x"), 1)
    with pytest.raises(BadRequest, match="cpu_layers and gpu_layers are both given"):
        EngineOptions(cpu_layers=1, gpu_layers=1)
    with pytest.raises(BadRequest, match=r"pipeline_parallel_size is 2, and layers on a CPU and a GPU"):
        EngineOptions(cpu_layers=1, pipeline_parallel_size=2)
    assert EngineOptions.of({"n_gpu_layers": 12}).gpu_layers == 12
    assert EngineOptions.of({"n_gpu_layers": -1}).gpu_layers is None, "all that fit"
    LLM(deep_model, n_gpu_layers=99, device="cpu")
    assert "have no effect without a GPU" in caplog.text
