"""The op sets by name, and how an executor makes one."""

from importlib import import_module
from typing import Any

from quire.core.errors import Unsupported
from quire.executors.options import ExecutorOptions

BACKENDS = {
    "native": ("quire.ops.native", "NativeOps"),
    "torch": ("quire.ops.reference", "TorchOps"),
    "cuda": ("quire.ops.gpu.opset", "GpuOps"),
}


def check_backend(options: ExecutorOptions) -> None:
    """Refuse what the backend cannot do, before anything is loaded."""
    if options.backend not in BACKENDS:
        raise Unsupported(f"the backend `{options.backend}` is not known", f"use one of {', '.join(BACKENDS)}")
    if options.backend == "native":
        if options.quantization == "fp8":
            raise Unsupported("quantization fp8 is for GPUs", "on a CPU, use int8, int4 or nf4")
        if options.kv_cache_dtype == "fp8":
            raise Unsupported("kv_cache_dtype is `fp8`, and the CPU has no such numbers", "use int8")


def new_ops(options: ExecutorOptions, *, graphs: bool = True, fp16_weights: bool = False) -> Any:
    """An op set. `graphs`: a GPU replays CUDA graphs. `fp16_weights`: a CPU keeps fp32 weights in fp16."""
    module, name = BACKENDS[options.backend]
    op_set = getattr(import_module(module), name)
    if options.on_gpu:
        return op_set(
            threads=options.threads,
            quantization=options.quantization,
            dtype=options.gpu_dtype,
            batch_invariant=options.batch_invariant,
            graphs=graphs and not options.enforce_eager,
            utilization=options.gpu_memory_utilization,
        )
    if options.backend == "torch":
        return op_set(threads=options.threads)
    return op_set(options.threads, options.quantization, fp16_weights)
