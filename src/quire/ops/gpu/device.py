"""Which GPU this is, and how much of it torch has used."""

from typing import Any

import torch
import triton

from quire.core.errors import Unsupported


def describe() -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(0)
    return {
        "name": properties.name,
        "memory": properties.total_memory,  # bytes
        "multiprocessors": properties.multi_processor_count,
        "torch": torch.__version__,
        "triton": triton.__version__,
    }


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
