"""From options to an executor: the one place that chooses where a model is computed."""

from dataclasses import fields
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, cast

from quire.core.encode_request import Task
from quire.core.errors import Unsupported
from quire.engine.options import EngineOptions
from quire.executors.options import ExecutorOptions
from quire.executors.protocol import Executor

if TYPE_CHECKING:
    from quire.text.tokenizers.tokenizer import Tokenizer


def tokenizer_path(path: Path, options: EngineOptions) -> Path:
    """Where the tokenizer of a checkpoint is."""
    return Path(options.tokenizer) if options.tokenizer else path


def load_tokenizer(path: Path, options: EngineOptions) -> "Tokenizer":
    from quire.text.chat.builtin_templates import read_chat_template
    from quire.text.tokenizers.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(tokenizer_path(path, options))
    if options.chat_template is not None:
        tokenizer.chat_template = read_chat_template(options.chat_template)
    return tokenizer


def new_executor(path: Path, options: EngineOptions) -> Executor:
    from quire.executors.local import LocalExecutor

    if options.task == "embed":
        raise Unsupported("task is embed, and this model is to generate", "use Embedder, or leave task out")
    return LocalExecutor(path, executor_options(options))


def executor_options(options: EngineOptions) -> ExecutorOptions:
    """The fields that executors share with the engine have the same names."""
    shared = {field.name for field in fields(ExecutorOptions)} - {
        "backend",
        "swap_space_bytes",
        "offload_bytes",
        "kv_disk_bytes",
        "max_loras",
    }
    return ExecutorOptions(
        backend="cuda" if uses_gpu(options.device) else "native",
        swap_space_bytes=int(options.swap_space * 2**30),
        offload_bytes=int(options.kv_offloading_size * 2**30),
        kv_disk_bytes=int(options.kv_disk_size * 2**30),
        max_loras=options.num_loras,
        **{name: getattr(options, name) for name in shared},
    )


def task_of(path: Path, options: EngineOptions) -> Task:
    """What the model is served for: what it was made for, unless another task is asked for."""
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
