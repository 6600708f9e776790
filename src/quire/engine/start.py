"""From options to an executor: the one place that chooses where a model is computed."""

from pathlib import Path

from quire.engine.options import EngineOptions
from quire.executors.protocol import Executor


def local_executor(path: Path, options: EngineOptions) -> Executor:
    from quire.executors.local import LocalExecutor

    return LocalExecutor(
        path,
        max_model_len=options.max_model_len,
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens,
        block_size=options.block_size,
        kv_cache_dtype=options.kv_cache_dtype,
        kv_cache_memory_bytes=options.kv_cache_memory_bytes,
        swap_space_bytes=int(options.swap_space * 2**30),
        threads=options.threads,
    )
