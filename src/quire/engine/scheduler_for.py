"""The scheduler of an engine: its limits from the options, its memory from what the executor has allocated."""

import sys
from typing import TYPE_CHECKING, cast

from quire.core.limits import SchedulerLimits
from quire.core.scheduler import Scheduler
from quire.engine.options import EngineOptions
from quire.executors.protocol import Capacity, Executor

if TYPE_CHECKING:
    from quire.runtime.kv_transfer.consumer import KVConsumer
    from quire.runtime.kv_transfer.producer import KVProducer


def scheduler_for(executor: Executor, capacity: Capacity, options: EngineOptions) -> Scheduler:
    transfer, config = executor.transfer, options.kv_transfer
    return Scheduler(
        _limits(capacity, options),
        capacity.num_blocks,
        num_host_blocks=capacity.num_host_blocks,
        policy=options.scheduling_policy,
        prefix_caching=options.enable_prefix_caching,
        ahead=capacity.ahead,
        micro_batches=capacity.micro_batches,
        window=capacity.window,
        num_adapters=options.num_loras,
        drafts=capacity.drafts,
        store=executor.store,
        offload=capacity.offload,
        block_bytes=capacity.block_bytes,
        host_slot_bytes=capacity.host_slot_bytes,
        num_slots=capacity.num_slots,
        num_checkpoint_slots=capacity.num_checkpoint_slots,
        small_host_slots=capacity.small_host_slots,
        num_host_slots=capacity.num_host_slots,
        num_pages=capacity.num_pages,
        page_window=capacity.page_window,
        page_bytes=capacity.page_bytes,
        write_through=options.kv_disk_write_policy == "write_through",
        prefill_engines=None if config is None or config.is_producer else cast("KVConsumer", transfer),
        block_sender=cast("KVProducer", transfer) if config is not None and config.is_producer else None,
    )


def _limits(capacity: Capacity, options: EngineOptions) -> SchedulerLimits:
    return SchedulerLimits(
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens,
        max_draft_tokens=capacity.max_draft_tokens,
        long_prefill_token_threshold=options.long_prefill_token_threshold,
        step_seconds=(options.target_itl_ms or 0) / 1000,
        block_size=options.block_size,
        max_model_len=capacity.max_model_len,
        seq2seq=capacity.seq2seq,
        has_states=capacity.has_states,
        max_queued=sys.maxsize,  # the client limits the queue
    )
