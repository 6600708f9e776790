"""The KV transfers of an executor: to engines that it computes prompts for, or from those that compute for it."""

import logging
import mmap
import os
from pathlib import Path

import numpy as np

from quire.core.errors import Unsupported
from quire.core.transfer_config import UNIX, TransferConfig
from quire.executors.disk import block_format, host_memory
from quire.executors.options import ExecutorOptions
from quire.models.config import ModelConfig, Seq2SeqConfig
from quire.ops.kv_spec import KVCache
from quire.runtime.kv import KVSize
from quire.runtime.kv_transfer.consumer import KVConsumer
from quire.runtime.kv_transfer.producer import KVProducer
from quire.runtime.kv_transfer.shared_blocks import can_share, new_shared_file

log = logging.getLogger("quire.engine")

CPU_SWAPS = 4  # blocks that a step copies beside its forward pass: pages that are touched for the first time take long
GPU_SWAPS = 64  # a kernel of the GPU copies them


def open_transfer(
    config: TransferConfig, model: str | Path, options: ExecutorOptions, size: KVSize, cache: KVCache
) -> KVProducer | KVConsumer:
    if config.without_effect:
        log.warning("kv_transfer_config: %s have no effect", ", ".join(config.without_effect))
    format, buffers = block_format(model, options, size, cache), host_memory(cache, size)
    if config.is_producer:
        return KVProducer(config.addresses[0], format, buffers)
    is_local = any(address.startswith(UNIX) for address in config.addresses)
    file = _share_host_blocks(size, cache) if is_local and can_share() else None
    swaps_a_step = GPU_SWAPS if options.on_gpu else CPU_SWAPS
    return KVConsumer(config.addresses, format, buffers, file, swaps_a_step, size.num_host_blocks)


def check_transfer(options: ExecutorOptions, config: ModelConfig) -> None:
    """Refuse models whose blocks do not go from engine to engine."""
    if options.kv_transfer is None:
        return
    hint = "leave out kv_transfer_config, prefill_engines and decode_engines"
    if config.window:
        raise Unsupported("KV transfers of a model whose every layer has a sliding window", hint)
    if isinstance(config, Seq2SeqConfig):
        raise Unsupported(f"KV transfers of a `{config.architecture}`, which has an encoder", hint)


def _share_host_blocks(size: KVSize, cache: KVCache) -> int | None:
    """A file with all host blocks, and host slots behind them, for other processes to write into; None: the backend
    keeps them in its own way."""
    num_bytes = size.num_host_blocks * size.spec.block_bytes
    if size.spec.states is not None:
        num_bytes += size.num_host_slots * size.spec.states.host_slot_bytes
    if not hasattr(cache, "move_host") or not num_bytes:
        return None
    file = new_shared_file(num_bytes)
    cache.move_host(np.frombuffer(mmap.mmap(file, os.fstat(file).st_size), np.uint8))
    return file
