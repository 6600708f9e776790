"""From options to an executor: the one place that chooses where a model is computed."""

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, cast

from quire.core.encode_request import Task
from quire.core.errors import Unsupported
from quire.engine.options import EngineOptions
from quire.executors.protocol import Executor

if TYPE_CHECKING:
    from quire.text.tokenizers.tokenizer import Tokenizer


def tokenizer_path(path: Path, options: EngineOptions) -> Path:
    """Where the tokenizer of a checkpoint is."""
    return Path(options.tokenizer) if options.tokenizer else path


def load_tokenizer(path: Path, options: EngineOptions) -> "Tokenizer":
    from quire.text.tokenizers.tokenizer import Tokenizer

    return Tokenizer.load(tokenizer_path(path, options))


def local_executor(path: Path, options: EngineOptions) -> Executor:
    from quire.executors.local import LocalExecutor

    if options.task == "embed":
        raise Unsupported("task is embed, and this continues texts", "use Embedder, or leave task out")
    backend = "cuda" if uses_gpu(options.device) else "native"
    if backend == "native":
        refuse_gpu_options(options)
    return LocalExecutor(
        path,
        backend=backend,
        max_model_len=options.max_model_len,
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens,
        block_size=options.block_size,
        kv_cache_dtype=options.kv_cache_dtype,
        kv_cache_memory_bytes=options.kv_cache_memory_bytes,
        swap_space_bytes=int(options.swap_space * 2**30),
        threads=options.threads,
        dtype=options.dtype,
        load_format=options.load_format,
        quantization=options.quantization,
        gpu_memory_utilization=options.gpu_memory_utilization,
        enforce_eager=options.enforce_eager,
        batch_invariant=options.batch_invariant,
        max_loras=options.num_loras,
        max_lora_rank=options.max_lora_rank,
        speculation=options.speculation,
    )


def task_of(path: Path, options: EngineOptions) -> Task:
    """What the model is to be served for: what it was made for, unless it is to make vectors."""
    if options.task != "auto":
        return cast(Task, options.task)
    from quire.models.registry import purpose
    from quire.weights.checkpoint import open_checkpoint

    return purpose(open_checkpoint(path).config.architecture)


def uses_gpu(device: str) -> bool:
    """auto: where there is a driver, and torch to reach it with. Nothing is imported to find out."""
    driver, torch = Path("/dev/nvidiactl").exists(), find_spec("torch") is not None and find_spec("triton") is not None
    if device == "cuda":
        if not driver:
            raise Unsupported("there is no NVIDIA driver on this machine", "use device cpu")
        if not torch:
            raise Unsupported("computing on a GPU needs torch and triton", "pip install 'quire[gpu]'")
    return device != "cpu" and driver and torch


def refuse_gpu_options(options: EngineOptions) -> None:
    if options.quantization == "fp8":
        raise Unsupported("quantization fp8 is for GPUs", "on a CPU, use int8, int4 or nf4")
    if options.dtype in ("bfloat16", "float16"):
        raise Unsupported(f"dtype {options.dtype} is for GPUs", "on a CPU, activations are float32")
