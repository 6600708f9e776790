"""The disk tier of an executor: its directory, and what tells its blocks from those of other engines."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path

from quire import __version__
from quire.core.errors import BadRequest
from quire.executors.options import ExecutorOptions
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
    buffers: Callable[[int], Buffers],
    rank_bytes: Sequence[int] = (),
) -> DiskTier:
    """`buffers`: the memory of a host block. `rank_bytes`: of the part of each rank, if there are several."""
    path, format = find_checkpoint(Path(model)), block_format(model, options, size, rank_bytes)
    if options.kv_disk_bytes < 2 * format.nbytes:
        raise BadRequest(
            f"kv_disk_size is {options.kv_disk_bytes / 2**30:.3f} GiB, and one block has {format.nbytes / 2**30:.3f}",
            "give more GiB",
            param="kv_disk_size",
        )
    _make_folder(root, root / format.fingerprint, path, format)
    return DiskTier(root, format, options.kv_disk_bytes, buffers, shares_cpu=not options.on_gpu)


def block_format(
    model: str | Path, options: ExecutorOptions, size: KVSize, rank_bytes: Sequence[int] = ()
) -> BlockFormat:
    """What tells the blocks of this engine from those of others."""
    described = _described(options, size) + (f" of ranks {[*rank_bytes]}" if rank_bytes else "")
    return BlockFormat(
        fingerprint=fingerprint(find_checkpoint(Path(model)), described),
        dtype=size.spec.dtype,
        block_size=size.spec.block_size,
        layout=options.backend,
        nbytes=sum(rank_bytes) or size.spec.block_bytes,
    )


def _described(options: ExecutorOptions, size: KVSize) -> str:
    """All that decides the bits of a KV block beside the files of the model, as text that is equal in every process."""
    computes = [options.backend, options.dtype, options.quantization, options.load_format, options.batch_invariant]
    if options.backend == "native":
        from quire.ops.native import isa

        computes.append(isa())
    return repr((__version__, computes, size.spec, size.max_model_len))


def _make_folder(root: Path, folder: Path, model: Path, format: BlockFormat) -> None:
    """A read-only directory is no error: what is in it can be read."""
    try:
        root.mkdir(parents=True, exist_ok=True)
        root.stat()
    except OSError as error:
        raise BadRequest(
            f"kv_disk_path is {root}, which is no directory and cannot be made one: {error.strerror}",
            "give another",
            param="kv_disk_path",
        ) from error
    about = {"model": str(model), "kv_cache_dtype": format.dtype, "block_size": format.block_size}
    try:
        folder.mkdir(exist_ok=True)
        if not (folder / "model.json").exists():
            (folder / "model.json").write_text(json.dumps(about))
    except OSError:
        return
