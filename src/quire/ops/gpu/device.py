"""Which GPU this is, and how much of it torch has used."""

from typing import Any

import torch
import triton

from quire.core.errors import Unsupported

MAX_LEFT_OVER = 0.1  # of a device


def describe() -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(0)
    return {
        "name": properties.name,
        "memory": properties.total_memory,  # bytes
        "multiprocessors": properties.multi_processor_count,
        "torch": torch.__version__,
        "triton": triton.__version__,
    }


def room_of_share(utilization: float, total: int, free: int, free_at_start: int) -> int:
    """Bytes that an engine may still take: its share of the device less what it holds, whatever others hold; and no
    more than is free, less what the share leaves over, of which a tenth of the device is enough."""
    held = max(free_at_start - free, 0)
    return int(min(utilization * total - held, free - min(1 - utilization, MAX_LEFT_OVER) * total))


def take_turn(index: int, size: int) -> tuple[torch.device, int]:
    """The GPU of one of `size` processes, which take the visible ones in turn; and how many of them share one."""
    if not torch.cuda.is_available():
        raise Unsupported("torch finds no GPU it can use", "use device cpu")
    num_devices = torch.cuda.device_count()
    device = torch.device("cuda", index % num_devices)
    torch.cuda.set_device(device)
    return device, -(-size // num_devices)


def peak_allocated() -> int:
    """Bytes of tensors, since the process began."""
    return int(torch.cuda.max_memory_allocated())


def release_memory() -> None:
    """Give memory without tensors, which torch keeps, back to the device."""
    torch.cuda.empty_cache()
