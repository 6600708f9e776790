"""What guides of other engines tell people to write, with the import changed and nothing else."""

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quire import (
    LLM,
    AsyncEngineArgs,
    AsyncLLMEngine,
    EngineArgs,
    GuidedDecodingParams,
    SamplingParams,
    StructuredOutputsParams,
)
from quire.core.errors import BadRequest, Unsupported
from quire.engine.options import QUANTIZE, STORED, EngineOptions
from quire.executors.backends import resolve_quantization
from quire.executors.options import ExecutorOptions
from quire.weights.checkpoint import open_checkpoint
from quire.weights.formats import FORMATS as READ_FORMATS
from weights.quantized_files import write_model


def test_offline_inference(tiny_model: Path) -> None:
    prompts = ["Hello, my name is", "The capital of France is"]
    llm = LLM(
        model=str(tiny_model),
        gpu_memory_utilization=0.9,
        max_model_len=512,
        enable_chunked_prefill=True,
        use_v2_block_manager=True,
        tensor_parallel_size=1,
        trust_remote_code=True,
        enforce_eager=True,
        dtype="half",
    )
    outputs = llm.generate(prompts, SamplingParams(temperature=0.8, top_p=0.95))
    assert [output.prompt for output in outputs] == prompts
    assert all(0 < len(output.outputs[0].token_ids) <= 16 for output in outputs)
    [answer] = llm.chat([{"role": "user", "content": "Hi"}], llm.get_default_sampling_params())
    assert answer.outputs[0].token_ids and llm.get_tokenizer() is llm.tokenizer
    tokenizer = llm.get_tokenizer()
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert isinstance(prompt, str) and llm.generate(prompt)[0].prompt_token_ids == answer.prompt_token_ids
    assert SamplingParams(stop_token_ids=[tokenizer.eos_token_id or 0])
    assert llm.generate("Hello")[0].outputs[0].token_ids
    assert llm.reset_prefix_cache() is True and llm.get_world_size() == 1


def test_async_inference(tiny_model: Path) -> None:
    async def ask(engine: AsyncLLMEngine, prompt: str, name: str) -> str:
        final = None
        async for output in engine.generate(prompt, request_id=name):
            final = output
        assert final is not None and final.finished
        return final.request_id

    async def main() -> None:
        args = AsyncEngineArgs(model=str(tiny_model), tensor_parallel_size=1, max_num_seqs=8, disable_log_requests=True)
        engine = AsyncLLMEngine.from_engine_args(args)
        names = await asyncio.gather(*(ask(engine, "The sea", str(number)) for number in range(3)))
        assert names == ["0", "1", "2"]
        async for output in engine.generate("The sea", SamplingParams(max_tokens=3)):  # an id of its own
            assert output.request_id
        assert await engine.reset_prefix_cache() is True
        await engine.check_health()
        assert (await engine.get_default_sampling_params()) == SamplingParams()
        await engine.shutdown()

    asyncio.run(main())


def test_structured_output_as_scripts_for_vllm_ask_for_it(tiny_model: Path) -> None:
    llm = LLM(str(tiny_model))
    for asked in (
        SamplingParams(structured_outputs=StructuredOutputsParams(choice=["yes", "no"])),
        SamplingParams(structured_outputs={"choice": ["yes", "no"]}),
        SamplingParams(guided_decoding=GuidedDecodingParams(choice=["yes", "no"])),
    ):
        assert llm.generate("So?", asked)[0].outputs[0].text in ("yes", "no")
    with pytest.raises(BadRequest, match=r"says nothing.*\n.*regex"):
        StructuredOutputsParams()
    with pytest.raises(BadRequest, match="given twice, once as guided_decoding"):
        SamplingParams(structured_outputs={"regex": "a"}, guided_decoding={"regex": "b"})


def test_engine_args_are_options(tiny_model: Path) -> None:
    args = EngineArgs(str(tiny_model), max_model_len=64)
    assert args == EngineOptions(model=str(tiny_model), max_model_len=64)
    assert LLM.from_engine_args(args).options == args


def test_options_of_other_engines_are_known_by_their_names(caplog: pytest.LogCaptureFixture) -> None:
    given = {
        "model_path": "m",
        "mem_fraction_static": 0.5,
        "disable_radix_cache": True,
        "ctx_size": 0,
        "quantize": "awq",
    }
    assert EngineOptions.of(given) == EngineOptions(
        model="m", gpu_memory_utilization=0.5, enable_prefix_caching=False, quantization="awq"
    )
    assert EngineOptions.of({"dtype": "half", "load_format": "safetensors"}) == EngineOptions(dtype="float16")
    assert not caplog.messages
    EngineOptions.of({"enable_chunked_prefill": True, "tensor_parallel_size": 1})
    assert len(caplog.messages) == 1 and "enable_chunked_prefill has no effect" in caplog.messages[0]


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"tensor_parallel_size": 0}, "tensor_parallel_size is 0"),
        ({"pipeline_parallel_size": 0}, "pipeline_parallel_size is 0"),
        ({"cpu_offload_gb": -8}, "offload_weights is -8"),
        ({"offload_folder": "/tmp"}, "no weights are offloaded.*\n.*offload_weights"),
        ({"hf_overrides": {"architectures": ["A"]}}, "hf_overrides has `architectures`.*\n.*rope_theta"),
        ({"distributed_executor_backend": "dask"}, "distributed_executor_backend is 'dask'"),
        ({"speculative_algorithm": "EAGLE"}, "eagle drafts with `model`"),
        ({"spec_model": "a", "speculative_config": {"model": "b"}}, "spec_model is a, and speculative_config says b"),
        ({"model_path": "a", "model": "b"}, "model_path and model are both given"),
        ({"max_modl_len": 5}, "did you mean max_model_len"),
        ({"quantization": "squeezellm"}, "quantization is 'squeezellm'"),
        ({"override_generation_config": {"temprature": 1}}, "`temprature`"),
        ({"override_generation_config": {"temperature": -1}}, "temperature is -1"),
        ({"override_generation_config": "{"}, "not JSON"),
    ],
)
def test_what_cannot_work_says_so_by_name(given: dict[str, Any], told: str) -> None:
    with pytest.raises(BadRequest, match=told):
        EngineOptions.of(given)


def test_half_precision_on_a_cpu_is_a_warning(tiny_model: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        llm = LLM(tiny_model, dtype="bfloat16", device="cpu")
    assert "dtype bfloat16 has no effect on a CPU" in caplog.text
    assert llm.generate("a", SamplingParams(max_tokens=2))[0].outputs[0].token_ids


# ---- what a checkpoint is quantized as


@pytest.fixture
def resolved(tmp_path: Path) -> Callable[..., str | None]:
    def resolve(file: str, asked: str, backend: str = "native") -> str | None:
        write_model(tmp_path, file)
        options = ExecutorOptions(quantization=asked, backend=backend)
        return resolve_quantization(options, open_checkpoint(tmp_path)).quantization

    return resolve


def test_every_format_that_is_read_can_be_named() -> None:
    assert set(READ_FORMATS) | {"gguf"} == set(STORED) | {"fp8"} and "fp8" in QUANTIZE


@pytest.mark.parametrize(
    ("file", "asked"), [("awq-gemm", "awq"), ("gptq-4", "gptq"), ("bitsandbytes-nf4", "bitsandbytes")]
)
def test_naming_what_the_checkpoint_is_changes_nothing(
    resolved: Callable[..., str | None], file: str, asked: str
) -> None:
    assert resolved(file, asked) is None


def test_naming_another_format_is_an_error_with_both(resolved: Callable[..., str | None]) -> None:
    with pytest.raises(BadRequest, match="quantization is gptq, and the checkpoint is awq"):
        resolved("awq-gemm", "gptq")


def test_a_plain_checkpoint_is_quantized_or_the_error_says_to_what(tiny_model: Path) -> None:
    def resolve(asked: str, backend: str = "native") -> str | None:
        options = ExecutorOptions(quantization=asked, backend=backend)
        return resolve_quantization(options, open_checkpoint(tiny_model)).quantization

    assert resolve("bitsandbytes") == "nf4" and resolve("eetq") == "int8" and resolve("fp8", "cuda") == "fp8"
    with pytest.raises(BadRequest, match="quantization is awq, and the checkpoint is not quantized"):
        resolve("awq")
    with pytest.raises(Unsupported, match="fp8 is for GPUs"):
        resolve("fp8")


def test_a_gguf_file_may_be_named_as_one(default_model: Path) -> None:
    options = ExecutorOptions(quantization="gguf")
    assert resolve_quantization(options, open_checkpoint(default_model)).quantization is None
    with pytest.raises(BadRequest, match="quantization is awq, and the checkpoint is gguf"):
        resolve_quantization(ExecutorOptions(quantization="awq"), open_checkpoint(default_model))


def test_advice_for_transformers_is_taken_or_refused_by_name() -> None:
    import torch

    assert EngineOptions.of({"torch_dtype": torch.bfloat16, "device_map": "auto"}) == EngineOptions(dtype="bfloat16")
    assert EngineOptions.of({"dtype": torch.float16}).dtype == "float16"
    assert EngineOptions.of({"load_in_8bit": True}).quantization == "int8"
    assert EngineOptions.of({"load_in_4bit": True, "low_cpu_mem_usage": True}).quantization == "nf4"
    with pytest.raises(BadRequest, match=r"device is \{'': 1\}") as refused:
        EngineOptions.of({"device_map": {"": 1}})
    assert "CUDA_VISIBLE_DEVICES" in refused.value.hint
    with pytest.raises(BadRequest, match=r"quantization_config is .*not possible here"):
        EngineOptions.of({"quantization_config": object()})
