"""Memory for hidden states between stages, and how a device reads it."""

from typing import Any

import numpy as np

from quire.executors.options import ExecutorOptions
from quire.executors.pipeline.links import DeviceSender, HiddenSlots, Sender
from quire.ops.opset import HiddenStates
from quire.ops.ranks.group import RankGroup


def num_micro_batches(size: int) -> int:
    """Steps in flight: one for each stage to compute."""
    return size


def shared_slots(group: RankGroup, options: ExecutorOptions, columns: int, num_stages: int) -> HiddenSlots:
    """What a stage hands to the next, in memory that the group maps: fp32 of a CPU, the bits of what a GPU computes
    in."""
    kind: type = np.int16 if options.on_gpu and options.gpu_dtype != "float32" else np.float32
    num_slots = num_micro_batches(num_stages)
    shape = num_slots * options.max_step_tokens, columns
    nbytes = np.dtype(kind).itemsize * shape[0] * shape[1]
    return HiddenSlots(group.allocate(nbytes)[:nbytes].view(kind).reshape(shape), num_slots)


def received_from(slots: HiddenSlots, options: ExecutorOptions, ops: Any) -> HiddenStates:
    """What `ops` reads of them: a CPU all, at its place; a GPU what it has copied for a step."""
    if not options.on_gpu:
        from quire.ops.native.hidden_states import NativeHiddenStates

        return NativeHiddenStates(slots.rows)
    from quire.ops.gpu.stage_rows import FetchedHiddenStates, HostRows

    host = HostRows(slots.rows, ops.dtype, ops.device)
    return FetchedHiddenStates.of(host, options.max_step_tokens, ops.device)


def sender_from(sender: Sender, slots: HiddenSlots, options: ExecutorOptions, ops: Any) -> Sender:
    """Of what `ops` has computed."""
    if not options.on_gpu:
        return sender
    from quire.ops.gpu.stage_rows import HostRows

    return DeviceSender(sender, slots, HostRows(slots.rows, ops.dtype, ops.device).take)
