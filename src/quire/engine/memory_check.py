"""Whether a model can fit the memory of this machine: planned before a weight is read."""

import glob
from pathlib import Path
from typing import TYPE_CHECKING

from quire.core.errors import DoesNotFit
from quire.executors.backends import resolve_quantization
from quire.executors.options import ExecutorOptions
from quire.runtime.available_memory import available_memory
from quire.weights.checkpoint import Checkpoint, find_checkpoint, open_checkpoint
from quire.weights.formats import stored_format
from quire.weights.gguf.splits import SPLIT_NAME

if TYPE_CHECKING:
    from quire.planning.memory import MemoryPlan

LEAST_CONTEXT = 512  # tokens of the KV cache without which nothing is served
QUANTIZED_HERE = ("int8", "int4")  # what a plain checkpoint can be quantized to on a CPU, the better first


def planned_weight_bytes(path: Path, options: ExecutorOptions) -> int | None:
    """What the weights will take in main memory; None where their files are so small that they need not be counted.
    Raises DoesNotFit if they do not fit with a KV cache for one short request, and says what would."""
    room = available_memory()
    if options.on_gpu or options.load_format == "dummy" or file_bytes(path) <= room // 2:
        return None
    checkpoint = open_checkpoint(path)
    options = resolve_quantization(options, checkpoint)
    memory = _least(checkpoint, options, options.quantization)
    if memory.total <= room:
        return memory.weights
    raise DoesNotFit(
        f"the weights of `{path.name}` take {_gib(memory.weights)}, {_gib(memory.total)} with the least KV cache and "
        f"buffers, and {_gib(room)} of memory are free",
        _what_fits(checkpoint, options, memory, room),
    )


def _least(checkpoint: Checkpoint, options: ExecutorOptions, quantization: str | None) -> "MemoryPlan":
    """The memory that serving one short request takes: the least with which an engine can run."""
    from quire.planning.memory import Load, plan_memory
    from quire.planning.packed_bytes import NativeFormat
    from quire.planning.planned_model import plan_model

    model = plan_model(checkpoint.path.name, checkpoint, NativeFormat(), quantization)
    kept = options.kv_cache_dtype, options.block_size, options.state_checkpoint_dtype
    kv = model.kv_spec(*kept, drafts=options.has_drafts)
    load = Load(users=1, context=min(LEAST_CONTEXT, model.config.max_length))
    return plan_memory(model, kv, load, max_num_batched_tokens=options.max_num_batched_tokens)


def _what_fits(checkpoint: Checkpoint, options: ExecutorOptions, memory: "MemoryPlan", room: int) -> str:
    """A hint."""
    if not stored_format(checkpoint.config, checkpoint.path):
        for quantization in QUANTIZED_HERE:
            smaller = _least(checkpoint, options, quantization)
            if smaller.total <= room:
                return f"use quantization {quantization}, which takes {_gib(smaller.total)}"
    left = room - memory.total + memory.weights
    if left <= 0:
        return f"free {_gib(memory.total - room)} first"
    ways = "take a smaller model, fewer bits a weight, or divide the layers among machines (pipeline_stages)"
    return f"weights of {_gib(left)} would fit: {ways}"


def file_bytes(path: Path) -> int:
    """The size of all files of a checkpoint. Costs nothing, unlike opening them."""
    path = find_checkpoint(path)
    if path.is_dir():
        files = list(path.iterdir())
    elif match := SPLIT_NAME.fullmatch(path.name):
        files = list(path.parent.glob(f"{glob.escape(match[1])}-*-of-{match[3]}.gguf"))
    else:
        files = [path]
    return sum(file.stat().st_size for file in files if file.is_file())


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.1f} MiB"
