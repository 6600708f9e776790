"""The disk tier of an executor: its directory, and what tells its blocks from those of other engines."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

from quire import __version__
from quire.core.errors import BadRequest
from quire.executors.options import ExecutorOptions
from quire.ops.kv_spec import KVCache, WindowedKVCache
from quire.runtime.disk_tier import DiskTier
from quire.runtime.kv import KVSize
from quire.runtime.kv_files import BlockFormat, Buffers
from quire.runtime.model_fingerprint import fingerprint
from quire.weights.checkpoint import find_checkpoint


def open_disk_tier(
    root: Path,
    model: str | Path,
    options: ExecutorOptions,
    size: KVSize,
    cache: KVCache,
    rank_bytes: Sequence[int] = (),
) -> DiskTier:
    """`rank_bytes`: of a block's part of each rank, if there are several."""
    path, format = find_checkpoint(Path(model)), block_format(model, options, size, cache, rank_bytes)
    sizes = {format.nbytes: "block", format.state_nbytes: "state", format.page_nbytes: "window page"}
    largest = max(sizes)
    if options.kv_disk_bytes < 2 * largest:
        what = sizes[largest]
        raise BadRequest(
            f"kv_disk_size is {options.kv_disk_bytes / 2**30:.3f} GiB, and one {what} has {largest / 2**30:.3f}",
            "give more GiB",
            param="kv_disk_size",
        )
    _make_root(root)
    buffers = host_memory(cache, size)
    return DiskTier(root, format, options.kv_disk_bytes, buffers, shares_cpu=not options.on_gpu, model=str(path))


def host_memory(cache: KVCache, size: KVSize) -> Callable[[int], Buffers]:
    """The memory of host blocks, and behind them of host slots, or of the window pages of the same host blocks."""
    num_blocks = size.num_host_blocks
    behind = cast(WindowedKVCache, cache).host_page_buffers if size.num_pages else cache.host_state_buffers

    def buffers(host: int) -> Buffers:
        return cache.host_buffers(host) if host < num_blocks else behind(host - num_blocks)

    return buffers


def block_format(
    model: str | Path, options: ExecutorOptions, size: KVSize, cache: KVCache, rank_bytes: Sequence[int] = ()
) -> BlockFormat:
    """The format of this engine's blocks on disk, with what tells them from those of other engines."""
    described = _described(options, size) + (f" of ranks {[*rank_bytes]}" if rank_bytes else "")
    return BlockFormat(
        fingerprint=fingerprint(find_checkpoint(Path(model)), described),
        dtype=size.spec.dtype,
        block_size=size.spec.block_size,
        layout=options.backend,
        nbytes=sum(rank_bytes) or size.spec.block_bytes,
        state_nbytes=sum(part.nbytes for part in cache.host_state_buffers(0)) if size.num_host_slots else 0,
        page_nbytes=sum(map(len, cast(WindowedKVCache, cache).host_page_buffers(0))) if size.num_pages else 0,
    )


def _described(options: ExecutorOptions, size: KVSize) -> str:
    """All that decides the bits of a KV block beside the files of the model, as text that is equal in every process."""
    computes = [options.backend, options.dtype, options.quantization, options.load_format, options.batch_invariant]
    if options.rope is not None:
        computes.append(options.rope)
    if options.backend == "native":
        from quire.ops.native import isa

        computes.append(isa())
    spec = size.spec
    if spec.windows is not None:  # how many pages there are decides nothing
        spec = replace(spec, windows=replace(spec.windows, num_pages=1))
    if spec.states is not None:  # the number of slots does not change what blocks hold
        spec = replace(spec, states=replace(spec.states, num_slots=0, num_checkpoint_slots=0, num_host_slots=0))
    return repr((__version__, computes, spec, size.max_model_len))


def _make_root(root: Path) -> None:
    try:
        root.mkdir(parents=True, exist_ok=True)
        root.stat()
    except OSError as error:
        raise BadRequest(
            f"kv_disk_path is {root}, which is no directory and cannot be made one: {error.strerror}",
            "give another",
            param="kv_disk_path",
        ) from error
