"""The op sets by name, and how an executor makes one."""

import logging
from dataclasses import dataclass, replace
from importlib import import_module
from typing import TYPE_CHECKING, Any

from quire.core.errors import BadRequest, Unsupported
from quire.executors.options import ExecutorOptions
from quire.models.config import ModelConfig, Seq2SeqConfig
from quire.weights.checkpoint import Checkpoint
from quire.weights.formats import stored_format

if TYPE_CHECKING:
    from quire.ops.ranks.group import RankGroup

log = logging.getLogger("quire.engine")

BACKENDS = {
    "native": ("quire.ops.native", "NativeOps"),
    "torch": ("quire.ops.reference", "TorchOps"),
    "cuda": ("quire.ops.gpu.opset", "GpuOps"),
}


def check_backend(options: ExecutorOptions) -> None:
    """Refuse what the backend cannot do, before anything is loaded."""
    if options.backend not in BACKENDS:
        raise Unsupported(f"the backend `{options.backend}` is not known", f"use one of {', '.join(BACKENDS)}")
    if options.backend == "native" and options.kv_cache_dtype == "fp8":
        raise Unsupported("kv_cache_dtype is `fp8`, and the CPU has no such numbers", "use int8")


# Names of formats that ask for a quantization of ours where the checkpoint is plain.
_IN_FLIGHT = {name: name for name in ("fp8", "int8", "int4", "nf4", "w8a8", "w4a8")} | {
    "bitsandbytes": "nf4",
    "eetq": "int8",
}
ON_GPU_ONLY = ("fp8", "w8a8", "w4a8")
_SAME = {"fbgemm_fp8": "fp8"}  # two names of one format


def resolve_quantization(options: ExecutorOptions, checkpoint: Checkpoint) -> ExecutorOptions:
    """`quantization` names a format that the checkpoint has, or one that its weights are to be quantized to."""
    asked = options.quantization
    stored = stored_format(checkpoint.config, checkpoint.path)
    if asked is None or _SAME.get(asked, asked) == _SAME.get(stored, stored):
        return replace(options, quantization=None)
    wanted = _IN_FLIGHT.get(asked)
    if wanted is None or (stored and wanted != asked):
        raise BadRequest(
            f"quantization is {asked}, and the checkpoint is {stored or 'not quantized'}",
            "leave quantization out"
            if stored
            else "leave it out, or quantize to int8, int4, nf4 or, on a GPU, fp8, w8a8 or w4a8",
            param="quantization",
        )
    if wanted in ON_GPU_ONLY and options.backend == "native":
        raise Unsupported(f"quantization {wanted} is for GPUs", "on a CPU, use int8, int4 or nf4")
    return replace(options, quantization=wanted)


def warn_of_dtype(options: ExecutorOptions, *taken: str) -> None:
    """`taken`: the types that this use of a CPU has."""
    if options.backend == "native" and options.dtype not in ("auto", "float32", *taken):
        log.warning("dtype %s has no effect on a CPU: activations are float32", options.dtype)


def warn_of_offloading(options: ExecutorOptions) -> None:
    if options.backend == "native" and options.offload_bytes:
        log.warning(
            "kv_offloading_size has no effect on a CPU, whose KV cache is in main memory: "
            "give kv_cache_memory_bytes, or kv_disk_path"
        )


def warn_of_tiers(options: ExecutorOptions, config: ModelConfig) -> None:
    """Warn where tiers were asked for, and the prefixes of this model stay in the KV cache."""
    given = {"kv_disk_path": options.kv_disk_path, "kv_offloading_size": options.host_tier_bytes}
    names = [name for name, value in given.items() if value]
    if isinstance(config, Seq2SeqConfig):
        reason = f"a `{config.architecture}` has an encoder"
    elif config.window:
        reason = f"every layer of this `{config.architecture}` has a sliding window"
    else:
        return
    if names:
        log.warning("%s: no effect, since %s, and its prefixes stay in the KV cache", ", ".join(names), reason)


def warn_of_synthetic_acceptance(options: ExecutorOptions) -> None:
    if options.speculation and options.speculation.synthetic_rates:
        length = 1 + sum(options.speculation.synthetic_rates)
        log.warning(
            "SYNTHETIC ACCEPTANCE: draft tokens are accepted by chance, %.2f tokens a step, for a benchmark. "
            "ANSWERS ARE NOT THE MODEL'S: leave out rejection_sample_method to serve",
            length,
        )


@dataclass(frozen=True, slots=True)
class Turn:
    """Of one of `size` processes of this machine, which take its GPUs in turn."""

    index: int
    size: int


def new_ops(
    options: ExecutorOptions,
    *,
    graphs: bool = True,
    fp16_weights: bool = False,
    group: "RankGroup | None" = None,
    turn: Turn | None = None,
) -> Any:
    """An op set. `graphs`: a GPU replays CUDA graphs. `fp16_weights`: a CPU keeps fp32 weights in fp16. `group`: the
    ranks that compute together with this process. `turn`: None: this process is alone, or has the turn of its rank."""
    module, name = BACKENDS[options.backend]
    op_set = getattr(import_module(module), name)
    if options.on_gpu:
        given: dict[str, Any] = {}
        utilization, sharing = options.gpu_memory_utilization, 1
        if turn is None and group is not None:
            turn = Turn(group.rank, group.size)
        if turn is not None:
            from quire.ops.gpu.device import take_turn

            device, sharing = take_turn(turn.index, turn.size)
            given["device"], utilization = str(device), utilization / sharing
        if group is not None:
            from quire.ops.gpu.collectives import rank_arguments

            op_set, more = rank_arguments(group, sharing)
            given |= more
        return op_set(
            **given,
            threads=options.threads,
            quantization=options.quantization,
            dtype=options.gpu_dtype,
            batch_invariant=options.batch_invariant,
            graphs=graphs and not options.enforce_eager,
            utilization=utilization,
            overlap=not options.offload_weight_bytes,  # no kernel begins before a copy that it waits for has ended
        )
    if options.backend == "torch":
        return op_set(threads=options.threads, group=group)
    return op_set(options.threads, options.quantization, fp16_weights, group)
